//! What is installed beside NIXL's library: its version, and the plugins of its backends.

use std::path::{Path, PathBuf};

/// The version in the name of a directory `nixl_cu12-1.5.1.dist-info` beside the library's directory.
pub(crate) fn version(library: &Path) -> Option<String> {
    let packages = library.parent()?.parent()?;
    entries(packages).find_map(|entry| {
        let name = name_of(&entry);
        let version = name.strip_suffix(".dist-info")?.strip_prefix("nixl_cu")?.split_once('-')?.1;
        Some(version.to_owned())
    })
}

/// The directory of plugins that the user has named, from the root.
pub(crate) fn named_plugin_dir() -> Option<PathBuf> {
    let named = std::env::var_os("NIXL_PLUGIN_DIR").map(PathBuf::from)?;
    Some(std::path::absolute(&named).unwrap_or(named))
}

fn plugin_dirs(library: &Path, named: Option<&Path>) -> impl Iterator<Item = PathBuf> + use<> {
    let beside = library.parent().map(|dir| dir.join("plugins"));
    [named.map(Path::to_owned), beside].into_iter().flatten()
}

pub(crate) fn plugin_name(backend: &str) -> String {
    format!("libplugin_{backend}.so")
}

pub(crate) fn plugin_file(library: &Path, named: Option<&Path>, backend: &str) -> Option<PathBuf> {
    let mut paths = plugin_dirs(library, named).map(|dir| dir.join(plugin_name(backend)));
    paths.find(|path| path.is_file())
}

/// `libplugin_UCX.so` is the plugin of the backend UCX.
pub(crate) fn plugins(library: &Path) -> Vec<String> {
    let mut names: Vec<String> = plugin_dirs(library, named_plugin_dir().as_deref())
        .flat_map(|dir| entries(&dir))
        .filter_map(|path| Some(name_of(&path).strip_prefix("libplugin_")?.strip_suffix(".so")?.to_owned()))
        .collect();
    names.sort();
    names.dedup();
    names
}

/// What is in a directory, sorted; nothing if the directory cannot be read.
pub(crate) fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries.into_iter()
}

/// The last part of a path, as text.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
