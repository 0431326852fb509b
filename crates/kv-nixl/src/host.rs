//! Which process a peer is, if it runs on this host: its death can then be seen at once.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

/// One process of one boot of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// The kernel's random id of this boot; empty if unknown.
    boot: String,
    /// The namespace that the number is of.
    namespace: u64,
    /// Its number.
    pid: i32,
    /// When it started, in clock ticks since the boot: numbers are given away again.
    start: u64,
}

/// What is known about the life of a peer.
#[derive(Debug)]
pub(crate) enum Life {
    /// Readable when the process is dead.
    Watched(OwnedFd),
    /// It is this process.
    Ours,
    /// It cannot be seen from here.
    Unseen,
    /// It is dead.
    Dead,
}

impl Process {
    /// This one.
    pub(crate) fn ours() -> Process {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino());
        let pid = std::process::id().cast_signed();
        Process { boot: boot.trim().to_owned(), namespace, pid, start: start_of(pid).unwrap_or(0) }
    }

    /// Whether the fields can be what `ours` returned elsewhere.
    pub(crate) fn is_valid(&self) -> bool {
        self.boot.len() <= 64 && self.pid > 0
    }

    /// Begins to watch it.
    pub(crate) fn watch(&self) -> Life {
        let ours = Process::ours();
        let known = !ours.boot.is_empty() && ours.namespace != 0 && ours.start != 0;
        if !known || self.boot != ours.boot || self.namespace != ours.namespace {
            return Life::Unseen;
        }
        if *self == ours {
            return Life::Ours;
        }
        let Some(pid) = Pid::from_raw(self.pid) else { return Life::Unseen };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::SRCH) => return Life::Dead,
            Err(_) => return Life::Unseen,
        };
        // The descriptor is of whoever has the number now. If that is the peer, it was the peer when
        // the descriptor was made.
        match start_of(self.pid) {
            Some(start) if start == self.start => Life::Watched(fd),
            _ => Life::Dead,
        }
    }
}

impl Life {
    /// True if the process is dead for certain.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Life::Watched(fd) => {
                let mut fds = [PollFd::new(fd, PollFlags::IN)];
                poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
            }
            Life::Dead => true,
            Life::Ours | Life::Unseen => false,
        }
    }
}

/// Field 22 of `stat`; the second field, the name, may hold spaces and parentheses.
fn start_of(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_alive_until_it_is_not_and_its_number_alone_is_not_it() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = Process { pid, start: start_of(pid).unwrap(), ..Process::ours() };
        let life = process.watch();
        assert!(matches!(life, Life::Watched(_)));
        assert!(!life.is_over());
        let earlier = Process { start: process.start - 1, ..process.clone() };
        assert!(matches!(earlier.watch(), Life::Dead), "the number was given away again");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(life.is_over());
        assert!(matches!(process.watch(), Life::Dead));
    }

    #[test]
    fn another_host_and_another_namespace_are_not_looked_into() {
        assert!(matches!(Process::ours().watch(), Life::Ours));
        let other = Process { boot: "another".to_owned(), ..Process::ours() };
        assert!(matches!(other.watch(), Life::Unseen));
        let other = Process { namespace: 1, ..Process::ours() };
        assert!(matches!(other.watch(), Life::Unseen));
    }
}
