//! Addresses of servers. Numeric addresses are parsed; names are resolved by the system's resolver, which
//! blocks and therefore runs on a thread of its own.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use kv_core::OsError;
use mio::Waker;

/// Most names resolved at the same time. A resolver that hangs keeps its thread for as long as it hangs, so
/// the number of threads must be bounded.
const MAX_THREADS: usize = 8;
/// Most addresses of one name that are tried.
const MAX_ADDRS: usize = 8;

/// The host and port of a server address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    host: String,
    port: u16,
}

impl Target {
    /// Splits `host:port`; an IPv6 address as host is in brackets. `None` if the text has another form.
    pub fn parse(addr: &str) -> Option<Target> {
        let (host, port) = addr.rsplit_once(':')?;
        let port = port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse().ok())??;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match bare {
            Some(bare) => {
                bare.parse::<std::net::Ipv6Addr>().ok()?;
                bare
            }
            None => host,
        };
        let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let valid = bare.is_some() || (!host.is_empty() && host.len() <= 253 && host.bytes().all(name));
        (valid && port != 0).then(|| Target { host: host.to_owned(), port })
    }

    /// The socket address, if the host is a numeric address.
    pub fn numeric(&self) -> Option<SocketAddr> {
        self.host.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, self.port))
    }
}

/// Resolves names in the background, on at most eight threads.
#[derive(Debug)]
pub struct Resolver {
    waker: Arc<Waker>,
    sender: Sender<Resolved>,
    receiver: Receiver<Resolved>,
    running: BTreeSet<String>,
}

/// An answer: the server address that was resolved, and its socket addresses or the reason why there are
/// none.
pub type Resolved = (String, Result<Vec<SocketAddr>, OsError>);

impl Resolver {
    /// A resolver that wakes its owner with each answer.
    pub fn new(waker: Waker) -> Resolver {
        let (sender, receiver) = channel();
        Resolver { waker: Arc::new(waker), sender, receiver, running: BTreeSet::new() }
    }

    /// Starts to resolve a name. The answer comes out of [`Resolver::next_answer`]. If too many names are being
    /// resolved, nothing happens: the caller asks again when one of their answers has come.
    pub fn start(&mut self, addr: &str, target: &Target) {
        if self.running.len() >= MAX_THREADS || !self.running.insert(addr.to_owned()) {
            return;
        }
        let (name, target) = (addr.to_owned(), target.clone());
        let (sender, waker) = (self.sender.clone(), Arc::clone(&self.waker));
        let resolve = move || {
            let found = (target.host.as_str(), target.port).to_socket_addrs();
            let found = found.map(|addrs| addrs.take(MAX_ADDRS).collect::<Vec<_>>());
            // The system's resolver has errors of its own, which have neither a kind nor a number.
            let found = found.map_err(|_| OsError::new("resolve", io::ErrorKind::NotFound));
            // If the client is gone, the answer is not needed.
            let _ = sender.send((name, found));
            let _ = waker.wake();
        };
        if let Err(error) = std::thread::Builder::new().name("kv-resolve".to_owned()).spawn(resolve) {
            let _ = self.sender.send((addr.to_owned(), Err(OsError::new("thread::spawn", error))));
            let _ = self.waker.wake();
        }
    }

    /// The next answer of a thread, if one has come.
    pub fn next_answer(&mut self) -> Option<Resolved> {
        let resolved = self.receiver.try_recv().ok()?;
        self.running.remove(&resolved.0);
        Some(resolved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_host_and_port_and_nothing_else() {
        let numeric = |addr: &str| Target::parse(addr).and_then(|target| target.numeric());
        assert_eq!(numeric("10.0.0.1:8998"), "10.0.0.1:8998".parse().ok());
        assert_eq!(numeric("[::1]:80"), "[::1]:80".parse().ok());
        let name = Target::parse("prefill-0.svc.local:8998").unwrap();
        assert_eq!((name.host.as_str(), name.port, name.numeric()), ("prefill-0.svc.local", 8998, None));
        for bad in [
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:99999",
            "host:+1",
            "::1:80",
            "[x]:1",
            "a b:1",
            "http://h:1",
            "h\r\n:1",
        ] {
            assert_eq!(Target::parse(bad), None, "{bad:?}");
        }
    }
}
