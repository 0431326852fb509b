//! When the reader of each request was last heard of, as the transport sees it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kv_transfer::unstable::wire::{Body, ConversationId, Delivery, Frame, Register};
use kv_transfer::{Attempt, Room};

/// The messages of readers about pages that they want to read: those that acquire a lease, and the heartbeats
/// that renew it. Clones share one record.
#[derive(Debug, Clone, Default)]
pub struct Heartbeats(Arc<Mutex<Heard>>);

#[derive(Debug, Default)]
struct Heard {
    /// The request of each attempt. Heartbeats name attempts; the message that acquires the lease says which
    /// request an attempt is for.
    attempts: BTreeMap<(ConversationId, Attempt), Room>,
    last: BTreeMap<Room, Instant>,
}

impl Heartbeats {
    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a frame that has arrived.
    pub fn note(&self, frame: &[u8]) {
        let Ok(Frame { conversation, body }) = Frame::decode(frame) else { return };
        let now = Instant::now();
        match body {
            Body::Register(Register { attempt, room, delivery: Delivery::Read(_), .. }) => {
                let mut heard = self.lock();
                heard.attempts.insert((conversation, attempt), room.clone());
                heard.last.insert(room, now);
            }
            Body::Heartbeat(heartbeat) => {
                let Heard { attempts, last } = &mut *self.lock();
                for (start, count) in heartbeat.leases {
                    let end = start.saturating_add(u64::from(count));
                    let named = attempts.range((conversation, Attempt(start))..(conversation, Attempt(end)));
                    last.extend(named.map(|(_, room)| (room.clone(), now)));
                }
            }
            _ => {}
        }
    }

    /// When the reader of a request was last heard of. The entry is removed.
    pub fn take(&self, room: &Room) -> Option<Instant> {
        let mut heard = self.lock();
        heard.attempts.retain(|_, other| other != room);
        heard.last.remove(room)
    }
}

#[cfg(test)]
mod tests {
    use kv_transfer::unstable::wire::{Acquire, Heartbeat};

    use super::*;

    #[test]
    fn a_heartbeat_counts_only_for_the_requests_it_names() {
        let heartbeats = Heartbeats::default();
        let conversation = ConversationId::new(1, 7);
        let say = |body| heartbeats.note(&Frame { conversation, body }.encode().unwrap());
        for attempt in 1..=3 {
            let (attempt, room) = (Attempt(attempt), Room::Number(attempt + 100));
            let delivery = Delivery::Read(Acquire { lease_id: None, number: 1 });
            say(Body::Register(Register {
                attempt,
                low_watermark: Attempt(0),
                room,
                ranks: 1,
                ttl_ms: 9,
                delivery,
            }));
        }
        let before = heartbeats.lock().last.clone();
        std::thread::sleep(std::time::Duration::from_millis(2));
        let leases = vec![(2, 1), (9, 1)];
        let asked = vec![(3, 1)];
        say(Body::Heartbeat(Heartbeat {
            number: 2,
            low_watermark: Attempt(0),
            leases,
            asked,
            writes: false,
        }));
        heartbeats.note(b"no frame");
        let last = heartbeats.lock().last.clone();
        let renewed: Vec<u64> =
            (101..=103).filter(|room| last[&Room::Number(*room)] > before[&Room::Number(*room)]).collect();
        assert_eq!(renewed, [102]);
        assert!(heartbeats.take(&Room::Number(102)).is_some());
        assert_eq!(heartbeats.take(&Room::Number(102)), None);
    }
}
