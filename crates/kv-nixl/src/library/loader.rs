//! What the dynamic loader would load, without loading anything.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The entry of the auxiliary vector that says where the kernel has put the loader.
const AT_BASE: usize = 7;

/// The directory of the copy of UCX that a plugin would be loaded with. The program of this process's loader
/// says so, in a process of its own; `None` if there is no such copy, or no such process.
pub(crate) fn directory_of_ucx(plugin: &Path) -> Option<PathBuf> {
    let (vector, maps) = (std::fs::read("/proc/self/auxv").ok()?, std::fs::read("/proc/self/maps").ok()?);
    let mut list = Command::new(loader(&vector, &maps)?);
    let said = list.arg("--list").arg(plugin).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    said.stdout.split(|byte| *byte == b'\n').find_map(directory_in)
}

/// The loader's file: the one that is mapped where the kernel has put the loader. A file's name proves nothing.
fn loader(vector: &[u8], maps: &[u8]) -> Option<PathBuf> {
    let mut words =
        vector.chunks_exact(size_of::<usize>()).map(|word| word.try_into().map(usize::from_ne_bytes));
    let mut base = None;
    while let (Some(Ok(entry)), Some(Ok(value))) = (words.next(), words.next()) {
        base = base.or((entry == AT_BASE).then_some(value));
    }
    let start = format!("{:08x}-", base?);
    maps.split(|byte| *byte == b'\n').find(|line| line.starts_with(start.as_bytes())).and_then(file_in)
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
    maps.split(|byte| *byte == b'\n').filter_map(file_in).collect()
}

/// The file in a line of `/proc/self/maps`.
fn file_in(line: &[u8]) -> Option<PathBuf> {
    let path = line.get(line.iter().position(|byte| *byte == b'/')?..)?;
    Some(PathBuf::from(OsStr::from_bytes(path)))
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

    #[test]
    fn the_loader_is_the_file_at_the_kernels_address_and_none_that_is_named_like_it() {
        let vector: Vec<u8> = [3, 64, AT_BASE, 0x7f00_0000_1000, 0, 0].map(usize::to_ne_bytes).concat();
        let maps = b"7e0000001000-7e0000002000 r-xp 00000000 08:01 7 /models/ld-linux-x86-64.so.2\n\
                     7f0000001000-7f0000002000 r--p 00000000 08:01 9                  /lib/ld-musl.so\n";
        assert_eq!(loader(&vector, maps), Some(PathBuf::from("/lib/ld-musl.so")));
        assert_eq!(loader(&vector[..32], &maps[..80]), None, "the address is not mapped");
        assert_eq!(loader(&[], maps), None, "a program without a loader");
    }
}
