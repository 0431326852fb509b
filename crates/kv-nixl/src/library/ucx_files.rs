//! The files in which the operator may have written settings of UCX.
//!
//! UCX reads five files when it is loaded, in this order, and the last value of a setting wins. The environment
//! wins over all files. A relative path begins at the working directory of the thread that loads UCX.
//!
//! ```text
//! /etc/ucx/ucx.conf                  the directory is chosen when UCX is built
//! ../etc/ucx/ucx.conf                beside the directory of libucs
//! $HOME/ucx.conf
//! $UCX_CONFIG_DIR/ucx.conf
//! ./ucx.conf
//! ```
//!
//! A file has lines `NAME = value` or `NAME : value`, comments, and sections, whose first lines may say for
//! which processors the section is meant. A setting in a section for other processors counts as the operator's
//! too: only UCX knows the processor's name as the section gives it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The name of each of UCX's files.
pub(crate) const NAME: &str = "ucx.conf";
const SYSTEM: &str = "/etc/ucx";

/// The contents of UCX's files, in the order in which UCX reads the files.
#[derive(Debug, Default)]
pub(crate) struct UcxFiles(Vec<Vec<u8>>);

impl UcxFiles {
    /// Reads the files that UCX would read on this thread, if its library is in the directory `ucx`.
    pub(crate) fn read(ucx: Option<&Path>) -> UcxFiles {
        let paths = paths(ucx, |name| std::env::var_os(name));
        UcxFiles(paths.iter().filter_map(|path| std::fs::read(path).ok()).collect())
    }

    /// Whether one of the files has the setting.
    pub(crate) fn name(&self, setting: &str) -> bool {
        self.0.iter().any(|content| has(content, setting))
    }

    /// All files as one file, which UCX reads as it reads the files one after the other: a section that UCX
    /// leaves out ends with its file.
    pub(crate) fn as_one(&self) -> Vec<u8> {
        let mut one = Vec::new();
        for (number, content) in self.0.iter().enumerate() {
            one.extend(format!("[file {number}]\n").into_bytes());
            one.extend(without_mark(content));
            one.push(b'\n');
        }
        one
    }
}

/// The paths of the files, as UCX puts them together.
fn paths(ucx: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut directories = vec![OsString::from(SYSTEM)];
    directories.extend(ucx.map(|directory| directory.join("../etc/ucx").into_os_string()));
    directories.extend(["HOME", "UCX_CONFIG_DIR"].into_iter().filter_map(variable));
    directories.push(OsString::from("."));
    let path = |mut directory: OsString| {
        directory.push("/");
        directory.push(NAME);
        PathBuf::from(directory)
    };
    directories.into_iter().map(path).collect()
}

/// Whether a file has a line for this setting, as UCX reads lines: a line that begins with a space goes on with
/// the setting before.
fn has(content: &[u8], setting: &str) -> bool {
    let mut before = false;
    for line in without_mark(content).split(|byte| *byte == b'\n') {
        let text = line.trim_ascii();
        let goes_on = before && line.first().is_some_and(u8::is_ascii_whitespace);
        match text.first() {
            None | Some(b'#' | b';') => {}
            Some(_) if goes_on => {}
            Some(b'[') => before = false,
            Some(_) => {
                let Some(end) = text.iter().position(|byte| matches!(byte, b'=' | b':')) else { continue };
                before = true;
                if text[..end].trim_ascii() == setting.as_bytes() {
                    return true;
                }
            }
        }
    }
    false
}

/// The content without the mark of UTF-8 at the beginning, which UCX passes over too.
fn without_mark(content: &[u8]) -> &[u8] {
    content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_those_of_ucx_in_the_order_of_ucx() {
        let found = |home: &'static str| {
            let variable = move |name: &str| Some(OsString::from(if name == "HOME" { home } else { "conf" }));
            paths(Some(Path::new("/opt/lib")), variable)
        };
        let expected = |home| {
            let system = ["/etc/ucx/ucx.conf", "/opt/lib/../etc/ucx/ucx.conf"].map(PathBuf::from);
            [&system[..], &[home, "conf/ucx.conf", "./ucx.conf"].map(PathBuf::from)].concat()
        };
        assert_eq!(found("/home/me"), expected("/home/me/ucx.conf"));
        assert_eq!(found(""), expected("/ucx.conf"));
        assert_eq!(paths(None, |_| None), ["/etc/ucx/ucx.conf", "./ucx.conf"].map(PathBuf::from));
    }

    #[test]
    fn a_setting_is_the_operators_where_ucx_reads_it_as_a_name() {
        let names = ["A=1", "\u{feff}A=1", "B=1\nA : 2\n", "[x]\nCPU vendor=y\n  \t\nA=", " A=1", "x\n A=1"];
        for content in names {
            assert!(has(content.as_bytes(), "A"), "{content:?}");
        }
        for content in ["", "#A=1", " ;A=1\n", "AB=1\nBA=1", "B=1\n A=1\n", "B=A\n", "A", "[A=1]", "a=1"] {
            assert!(!has(content.as_bytes(), "A"), "{content:?}");
        }
    }

    #[test]
    fn one_file_of_several_keeps_lines_and_sections_apart() {
        let files = UcxFiles(vec![b"[x]\nCPU vendor = none".to_vec(), b"\xef\xbb\xbfA = \xff\n".to_vec()]);
        let expected = b"[file 0]\n[x]\nCPU vendor = none\n[file 1]\nA = \xff\n\n";
        assert_eq!(files.as_one(), expected);
        assert!(files.name("A") && !files.name("B"));
    }
}
