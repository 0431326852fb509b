//! What the owner of a transport can choose.

use std::path::Path;
use std::time::Duration;

use kv_core::MAX_FRAME;
use kv_host::{Limit, check};

use crate::error::NixlError;
use crate::notifications::inbox::{OVERHEAD, SHARE};

/// An agent's share of the inbox holds at least one notification of every length.
const LEAST_INBOX: usize = SHARE * (MAX_FRAME + OVERHEAD);

/// Choices and limits of a [`NixlTransport`](crate::NixlTransport).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlConfig {
    /// NIXL's backend: `UCX` (default), or another one that is installed and does notifications,
    /// such as `LIBFABRIC`. Both ends of a connection use the same.
    pub backend: String,
    /// Parameters of the backend, over its defaults: for UCX, say, `("num_workers", "2")`.
    pub backend_params: Vec<(String, String)>,
    /// Network devices to use, and to listen on: `mlx5_0`, `mlx5_0:2`, `eth0`; empty: all. The
    /// `ib_device` of the `KvArgs` belongs here. Several must all be cards' first ports.
    pub devices: Vec<String>,
    /// How long one request to NIXL should take (default 1.5 ms). Long posts are cut accordingly, at
    /// the speed that each connection has shown. UCX may copy all of a request inside one call, so
    /// this is most of what a turn takes; two such requests are in flight to a peer at most, so that
    /// a small post is not behind a large one in UCX's queues.
    pub slice_time: Duration,
    /// Bytes of one request at most, where each descriptor counts 8 KiB more than it has (default
    /// 64 MiB).
    pub slice_bytes: u64,
    /// Most items (pages, or pieces of them) of a cache of which NIXL prepares lists, ours and each
    /// peer's (default 65 536; 0: none). Requests of single items then cost a little less; each item
    /// costs some 50 ns and 60 bytes when a peer is connected.
    pub prepared_items: usize,
    /// Bytes of frames sent to one peer that it has not confirmed, before `send` answers
    /// `WouldBlock` (default 4 MiB). A foreign agent confirms nothing: this much in ten seconds.
    pub outbound_bytes: usize,
    /// Bytes of raw notifications of foreign agents that wait to be
    /// [taken](crate::NixlTransport::next_notification) (default 0: raw notifications are dropped; 16 MiB is
    /// plenty). A notification counts 256 bytes more than it has, one agent's count a quarter of this at most,
    /// and what has no room is dropped and counted. While something waits, the transport does not sleep.
    pub foreign_bytes: usize,
    /// Posts accepted and not yet reported as ended (default 65 536).
    pub max_posts: usize,
    /// Allows READ over TCP (default no): it is slow, and a reader that dies in the middle may take the
    /// process down that it reads from. See [`Route::Tcp`](crate::Route::Tcp).
    pub reads_over_tcp: bool,
    /// Peers connected at once (default 1024).
    pub max_peers: usize,
    /// Longest sleep between two looks for frames when nothing is going on (default 20 ms). NIXL has
    /// no descriptor to wait on; peers on the same host wake each other, so this is for others.
    pub idle_poll: Duration,
    /// After the connection to a peer has failed with requests on their way, and UCX has closed it: how
    /// long until the transport takes it that none of them touches memory any more, here or there
    /// (default 20 s). Their posts end no sooner, and the peer cannot be connected again before, unless
    /// its process is seen to be dead, which ends them at once. A failed post to a file ends so long
    /// after its failure.
    pub settle: Duration,
    /// How long a write that a peer has begun over RDMA into this worker's memory may go on, where the
    /// owner of both ends knows it (default: unknown, and nothing but the peer's proven death ends the
    /// danger of its last writes). Goes for peers that are reached by RDMA, and only while UCX's setting
    /// `TLS` at this end allows `rc` and `dc` and nothing else: over all else a processor copies.
    /// A card gives up after at most 4.096 µs · 2^timeout · 4 · (retries + 1), 34 s by UCX's defaults
    /// (`UCX_RC_TIMEOUT`, `UCX_RC_RETRY_COUNT`). But UCX keeps what a card's queue has no room for,
    /// and a stopped process posts that when it goes on: set this only where peers' requests fit the
    /// queue (`UCX_RC_TX_QUEUE_LEN`).
    pub rdma_bound: Option<Duration>,
}

impl Default for NixlConfig {
    fn default() -> NixlConfig {
        NixlConfig {
            backend: "UCX".to_owned(),
            backend_params: Vec::new(),
            devices: Vec::new(),
            slice_time: Duration::from_micros(1500),
            slice_bytes: 64 << 20,
            prepared_items: 1 << 16,
            outbound_bytes: 4 << 20,
            foreign_bytes: 0,
            max_posts: 1 << 16,
            reads_over_tcp: false,
            max_peers: 1024,
            idle_poll: Duration::from_millis(20),
            settle: Duration::from_secs(20),
            rdma_bound: None,
        }
    }
}

impl NixlConfig {
    /// The backend's parameters, devices included. NIXL's UCX backend takes its `device_list` for names
    /// of cards, and adds `:1` to each: what has another port, or none, goes into UCX's own setting,
    /// which takes one only, because a comma ends it.
    pub(crate) fn params(&self) -> Result<Vec<(String, String)>, NixlError> {
        let mut params = self.backend_params.clone();
        let list = |devices: &[String]| ("device_list".to_owned(), devices.join(","));
        match &self.devices[..] {
            [] => {}
            devices if self.backend != "UCX" => params.push(list(devices)),
            [device] => {
                let setting = format!("NET_DEVICES={device}");
                match params.iter_mut().find(|(name, _)| name == "engine_config") {
                    Some((_, value)) => *value = format!("{setting},{value}"),
                    None => params.push(("engine_config".to_owned(), setting)),
                }
            }
            devices => {
                let card = |device: &String| device.strip_suffix(":1").unwrap_or(device).to_owned();
                let cards: Vec<String> = devices.iter().map(card).collect();
                let is_card = |name: &String| Path::new("/sys/class/infiniband").join(name).exists();
                if let Some(other) = cards.iter().find(|name| !is_card(name)) {
                    return Err(NixlError::Device { device: other.clone(), of: devices.len() });
                }
                params.push(list(&cards));
            }
        }
        Ok(params)
    }

    pub(crate) fn check(&self) -> Result<(), Limit> {
        let millis = |duration: Duration| usize::try_from(duration.as_millis()).unwrap_or(usize::MAX);
        let micros = usize::try_from(self.slice_time.as_micros()).unwrap_or(usize::MAX);
        check::limits([
            ("slice_time (µs)", micros, 100, 1_000_000),
            ("slice_bytes", self.slice_bytes as usize, 64 << 10, 1 << 40),
            ("prepared_items", self.prepared_items, 0, 1 << 24),
            ("outbound_bytes", self.outbound_bytes, 2 * MAX_FRAME, 1 << 30),
            (
                "foreign_bytes",
                if self.foreign_bytes == 0 { LEAST_INBOX } else { self.foreign_bytes },
                LEAST_INBOX,
                1 << 32,
            ),
            ("max_posts", self.max_posts, 1, 1 << 24),
            ("max_peers", self.max_peers, 1, 1 << 16),
            ("idle_poll (ms)", millis(self.idle_poll), 1, 1000),
            ("settle (ms)", millis(self.settle), 1, 3_600_000),
            ("rdma_bound (ms)", self.rdma_bound.map_or(1, millis), 1, 3_600_000),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_reach_ucx_in_the_form_that_it_takes() {
        let config = |devices: &[&str], params: &[(&str, &str)]| NixlConfig {
            devices: devices.iter().map(|device| (*device).to_owned()).collect(),
            backend_params: params.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            ..NixlConfig::default()
        };
        let params = |config: NixlConfig| config.params().unwrap();
        let set = |value: &str| vec![("engine_config".to_owned(), value.to_owned())];
        assert_eq!(params(config(&[], &[])), []);
        assert_eq!(params(config(&["mlx5_0:2"], &[])), set("NET_DEVICES=mlx5_0:2"));
        let both = config(&["eth0"], &[("engine_config", "TLS=tcp")]);
        assert_eq!(params(both), set("NET_DEVICES=eth0,TLS=tcp"));
        let error = config(&["no_such_card", "lo"], &[]).params().unwrap_err();
        assert_eq!(error, NixlError::Device { device: "no_such_card".to_owned(), of: 2 });
    }
}
