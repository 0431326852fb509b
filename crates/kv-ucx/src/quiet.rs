//! Whether anything of a process of this host that has ended can still arrive.
//!
//! UCX writes over TCP: the bytes of a put lie in socket buffers until this process's thread puts them in place. The
//! kernel goes on to send what a dead process has left in its buffers. So a peer's death is told only when no
//! connection of this process can bring such bytes any more:
//!
//! | this end of a connection | may bring bytes of a dead process |
//! |---|---|
//! | closed by the other side, or reset | if there are unread bytes |
//! | open, and the other end belongs to a process of this host, or to another host | no |
//! | open, and the other end is on this host and belongs to no process | yes |
//!
//! The connections are those of all libraries in the process: UCX does not say which ones are its own.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::net::SocketAddr;

use crate::sockets::{self, Connection, End};

/// Both ends of a connection in the form of `/proc/net/tcp`.
type Ends = (String, String);

/// True if no connection of this process can bring bytes of a process of this host that has ended. False also if the
/// kernel does not tell.
pub(crate) fn is_quiet() -> bool {
    let Some(connections) = sockets::connections() else { return false };
    let Some(table) = Table::read() else { return false };
    connections.iter().all(|connection| table.is_quiet(connection))
}

/// The TCP connections of the network namespace.
#[derive(Debug, Default)]
struct Table {
    /// Whether the first end belongs to a process.
    owned: HashMap<Ends, bool>,
    /// Addresses of this host, without ports.
    hosts: HashSet<String>,
}

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
            let (Some(local), Some(remote)) = (fields.nth(1), fields.next()) else { continue };
            let owned = fields.nth(6).is_some_and(|inode| inode != "0");
            self.hosts.insert(host(local).to_owned());
            self.owned.insert((local.to_owned(), remote.to_owned()), owned);
        }
    }

    fn is_quiet(&self, connection: &Connection) -> bool {
        match connection.end {
            End::Closed => connection.unread == 0,
            End::Open { local, remote } => {
                let (local, remote) = (written(local), written(remote));
                let far = !self.hosts.contains(host(&remote));
                // A process of this host whose end is gone from the table has just been reset.
                self.owned.get(&(remote, local)).copied().unwrap_or(far)
            }
        }
    }
}

fn host(end: &str) -> &str {
    end.split(':').next().unwrap_or_default()
}

/// An address as `/proc/net/tcp` has it: words of the host's byte order, in hexadecimal digits.
fn written(address: SocketAddr) -> String {
    let word = |bytes: &[u8]| {
        let bytes: [u8; 4] = bytes.try_into().unwrap_or_default();
        format!("{:08X}", u32::from_ne_bytes(bytes))
    };
    let host: String = match address {
        SocketAddr::V4(address) => word(&address.ip().octets()),
        SocketAddr::V6(address) => address.ip().octets().chunks(4).map(word).collect(),
    };
    format!("{host}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn addresses_are_written_as_the_kernel_writes_them() {
        let text = fs::read_to_string("/proc/self/net/tcp").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(written("127.0.0.1:8080".parse().unwrap()), "0100007F:1F90");
        assert!(!text.contains(&written(address)));
        assert!(fs::read_to_string("/proc/self/net/tcp").unwrap().contains(&written(address)));
        assert_eq!(written("[::1]:80".parse().unwrap()), "00000000000000000000000001000000:0050");
    }

    fn wait(what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// One test, because all connections of the process count.
    #[test]
    fn bytes_that_a_dead_process_has_left_are_seen_until_they_are_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        near.write_all(b"bytes of a living process").unwrap();
        wait("a quiet begin", is_quiet);
        // The child inherits the connection as its standard output, writes more than buffers hold, and is killed.
        let writer: std::os::fd::OwnedFd = near.into();
        let mut child = Command::new("cat").arg("/dev/zero").stdout(Stdio::from(writer)).spawn().unwrap();
        let unread = |other: &TcpStream| rustix::io::ioctl_fionread(other).unwrap();
        wait("full buffers", || {
            let before = unread(&other);
            std::thread::sleep(Duration::from_millis(50));
            before > 100_000 && unread(&other) == before
        });
        assert!(is_quiet(), "the writer lives");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_quiet());
        let (mut buffer, mut read) = (vec![0; 64 << 10], 0);
        while let Ok(count @ 1..) = other.read(&mut buffer) {
            read += count;
        }
        assert!(read > 100_000, "{read}");
        wait("a quiet end", is_quiet);
    }
}
