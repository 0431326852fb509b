//! Which process a plane lives in, in terms that the kernel confirms to other processes.
//!
//! A token says that somebody has read a plane's metadata, which is no secret among a server's
//! components. The process at the other end of a socket, which the kernel names, says who somebody is.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use rustix::fs::{fstat, fstatfs};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde::{Deserialize, Serialize};

/// The file system of process descriptors (Linux 6.9): its inode numbers are never used twice.
const PIDFS: u64 = 0x5049_4446;

/// A process, as its plane's metadata names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessIdentity {
    /// Inode number of the process's descriptor; zero before Linux 6.9.
    pub(crate) inode: u64,
    /// Inode number of its PID namespace; zero if unknown.
    pub(crate) namespace: u64,
    /// Its number in that namespace.
    pub(crate) pid: i32,
    /// When it began, in clock ticks since the host's boot; zero if unknown.
    pub(crate) started: u64,
}

/// What the kernel says about a claimed identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    /// It is the process.
    Proven,
    /// It is another process.
    Refuted,
    /// The process is in a PID namespace that cannot be seen from here, and the kernel is older than
    /// Linux 6.9.
    Unknown,
}

impl ProcessIdentity {
    /// This process.
    pub(crate) fn here() -> io::Result<ProcessIdentity> {
        let pid = getpid();
        let inode = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => inode(pidfd.as_fd()),
            Err(error) => return Err(error.into()),
        };
        let pid = pid.as_raw_nonzero().get();
        Ok(ProcessIdentity { inode, namespace: namespace(), pid, started: started(pid) })
    }

    /// Compares what metadata claims with the process behind a socket: the descriptor that stands for
    /// it, and its number as seen from here.
    pub(crate) fn check(&self, pidfd: BorrowedFd<'_>, pid: Option<i32>) -> Proof {
        let seen = inode(pidfd);
        if self.inode != 0 && seen != 0 {
            return if self.inode == seen { Proof::Proven } else { Proof::Refuted };
        }
        let Some(pid) = pid.filter(|_| self.namespace != 0 && self.namespace == namespace()) else {
            return Proof::Unknown;
        };
        let started = started(pid);
        let same_start = started == self.started || started == 0 || self.started == 0;
        if pid == self.pid && same_start { Proof::Proven } else { Proof::Refuted }
    }
}

/// What tells this process from all others of this boot; zero before Linux 6.9.
pub(crate) fn inode(pidfd: BorrowedFd<'_>) -> u64 {
    match (fstatfs(pidfd), fstat(pidfd)) {
        (Ok(system), Ok(file)) if system.f_type as u64 == PIDFS => file.st_ino,
        _ => 0,
    }
}

fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |file| file.ino())
}

/// Field 22 of `/proc/PID/stat`. The second field, a name in brackets, may hold anything.
fn started(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let mut fields = text.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    fields.nth(19).and_then(|field| field.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::Pid;

    use super::*;

    #[test]
    fn a_process_is_itself_and_no_other_with_and_without_inode_numbers() {
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let other_pid = other.id() as i32;
        let here = ProcessIdentity::here().unwrap();
        let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let others = pidfd_open(Pid::from_raw(other_pid).unwrap(), PidfdFlags::empty()).unwrap();
        assert!(here.started > 0 && here.namespace > 0);
        for claimed in [here, ProcessIdentity { inode: 0, ..here }] {
            assert_eq!(claimed.check(own.as_fd(), Some(here.pid)), Proof::Proven);
            assert_eq!(claimed.check(others.as_fd(), Some(other_pid)), Proof::Refuted);
        }
        let reused = ProcessIdentity { inode: 0, started: here.started + 1, ..here };
        assert_eq!(reused.check(own.as_fd(), Some(here.pid)), Proof::Refuted);
        let elsewhere = ProcessIdentity { inode: 0, namespace: 1, ..here };
        assert_eq!(elsewhere.check(own.as_fd(), Some(here.pid)), Proof::Unknown);
        assert_eq!(ProcessIdentity { inode: 0, ..here }.check(own.as_fd(), None), Proof::Unknown);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
