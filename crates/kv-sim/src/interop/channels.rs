//! Side channels as ZeroMQ's sockets behave: messages of one connection are ordered and reliable while the
//! connection lives, and lost with the connection. A process that is dead refuses connections, and so does one whose
//! side channel's thread has ended; a process that is stopped, or cannot be reached, does not.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::Input;
use kv_core::{Origin, PeerId, WayEnd};
use kv_interop::message::{Incoming, Message};

use super::world::{Event, World};
use super::{Dialect, LifeId, hosts};
use crate::clock::{MS, SEC};

/// The number of one side channel, counted over the whole world.
pub(super) type ChannelId = usize;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: u64 = 5 * SEC;
/// How long a connection lives whose other end does not acknowledge anything.
const UNACKNOWLEDGED: u64 = 20 * SEC;
/// How soon something is tried again that waits for the other end.
const AGAIN: u64 = 100 * MS;
/// What a proof of death says of the last writes.
const QUIET_AFTER: Duration = Duration::from_secs(2);

/// One REQ or PUSH socket with its one connection.
#[derive(Debug)]
pub(super) struct Channel {
    owner: LifeId,
    peer: PeerId,
    addr: String,
    /// True for a REQ socket.
    asks: bool,
    /// The process at the other end, once there is a connection.
    target: Option<LifeId>,
    opened: u64,
    /// Since when the other end could not be reached.
    silent_since: Option<u64>,
    /// What was sent and has not arrived.
    queue: VecDeque<Vec<Bytes>>,
    /// The answer that is under way.
    answer: Option<Vec<Bytes>>,
    /// An event of this channel is in the calendar.
    scheduled: bool,
    /// The connection has ended.
    over: bool,
    /// The owner has forgotten the peer: what was sent still goes out.
    pub(super) leaving: bool,
}

impl World {
    pub(super) fn open_channel(
        &mut self,
        owner: LifeId,
        peer: PeerId,
        (addr, asks): (String, bool),
    ) -> ChannelId {
        self.channels.push(Channel {
            owner,
            peer,
            addr,
            asks,
            target: None,
            opened: self.now,
            silent_since: None,
            queue: VecDeque::new(),
            answer: None,
            scheduled: false,
            over: false,
            leaving: false,
        });
        let channel = self.channels.len() - 1;
        self.schedule(channel, self.params.channel_delay.0);
        channel
    }

    fn schedule(&mut self, channel: ChannelId, after: u64) {
        if !std::mem::replace(&mut self.channels[channel].scheduled, true) {
            self.enter(after, Event::Channel { channel });
        }
    }

    fn channel_delay(&mut self) -> u64 {
        let (usual, most) = if self.healed { (MS, MS) } else { self.params.channel_delay };
        self.rng.tail(usual, most)
    }

    /// Sends a message, after those before it.
    pub(super) fn say(&mut self, channel: ChannelId, frame: &[u8]) {
        let Some(message) = Message::decode(frame) else {
            let life = self.channels[channel].owner;
            let wrong = format!("life {life} sends a frame to a side channel that is no message");
            return self.violate("dialect_machines_are_bounded", wrong);
        };
        if self.channels[channel].over {
            return;
        }
        self.channels[channel].queue.push_back(message.0);
        let delay = self.channel_delay();
        self.schedule(channel, delay);
    }

    /// The life whose process listens at an address.
    pub(super) fn listener(&self, addr: &str) -> Option<LifeId> {
        let mut lives = self.engines.iter().flat_map(|engine| engine.lives.iter().copied());
        let listens = |life: LifeId| {
            let place = self.lives[life].place;
            place.addr() == addr && (self.params.dialect == Dialect::Sglang || place.rank == 0)
        };
        lives.find(|&life| self.lives[life].alive && !self.lives[life].deaf && listens(life))
    }

    /// True if the side channel of a life's engine has ended, with its thread or with the first process.
    pub(super) fn is_deaf(&self, life: LifeId) -> bool {
        let engine = &self.engines[self.lives[life].place.engine];
        let first = &self.lives[engine.lives[0]];
        !engine.lives.contains(&life) || first.deaf || !first.alive
    }

    /// The last process that has listened at an address, whether or not it lives.
    fn last_at(&self, addr: &str) -> Option<LifeId> {
        (0..self.lives.len()).rev().find(|&life| self.lives[life].place.addr() == addr)
    }

    /// One step: the connection is made, an answer or the next message arrives.
    pub(super) fn advance_channel(&mut self, id: ChannelId) {
        let channel = &mut self.channels[id];
        channel.scheduled = false;
        if channel.over || !self.lives[channel.owner].alive {
            return;
        }
        let Some(target) = channel.target else { return self.make(id) };
        let (owner, peer) = (channel.owner, channel.peer);
        if self.are_parted(owner, target) {
            let since = *self.channels[id].silent_since.get_or_insert(self.now);
            let waits = !self.channels[id].queue.is_empty() || self.channels[id].answer.is_some();
            if waits && self.now - since > UNACKNOWLEDGED {
                return self.end_channel(id, WayEnd::Lost);
            }
            return self.schedule(id, AGAIN);
        }
        self.channels[id].silent_since = None;
        if let Some(parts) = self.channels[id].answer.take() {
            if !self.channels[id].leaving {
                let frame = Incoming::reply(peer, parts).encode();
                self.counters.messages += 1;
                self.tell(owner, "answer", Input::Frame { from: Origin(peer.0), frame });
            }
        } else if self.lives[target].stopped && self.params.dialect != Dialect::Sglang {
            return self.schedule(id, AGAIN);
        } else if let Some(parts) = self.channels[id].queue.pop_front() {
            self.arrive(id, target, parts);
        }
        let channel = &self.channels[id];
        if !channel.queue.is_empty() || channel.answer.is_some() {
            let delay = self.channel_delay();
            self.schedule(id, delay);
        }
    }

    fn make(&mut self, id: ChannelId) {
        let (owner, addr) = (self.channels[id].owner, self.channels[id].addr.clone());
        let waited = self.now - self.channels[id].opened;
        let Some(last) = self.last_at(&addr) else { return self.end_channel(id, WayEnd::Lost) };
        let stopped = self.listener(&addr).is_some_and(|life| self.lives[life].stopped);
        if self.are_parted(owner, last) || stopped {
            if waited > CONNECT_TIMEOUT {
                return self.end_channel(id, WayEnd::Lost);
            }
            return self.schedule(id, AGAIN);
        }
        let Some(target) = self.listener(&addr) else {
            // Refused. A first connection that is refused proves nothing.
            return self.end_channel(id, WayEnd::Lost);
        };
        self.trace.note(self.now, || format!("channel {id} of life {owner} reaches life {target}"));
        self.channels[id].target = Some(target);
        let delay = self.channel_delay();
        self.schedule(id, delay);
    }

    fn arrive(&mut self, id: ChannelId, target: LifeId, parts: Vec<Bytes>) {
        let Channel { owner, asks, .. } = self.channels[id];
        self.counters.messages += 1;
        self.trace.note(self.now, || format!("a message of life {owner} reaches life {target}"));
        if !asks {
            let frame = Incoming::Message { peer: None, message: Message(parts) }.encode();
            let from = Origin(1 << 32 | id as u64);
            return self.tell(target, "message", Input::Frame { from, frame });
        }
        let engine = self.lives[target].place.engine;
        let clock = self.lives[target].clock.local(self.now);
        let rank = |rank: u32| {
            let life = *self.engines[engine].lives.get(rank as usize)?;
            Some((self.lives[life].args.clone(), life))
        };
        let answer = parts.last().and_then(|part| hosts::answer(part, clock, rank));
        self.channels[id].answer = answer;
    }

    /// The connection ends for its owner. Nothing more arrives.
    fn end_channel(&mut self, id: ChannelId, end: WayEnd) {
        let Channel { owner, peer, leaving, .. } = self.channels[id];
        self.channels[id].over = true;
        if !leaving {
            self.gone(owner, peer, end);
        }
    }

    /// A process has died: its connections end, and their other ends try the port again.
    pub(super) fn break_channels(&mut self, target: LifeId) {
        for id in 0..self.channels.len() {
            if self.channels[id].target == Some(target) && !self.channels[id].over {
                self.break_channel(id);
            }
        }
    }

    /// A connection breaks, and its owner tries the port again.
    pub(super) fn break_channel(&mut self, id: ChannelId) {
        self.channels[id].over = true;
        let delay = self.channel_delay();
        self.enter(delay, Event::Probe { channel: id, refused: 0 });
    }

    /// The connections that live.
    pub(super) fn open_channels(&self) -> Vec<ChannelId> {
        let lives = |channel: &Channel| {
            let listens = |target: LifeId| self.lives[target].alive && !self.lives[target].deaf;
            !channel.over && channel.target.is_some_and(listens)
        };
        (0..self.channels.len()).filter(|&id| lives(&self.channels[id])).collect()
    }

    /// Tries the port of a connection that has ended.
    pub(super) fn probe(&mut self, id: ChannelId, refused: u32) {
        let Channel { owner, target, leaving, .. } = self.channels[id];
        let addr = self.channels[id].addr.clone();
        let Some(target) = target else { return };
        if leaving || !self.lives[owner].alive {
            return;
        }
        if self.are_parted(owner, target) {
            if refused == 0 {
                // The owner does not even know yet.
                let patience = self.rng.below(UNACKNOWLEDGED);
                if patience > 2 * SEC {
                    return self.enter(AGAIN, Event::Probe { channel: id, refused: 0 });
                }
            }
            return self.end_channel(id, WayEnd::Lost);
        }
        match self.listener(&addr) {
            Some(_) => self.end_channel(id, WayEnd::Lost),
            None if refused == 0 => self.enter(100 * MS, Event::Probe { channel: id, refused: 1 }),
            None => self.end_channel(id, WayEnd::Dead { quiet_after: QUIET_AFTER }),
        }
    }
}
