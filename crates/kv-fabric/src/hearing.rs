//! Messages of peers: greetings, frames, farewells.

use kv_core::{Origin, TransportEvent};
use kv_host::Life;

use crate::device::Device;
use crate::guest::{Guest, GuestId, Reply};
use crate::incoming::{ANNOUNCED, Incoming};
use crate::message::{Header, Hello, Kind};
use crate::pairing::MAX_LANES;
use crate::transport::FabricTransport;
use crate::way::Stage;

impl FabricTransport {
    /// A message of somebody is in a buffer.
    pub(crate) fn heard_message(&mut self, device: usize, buffer: usize, len: usize) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let device = self.devices.get(device);
        let message = device.map_or(&[][..], |device| device.endpoint.message(buffer, &mut scratch, len));
        let heard = match Header::decode(message) {
            Some((header, body)) => self.heard(header, body),
            None => None,
        };
        self.stats.refused += u64::from(heard.is_none());
        self.scratch = scratch;
    }

    /// Does what a message asks for; `None` if it is a stranger's, or of an earlier life of either side.
    fn heard(&mut self, header: Header, body: &[u8]) -> Option<()> {
        match header.kind {
            Kind::Hello => self.hello(header.key, Hello::decode(body)?),
            Kind::Welcome => self.welcome(header, body),
            Kind::Ask => self.asked(header),
            Kind::Answer => self.answered(header),
            Kind::Farewell => {
                let id = *self.keys.get(&header.key)?;
                let way = self.ways.get_mut(&id)?;
                if let Life::Watched(process) = &way.life {
                    self.watch.forget(process);
                }
                // The transport there has ended, and none of its writes is under way.
                way.life = Life::Dead;
                self.break_way(id, None);
                Some(())
            }
            Kind::Bye => {
                let id = self.guests.by_key(header.key)?;
                self.forget_guest(id);
                Some(())
            }
            Kind::Frame | Kind::More | Kind::Withdraw => {
                let id = self.guests.by_key(header.key)?;
                let guest = self.guests.get_mut(id)?;
                guest.heard = self.now;
                match guest.incoming.take(header, body) {
                    Ok(Some(frame)) => self.posts.tell(TransportEvent::Frame { from: Origin(id), frame }),
                    Ok(None) => {}
                    Err(_) => {
                        self.stats.broken += 1;
                        self.forget_guest(id);
                    }
                }
                Some(())
            }
        }
    }

    /// Somebody connects this transport, or asks whether it is still there.
    fn hello(&mut self, key: u64, hello: Hello) -> Option<()> {
        if hello.to != self.given.token() || hello.from.token == self.given.token() {
            return None;
        }
        if let Some(id) = self.guests.by_key(key) {
            let guest = self.guests.get_mut(id).filter(|guest| guest.from == hello.from)?;
            guest.heard = self.now;
            self.welcome_guest(id);
            return Some(());
        }
        // Taken before an earlier way of the same peer is given back, so that its connection stays.
        let Device { addresses, endpoint, .. } = self.devices.first();
        let address = addresses.take(endpoint, &hello.name).ok()?;
        if let Some(earlier) = self.guests.by_token(hello.from.token) {
            self.forget_guest(earlier);
        }
        let Some(slot) = self.room_for_guest() else {
            let Device { addresses, endpoint, .. } = self.devices.first();
            addresses.give_back(endpoint, &hello.name);
            return None;
        };
        let id = self.next_id();
        let Hello { from, name, .. } = hello;
        let incoming = Incoming::default();
        let (heard, withheld) = (self.now, None);
        self.guests.insert(id, Guest { from, key, name, address, slot, incoming, withheld, heard });
        self.stats.guests += 1;
        self.welcome_guest(id);
        Some(())
    }

    fn welcome_guest(&mut self, id: GuestId) {
        if let Some(guest) = self.guests.get(id) {
            let welcome = Header { sequence: guest.slot as u32, ..Header::new(guest.key, Kind::Welcome) };
            self.unanswered.insert((id, Reply::Welcome), welcome);
        }
    }

    /// A guest asks whether a lane leads here, or whether its frames have arrived.
    fn asked(&mut self, header: Header) -> Option<()> {
        let id = self.guests.by_key(header.key)?;
        let guest = self.guests.get_mut(id)?;
        guest.heard = self.now;
        if header.sequence as usize >= MAX_LANES {
            return None;
        }
        let answer = Header { kind: Kind::Answer, len: 0, ..header };
        if header.sequence == 0 && guest.incoming.counters() > ANNOUNCED {
            // The writes for which the frames wait are in the queue of another device.
            guest.withheld = Some(answer);
        } else {
            self.unanswered.insert((id, Reply::Answer(header.sequence)), answer);
        }
        Some(())
    }

    /// A peer has answered a question.
    fn answered(&mut self, header: Header) -> Option<()> {
        let id = *self.keys.get(&header.key)?;
        let way = self.ways.get_mut(&id)?;
        let lane = way.lanes.get_mut(header.sequence as usize)?;
        way.heard = self.now;
        lane.is_heard(self.now);
        // No more than was sent, and no less than was known.
        let (new, unknown) =
            (header.count.wrapping_sub(way.confirmed), way.ahead.wrapping_sub(way.confirmed));
        if header.sequence == 0 && new <= unknown {
            way.confirmed = header.count;
        }
        self.stirred.insert(id);
        Some(())
    }

    fn room_for_guest(&mut self) -> Option<usize> {
        if let Some(slot) = self.guests.free_slot(self.config.max_guests) {
            return Some(slot);
        }
        let (id, heard) = self.guests.most_silent()?;
        if self.now.since(heard) < self.config.silence {
            return None;
        }
        self.forget_guest(id);
        self.guests.free_slot(self.config.max_guests)
    }

    /// The peer of a way has answered.
    fn welcome(&mut self, header: Header, body: &[u8]) -> Option<()> {
        let id = *self.keys.get(&header.key)?;
        let way = self.ways.get_mut(&id)?;
        if body != way.identity.token.to_bytes() {
            return None;
        }
        way.heard = self.now;
        way.slot = header.sequence;
        if let Stage::Greeting { .. } = way.stage {
            way.stage = Stage::Open;
            way.greet_at = self.now + self.config.silence / 4;
            let at = way.greet_at;
            self.look_at(id, at);
            self.ask_lanes(id);
            self.stirred.insert(id);
        }
        Some(())
    }

    /// Forgets a guest. Writes that it has begun go on; frames that wait for them are never given out.
    pub(crate) fn forget_guest(&mut self, id: GuestId) {
        self.unanswered.retain(|(guest, _), _| *guest != id);
        if let Some(guest) = self.guests.remove(id) {
            let Device { addresses, endpoint, .. } = self.devices.first();
            addresses.give_back(endpoint, &guest.name);
        }
    }
}
