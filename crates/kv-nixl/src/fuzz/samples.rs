//! Inputs that the readers accept, written by this crate's own encoders.

use bytes::Bytes;
use kv_core::{MemoryKind, TransportError};
use kv_host::{Host, ProcessIdentity};

use crate::agent::name::agent_name;
use crate::connections::route::Reach;
use crate::connections::transport_metadata::TransportMetadata;
use crate::foreign::sample::sample;
use crate::notifications::datagrams::{RING, add};
use crate::notifications::envelope::{Answer, Kind, Notification};
use crate::regions::place::Place;

const TOKEN: u64 = 7;

fn ranges(count: usize) -> Vec<[u64; 3]> {
    (1..=count as u64).map(|range| [range << 12, 4096, 0]).collect()
}

/// Metadata without regions, and with two.
pub fn metadata() -> Result<Vec<Vec<u8>>, TransportError> {
    let host = Host { boot: (1, 2), network: 3 };
    let process = ProcessIdentity { inode: 4, namespace: 5, pid: 6, started: 7 };
    let place =
        |[addr, len, device]: [u64; 3]| Place { addr, len, item_len: 64, kind: MemoryKind::Dram, device };
    let of = |count| {
        let nixl = sample(agent_name(TOKEN).as_bytes(), &ranges(count));
        let regions = ranges(count).into_iter().map(place).collect();
        TransportMetadata::new(TOKEN, "UCX", (host, process), Reach::EVERYWHERE, regions, nixl.into())
    };
    [of(0), of(2)].iter().map(|metadata| Ok(metadata.encode()?.to_vec())).collect()
}

/// The metadata of agents of another framework, without memory and with three ranges.
pub fn agent_metadata() -> Vec<Vec<u8>> {
    [0, 3].map(|count| sample(b"0f8fad5b-d9cb-469f", &ranges(count))).to_vec()
}

/// Every kind of notification.
pub fn notifications() -> Vec<Vec<u8>> {
    let kinds = [
        Kind::Frame(Bytes::from_static(b"frame")),
        Kind::Arrived(5),
        Kind::Probe,
        Kind::Farewell(6),
        Kind::Ask(7),
        Kind::Answer(Answer { asked: 3, number: 8 }),
    ];
    kinds.map(|kind| Notification { to: TOKEN, connection: 9, kind }.encode()).to_vec()
}

/// A datagram with all notifications, one with a single one, and a ring.
pub fn datagrams() -> Vec<Vec<u8>> {
    let (mut all, mut one) = (Vec::new(), Vec::new());
    notifications().iter().for_each(|notification| add(&mut all, notification));
    notifications().iter().take(1).for_each(|notification| add(&mut one, notification));
    vec![all, one, RING.to_vec()]
}
