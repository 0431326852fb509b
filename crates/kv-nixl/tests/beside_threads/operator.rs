//! What the operator has written, in any of UCX's files and with any path, is what UCX has.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::{BROKEN, HOOKS, LOG_FILE, MODULES, as_it_should_be, printed, process};

/// A directory for one check, which is removed afterwards.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("kv-nixl-operator-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Place(path)
    }

    fn put(&self, path: &str, content: &str) -> PathBuf {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    fn dir(&self, path: &str) -> PathBuf {
        let path = self.0.join(path);
        fs::create_dir_all(&path).unwrap();
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Every file that UCX reads wins over the settings that this crate would make, in each way in which the
/// settings reach UCX: in a process without other threads, beside threads, and where the system refuses.
pub fn every_file_wins(nixl: &Path) {
    for role in ["alone", "tokio", "refused"] {
        for file in ["home", "config", "relative", "current", "library"] {
            let place = Place::new("wins");
            place.put(
                &format!("{file}/etc/ucx/ucx.conf"),
                &format!("# A comment without an end of line: {MODULES}=all\n{MODULES} : ^ib,cma\n {HOOKS}=no\n{HOOKS}=bistro"),
            );
            let file_dir = place.0.join(file).join("etc/ucx");
            let mut command = process(role);
            command.current_dir(place.dir("elsewhere")).env("HOME", place.dir("empty"));
            match file {
                "home" => command.env("HOME", &file_dir),
                "config" => command.env("UCX_CONFIG_DIR", &file_dir),
                "relative" => command.env("UCX_CONFIG_DIR", "../relative/etc/ucx"),
                "current" => command.current_dir(&file_dir),
                _ => command.env("KV_NIXL_LIB", copied(nixl, &place.0.join(file), "nixl_cu12.libs")),
            };
            let expected = ["module cma false", "module ib false", "intercepts true"];
            assert_eq!(printed(command), expected, "{role}, the file at {file}");
        }
    }
}

/// The log goes where the operator's relative path points from the process's own working directory.
pub fn a_relative_log_is_in_the_working_directory() {
    for role in ["alone", "tokio", "refused"] {
        for in_file in [false, true] {
            let place = Place::new("log");
            let mut command = process(role);
            command.current_dir(&place.0).env("UCX_LOG_LEVEL", "info");
            if in_file {
                place.put("ucx.conf", &format!("{LOG_FILE} = file:own.log\n"));
            } else {
                command.env(LOG_FILE, "own.log");
            }
            printed(command);
            let log = fs::read_to_string(place.0.join("own.log")).unwrap_or_default();
            assert!(log.contains("UCX"), "{role}, in a file: {in_file}: the log is {log:?}");
        }
    }
}

/// A loader's path that is relative holds for NIXL as well, and what cannot be set then is told.
pub fn a_relative_loader_path_finds_nixl(nixl: &Path) {
    let place = Place::new("loader");
    let library = copied(nixl, &place.dir("nixl"), "libs");
    let mut command = process("tokio");
    command.current_dir(place.0.join("nixl")).env("KV_NIXL_LIB", library).env("LD_LIBRARY_PATH", "libs");
    let mut expected = as_it_should_be();
    expected[2] = "intercepts true".to_owned();
    expected.insert(0, format!("warning {HOOKS} not loaded"));
    assert_eq!(printed(command), expected);
}

/// A plugin that cannot be loaded is told with every setting that was not made, and the worker runs once the
/// plugin is whole.
pub fn a_broken_plugin_is_told(nixl: &Path) {
    for role in ["tokio", "refused"] {
        let place = Place::new("broken");
        let plugin = place.put("libplugin_UCX.so", "not a library");
        let mut command = process(role);
        let libraries = nixl.parent().unwrap().with_file_name("nixl_cu12.libs");
        command.env("NIXL_PLUGIN_DIR", &place.0).env(BROKEN, plugin).env("LD_LIBRARY_PATH", libraries);
        let told: Vec<String> =
            printed(command).into_iter().filter(|line| line.starts_with("warning")).collect();
        let guards = kv_nixl::guards::guards();
        let expected: Vec<_> =
            guards.iter().map(|guard| format!("warning {} not loaded", guard.name)).collect();
        assert_eq!(told, expected, "{role}");
    }
}

/// A copy of NIXL's package in `to`, made of links, in which NIXL's dependencies are in `libraries`. Returns
/// the path of the library.
fn copied(nixl: &Path, to: &Path, libraries: &str) -> PathBuf {
    let library_dir = nixl.parent().unwrap();
    let packages = library_dir.parent().unwrap();
    let name = library_dir.file_name().unwrap();
    linked(library_dir, &to.join(name));
    linked(&packages.join("nixl_cu12.libs"), &to.join(libraries));
    to.join(name).join(nixl.file_name().unwrap())
}

fn linked(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let from = entry.unwrap().path();
        let name: OsString = from.file_name().unwrap().to_owned();
        match from.is_dir() {
            true => linked(&from, &to.join(name)),
            false => symlink(&from, to.join(name)).unwrap(),
        }
    }
}
