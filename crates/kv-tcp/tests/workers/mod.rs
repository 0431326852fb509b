//! Workers with a TCP transport, for tests.
#![allow(dead_code)] // Each test binary uses a part of it.

#[cfg(feature = "tls")]
pub mod authority;
pub mod wire;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Pages, Side, boottime};
use kv_core::{Descriptor, Op, Post, PostId, Transport, TransportError, TransportEvent};
use kv_tcp::{HostMemory, Memory, TcpConfig, TcpTransport};

/// How the workers of a check are configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As they come.
    Usual,
    /// Pages and frames share one connection.
    One,
    /// Three connections for pages, small slices and a small window.
    Many,
    /// IPv6.
    Six,
    /// TLS, with the authority of the test binary with this process id.
    #[cfg(feature = "tls")]
    Tls(u32),
}

impl Kind {
    pub fn named(name: &str) -> Kind {
        #[cfg(feature = "tls")]
        if let Some(number) = name.strip_prefix("Tls(") {
            return Kind::Tls(number.trim_end_matches(')').parse().unwrap());
        }
        let all = [Kind::Usual, Kind::One, Kind::Many, Kind::Six];
        all.into_iter().find(|kind| format!("{kind:?}") == name).unwrap()
    }

    pub fn config(self) -> TcpConfig {
        let config = TcpConfig::new(loopback());
        match self {
            Kind::Usual => config,
            Kind::One => config.with(|config| config.data_connections = 0),
            Kind::Many => config.with(|config| {
                config.data_connections = 3;
                (config.slice_bytes, config.window_bytes) = (10_000, 70_000);
                (config.send_buffer, config.receive_buffer) = (Some(16 << 10), Some(16 << 10));
            }),
            Kind::Six => TcpConfig::new("[::1]:0".parse().unwrap()),
            #[cfg(feature = "tls")]
            Kind::Tls(number) => config.with(|config| config.tls = Some(authority::shared(number))),
        }
    }
}

impl Harness for Kind {
    type Transport = TcpTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<TcpTransport> {
        worker(self.config(), lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&format!("{self:?}"), job, peer)
    }

    fn most_descriptors(&self) -> usize {
        if *self == Kind::Usual { 1_000_000 } else { 100_000 }
    }
}

pub fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// A worker with regions of these lengths, with gaps between them that nothing may touch.
pub fn worker(config: TcpConfig, lens: &[usize]) -> Side<TcpTransport> {
    let mut transport = TcpTransport::new(config).unwrap();
    let make = |room| {
        let memory = HostMemory::new(room).unwrap();
        transport.add_memory(&memory).unwrap();
        (memory.addr(), Memory::clone(&memory))
    };
    Pages::new(lens, make, Memory::read, Memory::write).side(transport)
}

/// A post of the first `len` bytes of the first region on both sides.
pub fn post(id: u64, op: Op, len: usize) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: len as u64 };
    Post { id: PostId(id), op, descriptors: vec![descriptor], notify: None }
}

/// Polls all workers until `done` returns true of the events of each.
pub fn until(
    what: &str,
    sides: &mut [&mut Side<TcpTransport>],
    events: &mut Vec<Vec<TransportEvent>>,
    mut done: impl FnMut(&[Vec<TransportEvent>]) -> bool,
) {
    events.resize(sides.len(), Vec::new());
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(events) {
        assert!(Instant::now() < deadline, "{what}: {events:?}");
        for (side, events) in sides.iter_mut().zip(events.iter_mut()) {
            side.transport.poll(boottime(), events);
        }
    }
}

/// The result of a post, if the events tell its end.
pub fn ended(events: &[TransportEvent], id: u64) -> Option<Result<(), TransportError>> {
    events.iter().find_map(|event| match event {
        TransportEvent::Posted { post, result } if post.0 == id => Some(result.clone()),
        _ => None,
    })
}

/// Bytes of memory that this process has in use.
pub fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
}
