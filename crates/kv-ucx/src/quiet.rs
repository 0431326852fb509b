//! Whether anything of a process of this host that has ended can still arrive.
//!
//! UCX writes over TCP: the bytes of a put lie in socket buffers until this process's thread puts them in place. The
//! kernel goes on to send what a dead process has left in its buffers. So a peer's death is told only when no
//! connection of this process can bring such bytes any more:
//!
//! | this end of a connection | may bring bytes of a dead process |
//! |---|---|
//! | to an address of another host | no |
//! | closed by the other side, or reset | if there are unread bytes |
//! | open, and the other end belongs to a process of this network namespace, or to none yet | no |
//! | open, and the other end belongs to no process any more | yes |
//! | open, and there is no other end in this network namespace | if there are unread bytes, or just after the death |
//!
//! The last row is that of a process in another network namespace, which a mapped port of this host leads to. But it is
//! also that of a process of this namespace whose end was reset a moment ago, so that this end is about to be closed.
//!
//! The connections are those of all libraries in the process: UCX does not say which ones are its own.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use crate::sockets::{self, Connection};

/// Both ends of a connection. An IPv4 address has one form only.
type Ends = ((IpAddr, u16), (IpAddr, u16));

/// What the kernel says about the bytes of dead processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// None can arrive.
    Quiet,
    /// None can arrive, unless the process has just died.
    Doubtful,
    /// Some may arrive, or the kernel does not tell.
    Unquiet,
}

/// Looks at all connections of this process.
pub(crate) fn look() -> Verdict {
    // The table is the older of the two: what has no row in it has got its last bytes before its end is looked at.
    let table = Table::read();
    let (Some(mut table), Some(connections)) = (table, sockets::connections()) else {
        return Verdict::Unquiet;
    };
    connections.iter().map(|connection| table.judge(connection)).max().unwrap_or(Verdict::Quiet)
}

/// The TCP connections of the network namespace.
#[derive(Debug, Default)]
struct Table {
    /// Whether the first end belongs to a process, or to none yet.
    owned: HashMap<Ends, bool>,
    /// Addresses, and whether they are this host's.
    ours: HashMap<SocketAddr, bool>,
}

/// The states `TCP_ESTABLISHED` and `TCP_SYN_RECV` in `/proc/net/tcp`. Before a process leaves its end, the end changes to
/// another state; so an end in these states without a process is one that was not accepted yet.
const NOT_LEFT: [&str; 2] = ["01", "03"];

impl Table {
    fn read() -> Option<Table> {
        let mut table = Table::default();
        table.add(&fs::read_to_string("/proc/self/net/tcp").ok()?);
        // Absent where IPv6 is switched off.
        table.add(&fs::read_to_string("/proc/self/net/tcp6").unwrap_or_default());
        Some(table)
    }

    fn add(&mut self, text: &str) {
        for line in text.lines().skip(1) {
            let mut fields = line.split_ascii_whitespace();
            let (local, remote) = (fields.nth(1).and_then(read_end), fields.next().and_then(read_end));
            let (Some(local), Some(remote), Some(state)) = (local, remote, fields.next()) else { continue };
            let owned = NOT_LEFT.contains(&state) || fields.nth(5).is_some_and(|inode| inode != "0");
            self.owned.insert((local, remote), owned);
        }
    }

    fn judge(&mut self, connection: &Connection) -> Verdict {
        let Connection { local, remote, closed, unread } = *connection;
        let row = remote.and_then(|remote| self.owned.get(&(end_of(remote), end_of(local))).copied());
        let may_bring = match row {
            _ if closed => unread > 0,
            Some(owned) => !owned,
            None => true,
        };
        if !may_bring || remote.is_some_and(|remote| !self.is_ours(remote)) {
            return Verdict::Quiet;
        }
        let in_doubt = !closed && row.is_none() && unread == 0;
        if in_doubt { Verdict::Doubtful } else { Verdict::Unquiet }
    }

    /// True unless the address is for certain none of this host's: sockets can be bound to a host's own addresses.
    fn is_ours(&mut self, mut address: SocketAddr) -> bool {
        address.set_port(0);
        let refused = |error: io::Error| error.kind() == io::ErrorKind::AddrNotAvailable;
        *self.ours.entry(address).or_insert_with(|| !UdpSocket::bind(address).is_err_and(refused))
    }
}

fn end_of(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

/// Reads an address of `/proc/net/tcp`: words of the host's byte order, in hexadecimal digits.
fn read_end(text: &str) -> Option<(IpAddr, u16)> {
    let (host, port) = text.split_once(':')?;
    let word = |digits: &[u8]| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
    let words: Vec<[u8; 4]> =
        host.as_bytes().chunks(8).map(|digits| Some(word(digits)?.to_ne_bytes())).collect::<Option<_>>()?;
    let ip = match words.as_slice() {
        [word] => IpAddr::V4(Ipv4Addr::from(*word)),
        words => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(words.concat()).ok()?)),
    };
    Some((ip.to_canonical(), u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn rows_of_the_kernel_are_read_with_one_form_for_each_address() {
        let (near, _other) = pair();
        let (local, remote) = (near.local_addr().unwrap(), near.peer_addr().unwrap());
        assert_eq!(Table::read().unwrap().owned.get(&(end_of(local), end_of(remote))), Some(&true));
        let address = |text: &str| text.parse::<SocketAddr>().map(end_of).ok();
        assert_eq!(read_end("0100007F:1F90"), address("127.0.0.1:8080"));
        assert_eq!(read_end("00000000000000000000000001000000:0050"), address("[::1]:80"));
        assert_eq!(read_end("0000000000000000FFFF00000100007F:0050"), address("127.0.0.1:80"));
        for damaged in ["", ":", "0100007F", "0100007F:", "0100007G:1", "0100007F0100007F:1", "0100007é:1"] {
            assert_eq!(read_end(damaged), None, "{damaged}");
        }
    }

    pub(crate) fn wait(what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Both ends of a connection.
    pub(crate) fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// What is found of one end, whatever else this process has.
    fn verdict(end: impl AsFd) -> Verdict {
        let mut table = Table::read().unwrap();
        table.judge(&sockets::connection(end.as_fd().as_raw_fd()).unwrap())
    }

    fn unread(end: &TcpStream) -> u64 {
        rustix::io::ioctl_fionread(end).unwrap()
    }

    /// A process that inherits a connection as its standard output, and writes more than buffers hold.
    pub(crate) fn writer_into(near: TcpStream, other: &TcpStream) -> Child {
        let output = Stdio::from(OwnedFd::from(near));
        let child = Command::new("cat").arg("/dev/zero").stdout(output).spawn().unwrap();
        wait("full buffers", || {
            let before = unread(other);
            std::thread::sleep(Duration::from_millis(50));
            before > 100_000 && unread(other) == before
        });
        child
    }

    pub(crate) fn kill(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn read_all(end: &mut TcpStream) -> usize {
        let (mut buffer, mut read) = (vec![0; 64 << 10], 0);
        while let Ok(count @ 1..) = end.read(&mut buffer) {
            read += count;
        }
        read
    }

    #[test]
    fn bytes_that_a_dead_process_has_left_are_seen_until_they_are_read() {
        let (mut near, mut other) = pair();
        near.write_all(b"bytes of a living process").unwrap();
        assert_eq!(verdict(&other), Verdict::Quiet);
        let child = writer_into(near, &other);
        assert_eq!(verdict(&other), Verdict::Quiet, "the writer lives");
        kill(child);
        assert_eq!((verdict(&other), look()), (Verdict::Unquiet, Verdict::Unquiet));
        let read = read_all(&mut other);
        assert!(read > 100_000, "{read}");
        assert_eq!(verdict(&other), Verdict::Quiet);
    }

    #[test]
    fn unread_bytes_of_a_closed_connection_count_unless_they_are_of_another_host() {
        let (mut near, other) = pair();
        near.write_all(b"the last words").unwrap();
        drop(near);
        wait("the end of the stream", || sockets::connection(other.as_raw_fd()).unwrap().closed);
        let connection = sockets::connection(other.as_raw_fd()).unwrap();
        let mut table = Table::read().unwrap();
        assert_eq!((connection.unread, table.judge(&connection)), (14, Verdict::Unquiet));
        // An address for documentation, which no host has.
        let far = Some("192.0.2.1:443".parse().unwrap());
        assert_eq!(table.judge(&Connection { remote: far, ..connection }), Verdict::Quiet);
        // All addresses of the loopback network are this host's, also those that no socket has.
        let ours = Some("127.45.67.89:443".parse().unwrap());
        assert_eq!(table.judge(&Connection { remote: ours, ..connection }), Verdict::Unquiet);
        assert_eq!(table.judge(&Connection { remote: None, ..connection }), Verdict::Unquiet);
        assert_eq!(table.judge(&Connection { remote: None, unread: 0, ..connection }), Verdict::Quiet);
    }

    #[test]
    fn an_open_connection_without_another_end_here_is_in_doubt_only_for_its_unread_bytes() {
        let (_near, other) = pair();
        let connection = sockets::connection(other.as_raw_fd()).unwrap();
        let mut table = Table::default();
        assert_eq!(table.judge(&connection), Verdict::Doubtful, "a mapped port of this host");
        assert_eq!(table.judge(&Connection { unread: 1, ..connection }), Verdict::Unquiet);
        let far = Some("192.0.2.1:443".parse().unwrap());
        assert_eq!(table.judge(&Connection { remote: far, unread: 1, ..connection }), Verdict::Quiet);
    }

    #[test]
    fn a_connection_that_nobody_has_accepted_is_quiet() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let waiting = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(verdict(&waiting), Verdict::Quiet);
    }
}
