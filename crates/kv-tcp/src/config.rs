//! [`TcpConfig`]: where a transport listens, how its connections are tuned, and bounds on what peers,
//! strangers and the owner can make it hold.

use std::net::SocketAddr;
use std::time::Duration;

use kv_core::MAX_FRAME;
use kv_host::{Limit, check};

use crate::message::{HEADER, MAX_SLICE};
use crate::metadata::MAX_ADDRESSES;
use crate::tls::Tls;

/// Addresses, limits and tuning of a [`TcpTransport`](crate::TcpTransport).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpConfig {
    /// Where the transport listens, IPv4 or IPv6; port 0 is any free port.
    pub bind: SocketAddr,
    /// The addresses that peers try, in this order, 16 at most; port 0 stands for the port that `bind` got.
    /// Empty (the default): the address of `bind`, which must then name a host (neither `0.0.0.0` nor `::`).
    /// Link-local IPv6 addresses (`fe80::…`) are refused: their zone is a number of this host only.
    pub advertise: Vec<SocketAddr>,
    /// Connections that carry pages to one peer, beside the one that carries frames (default 1, 0 to 16).
    /// With 0, pages and frames share one connection. More than one helps where one connection does not fill
    /// the network. Connections for pages are opened when the peer first permits writes, or at the first
    /// post.
    pub data_connections: usize,
    /// Most bytes of one slice of a post (default 1 MiB, 4 KiB to 16 MiB). Posts to a peer take turns slice
    /// by slice.
    pub slice_bytes: usize,
    /// Most bytes of slices that are under way on one connection (default 4 MiB, 4 KiB to 1 GiB). A peer that
    /// is too slow for its slices gets fewer.
    pub window_bytes: usize,
    /// How long a slice may be under way (default 2 s, 10 ms to 1 minute). A slice that is not in place by
    /// then is discarded by its receiver and sent again. This bounds how long a cancelled post to a
    /// peer that does not answer can take to end.
    pub slice_time: Duration,
    /// Size of each connection's send buffer in bytes, 4096 to 2^30; `None` (the default) leaves that to the kernel.
    pub send_buffer: Option<usize>,
    /// Size of each connection's receive buffer in bytes, 4096 to 2^30; `None` (the default) leaves that to the kernel.
    pub receive_buffer: Option<usize>,
    /// A peer whose host has answered nothing for this long is lost (default 20 s, 1 s to 1 day): bytes that
    /// nobody acknowledges (`TCP_USER_TIMEOUT`), or an idle connection without an answer to keepalive
    /// probes. A stopped process that does not empty its full buffers for so long is lost, too. The end of a
    /// peer's process is seen at once, whatever this says.
    pub silence: Duration,
    /// How long the way to a peer may take to open, over all its addresses, and how long a stranger may take
    /// to say who it is (default 5 s, 10 ms to 1 minute).
    pub handshake_timeout: Duration,
    /// Most peers that this side has connected (default 1024, 1 to 2^20).
    pub max_peers: usize,
    /// Most guests: ways that peers have opened to this side (default 1024, 1 to 2^20). When the limit is reached,
    /// further ones are refused.
    pub max_guests: usize,
    /// Most strangers: accepted connections whose hello has not arrived (default 64, 1 to 65 536). When the limit
    /// is reached, a new one takes the place of the oldest, once that has had 100 ms; until then, new connections
    /// wait in the backlog.
    pub max_strangers: usize,
    /// Most bytes of frames queued for one peer; beyond that `send` returns `WouldBlock` (default 4 MiB, 1 MiB and
    /// 32 bytes to 1 GiB).
    pub outbound_bytes: usize,
    /// TLS on every connection, with certificates on both sides; `None` (the default) for plain connections. A
    /// transport with TLS and one without refuse to [`connect`](kv_core::Transport::connect) to each other.
    #[cfg(feature = "tls")]
    pub tls: Option<crate::Tls>,
    /// Most posts that are accepted and not reported as ended; beyond that `post` returns `WouldBlock`
    /// (default 65 536, 1 to 2^24).
    pub max_posts: usize,
}

impl TcpConfig {
    /// The defaults, with this address to listen on.
    pub fn new(bind: SocketAddr) -> TcpConfig {
        TcpConfig {
            bind,
            advertise: Vec::new(),
            data_connections: 1,
            slice_bytes: 1 << 20,
            window_bytes: 4 << 20,
            slice_time: Duration::from_secs(2),
            send_buffer: None,
            receive_buffer: None,
            silence: Duration::from_secs(20),
            handshake_timeout: Duration::from_secs(5),
            max_peers: 1024,
            max_guests: 1024,
            max_strangers: 64,
            outbound_bytes: 4 << 20,
            #[cfg(feature = "tls")]
            tls: None,
            max_posts: 1 << 16,
        }
    }

    /// The same with some fields changed: `config.with(|config| config.max_peers = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The encryption of connections, if they are encrypted.
    pub(crate) fn encryption(&self) -> Option<&Tls> {
        #[cfg(feature = "tls")]
        return self.tls.as_ref();
        #[cfg(not(feature = "tls"))]
        None
    }

    pub(crate) fn check(&self) -> Result<(), Limit> {
        let millis = |span: Duration| usize::try_from(span.as_millis()).unwrap_or(usize::MAX);
        check::limits([
            ("advertise.len", self.advertise.len(), 0, MAX_ADDRESSES),
            ("data_connections", self.data_connections, 0, 16),
            ("slice_bytes", self.slice_bytes, 4 << 10, MAX_SLICE),
            ("window_bytes", self.window_bytes, 4 << 10, 1 << 30),
            ("slice_time in ms", millis(self.slice_time), 10, 60_000),
            ("send_buffer", self.send_buffer.unwrap_or(4096), 4096, 1 << 30),
            ("receive_buffer", self.receive_buffer.unwrap_or(4096), 4096, 1 << 30),
            ("silence in ms", millis(self.silence), 1000, 86_400_000),
            ("handshake_timeout in ms", millis(self.handshake_timeout), 10, 60_000),
            ("max_peers", self.max_peers, 1, 1 << 20),
            ("max_guests", self.max_guests, 1, 1 << 20),
            ("max_strangers", self.max_strangers, 1, 1 << 16),
            ("outbound_bytes", self.outbound_bytes, MAX_FRAME + HEADER, 1 << 30),
            ("max_posts", self.max_posts, 1, 1 << 24),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_out_of_its_range_is_named_with_its_value() {
        let config = TcpConfig::new("127.0.0.1:0".parse().unwrap());
        assert_eq!(config.check(), Ok(()));
        let refused = |change: fn(&mut TcpConfig)| {
            let Limit { field, got, .. } = config.clone().with(change).check().unwrap_err();
            (field, got)
        };
        assert_eq!(refused(|config| config.slice_bytes = 1), ("slice_bytes", 1));
        assert_eq!(refused(|config| config.silence = Duration::from_millis(3)), ("silence in ms", 3));
        assert_eq!(refused(|config| config.advertise = vec![config.bind; 17]), ("advertise.len", 17));
    }

    #[test]
    fn each_limit_is_taken_and_what_is_beyond_it_is_refused() {
        type Set = fn(&mut TcpConfig, u64);
        let limits: [(Set, u64, u64); 13] = [
            (|config, value| config.data_connections = value as usize, 0, 16),
            (|config, value| config.slice_bytes = value as usize, 4 << 10, 16 << 20),
            (|config, value| config.window_bytes = value as usize, 4 << 10, 1 << 30),
            (|config, value| config.slice_time = Duration::from_millis(value), 10, 60_000),
            (|config, value| config.send_buffer = Some(value as usize), 4096, 1 << 30),
            (|config, value| config.receive_buffer = Some(value as usize), 4096, 1 << 30),
            (|config, value| config.silence = Duration::from_millis(value), 1000, 86_400_000),
            (|config, value| config.handshake_timeout = Duration::from_millis(value), 10, 60_000),
            (|config, value| config.max_peers = value as usize, 1, 1 << 20),
            (|config, value| config.max_guests = value as usize, 1, 1 << 20),
            (|config, value| config.max_strangers = value as usize, 1, 65_536),
            (|config, value| config.outbound_bytes = value as usize, (1 << 20) + 32, 1 << 30),
            (|config, value| config.max_posts = value as usize, 1, 1 << 24),
        ];
        for (number, (set, least, most)) in limits.into_iter().enumerate() {
            let config = TcpConfig::new("127.0.0.1:0".parse().unwrap());
            let is_taken = |value| config.clone().with(|config| set(config, value)).check().is_ok();
            assert!(is_taken(least) && is_taken(most), "field {number}");
            assert!(!is_taken(most + 1) && (least == 0 || !is_taken(least - 1)), "field {number}");
        }
    }
}
