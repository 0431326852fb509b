//! The address at which the server of a host listens.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use kv_host::OsError;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 256;

/// The address of a host's server: a Unix socket.
///
/// As text: `@name` is a name of the abstract namespace, anything else a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum HostAddress {
    /// A name that exists while the server does, for processes of one network namespace.
    Abstract(String),
    /// The path of a socket file, for containers that share a directory but no network namespace. A server
    /// replaces the file that a killed server has left behind.
    Path(PathBuf),
}

impl FromStr for HostAddress {
    type Err = OsError;

    /// Refuses a text that no socket can have as its address: an empty one, or one of more than 108 bytes.
    fn from_str(text: &str) -> Result<HostAddress, OsError> {
        let address = match text.strip_prefix('@') {
            Some(name) => HostAddress::Abstract(name.to_owned()),
            None => HostAddress::Path(PathBuf::from(text)),
        };
        if text.trim_start_matches('@').is_empty() {
            return Err(OsError::new("bind", Errno::INVAL));
        }
        address.resolve().map(|_| address)
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostAddress::Abstract(name) => write!(f, "@{name}"),
            HostAddress::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

impl HostAddress {
    fn resolve(&self) -> Result<SocketAddrUnix, OsError> {
        let address = match self {
            HostAddress::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
            HostAddress::Path(path) => SocketAddrUnix::new(path),
        };
        address.map_err(|error| OsError::new("bind", error))
    }

    /// Connects to the server, waiting no longer than `timeout` for room among those that wait to be accepted.
    pub(super) fn dial(&self, timeout: Duration) -> Result<OwnedFd, OsError> {
        let failed = |error| OsError::new("connect", error);
        let (socket, address) = (packets(SocketFlags::CLOEXEC)?, self.resolve()?);
        set_socket_timeout(&socket, Timeout::Send, Some(timeout)).map_err(failed)?;
        connect(&socket, &address).map_err(failed)?;
        Ok(socket)
    }

    pub(super) fn listen(&self) -> Result<Listener, OsError> {
        let (socket, address) = (packets(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?, self.resolve()?);
        let mut bound = bind(&socket, &address);
        if let (Err(Errno::ADDRINUSE), HostAddress::Path(path)) = (bound, self)
            && self
                .dial(Duration::from_secs(1))
                .is_err_and(|error| error.errno == Some(Errno::CONNREFUSED.raw_os_error()))
        {
            // Nobody listens there any more.
            let _ = std::fs::remove_file(path);
            bound = bind(&socket, &address);
        }
        bound.map_err(|error| OsError::new("bind", error))?;
        listen(&socket, BACKLOG).map_err(|error| OsError::new("listen", error))?;
        let file = match self {
            HostAddress::Abstract(_) => None,
            HostAddress::Path(path) => inode(path).map(|inode| (path.clone(), inode)),
        };
        Ok(Listener { socket, file })
    }
}

/// A socket that listens. Dropping the value removes the socket's file, if there is one.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    file: Option<(PathBuf, (u64, u64))>,
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, inode_then)) = self.file.take()
            && inode(&path) == Some(inode_then)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn inode(path: &PathBuf) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// A socket that keeps messages apart.
fn packets(flags: SocketFlags) -> Result<OwnedFd, OsError> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|error| OsError::new("socket", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_printed_and_impossible_ones_are_refused() {
        for text in ["@ranks", "/run/ec.sock", "ec.sock"] {
            assert_eq!(text.parse::<HostAddress>().unwrap().to_string(), text);
        }
        let long = format!("@{}", "x".repeat(109));
        for text in ["", "@", &long, &long[1..], "a\0b"] {
            assert!(text.parse::<HostAddress>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_file_that_a_killed_server_left_is_replaced_and_a_served_one_is_not() {
        let path = std::env::temp_dir().join(format!("kv-ec-{}.sock", std::process::id()));
        let address = HostAddress::Path(path.clone());
        let mut killed = address.listen().unwrap();
        killed.file = None;
        drop(killed);
        assert!(path.exists());
        let serving = address.listen().unwrap();
        assert_eq!(address.listen().unwrap_err().errno, Some(Errno::ADDRINUSE.raw_os_error()));
        assert!(address.dial(Duration::from_secs(10)).is_ok());
        drop(serving);
        assert!(!path.exists());
    }
}
