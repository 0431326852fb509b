//! [`FabricConfig`]: which provider carries the bytes, and bounds on what peers and the owner can make a transport
//! hold.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use kv_core::MAX_FRAME;
use kv_host::check;

use crate::error::FabricError;
use crate::message::HEADER;

/// Provider, limits and tuning of a [`FabricTransport`](crate::FabricTransport).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FabricConfig {
    /// libfabric's provider, by its name: `tcp;ofi_rxm` (the default), `efa`, `verbs;ofi_rxm`, `cxi` … Both ends need
    /// the same. `shm` is refused.
    pub provider: String,
    /// The devices that carry the bytes, one to [`MAX_DEVICES`]; one of the provider's choice by default. The first one
    /// carries the messages, too. A peer may have more or fewer.
    pub devices: Vec<FabricDevice>,
    /// The file of libfabric; `None` (the default) is what the variable `KV_FABRIC_LIB` names, or what the dynamic
    /// loader finds.
    pub library: Option<PathBuf>,
    /// Most bytes of one slice of a post (default 640 KiB, 4 KiB to 16 MiB). Posts to a peer take turns slice by slice.
    /// Over TCP both kernels copy: reads in slices of 1 MiB, the size of a core's own cache, were a sixth slower.
    pub slice_bytes: usize,
    /// Most bytes of slices that are under way to one peer over one device (default 4 MiB, 4 KiB to 1 GiB).
    pub window_bytes: usize,
    /// How long nothing may be heard of a peer (default 20 s, 1 s to 1 day). After that, the peer is greeted, and is lost
    /// once four looks of this side, a sixteenth of this apart or more, have found nothing: within 5/4 of this while this
    /// side polls. Time in which this side does not poll is one look at most. The end of a peer's process on this host is
    /// seen at once, whatever this says. An idle connection over TCP is closed if its other end does not answer the
    /// kernel's keepalive for as long.
    pub silence: Duration,
    /// How long the way to a peer may take to open (default 5 s, 10 ms to 1 minute). It is given up by the rule of
    /// [`silence`](FabricConfig::silence): a quarter later at the latest, and not because this side has not polled.
    pub handshake_timeout: Duration,
    /// Most connected peers (default 1024, 1 to 2^20).
    pub max_peers: usize,
    /// Most peers that may be connected to this transport (default 1024, 1 to 4096). For one more, the one that was
    /// silent for longest is forgotten, if nothing was heard of it for [`silence`](FabricConfig::silence) and in four looks
    /// after that; otherwise the one more is refused.
    pub max_guests: usize,
    /// Most bytes of frames queued for one peer; beyond that `send` returns `WouldBlock` (default 4 MiB, 1 MiB and
    /// 24 bytes to 1 GiB).
    pub outbound_bytes: usize,
    /// Most posts that are accepted and not reported as ended; beyond that `post` returns `WouldBlock`
    /// (default 65 536, 1 to 2^24).
    pub max_posts: usize,
}

/// Most devices of a transport.
pub const MAX_DEVICES: usize = 8;

/// A network card, or an interface, that a [`FabricTransport`](crate::FabricTransport) uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FabricDevice {
    /// The device, by libfabric's name of its domain (`fi_info` lists them: `eth0`, `mlx5_0`, `rdmap0s6-rdm`); `None`
    /// leaves the choice to the provider.
    pub name: Option<String>,
    /// The address of the interface, for providers whose addresses are those of sockets; `None` leaves the choice to the
    /// provider. Peers are told this address.
    pub address: Option<IpAddr>,
}

impl FabricDevice {
    /// The device of this name.
    pub fn named(name: impl Into<String>) -> FabricDevice {
        FabricDevice { name: Some(name.into()), address: None }
    }

    /// The interface that has this address.
    pub fn at(address: IpAddr) -> FabricDevice {
        FabricDevice { name: None, address: Some(address) }
    }
}

impl Default for FabricConfig {
    fn default() -> FabricConfig {
        FabricConfig {
            provider: "tcp;ofi_rxm".to_owned(),
            devices: vec![FabricDevice::default()],
            library: None,
            slice_bytes: 640 << 10,
            window_bytes: 4 << 20,
            silence: Duration::from_secs(20),
            handshake_timeout: Duration::from_secs(5),
            max_peers: 1024,
            max_guests: 1024,
            outbound_bytes: 4 << 20,
            max_posts: 1 << 16,
        }
    }
}

impl FabricConfig {
    /// The defaults, with this address of an interface.
    pub fn new(address: IpAddr) -> FabricConfig {
        FabricConfig { devices: vec![FabricDevice::at(address)], ..FabricConfig::default() }
    }

    /// The same with some fields changed: `config.with(|config| config.max_peers = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn check(&self) -> Result<(), FabricError> {
        let millis = |span: Duration| usize::try_from(span.as_millis()).unwrap_or(usize::MAX);
        check::limits([
            ("devices.len", self.devices.len(), 1, MAX_DEVICES),
            ("slice_bytes", self.slice_bytes, 4 << 10, 16 << 20),
            ("window_bytes", self.window_bytes, 4 << 10, 1 << 30),
            ("silence in ms", millis(self.silence), 1000, 86_400_000),
            ("handshake_timeout in ms", millis(self.handshake_timeout), 10, 60_000),
            ("max_peers", self.max_peers, 1, 1 << 20),
            ("max_guests", self.max_guests, 1, 4096),
            ("outbound_bytes", self.outbound_bytes, MAX_FRAME + HEADER, 1 << 30),
            ("max_posts", self.max_posts, 1, 1 << 24),
        ])?;
        let mut addresses = self.devices.iter().filter_map(|device| device.address);
        if let Some(address) = addresses.find(IpAddr::is_unspecified) {
            return Err(FabricError::Address { address });
        }
        let provider = self.provider.clone();
        if provider.split(';').any(|part| part.eq_ignore_ascii_case("shm")) {
            let reason = "it crashes this process when a peer's process is killed; use kv-local between processes of one host";
            return Err(FabricError::Refused { provider, reason });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_out_of_its_range_is_named_with_its_value() {
        assert_eq!(FabricConfig::default().check(), Ok(()));
        let refused = |change: fn(&mut FabricConfig)| match FabricConfig::default().with(change).check() {
            Err(FabricError::Limit(limit)) => (limit.field, limit.got),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(|config| config.slice_bytes = 1), ("slice_bytes", 1));
        assert_eq!(refused(|config| config.silence = Duration::from_millis(3)), ("silence in ms", 3));
        assert_eq!(refused(|config| config.max_guests = 4097), ("max_guests", 4097));
        assert_eq!(refused(|config| config.devices.clear()), ("devices.len", 0));
        let device = FabricDevice::default();
        let many = FabricConfig::default().with(|config| config.devices = vec![device; MAX_DEVICES + 1]);
        assert!(matches!(many.check(), Err(FabricError::Limit(limit)) if limit.got == MAX_DEVICES + 1));
    }

    #[test]
    fn shared_memory_and_addresses_of_no_host_are_refused_with_the_reason() {
        let shm = FabricConfig::default().with(|config| config.provider = "shm".to_owned()).check();
        assert!(matches!(&shm, Err(FabricError::Refused { provider, .. }) if provider == "shm"), "{shm:?}");
        let nowhere: IpAddr = "0.0.0.0".parse().unwrap();
        assert_eq!(FabricConfig::new(nowhere).check(), Err(FabricError::Address { address: nowhere }));
        let second = FabricConfig::default().with(|config| config.devices.push(FabricDevice::at(nowhere)));
        assert_eq!(second.check(), Err(FabricError::Address { address: nowhere }));
    }
}
