//! Which host and which process a peer is, in terms that the kernel confirms to other processes.
//!
//! A token in a message proves only that the sender has read a transport's metadata, which is no secret among
//! a server's components. The process at the other end of a socket, which the kernel names, proves which
//! worker the sender is.

use std::fs;
use std::os::unix::fs::MetadataExt;

use kv_core::TransportError;
use rustix::process::getpid;
use serde::{Deserialize, Serialize};

use crate::error::{OsError, PeerError};
use crate::process::Process;

/// Where a transport runs: one boot of one kernel, and one network namespace of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The kernel's random id of this boot, low half first; zeroes if unknown.
    pub boot: (u64, u64),
    /// Inode number of the network namespace, in which abstract socket names live; zero if unknown.
    pub network: u64,
}

impl Host {
    /// The host, boot and network namespace of the calling process.
    pub fn here() -> Result<Host, OsError> {
        let error = |error| OsError::new("read boot_id", error);
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(error)?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let boot = u128::from_str_radix(&digits, 16);
        let boot = boot.map_err(|_| error(std::io::ErrorKind::InvalidData.into()))?;
        let network = fs::metadata("/proc/self/ns/net").map_or(0, |file| file.ino());
        Ok(Host { boot: (boot as u64, (boot >> 64) as u64), network })
    }

    /// True if both are known to be the same boot of the same kernel.
    pub fn is_same_boot(&self, other: &Host) -> bool {
        self.boot == other.boot && self.boot != (0, 0)
    }

    /// Refuses a transport whose socket cannot be reached from here: one on another host, or in another
    /// network namespace.
    pub fn check(&self, other: &Host) -> Result<(), TransportError> {
        if !self.is_same_boot(other) {
            return Err(TransportError::Metadata("the peer is on another host"));
        }
        if self.network != other.network && self.network != 0 && other.network != 0 {
            return Err(TransportError::Metadata("the peer is in another network namespace"));
        }
        Ok(())
    }
}

/// A process, as the metadata of its transport names it. This is a claim until [`check`](Self::check) has
/// proven it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Inode number of the process descriptor (pidfd); zero before Linux 6.9.
    pub inode: u64,
    /// Inode number of the PID namespace; zero if unknown.
    pub namespace: u64,
    /// Process id in that PID namespace.
    pub pid: i32,
    /// When the process started, in clock ticks since the host's boot; zero if unknown.
    pub started: u64,
}

/// What the kernel says about a claimed identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The process is the one that the claim names.
    Proven,
    /// The process is another one.
    Refuted,
    /// The process is in a PID namespace that this process cannot see, and the kernel is older than Linux
    /// 6.9.
    Unknown,
}

/// What is known about the life of a peer's process.
#[derive(Debug)]
pub enum Life {
    /// The process is on this host and held by a descriptor, which is readable once the process has ended.
    Watched(Process),
    /// The peer's process is the calling process.
    Ours,
    /// The process cannot be seen from here: another host, another PID namespace, or an old kernel.
    Unseen,
    /// The process has ended, for certain.
    Dead,
}

impl ProcessIdentity {
    /// The identity of the calling process.
    pub fn here() -> Result<ProcessIdentity, OsError> {
        let pid = getpid().as_raw_nonzero().get();
        let inode = match Process::open(pid) {
            Ok(process) => process.inode(),
            Err(PeerError::Os(error)) => return Err(error),
            Err(_) => return Err(OsError::new("pidfd_open", rustix::io::Errno::SRCH)),
        };
        Ok(ProcessIdentity { inode, namespace: namespace(), pid, started: started(pid) })
    }

    /// Compares the claim with a process that the kernel has named.
    pub fn check(&self, process: &Process) -> Proof {
        let seen = process.inode();
        if self.inode != 0 && seen != 0 {
            return if self.inode == seen { Proof::Proven } else { Proof::Refuted };
        }
        let Some(pid) = process.pid().filter(|_| self.namespace != 0 && self.namespace == namespace()) else {
            return Proof::Unknown;
        };
        let started = started(pid);
        let same_start = started == self.started || started == 0 || self.started == 0;
        if pid == self.pid && same_start { Proof::Proven } else { Proof::Refuted }
    }

    /// Looks for the process, which is claimed to run on `host`, and holds a descriptor of it, so that its
    /// end will be seen. A process that the kernel cannot confirm is [`Life::Unseen`].
    pub fn watch(&self, host: &Host) -> Life {
        let (Ok(here), Ok(ours)) = (Host::here(), ProcessIdentity::here()) else { return Life::Unseen };
        let comparable = self.inode != 0 && ours.inode != 0 || self.started != 0 && ours.started != 0;
        let visible = self.namespace != 0 && self.namespace == ours.namespace;
        if !here.is_same_boot(host) || !visible || !comparable {
            return Life::Unseen;
        }
        if *self == ours {
            return Life::Ours;
        }
        // The descriptor is of the process that has the number now. If that process is the peer, it was the
        // peer when the descriptor was made.
        match Process::open(self.pid) {
            Ok(process) if self.check(&process) == Proof::Proven => Life::Watched(process),
            Ok(_) | Err(PeerError::Gone) => Life::Dead,
            Err(_) => Life::Unseen,
        }
    }
}

impl Life {
    /// True if the process has ended, for certain.
    pub fn is_over(&self) -> bool {
        match self {
            Life::Watched(process) => !process.is_alive(),
            Life::Dead => true,
            Life::Ours | Life::Unseen => false,
        }
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
    use super::*;
    use crate::process::tests::Sleeper;

    fn sleeper() -> (Sleeper, ProcessIdentity) {
        let child = Sleeper::start();
        let pid = child.pid();
        let inode = Process::open(pid).unwrap().inode();
        (child, ProcessIdentity { inode, namespace: namespace(), pid, started: started(pid) })
    }

    #[test]
    fn a_process_is_itself_and_no_other_with_and_without_inode_numbers() {
        let (_child, there) = sleeper();
        let here = ProcessIdentity::here().unwrap();
        let (own, other) = (Process::open(here.pid).unwrap(), Process::open(there.pid).unwrap());
        assert!(here.started > 0 && here.namespace > 0);
        for claimed in [here, ProcessIdentity { inode: 0, ..here }] {
            assert_eq!(claimed.check(&own), Proof::Proven);
            assert_eq!(claimed.check(&other), Proof::Refuted);
        }
        let reused = ProcessIdentity { inode: 0, started: here.started + 1, ..here };
        assert_eq!(reused.check(&own), Proof::Refuted);
        let elsewhere = ProcessIdentity { inode: 0, namespace: 1, ..here };
        assert_eq!(elsewhere.check(&own), Proof::Unknown);
    }

    #[test]
    fn a_process_is_identified_by_more_than_its_number() {
        let host = Host::here().unwrap();
        for without_inode in [false, true] {
            let (mut child, mut process) = sleeper();
            if without_inode {
                process.inode = 0;
            }
            let life = process.watch(&host);
            assert!(matches!(life, Life::Watched(_)));
            assert!(!life.is_over());
            let earlier = ProcessIdentity { inode: 0, started: process.started - 1, ..process };
            assert!(matches!(earlier.watch(&host), Life::Dead), "the number was given away again");
            child.end();
            assert!(life.is_over());
            let late = process.watch(&host);
            assert!(matches!(late, Life::Dead) && late.is_over());
        }
    }

    #[test]
    fn another_host_another_namespace_and_an_empty_claim_are_not_looked_into() {
        let (host, here) = (Host::here().unwrap(), ProcessIdentity::here().unwrap());
        assert!(matches!(here.watch(&host), Life::Ours));
        let (_child, there) = sleeper();
        for other in [Host::default(), Host { boot: (host.boot.0, host.boot.1 ^ 1), ..host }] {
            assert!(matches!(there.watch(&other), Life::Unseen));
        }
        for claim in [
            ProcessIdentity { namespace: 1, ..there },
            ProcessIdentity { namespace: 0, ..there },
            ProcessIdentity { inode: 0, started: 0, ..there },
            ProcessIdentity::default(),
        ] {
            assert!(matches!(claim.watch(&host), Life::Unseen), "{claim:?}");
        }
        for pid in [0, -1, i32::MIN] {
            assert!(!matches!(ProcessIdentity { pid, ..there }.watch(&host), Life::Watched(_)));
        }
    }

    #[test]
    fn another_boot_is_another_host() {
        let here = Host::here().unwrap();
        assert_eq!(here.check(&here), Ok(()));
        assert!(here.check(&Host { boot: (1, 2), ..here }).is_err());
        assert!(here.check(&Host { network: here.network + 1, ..here }).is_err());
        assert!(here.check(&Host { network: 0, ..here }).is_ok());
        assert!(Host::default().check(&Host::default()).is_err(), "two unknown hosts are not one");
    }
}
