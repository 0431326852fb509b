//! The sockets of an endpoint's connections, as the kernel lists them. libfabric gives out neither the sockets nor a call
//! that ends a connection.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::fs;
use std::io;
use std::os::fd::RawFd;

/// The connections over TCP that this epoll set watches, or one of the sets that it watches.
pub(super) fn connections(set: RawFd) -> io::Result<Vec<RawFd>> {
    let (mut sets, mut seen, mut found) = (vec![set], BTreeSet::new(), Vec::new());
    while let Some(set) = sets.pop() {
        for (fd, inode) in watched(&fs::read_to_string(format!("/proc/thread-self/fdinfo/{set}"))?) {
            if !seen.insert(fd) {
                continue;
            }
            let Ok(what) = fs::read_link(format!("/proc/thread-self/fd/{fd}")) else { continue };
            if what.as_os_str() == "anon_inode:[eventpoll]" {
                sets.push(fd);
            } else if what.as_os_str() == format!("socket:[{inode}]").as_str() && is_connection(fd) {
                found.push(fd);
            }
        }
    }
    Ok(found)
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
