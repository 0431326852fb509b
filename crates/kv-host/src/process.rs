//! [`Process`]: a process of this host, held by a descriptor that tells the process's end for certain.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{fstat, fstatfs};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use rustix::time::Timespec;

use crate::error::{OsError, PeerError};
use crate::sys;

/// The file system of process descriptors (Linux 6.9): its inode numbers are never used twice.
const PIDFS: u64 = 0x5049_4446;

/// A process, held by a descriptor (pidfd) that names the same process even after its process id is used
/// again. The descriptor is readable once every thread of the process has ended.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    pidfd: OwnedFd,
}

impl Process {
    /// The process that connected, or that listens, at the other end of a Unix socket. The kernel names the
    /// process; nothing that the peer claims is used. Refused with [`PeerError::OtherUser`] if the process
    /// belongs to another user.
    pub fn behind(socket: BorrowedFd<'_>) -> Result<Process, PeerError> {
        let credentials = credentials(socket)?;
        match sys::peer_pidfd(socket) {
            Ok(pidfd) => Ok(Process { pid: credentials.pid, pidfd }),
            // Before Linux 6.5 the kernel does not give the descriptor. If the stream turns out to be alive
            // after this, the process still holds the other end, so that its id has not been used again.
            Err(_) => Process::open(credentials.pid),
        }
    }

    /// The process that has the process id `pid` now, in the PID namespace of the calling process.
    pub fn open(pid: i32) -> Result<Process, PeerError> {
        // `Pid::from_raw` panics at a negative number, and a peer may have sent this one.
        let number = (pid > 0).then_some(pid).and_then(Pid::from_raw).ok_or(PeerError::Unseen)?;
        match pidfd_open(number, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Process { pid, pidfd }),
            Err(Errno::SRCH) => Err(PeerError::Gone),
            Err(error) => Err(OsError::new("pidfd_open", error).into()),
        }
    }

    /// The process id, if the process is in a PID namespace that the calling process can see.
    pub fn pid(&self) -> Option<i32> {
        (self.pid > 0).then_some(self.pid)
    }

    /// True if both values hold the same process.
    pub fn is(&self, other: &Process) -> bool {
        let (ours, theirs) = (self.inode(), other.inode());
        if ours != 0 && theirs != 0 { ours == theirs } else { self.pid > 0 && self.pid == other.pid }
    }

    /// False once every thread of the process has ended.
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        !matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(count) if count > 0)
    }

    /// The process's memory, as a file that stays with the address space that the process has now: once the process has
    /// ended, or executes another program, nothing can be read there (unless a process that shares the address space
    /// goes on with it). Needs the right to trace the process; the error is `EACCES` otherwise.
    pub fn memory(&self) -> Result<OwnedFd, PeerError> {
        let error = |call| move |error: io::Error| OsError::new(call, error);
        // `/proc` may have been mounted in another PID namespace, where the process has another number.
        let path = format!("/proc/self/fdinfo/{}", self.pidfd.as_raw_fd());
        let info = fs::read_to_string(path).map_err(error("read fdinfo"))?;
        let number = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse::<i32>().ok());
        let number = match number {
            Some(number) if number > 0 => number,
            _ if self.is_alive() => return Err(PeerError::Unseen),
            _ => return Err(PeerError::Gone),
        };
        let opened = File::open(format!("/proc/{number}/mem"));
        // Until now, the number was not used again.
        if self.is_alive() { Ok(opened.map_err(error("open mem"))?.into()) } else { Err(PeerError::Gone) }
    }

    /// A number that no other process of this boot has; zero before Linux 6.9.
    pub(crate) fn inode(&self) -> u64 {
        match (fstatfs(&self.pidfd), fstat(&self.pidfd)) {
            (Ok(system), Ok(file)) if system.f_type as u64 == PIDFS => file.st_ino,
            _ => 0,
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Refuses the process at the other end of a Unix socket with [`PeerError::OtherUser`] if it belongs to
/// another user. A process of the same user could reach this process's memory without a transport, too.
///
/// In a user namespace, the kernel shows every user that the namespace does not map under one number, the overflow user
/// id (65534). Where this process runs under that number, a peer is refused with [`PeerError::UnmappedUser`], unless the
/// namespace maps the number and the peer is seen to be in the same namespace.
pub fn check_user(socket: BorrowedFd<'_>) -> Result<(), PeerError> {
    credentials(socket).map(|_| ())
}

fn credentials(socket: BorrowedFd<'_>) -> Result<sys::Credentials, PeerError> {
    let credentials = sys::peer_credentials(socket)?;
    let (peer, ours) = (credentials.uid, geteuid().as_raw());
    if peer != ours {
        return Err(PeerError::OtherUser { peer, ours });
    }
    let overflow = fs::read_to_string("/proc/sys/kernel/overflowuid");
    let overflow = overflow.map_err(|error| OsError::new("read overflowuid", error))?;
    if overflow.trim().parse() != Ok(peer) {
        return Ok(credentials);
    }
    let map = match fs::read_to_string("/proc/self/uid_map") {
        Ok(map) => map,
        // A kernel without user namespaces.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(credentials),
        Err(error) => return Err(OsError::new("read uid_map", error).into()),
    };
    if has_all_users(&map) || has_user(&map, peer) && is_of_our_user_namespace(credentials.pid) {
        return Ok(credentials);
    }
    Err(PeerError::UnmappedUser { peer })
}

/// True if a user namespace with this map has every user under its own number.
fn has_all_users(map: &str) -> bool {
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// True if a user namespace with this map has a user of its own under this number.
fn has_user(map: &str, uid: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_ascii_whitespace().map(|number| number.parse::<u32>());
        let (Some(Ok(first)), _, Some(Ok(count))) = (numbers.next(), numbers.next(), numbers.next()) else {
            return false;
        };
        uid.checked_sub(first).is_some_and(|at| at < count)
    })
}

/// True if the process is for certain in the calling process's user namespace, in which it has the user that it shows.
fn is_of_our_user_namespace(pid: i32) -> bool {
    let [ours, theirs] =
        ["self".to_owned(), pid.to_string()].map(|of| fs::read_link(format!("/proc/{of}/ns/user")));
    pid > 0 && ours.is_ok_and(|ours| theirs.is_ok_and(|theirs| theirs == ours))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command};

    use super::*;

    const NOBODY: &str = "KV_HOST_NOBODY";

    /// Another process, which is killed when this value is dropped.
    pub(crate) struct Sleeper(Child);

    impl Sleeper {
        pub(crate) fn start() -> Sleeper {
            Sleeper(Command::new("sleep").arg("1000").spawn().unwrap())
        }

        pub(crate) fn pid(&self) -> i32 {
            self.0.id().cast_signed()
        }

        pub(crate) fn end(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.end();
        }
    }

    #[test]
    fn the_process_behind_a_socket_is_alive_and_itself() {
        let (socket, _other) = UnixStream::pair().unwrap();
        assert_eq!(check_user(socket.as_fd()), Ok(()));
        let process = Process::behind(socket.as_fd()).unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(process.pid(), Some(pid));
        assert!(process.is_alive());
        assert!(process.is(&Process::open(pid).unwrap()));
    }

    #[test]
    fn a_map_of_users_says_whether_a_number_is_that_of_one_user() {
        let all = "         0          0 4294967295\n";
        assert!(has_all_users(all) && has_user(all, 65534));
        for (map, has) in [
            ("", false),
            ("0 1000 1\n", false),
            ("65534 1000 1\n", true),
            ("0 100000 65534\n", false),
            ("0 100000 65536\n", true),
            ("0 0 1000\n1000 1000 4294966295\n", true),
            ("65535 0 7\n", false),
            ("0 0\n", false),
        ] {
            assert_eq!((has_all_users(map), has_user(map, 65534)), (false, has), "{map}");
        }
        let ours = std::process::id().cast_signed();
        assert!(
            is_of_our_user_namespace(ours) && !is_of_our_user_namespace(0) && !is_of_our_user_namespace(-1)
        );
    }

    /// A process without a user of its own. Without its variable, this test does nothing.
    #[test]
    fn nobody() {
        if std::env::var_os(NOBODY).is_some() {
            let (socket, _other) = UnixStream::pair().unwrap();
            println!("as {}: {:?}", geteuid().as_raw(), check_user(socket.as_fd()));
        }
    }

    #[test]
    fn a_process_that_runs_as_the_overflow_user_accepts_no_peer() {
        let child = Command::new("unshare")
            .args(["--user", "--"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "process::tests::nobody", "--nocapture", "--test-threads=1"])
            .env(NOBODY, "1")
            .output();
        match child {
            Ok(child) if child.status.success() => {
                let said = String::from_utf8_lossy(&child.stdout).into_owned();
                let uid = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap();
                let uid = uid.trim();
                assert!(said.contains(&format!("as {uid}: Err(UnmappedUser {{ peer: {uid} }})")), "{said}");
            }
            // A container may forbid its processes to make user namespaces.
            refused => {
                println!("SKIPPED: a_process_that_runs_as_the_overflow_user_accepts_no_peer: {refused:?}");
            }
        }
    }

    #[test]
    fn an_ended_process_stays_dead_although_its_number_is_free() {
        let mut child = Sleeper::start();
        let process = Process::open(child.pid()).unwrap();
        assert!(process.is_alive());
        assert!(!process.is(&Process::open(std::process::id().cast_signed()).unwrap()));
        child.end();
        assert!(!process.is_alive());
        assert_eq!(Process::open(child.pid()).err(), Some(PeerError::Gone));
        assert_eq!(Process::open(0).err(), Some(PeerError::Unseen));
        assert_eq!(Process::open(-1).err(), Some(PeerError::Unseen));
    }
}
