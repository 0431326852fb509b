//! Where NIXL's C library may be: what the user has named, what variables of linkers and of Python point to, what
//! the setup script makes, and what is usual.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::library::installed::{entries, name_of};

pub(crate) const LIBRARY: &str = "libnixl_capi.so";
/// The environment variable that names the library, or its directory.
const BY_NAME: &str = "KV_NIXL_LIB";

/// Where to look for NIXL.
///
/// The places, in this order: `library`; `KV_NIXL_LIB`; `NIXL_PREFIX`; `LD_LIBRARY_PATH`; a Python
/// environment (`VIRTUAL_ENV`, `CONDA_PREFIX`, `PYTHONPATH`) with a `nixl-cu12` or `nixl-cu13` wheel;
/// `target/nixl` of a directory above the current one or above the program, where `scripts/setup-nixl.sh`
/// puts NIXL; the usual prefixes of the system and its Python. A library that `library` or `KV_NIXL_LIB`
/// names must be usable; the other places are tried one after the other. A library under `target/nixl` that another
/// user could have put there is passed over ([`check_owner`](kv_host::check_owner)).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Search {
    /// The library itself, or the directory that holds it.
    pub library: Option<PathBuf>,
}

impl Search {
    /// The same with some fields changed: `Search::default().with(|search| search.library = Some(path))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// A place where the library may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) path: PathBuf,
    pub(crate) because: &'static str,
    pub(crate) by: By,
}

/// How the search comes to a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// The user has named the library: it is used, or the search fails.
    Name,
    /// The user or the system points to the folder.
    Pointer,
    /// A folder above the current one or above the program has the name that the script gives it. Anybody may have
    /// made it.
    Script,
}

/// The environment and the directories on which the search depends. Tests have others.
pub(crate) struct Surroundings {
    pub(crate) variable: fn(&str) -> Option<OsString>,
    pub(crate) current: Option<PathBuf>,
    pub(crate) program: Option<PathBuf>,
}

impl Surroundings {
    pub(crate) fn here() -> Surroundings {
        Surroundings {
            variable: |name| std::env::var_os(name).filter(|value| !value.is_empty()),
            current: std::env::current_dir().ok(),
            program: std::env::current_exe().ok(),
        }
    }
}

/// All places where the library may be, in the order of the search.
pub(crate) fn candidates(search: &Search, around: &Surroundings) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = Vec::new();
    let mut add = |path: PathBuf, because, by| {
        // The library is loaded by a thread that may have another working directory.
        let path = std::path::absolute(&path).unwrap_or(path);
        if found.iter().all(|known| known.path != path) {
            found.push(Candidate { path, because, by });
        }
    };
    by_name(search, around, &mut add);
    by_variable(around, &mut add);
    by_script(around, &mut add);
    by_custom(&mut add);
    found
}

/// The libraries that the user has named.
fn by_name(search: &Search, around: &Surroundings, add: &mut impl FnMut(PathBuf, &'static str, By)) {
    let file = |path: PathBuf| if path.is_dir() { path.join(LIBRARY) } else { path };
    if let Some(path) = &search.library {
        add(file(path.clone()), "the configuration", By::Name);
    }
    if let Some(path) = (around.variable)(BY_NAME) {
        add(file(path.into()), BY_NAME, By::Name);
    }
}

/// The places to which the variables of linkers and of Python point.
fn by_variable(around: &Surroundings, add: &mut impl FnMut(PathBuf, &'static str, By)) {
    if let Some(prefix) = (around.variable)("NIXL_PREFIX") {
        for path in under_prefix(Path::new(&prefix)) {
            add(path, "NIXL_PREFIX", By::Pointer);
        }
    }
    if let Some(path) = (around.variable)("LD_LIBRARY_PATH") {
        for dir in std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()) {
            add(dir.join(LIBRARY), "LD_LIBRARY_PATH", By::Pointer);
        }
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = (around.variable)(name) {
            for path in under_python(Path::new(&prefix)) {
                add(path, name, By::Pointer);
            }
        }
    }
    if let Some(path) = (around.variable)("PYTHONPATH") {
        for path in std::env::split_paths(&path).flat_map(|dir| in_packages(&dir)) {
            add(path, "PYTHONPATH", By::Pointer);
        }
    }
}

/// The places of `scripts/setup-nixl.sh`, above the current directory and above the program.
fn by_script(around: &Surroundings, add: &mut impl FnMut(PathBuf, &'static str, By)) {
    for start in [&around.current, &around.program].into_iter().flatten() {
        for dir in start.ancestors() {
            // Above the program, `target` may be one of the ancestors itself.
            for root in [dir.join("target/nixl"), dir.join("nixl")] {
                for package in entries(&root) {
                    for path in in_packages(&package) {
                        add(path, "scripts/setup-nixl.sh", By::Script);
                    }
                }
            }
        }
    }
    if let Some(dir) = &around.current {
        // One that shows a reader of the error where the script would have put it.
        let path = dir.join("target/nixl/nixl_cu12/.nixl_cu12.mesonpy.libs").join(LIBRARY);
        add(path, "scripts/setup-nixl.sh, here or above", By::Script);
    }
}

/// The usual places on a Linux system.
fn by_custom(add: &mut impl FnMut(PathBuf, &'static str, By)) {
    for prefix in ["/opt/nvidia/nvda_nixl", "/usr/local/nixl", "/usr/local", "/usr"] {
        for path in under_prefix(Path::new(prefix)) {
            add(path, "a usual place", By::Pointer);
        }
    }
    for prefix in ["/usr/local", "/usr"] {
        for path in under_python(Path::new(prefix)) {
            add(path, "the system's Python", By::Pointer);
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
