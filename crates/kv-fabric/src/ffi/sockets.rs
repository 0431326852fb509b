//! The sockets of an endpoint's connections, as the kernel lists them. libfabric gives out neither the sockets nor a call
//! that ends a connection, and sets no keepalive.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;

/// How many probes of the kernel must stay without an answer until an idle connection has ended.
const PROBES: u32 = 4;
/// Most seconds that the kernel takes for [`Keepalive::idle`] and [`Keepalive::interval`].
const LONGEST: u64 = 32_767;

/// The connections over TCP that this epoll set watches, or one of the sets that it watches.
pub(super) fn connections(set: RawFd) -> io::Result<Vec<RawFd>> {
    new_connections(set, &mut BTreeSet::new())
}

/// The same without those that are `known`, by their descriptors and inodes. Then they all are, and nothing else is.
pub(super) fn new_connections(set: RawFd, known: &mut BTreeSet<(RawFd, u64)>) -> io::Result<Vec<RawFd>> {
    let (mut sets, mut seen, mut found) = (vec![set], BTreeSet::new(), Vec::new());
    let mut open = BTreeSet::new();
    while let Some(set) = sets.pop() {
        for (fd, inode) in watched(&fs::read_to_string(format!("/proc/thread-self/fdinfo/{set}"))?) {
            // A child may keep an ended connection in the set, whose descriptor is now that of another one.
            if !seen.insert((fd, inode)) {
                continue;
            }
            if known.contains(&(fd, inode)) {
                open.insert((fd, inode));
                continue;
            }
            let Ok(what) = fs::read_link(format!("/proc/thread-self/fd/{fd}")) else { continue };
            if what.as_os_str() == "anon_inode:[eventpoll]" {
                sets.push(fd);
            } else if what.as_os_str() == format!("socket:[{inode}]").as_str() && is_connection(fd) {
                open.insert((fd, inode));
                found.push(fd);
            }
        }
    }
    *known = open;
    Ok(found)
}

/// When the kernel asks whether the other end of an idle connection is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keepalive {
    idle: Duration,
    interval: Duration,
}

impl Keepalive {
    /// The last of the questions is without an answer within this time, or within five seconds: the kernel counts whole
    /// ones.
    pub(super) fn within(silence: Duration) -> Keepalive {
        let bounded = |time: Duration| Duration::from_secs(time.as_secs().clamp(1, LONGEST));
        let interval = bounded(silence / (2 * PROBES));
        Keepalive { idle: bounded(silence.saturating_sub(PROBES * interval)), interval }
    }

    /// Has the kernel ask on this connection, which ends when the other kernel does not know it any more, or does not
    /// answer. A process that is stopped does not matter: its kernel answers.
    pub(super) fn set(self, fd: RawFd) -> Result<(), Errno> {
        // SAFETY: libfabric's epoll set watches the descriptor, and nobody closes it meanwhile: libfabric does so only in
        // calls of the endpoint, of which this is one.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        sockopt::set_tcp_keepidle(socket, self.idle)?;
        sockopt::set_tcp_keepintvl(socket, self.interval)?;
        sockopt::set_tcp_keepcnt(socket, PROBES)?;
        sockopt::set_socket_keepalive(socket, true)
    }
}

/// The descriptors that an epoll set watches, with the inodes that they had when they were added.
fn watched(info: &str) -> impl Iterator<Item = (RawFd, u64)> {
    info.lines().filter_map(|line| {
        let (fd, rest) = line.strip_prefix("tfd:")?.trim_start().split_once(' ')?;
        let inode = rest.split_whitespace().find_map(|field| field.strip_prefix("ino:"))?;
        Some((fd.parse().ok()?, u64::from_str_radix(inode, 16).ok()?))
    })
}

fn is_connection(fd: RawFd) -> bool {
    let family = option(fd, libc::SO_DOMAIN);
    let listens = option(fd, libc::SO_ACCEPTCONN);
    [Some(libc::AF_INET), Some(libc::AF_INET6)].contains(&family)
        && option(fd, libc::SO_TYPE) == Some(libc::SOCK_STREAM)
        && listens == Some(0)
}

fn option(fd: RawFd, name: c_int) -> Option<c_int> {
    let (mut value, mut len): (c_int, _) = (0, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: there is room for the value, as long as is said.
    let got = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
    (got == 0).then_some(value)
}

/// Ends a connection in both directions. What has arrived can still be read, and then its end.
pub(super) fn shut_down(fd: RawFd) {
    // SAFETY: no memory is involved.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

    use super::*;

    fn set<'a>(members: impl IntoIterator<Item = &'a dyn AsFd>) -> OwnedFd {
        let set = epoll::create(CreateFlags::CLOEXEC).unwrap();
        for member in members {
            epoll::add(&set, member.as_fd(), EventData::new_u64(0), EventFlags::IN).unwrap();
        }
        set
    }

    #[test]
    fn each_connection_is_new_once_and_its_descriptor_is_new_again_with_another() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (first, second) = (connect(), connect());
        let outer = set([&first as &dyn AsFd, &listener]);
        let mut known = BTreeSet::new();
        let mut found = || new_connections(outer.as_raw_fd(), &mut known).unwrap();
        assert_eq!(found(), [first.as_raw_fd()]);
        assert_eq!(found(), []);
        let mut first = OwnedFd::from(first);
        rustix::io::dup2(&second, &mut first).unwrap();
        epoll::add(&outer, &first, EventData::new_u64(0), EventFlags::IN).unwrap();
        assert_eq!(found(), [first.as_raw_fd()], "the descriptor of another connection");
        assert_eq!(found(), []);
        assert_eq!(known.len(), 1, "connections that have ended are forgotten");
    }

    /// A child that has inherited the socket of an ended connection keeps it in the set.
    #[test]
    fn a_connection_is_found_beside_an_ended_one_with_its_descriptor_that_a_child_keeps() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // The kernel lists the two in the order of addresses of its own.
        for round in 0..20 {
            let mut descriptor = OwnedFd::from(connect());
            let outer = set([&descriptor as &dyn AsFd]);
            let mut known = BTreeSet::new();
            let mut found = || new_connections(outer.as_raw_fd(), &mut known).unwrap();
            assert_eq!(found(), [descriptor.as_raw_fd()]);
            let (_kept, next) = (descriptor.try_clone().unwrap(), connect());
            rustix::io::dup2(&next, &mut descriptor).unwrap();
            assert_eq!(found(), [], "round {round}: only the ended one is watched");
            epoll::add(&outer, &descriptor, EventData::new_u64(0), EventFlags::IN).unwrap();
            assert_eq!(found(), [descriptor.as_raw_fd()], "round {round}");
            assert_eq!(connections(outer.as_raw_fd()).unwrap(), [descriptor.as_raw_fd()], "round {round}");
            assert_eq!(found(), []);
        }
    }

    #[test]
    fn an_idle_connection_is_asked_for_within_the_silence_and_never_more_often_than_the_kernel_can() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for silence in (1000..20_000).step_by(100).chain([86_399_999]).map(Duration::from_millis) {
            let Keepalive { idle, interval } = Keepalive::within(silence);
            let last = idle + PROBES * interval;
            assert!(last <= silence.max(Duration::from_secs(5)), "{silence:?}: {last:?}");
        }
        for (silence, idle, interval) in [(1, 1, 1), (20, 12, 2), (86_400, 32_767, 10_800)] {
            Keepalive::within(Duration::from_secs(silence)).set(stream.as_raw_fd()).unwrap();
            assert_eq!(sockopt::socket_keepalive(&stream), Ok(true));
            assert_eq!(sockopt::tcp_keepidle(&stream), Ok(Duration::from_secs(idle)));
            assert_eq!(sockopt::tcp_keepintvl(&stream), Ok(Duration::from_secs(interval)));
            assert_eq!(sockopt::tcp_keepcnt(&stream), Ok(PROBES));
        }
    }

    #[test]
    fn connections_are_found_in_sets_inside_of_sets_and_end_after_what_has_arrived() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut near, _) = listener.accept().unwrap();
        let (local, _other) = UnixStream::pair().unwrap();
        let inner = set([&near as &dyn AsFd, &local, &listener]);
        let outer = set([&inner as &dyn AsFd]);
        assert_eq!(connections(outer.as_raw_fd()).unwrap(), [near.as_raw_fd()]);
        far.write_all(b"arrived").unwrap();
        shut_down(near.as_raw_fd());
        let mut all = Vec::new();
        near.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"arrived");
        drop(near);
        assert_eq!(connections(outer.as_raw_fd()).unwrap(), []);
        assert!(connections(-1).is_err());
    }
}
