//! What the dynamic loader would load, without loading anything.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The directory of the copy of UCX that a plugin would be loaded with. The program of this process's loader
/// says so, in a process of its own; `None` if there is no such copy, or no such process.
pub(crate) fn directory_of_ucx(plugin: &Path) -> Option<PathBuf> {
    let is_loader =
        |file: &&PathBuf| file.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-"));
    let loader = mapped_files().iter().find(is_loader).cloned()?;
    let mut list = Command::new(loader);
    let said = list.arg("--list").arg(plugin).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    said.stdout.split(|byte| *byte == b'\n').find_map(directory_in)
}

/// The directory in a line `libucs.so.0 => /usr/lib/libucs.so.0 (0x00007f926bf64000)`.
fn directory_in(line: &[u8]) -> Option<PathBuf> {
    let line = line.trim_ascii();
    if !line.starts_with(b"libucs.") && !line.starts_with(b"libucs-") {
        return None;
    }
    let arrow = line.windows(4).position(|part| part == b" => ")?;
    let path = line.get(arrow + 4..)?;
    let end = path.windows(3).rposition(|part| part == b" (0")?;
    Path::new(OsStr::from_bytes(path.get(..end)?)).parent().map(Path::to_owned)
}

/// Files that are mapped into this process.
pub(crate) fn mapped_files() -> BTreeSet<PathBuf> {
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let file = |line: &[u8]| {
        let path = line.get(line.iter().position(|byte| *byte == b'/')?..)?;
        Some(PathBuf::from(OsStr::from_bytes(path)))
    };
    maps.split(|byte| *byte == b'\n').filter_map(file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_line_of_ucx_names_the_directory() {
        let directory = |line: &str| directory_in(line.as_bytes());
        let line = "\tlibucs-14c218c5.so.0.0.0 => /a b/plugins/../libs/libucs-14c218c5.so.0.0.0 (0x00007f92)";
        assert_eq!(directory(line), Some(PathBuf::from("/a b/plugins/../libs")));
        assert_eq!(directory("libucs.so.0 => libs/libucs.so.0 (0x1)"), Some(PathBuf::from("libs")));
        assert_eq!(directory("libucs.so.0 => not found"), None);
        assert_eq!(directory("libucs_signal.so.0 => /lib/libucs_signal.so.0 (0x1)"), None);
        assert_eq!(directory_of_ucx(&std::env::current_exe().unwrap()), None, "this program has no UCX");
    }
}
