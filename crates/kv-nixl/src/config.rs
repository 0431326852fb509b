//! The configuration of a transport.

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
#[non_exhaustive]
pub struct NixlConfig {
    /// NIXL's backend: `UCX` (default), or another installed backend that has notifications, such as
    /// `LIBFABRIC`. Both ends of a connection need the same backend.
    pub backend: String,
    /// Parameters of the backend, which override the backend's defaults: for UCX, say, `("num_workers",
    /// "2")`, or `("engine_config", "TLS=rc")` for settings of UCX.
    pub backend_params: Vec<(String, String)>,
    /// Network devices to use and to listen on: `mlx5_0`, `mlx5_0:2`, `eth0`; all devices if empty. The
    /// `ib_device` of the `KvArgs` is not read: give it here. Each must be the first port of a card, if there are
    /// several. One device alone is given to UCX as its setting `NET_DEVICES`, which NIXL leaves out where the environment
    /// has `UCX_NET_DEVICES`.
    pub devices: Vec<String>,
    /// How long one request to NIXL should take (default 1.5 ms, 0.1 ms to 1 s). Long posts are cut into requests of this
    /// duration, at the measured speed of their connection. UCX may copy all of a request inside one call, so
    /// this is most of the time of a turn. At most two such requests are in flight to a peer, so that a small
    /// post does not wait behind a large post in UCX's queues.
    pub slice_time: Duration,
    /// Most bytes of one request, where each descriptor counts 8 KiB beside its own bytes (default 64 MiB, 64 KiB to
    /// 1 TiB).
    pub slice_bytes: u64,
    /// The most items (pages, or a layer's share of pages) of a cache of which NIXL prepares lists, for this
    /// worker and for each peer (default 65 536, at most 2^24; 0: no lists). With lists, requests of single items cost a
    /// little less; each item costs some 50 ns and 60 bytes when a peer is connected.
    pub prepared_items: usize,
    /// Most bytes of frames that were sent to one peer and not confirmed by the peer; beyond that `send`
    /// answers `WouldBlock` (default 4 MiB, 2 MiB to 1 GiB). A foreign agent confirms nothing: the limit is then on the bytes
    /// in ten seconds.
    pub outbound_bytes: usize,
    /// Most bytes of raw notifications of foreign agents that wait to be
    /// [taken](crate::NixlTransport::next_notification): 0 (the default), with which raw notifications are
    /// dropped, or 4 195 328 (4 MiB and 1 KiB) to 2^32; 16 MiB is plenty. A notification counts 256 bytes
    /// beside its own, and one agent's notifications take at most a quarter: so the least is four times the
    /// longest notification. Notifications without room are dropped and counted. The transport does not sleep while a
    /// notification waits.
    pub foreign_bytes: usize,
    /// Gives the transport's agent a name as vLLM and SGLang name their agents, a random UUID (default no). Such
    /// a transport is a foreign agent for everybody: for transports of this crate, too, which reach it by
    /// [`connect_foreign`](crate::NixlTransport::connect_foreign) only. Workers that speak a foreign dialect need
    /// such a name where both ends of a connection may be workers of this library.
    pub uuid_name: bool,
    /// Most posts that were accepted and whose end was not reported yet (default 65 536, 1 to 2^24).
    pub max_posts: usize,
    /// Allows READ over TCP, which within a host is the way between GPU memory and host memory (default no). Such a
    /// READ is slow, and a reader that dies in the middle may take down the process that is read from. See
    /// [`Route::Tcp`](crate::Route::Tcp).
    pub reads_over_tcp: bool,
    /// Allows WRITE over TCP from or into GPU memory, which within a host is the way between GPU memory and host memory
    /// (default no). Such a WRITE is slow, and a writer that dies in the middle may take down the process that is written
    /// to. See [`Route::Tcp`](crate::Route::Tcp).
    pub gpu_over_tcp: bool,
    /// Most peers that are connected at once (default 1024, 1 to 65 536).
    pub max_peers: usize,
    /// Longest sleep of an idle transport before it looks for frames again (default 20 ms, 1 ms to 1 s). NIXL has no
    /// descriptor to wait on. Frames of peers on the same host wake this one; the sleep delays frames of other hosts.
    pub idle_poll: Duration,
    /// How long the requests of a failed connection may still touch memory after UCX has closed the
    /// connection (default 20 s, 1 ms to 1 hour). The posts end after this time, and the peer cannot be connected again
    /// before, unless the peer's process is seen to be dead, which ends the posts at once. A failed post to a
    /// file ends this long after its failure.
    pub settle: Duration,
    /// How long a peer's RDMA write into this worker's memory may go on after the peer has begun the write,
    /// where the owner of both ends knows (default: unknown, and only the peer's proven death ends the danger
    /// of the peer's last writes; 1 ms to 1 hour). The bound holds for peers that are reached by RDMA, and only while UCX's
    /// setting `TLS` at this end allows `rc` and `dc` and nothing else: over all other routes a processor
    /// copies.
    ///
    /// A card gives up after at most 4.096 µs · 2^timeout · 4 · (retries + 1), 34 s by UCX's defaults
    /// (`UCX_RC_TIMEOUT`, `UCX_RC_RETRY_COUNT`). But UCX keeps requests for which a card's queue has no room,
    /// and a stopped process posts them when the process goes on: set the bound only where peers' requests
    /// fit the queue (`UCX_RC_TX_QUEUE_LEN`).
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
            uuid_name: false,
            max_posts: 1 << 16,
            reads_over_tcp: false,
            gpu_over_tcp: false,
            max_peers: 1024,
            idle_poll: Duration::from_millis(20),
            settle: Duration::from_secs(20),
            rdma_bound: None,
        }
    }
}

impl NixlConfig {
    /// The same with some fields changed: `NixlConfig::default().with(|config| config.max_peers = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The backend's parameters, devices included. NIXL's UCX backend takes `device_list` for names of cards,
    /// and adds `:1` to each name. A device with another port, or with none, goes into UCX's own setting,
    /// which takes one device only, because a comma ends the setting.
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
