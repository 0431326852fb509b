//! The ports of ranks that are watched: what the table asks of the watcher, and what the watcher has found.

use std::net::{IpAddr, SocketAddr};

use super::claim::RankInfo;
use crate::client_addr::ClientAddr;

/// What the table asks of the watcher. `seq` names the entry, and is never used again for another port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchOrder {
    Begin { seq: u64, addr: SocketAddr, client: ClientAddr },
    End { seq: u64 },
}

/// What the watcher has found at a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A process has greeted, and the connection is open.
    Lives,
    /// The connection has ended, and another is being tried.
    Unknown,
    /// The port has refused a connection once.
    Refused,
    /// The port cannot be reached, or accepts connections and says nothing. The process may come back.
    Silent,
    /// The port has refused twice in a row: the process has ended.
    Dead,
}

impl RankInfo {
    /// The port to watch; `None` for a host name, and for an address that is not of one host.
    pub(super) fn socket_addr(&self) -> Option<SocketAddr> {
        let ip: IpAddr = self.rank_ip.trim_matches(['[', ']']).parse().ok()?;
        let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        let one_host = !ip.is_unspecified() && !ip.is_multicast() && !broadcast;
        (one_host && self.rank_port != 0).then(|| SocketAddr::new(ip, self.rank_port))
    }
}
