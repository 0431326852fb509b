//! Finding and loading NIXL's C library. `nixl-sys` looks for the library by itself, and ends the process if
//! there is none; so the library is loaded here before.

use std::ffi::{CStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::DiscoveryError;
use crate::ffi::library::Library;
use crate::library::looked::{Looked, Outcome};
use crate::library::settings;
use crate::library::warnings::SettingWarning;

const LIBRARY: &str = "libnixl_capi.so";
/// The environment variable that names the library, or its directory.
const BY_NAME: &str = "KV_NIXL_LIB";

/// Where to look for NIXL.
///
/// The places, in this order: `library`; `KV_NIXL_LIB`; `NIXL_PREFIX`; `LD_LIBRARY_PATH`; a Python
/// environment (`VIRTUAL_ENV`, `CONDA_PREFIX`, `PYTHONPATH`) with a `nixl-cu12` or `nixl-cu13` wheel;
/// `target/nixl` of a directory above the current one or above the program, where `scripts/setup-nixl.sh`
/// puts NIXL; the usual prefixes of the system and its Python. A library that `library` or `KV_NIXL_LIB`
/// names must be usable; the other places are tried one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Search {
    /// The library itself, or the directory that holds it.
    pub library: Option<PathBuf>,
}

/// NIXL's library, loaded. A process has one, which stays loaded until the process ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nixl {
    library: PathBuf,
    version: Option<String>,
    plugins: Vec<String>,
    warnings: Vec<SettingWarning>,
}

static LOADED: Mutex<Option<Nixl>> = Mutex::new(None);

impl Nixl {
    /// Finds the library, loads and checks it, and gives UCX the settings of [`guards`](crate::guards) that
    /// the user has not set. Other threads may run; [`warnings`](Nixl::warnings) names the settings that
    /// could not be made. Later calls return what the first successful call found.
    pub fn load(search: &Search) -> Result<Nixl, DiscoveryError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nixl) = &*loaded {
            return Ok(nixl.clone());
        }
        let (candidates, named) = (candidates(search, &Surroundings::here()), named_plugin_dir());
        let (library, warnings) = settings::load_with_guards(
            || find(&candidates, check),
            |library| plugin_file(library, named.as_deref(), "UCX"),
        )?;
        let nixl = Nixl { version: version(&library), plugins: plugins(&library), warnings, library };
        *loaded = Some(nixl.clone());
        Ok(nixl)
    }

    /// The path of the library.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// NIXL's version, if the library lies in a Python package; the library itself does not know its version.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The backends whose plugins lie beside the library, sorted by name.
    pub fn plugins(&self) -> &[String] {
        &self.plugins
    }

    /// Settings that UCX should have and does not have, or may not have, in this process. Empty as a rule.
    pub fn warnings(&self) -> &[SettingWarning] {
        &self.warnings
    }

    /// Why the plugin of a backend cannot be loaded, in the loader's words; `None` if the plugin can be
    /// loaded.
    pub fn why_not(&self, backend: &str) -> Option<String> {
        let Some(path) = plugin_file(&self.library, named_plugin_dir().as_deref(), backend) else {
            return Some(format!("there is no {} beside the library", plugin_name(backend)));
        };
        Library::load(&path).err()
    }

    /// Looks for the library as [`load`](Nixl::load) does, without loading or changing anything. Returns the
    /// places in their order, up to the first file.
    pub fn look(search: &Search) -> Vec<Looked> {
        let mut looked = Vec::new();
        for candidate in candidates(search, &Surroundings::here()) {
            let there = candidate.path.is_file();
            let outcome = if there { Outcome::Usable } else { Outcome::Absent };
            looked.push(Looked { path: candidate.path, because: candidate.because, outcome });
            if there {
                break;
            }
        }
        looked
    }
}

/// The functions that this crate calls through `nixl-sys`, which would end the process if one were missing.
const SYMBOLS: &[&CStr] = &[
    c"nixl_capi_create_configured_agent",
    c"nixl_capi_destroy_agent",
    c"nixl_capi_get_plugin_params",
    c"nixl_capi_params_add",
    c"nixl_capi_destroy_params",
    c"nixl_capi_destroy_mem_list",
    c"nixl_capi_create_backend",
    c"nixl_capi_destroy_backend",
    c"nixl_capi_create_opt_args",
    c"nixl_capi_destroy_opt_args",
    c"nixl_capi_opt_args_add_backend",
    c"nixl_capi_create_reg_dlist",
    c"nixl_capi_reg_dlist_clear",
    c"nixl_capi_reg_dlist_add_desc",
    c"nixl_capi_destroy_reg_dlist",
    c"nixl_capi_register_mem",
    c"nixl_capi_deregister_mem",
    c"nixl_capi_get_local_md",
    c"nixl_capi_load_remote_md",
    c"nixl_capi_check_remote_md",
    c"nixl_capi_invalidate_remote_md",
    c"nixl_capi_create_xfer_dlist",
    c"nixl_capi_xfer_dlist_clear",
    c"nixl_capi_xfer_dlist_add_desc",
    c"nixl_capi_destroy_xfer_dlist",
    c"nixl_capi_prep_xfer_dlist",
    c"nixl_capi_release_xfer_dlist_handle",
    c"nixl_capi_make_xfer_req",
    c"nixl_capi_create_xfer_req",
    c"nixl_capi_post_xfer_req",
    c"nixl_capi_get_xfer_status",
    c"nixl_capi_release_xfer_req",
    c"nixl_capi_destroy_xfer_req",
    c"nixl_capi_create_notif_map",
    c"nixl_capi_destroy_notif_map",
    c"nixl_capi_get_notifs",
    c"nixl_capi_notif_map_size",
    c"nixl_capi_notif_map_get_agent_at",
    c"nixl_capi_notif_map_get_notifs_size",
    c"nixl_capi_notif_map_get_notif",
    c"nixl_capi_gen_notif",
    c"nixl_capi_is_stub",
];

#[derive(Debug, Clone, PartialEq, Eq)]
struct Candidate {
    path: PathBuf,
    because: &'static str,
    /// The user has named the library: the library is used, or the search fails.
    named: bool,
}

/// The environment and the directories on which the search depends. Tests have others.
struct Surroundings {
    variable: fn(&str) -> Option<OsString>,
    current: Option<PathBuf>,
    program: Option<PathBuf>,
}

impl Surroundings {
    fn here() -> Surroundings {
        Surroundings {
            variable: |name| std::env::var_os(name).filter(|value| !value.is_empty()),
            current: std::env::current_dir().ok(),
            program: std::env::current_exe().ok(),
        }
    }
}

fn candidates(search: &Search, around: &Surroundings) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = Vec::new();
    let mut add = |path: PathBuf, because, named| {
        // The library is loaded by a thread that may have another working directory.
        let path = std::path::absolute(&path).unwrap_or(path);
        if found.iter().all(|known| known.path != path) {
            found.push(Candidate { path, because, named });
        }
    };
    by_name(search, around, &mut add);
    by_variable(around, &mut add);
    by_script(around, &mut add);
    by_custom(&mut add);
    found
}

/// The libraries that the user has named.
fn by_name(search: &Search, around: &Surroundings, add: &mut impl FnMut(PathBuf, &'static str, bool)) {
    let file = |path: PathBuf| if path.is_dir() { path.join(LIBRARY) } else { path };
    if let Some(path) = &search.library {
        add(file(path.clone()), "the configuration", true);
    }
    if let Some(path) = (around.variable)(BY_NAME) {
        add(file(path.into()), BY_NAME, true);
    }
}

/// The places to which the variables of linkers and of Python point.
fn by_variable(around: &Surroundings, add: &mut impl FnMut(PathBuf, &'static str, bool)) {
    if let Some(prefix) = (around.variable)("NIXL_PREFIX") {
        for path in under_prefix(Path::new(&prefix)) {
            add(path, "NIXL_PREFIX", false);
        }
    }
    if let Some(path) = (around.variable)("LD_LIBRARY_PATH") {
        for dir in std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()) {
            add(dir.join(LIBRARY), "LD_LIBRARY_PATH", false);
        }
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = (around.variable)(name) {
            for path in under_python(Path::new(&prefix)) {
                add(path, name, false);
            }
        }
    }
    if let Some(path) = (around.variable)("PYTHONPATH") {
        for path in std::env::split_paths(&path).flat_map(|dir| in_packages(&dir)) {
            add(path, "PYTHONPATH", false);
        }
    }
}

/// The places of `scripts/setup-nixl.sh`, above the current directory and above the program.
fn by_script(around: &Surroundings, add: &mut impl FnMut(PathBuf, &'static str, bool)) {
    for start in [&around.current, &around.program].into_iter().flatten() {
        for dir in start.ancestors() {
            // Above the program, `target` may be one of the ancestors itself.
            for root in [dir.join("target/nixl"), dir.join("nixl")] {
                for package in entries(&root) {
                    for path in in_packages(&package) {
                        add(path, "scripts/setup-nixl.sh", false);
                    }
                }
            }
        }
    }
    if let Some(dir) = &around.current {
        // One that shows a reader of the error where the script would have put it.
        let path = dir.join("target/nixl/nixl_cu12/.nixl_cu12.mesonpy.libs").join(LIBRARY);
        add(path, "scripts/setup-nixl.sh, here or above", false);
    }
}

/// The usual places on a Linux system.
fn by_custom(add: &mut impl FnMut(PathBuf, &'static str, bool)) {
    for prefix in ["/opt/nvidia/nvda_nixl", "/usr/local/nixl", "/usr/local", "/usr"] {
        for path in under_prefix(Path::new(prefix)) {
            add(path, "a usual place", false);
        }
    }
    for prefix in ["/usr/local", "/usr"] {
        for path in under_python(Path::new(prefix)) {
            add(path, "the system's Python", false);
        }
    }
}

fn under_prefix(prefix: &Path) -> Vec<PathBuf> {
    let arch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    ["lib", "lib64", &arch].iter().map(|dir| prefix.join(dir).join(LIBRARY)).collect()
}

fn under_python(prefix: &Path) -> Vec<PathBuf> {
    let versions = entries(&prefix.join("lib"));
    let versions = versions.filter(|dir| name_of(dir).starts_with("python3"));
    let mut paths: Vec<PathBuf> = versions
        .flat_map(|dir| [dir.join("site-packages"), dir.join("dist-packages")])
        .flat_map(|packages| in_packages(&packages))
        .collect();
    if paths.is_empty() {
        // One that shows a reader of the error where it would have been.
        paths.push(prefix.join("lib/python3/site-packages/.nixl_cu12.mesonpy.libs").join(LIBRARY));
    }
    paths
}

/// The place in a wheel: `.nixl_cu12.mesonpy.libs`.
fn in_packages(dir: &Path) -> Vec<PathBuf> {
    entries(dir)
        .filter(|entry| {
            let name = name_of(entry);
            name.starts_with(".nixl") && name.ends_with(".mesonpy.libs")
        })
        .map(|entry| entry.join(LIBRARY))
        .filter(|path| path.is_file())
        .collect()
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries.into_iter()
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn find(
    candidates: &[Candidate],
    check: impl Fn(&Path) -> Result<(), String>,
) -> Result<PathBuf, DiscoveryError> {
    let mut looked = Vec::new();
    for candidate in candidates {
        let path = &candidate.path;
        let result = if path.is_file() { Some(check(path)) } else { None };
        let reason = match result {
            Some(Ok(())) => return Ok(path.clone()),
            Some(Err(reason)) => Some(reason),
            None => None,
        };
        if candidate.named {
            let reason = reason.unwrap_or_else(|| "there is no such file".to_owned());
            return Err(DiscoveryError::Named { asked_by: candidate.because, path: path.clone(), reason });
        }
        let outcome = reason.map_or(Outcome::Absent, Outcome::Unusable);
        looked.push(Looked { path: path.clone(), because: candidate.because, outcome });
    }
    Err(DiscoveryError::NotFound { looked })
}

/// Loads a library, and makes sure that `nixl-sys` will use this library: `nixl-sys` asks the loader for the
/// bare name, which the loader knows once a library of that name is loaded.
fn check(path: &Path) -> Result<(), String> {
    let library = Library::load(path)?;
    let missing: Vec<_> = SYMBOLS.iter().filter(|symbol| library.symbol(symbol).is_none()).collect();
    if !missing.is_empty() {
        return Err(format!("the library is of another version of NIXL, and lacks {missing:?}"));
    }
    if nixl_sys::is_stub() {
        return Err(format!("the library is loaded, but the loader does not know the library as {LIBRARY}"));
    }
    Ok(())
}

/// The version in the name of a directory `nixl_cu12-1.5.1.dist-info` beside the library's directory.
fn version(library: &Path) -> Option<String> {
    let packages = library.parent()?.parent()?;
    entries(packages).find_map(|entry| {
        let name = name_of(&entry);
        let version = name.strip_suffix(".dist-info")?.strip_prefix("nixl_cu")?.split_once('-')?.1;
        Some(version.to_owned())
    })
}

/// The directory of plugins that the user has named, from the root.
fn named_plugin_dir() -> Option<PathBuf> {
    let named = std::env::var_os("NIXL_PLUGIN_DIR").map(PathBuf::from)?;
    Some(std::path::absolute(&named).unwrap_or(named))
}

fn plugin_dirs(library: &Path, named: Option<&Path>) -> impl Iterator<Item = PathBuf> + use<> {
    let beside = library.parent().map(|dir| dir.join("plugins"));
    [named.map(Path::to_owned), beside].into_iter().flatten()
}

fn plugin_name(backend: &str) -> String {
    format!("libplugin_{backend}.so")
}

fn plugin_file(library: &Path, named: Option<&Path>, backend: &str) -> Option<PathBuf> {
    let mut paths = plugin_dirs(library, named).map(|dir| dir.join(plugin_name(backend)));
    paths.find(|path| path.is_file())
}

/// `libplugin_UCX.so` is the plugin of the backend UCX.
fn plugins(library: &Path) -> Vec<String> {
    let mut names: Vec<String> = plugin_dirs(library, named_plugin_dir().as_deref())
        .flat_map(|dir| entries(&dir))
        .filter_map(|path| Some(name_of(&path).strip_prefix("libplugin_")?.strip_suffix(".so")?.to_owned()))
        .collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Dir {
            let path = std::env::temp_dir().join(format!("kv-nixl-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Dir(path)
        }

        fn put(&self, path: &str) -> PathBuf {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, b"not a library").unwrap();
            path
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn nowhere() -> Surroundings {
        Surroundings { variable: |_| None, current: None, program: None }
    }

    #[test]
    fn a_library_named_by_the_user_is_used_or_refused_but_never_replaced() {
        let dir = Dir::new("named");
        let search = Search { library: Some(dir.0.clone()) };
        let error = find(&candidates(&search, &nowhere()), |_| Ok(())).unwrap_err();
        let reason = "there is no such file".to_owned();
        let path = dir.0.join(LIBRARY);
        assert_eq!(error, DiscoveryError::Named { asked_by: "the configuration", path, reason });
        let path = dir.put(LIBRARY);
        assert_eq!(find(&candidates(&search, &nowhere()), |_| Ok(())), Ok(path.clone()));
        let broken = find(&candidates(&search, &nowhere()), check).unwrap_err();
        assert!(
            matches!(&broken, DiscoveryError::Named { reason, .. } if reason.contains("file too short")),
            "{broken}"
        );
    }

    #[test]
    fn what_the_setup_script_installs_is_found_from_below_the_workspace_and_from_the_program() {
        let dir = Dir::new("workspace");
        let wheel = "target/nixl/nixl_cu12-1.5.1";
        let library = dir.put(&format!("{wheel}/.nixl_cu12.mesonpy.libs/{LIBRARY}"));
        dir.put(&format!("{wheel}/.nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so"));
        dir.put(&format!("{wheel}/nixl_cu12-1.5.1.dist-info/METADATA"));
        let below = Surroundings { current: Some(dir.0.join("crates/x")), ..nowhere() };
        assert_eq!(find(&candidates(&Search::default(), &below), |_| Ok(())), Ok(library.clone()));
        let program = Surroundings { program: Some(dir.0.join("target/release/examples/pd")), ..nowhere() };
        assert_eq!(find(&candidates(&Search::default(), &program), |_| Ok(())), Ok(library.clone()));
        assert_eq!(version(&library).as_deref(), Some("1.5.1"));
        assert_eq!(plugins(&library), ["UCX"]);
    }

    #[test]
    fn unusable_libraries_are_passed_over_and_the_error_tells_all_places_and_the_way_out() {
        let dir = Dir::new("unusable");
        let path = dir.put(&format!("target/nixl/x/.nixl_cu12.mesonpy.libs/{LIBRARY}"));
        let around = Surroundings { current: Some(dir.0.clone()), ..nowhere() };
        let candidates = candidates(&Search::default(), &around);
        let error = find(&candidates, |_| Err("too old".to_owned())).unwrap_err();
        let DiscoveryError::NotFound { looked } = &error else { panic!("{error}") };
        assert_eq!(looked.len(), candidates.len());
        let ours = looked.iter().find(|looked| looked.path == path).unwrap();
        assert_eq!(ours.outcome, Outcome::Unusable("too old".to_owned()));
        let text = error.to_string();
        for word in ["too old", "not there", "/opt/nvidia/nvda_nixl", "scripts/setup-nixl.sh"] {
            assert!(text.contains(word), "{word} is not in:\n{text}");
        }
    }
}
