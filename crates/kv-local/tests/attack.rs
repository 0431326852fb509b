//! Attacks on the promises that succeed: each test fails until its hole is closed.

use std::collections::BTreeSet;

use bytes::Bytes;
use kv_core::{PeerId, Plane, PlaneEvent, Region, RegionRole, Time};
use kv_local::{Arena, LocalConfig, LocalPlane};

const LEN: usize = 1 << 16;

fn plane() -> (LocalPlane, Arena) {
    let arena = Arena::new(LEN).unwrap();
    let mut plane = LocalPlane::new(LocalConfig::default()).unwrap();
    plane.add_arena(&arena).unwrap();
    plane.register(&Region::dram(RegionRole::Kv, arena.addr(), LEN as u64, 4096)).unwrap();
    (plane, arena)
}

/// P5: a machine bounds what a connection may cost it by the connection's origin, of which "one remote process
/// has few". Here a process has as many as it opens sockets.
#[test]
fn one_process_has_few_origins() {
    let (mut us, _arena) = plane();
    let mut origins = BTreeSet::new();
    for _ in 0..40 {
        // The same plane, or a new one in the same process: it makes no difference.
        let (mut them, _theirs) = plane();
        them.connect(PeerId(1), &us.metadata().unwrap()).unwrap();
        them.send(PeerId(1), Bytes::from_static(b"an abort of somebody else's room")).unwrap();
        let mut events = Vec::new();
        for _ in 0..10_000 {
            them.poll(Time::ZERO, &mut Vec::new());
            us.poll(Time::ZERO, &mut events);
            if !events.is_empty() {
                break;
            }
        }
        origins.extend(events.iter().filter_map(|event| match event {
            PlaneEvent::Frame { from, .. } => Some(*from),
            _ => None,
        }));
    }
    assert!(origins.len() <= 4, "one process speaks from {} origins", origins.len());
}
