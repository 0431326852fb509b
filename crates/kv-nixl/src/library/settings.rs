//! Loading NIXL and its UCX with the [guards](crate::guards), and looking whether UCX has them.
//!
//! The table in [`guards`](crate::guards) says which setting takes which way.

use std::fmt::Display;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::ffi::directory::in_directory;
use crate::ffi::environment::set_variables_alone;
use crate::ffi::ucx::{Ucx, intercepted_code};
use crate::library::config_file::{self, ConfigDirectory};
use crate::library::guards::{self, Guard, HOOKS, RCACHE};
use crate::library::loader::{directory_of_ucx, mapped_files};
use crate::library::ucx_files::UcxFiles;
use crate::library::warnings::{NotSet, SettingWarning};

/// How the missing guards were given to UCX.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Given {
    /// By the environment: no other thread runs.
    Environment,
    /// By UCX's configuration file, while UCX was loaded.
    ConfigFile,
    /// By calls of UCX after UCX was loaded, which is too late for some. The reason is the file's, which could not
    /// be used.
    Calls(NotSet),
}

/// NIXL's library, and the copy of UCX that came with its plugin if there is a plugin. `Err` in the copy's place
/// is the loader's reason for refusing the plugin.
type Loaded = (PathBuf, Option<Result<Ucx, String>>);

/// What is seen of UCX after UCX was loaded.
#[derive(Debug)]
struct Seen {
    /// Another part of the process had loaded the same copy before.
    loaded_before: bool,
    /// Functions of libc were overwritten while UCX was loaded.
    intercepts: bool,
    /// Lines `NAME=value`.
    settings: String,
}

/// What has become of the guards that the operator has not set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct GuardReport {
    /// The names of those that UCX has been given.
    pub(crate) made: Vec<&'static str>,
    /// The names of all of them.
    pub(crate) missing: Vec<&'static str>,
    /// Those that UCX does not have, or may not have.
    pub(crate) warnings: Vec<SettingWarning>,
}

impl GuardReport {
    fn new(missing: &[Guard], warnings: Vec<SettingWarning>) -> GuardReport {
        let has_warning = |name| warnings.iter().any(|warning| warning.name == name);
        let missing: Vec<_> = missing.iter().map(|guard| guard.name).collect();
        let made = missing.iter().copied().filter(|name| !has_warning(*name)).collect();
        GuardReport { made, missing, warnings }
    }
}

/// Runs `load`, which loads NIXL's library, and loads the plugin for UCX that `plugin` finds beside the
/// library, with the guards that the operator has not set. `likely` is the library that `load` most likely loads.
pub(crate) fn load_with_guards<E: Send + Display>(
    likely: Option<&Path>,
    load: impl Fn() -> Result<PathBuf, E> + Sync,
    plugin: impl Fn(&Path) -> Option<PathBuf> + Sync,
) -> Result<(PathBuf, GuardReport), E> {
    let directory = likely.and_then(&plugin).and_then(|plugin| directory_of_ucx(&plugin));
    let files = UcxFiles::read(directory.as_deref());
    let missing = guards::missing_in(&files);
    if missing.is_empty() {
        return Ok((load()?, GuardReport::default()));
    }
    let (libraries, code) = (mapped_files(), intercepted_code());
    let load_both = || {
        let library = load()?;
        let ucx = plugin(&library).map(|plugin| Ucx::load(&plugin));
        Ok((library, ucx))
    };
    let (given, loaded) = give(&missing, &files, load_both);
    let (library, ucx) = loaded?;
    let ucx = match ucx {
        Some(Ok(ucx)) => ucx,
        Some(Err(reason)) => {
            let told = not_loaded(&missing, &given, &reason);
            return Ok((library, GuardReport::new(&missing, told)));
        }
        // Without UCX there is nothing to set.
        None => return Ok((library, GuardReport::default())),
    };
    let loaded_before = ucx.file().is_some_and(|file| libraries.contains(&file));
    if matches!(given, Given::Calls(_)) && !loaded_before {
        give_late(ucx, &missing);
    }
    // Only now: UCX loads its modules in order to say what it has read.
    let seen = Seen { loaded_before, intercepts: intercepted_code() != code, settings: ucx.settings() };
    if given == Given::ConfigFile && !loaded_before && seen.has_relative_log() {
        ucx.reopen_log();
    }
    Ok((library, GuardReport::new(&missing, warnings(&missing, &given, &seen))))
}

/// Gives UCX the guards, as early as possible, and runs `load`.
fn give<E: Send + Display>(
    missing: &[Guard],
    files: &UcxFiles,
    load: impl Fn() -> Result<Loaded, E> + Sync,
) -> (Given, Result<Loaded, E>) {
    let pairs: Vec<_> = missing.iter().map(|guard| (guard.name, guard.value.clone())).collect();
    let Err(threads) = set_variables_alone(&pairs) else { return (Given::Environment, load()) };
    let directory = ConfigDirectory::new(&config_file::content(missing, files));
    let refused = match directory.and_then(|directory| in_directory(directory.as_fd(), &load)) {
        Ok(Ok((_, Some(Err(reason))))) => NotSet::NotLoaded { reason },
        Ok(Err(error)) => NotSet::NotLoaded { reason: error.to_string() },
        Ok(loaded) => return (Given::ConfigFile, loaded),
        Err(error) => NotSet::Refused { threads, error },
    };
    // What the loader refuses there for a relative path is loaded from the process's own working directory.
    (Given::Calls(refused), load())
}

/// Gives a UCX that is loaded, and not used yet, what its initializers have not put into effect for good.
fn give_late(ucx: Ucx, missing: &[Guard]) {
    for Guard { name, value, .. } in missing {
        match *name {
            "UCX_MODULES" => ucx.set_global("MODULES", value),
            "UCX_MEMTYPE_CACHE" => ucx.set_global("MEMTYPE_CACHE", value),
            "UCX_LOG_FILE" => {
                ucx.set_global("LOG_FILE", value);
                ucx.reopen_log();
            }
            _ => {}
        }
    }
    ucx.read_config_file(&config_file::content(missing, &UcxFiles::default()));
}

/// What is told of a UCX that is not loaded: all guards may be missing when UCX comes, unless the environment has
/// them.
fn not_loaded(missing: &[Guard], given: &Given, reason: &str) -> Vec<SettingWarning> {
    if *given == Given::Environment {
        return Vec::new();
    }
    let reason = NotSet::NotLoaded { reason: reason.to_owned() };
    missing.iter().map(|guard| warning(guard, reason.clone())).collect()
}

fn warnings(missing: &[Guard], given: &Given, seen: &Seen) -> Vec<SettingWarning> {
    let told = |guard: &Guard| Some(warning(guard, not_set(guard, missing, given, seen)?));
    missing.iter().filter_map(told).collect()
}

fn warning(guard: &Guard, reason: NotSet) -> SettingWarning {
    SettingWarning { name: guard.name, wanted: guard.value.clone(), reason, consequence: guard.why }
}

/// Why UCX does not have a guard; `None` if UCX has the guard.
fn not_set(guard: &Guard, missing: &[Guard], given: &Given, seen: &Seen) -> Option<NotSet> {
    match (seen.shows(guard), given) {
        (Some(true), _) => None,
        _ if seen.loaded_before => Some(NotSet::LoadedBefore),
        (Some(false), Given::Calls(refused)) => Some(refused.clone()),
        (Some(false), _) => Some(NotSet::Other { value: seen.value(guard.name).map(str::to_owned) }),
        (None, Given::Environment) => None,
        // What came by the same file is in effect.
        (None, _) if missing.iter().any(|other| seen.confirms(other, given)) => None,
        (None, _) => Some(NotSet::Unconfirmed),
    }
}

impl Seen {
    /// Whether UCX has a guard; `None` if nothing shows.
    fn shows(&self, guard: &Guard) -> Option<bool> {
        match guard.name {
            HOOKS if self.loaded_before => None,
            HOOKS => Some(!self.intercepts),
            name => self.value(name).map(|value| value == guard.value),
        }
    }

    /// Whether this guard shows that UCX has read our file, so that the other guards in the file have reached UCX, too. If
    /// UCX was given its file only after it was loaded, the guards that calls have made one by one show nothing of the file.
    fn confirms(&self, guard: &Guard, given: &Given) -> bool {
        let is_by_file = match given {
            Given::ConfigFile => true,
            Given::Calls(_) => guard.name == RCACHE,
            Given::Environment => false,
        };
        is_by_file && self.shows(guard) == Some(true)
    }

    /// Whether UCX's log is a file whose path begins at the working directory. UCX takes the beginning of a
    /// stream's name for the name.
    fn has_relative_log(&self) -> bool {
        let log = self.value("UCX_LOG_FILE").unwrap_or_default();
        let log = log.split_once("file:").map_or(log, |(_, path)| path);
        !log.starts_with('/') && !["stdout", "stderr"].iter().any(|stream| stream.starts_with(log))
    }

    /// The value of a setting, as UCX writes it.
    fn value(&self, name: &str) -> Option<&str> {
        self.settings.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
    }
}

#[cfg(test)]
mod tests {
    use kv_host::OsError;

    use super::*;

    const REFUSED: OsError =
        OsError { call: "unshare", kind: std::io::ErrorKind::PermissionDenied, errno: Some(libc::EPERM) };

    fn guard(name: &'static str, value: &str) -> Guard {
        Guard { name, value: value.to_owned(), why: "something follows" }
    }

    fn missing() -> Vec<Guard> {
        vec![guard(HOOKS, "none"), guard("UCX_MODULES", "^ib"), guard("UCX_CUDA_IPC_CACHE", "n")]
    }

    fn seen(settings: &str) -> Seen {
        Seen { loaded_before: false, intercepts: false, settings: settings.to_owned() }
    }

    fn reasons(given: &Given, seen: &Seen) -> Vec<(&'static str, NotSet)> {
        warnings(&missing(), given, seen).into_iter().map(|warning| (warning.name, warning.reason)).collect()
    }

    fn calls() -> Given {
        Given::Calls(NotSet::Refused { threads: 3, error: REFUSED })
    }

    #[test]
    fn settings_that_ucx_shows_bring_no_warning_in_any_way() {
        let seen = seen("UCX_MODULES_X=1\nUCX_MODULES=^ib\nUCX_RCACHE_MAX_UNRELEASED=1K\n");
        let all = [missing(), vec![guard(RCACHE, "1K")]].concat();
        for given in [Given::Environment, Given::ConfigFile, calls()] {
            assert_eq!(warnings(&all, &given, &seen), []);
        }
    }

    #[test]
    fn what_one_call_has_set_says_nothing_of_what_a_file_was_to_set() {
        let unconfirmed = [("UCX_CUDA_IPC_CACHE", NotSet::Unconfirmed)];
        assert_eq!(reasons(&calls(), &seen("UCX_MODULES=^ib\n")), unconfirmed);
    }

    #[test]
    fn only_guards_without_a_warning_count_as_made() {
        let made = |warnings| GuardReport::new(&missing(), warnings).made;
        let names: Vec<_> = missing().iter().map(|guard| guard.name).collect();
        assert_eq!(made(Vec::new()), names);
        assert_eq!(made(not_loaded(&missing(), &calls(), "too short")), [""; 0]);
        assert_eq!(made(not_loaded(&missing(), &Given::Environment, "too short")), names);
        let before = Seen { loaded_before: true, ..seen("UCX_MODULES=^ib\n") };
        assert_eq!(made(warnings(&missing(), &Given::Environment, &before)), ["UCX_MODULES"]);
    }

    #[test]
    fn only_a_log_with_a_relative_path_is_opened_again() {
        for (log, relative) in [
            ("own.log", true),
            ("file:own.log", true),
            ("logs/%p", true),
            ("", false),
            ("stdout", false),
            ("stderr", false),
            ("/var/own.log", false),
            ("file:/var/own.log", false),
        ] {
            assert_eq!(seen(&format!("UCX_LOG_FILE={log}\n")).has_relative_log(), relative, "{log}");
        }
        assert!(!seen("").has_relative_log());
    }

    #[test]
    fn a_plugin_that_is_not_loaded_misses_all_that_the_environment_does_not_have() {
        assert_eq!(not_loaded(&missing(), &Given::Environment, "too short"), []);
        let told = not_loaded(&missing(), &calls(), "too short");
        assert_eq!(
            told.iter().map(|warning| warning.name).collect::<Vec<_>>(),
            missing().iter().map(|guard| guard.name).collect::<Vec<_>>()
        );
        assert!(told.iter().all(|warning| warning.to_string().contains("too short")));
    }

    #[test]
    fn another_value_than_the_one_given_is_named_in_the_warning() {
        let value = Some("all".to_owned());
        let expected = [("UCX_MODULES", NotSet::Other { value })];
        assert_eq!(reasons(&Given::Environment, &seen("UCX_MODULES=all\n")), expected);
    }

    #[test]
    fn hooks_that_are_in_place_after_a_late_setting_are_told_with_what_was_refused() {
        let seen = Seen { intercepts: true, ..seen("UCX_MODULES=^ib\n") };
        let refused = NotSet::Refused { threads: 3, error: REFUSED };
        let cache = ("UCX_CUDA_IPC_CACHE", NotSet::Unconfirmed);
        assert_eq!(reasons(&calls(), &seen), [(HOOKS, refused.clone()), cache]);
        let text = warnings(&missing(), &calls(), &seen)[0].to_string();
        for word in [HOOKS, "none", "3 threads", "unshare", "something follows"] {
            assert!(text.contains(word), "{word} is not in: {text}");
        }
    }

    #[test]
    fn a_file_that_ucx_has_not_shown_to_have_read_is_unconfirmed() {
        let unread = Seen { intercepts: true, ..seen("") };
        let hooks = (HOOKS, NotSet::Other { value: None });
        let unconfirmed = ["UCX_MODULES", "UCX_CUDA_IPC_CACHE"].map(|name| (name, NotSet::Unconfirmed));
        let [modules, cache] = unconfirmed.clone();
        assert_eq!(reasons(&Given::ConfigFile, &unread), [hooks.clone(), modules, cache]);
        assert_eq!(reasons(&Given::ConfigFile, &seen("")), []);
        assert_eq!(reasons(&calls(), &seen("")), unconfirmed);
        assert_eq!(reasons(&Given::Environment, &unread), [hooks]);
    }

    #[test]
    fn a_ucx_that_was_there_before_has_only_what_it_shows() {
        let seen = Seen { loaded_before: true, ..seen("UCX_MODULES=^ib\n") };
        let expected = [(HOOKS, NotSet::LoadedBefore), ("UCX_CUDA_IPC_CACHE", NotSet::LoadedBefore)];
        assert_eq!(reasons(&Given::Environment, &seen), expected);
    }
}
