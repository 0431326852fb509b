//! [`Way`]: this side's way to one peer, and what is to go over it.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_core::{PeerId, Time, WayEnd};
use kv_host::{Life, TransferId, Turns};

use crate::ffi::Address;
use crate::lane::{Lane, Link, Probe, Reach};
use crate::message::Header;
use crate::metadata::{Identity, Metadata, Place};

/// Number of a way; never used again.
pub(crate) type WayId = u64;

/// How far a way is.
///
/// | from | to | when |
/// |---|---|---|
/// | – | `Greeting` | `connect` |
/// | `Greeting` | `Open` | the peer has welcomed this transport |
/// | `Greeting`, `Open` | `Leaving` | `disconnect`: slices and messages under way are awaited |
/// | `Greeting`, `Open` | `Broken` | the peer's process has ended, an operation has failed, or the peer is silent |
/// | `Leaving`, `Broken` | – | nothing is under way any more |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing but greetings is sent until the peer has welcomed this transport.
    Greeting,
    Open,
    /// Frames are sent for a while from then on.
    Leaving {
        since: Time,
    },
    /// Nothing more is begun. If the peer's process is on this host, its end is awaited until `until`: connections are
    /// closed a moment before a process has ended.
    Broken {
        until: Time,
        end: Option<WayEnd>,
    },
}

/// A message, or the rest of a frame, that is to be sent.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) header: Header,
    pub(crate) body: Bytes,
    /// Bytes of the body that have been sent.
    pub(crate) sent: usize,
}

/// This side's way to one peer.
#[derive(Debug)]
pub(crate) struct Way {
    /// The owner's name of the peer; `None` after `disconnect`.
    pub(crate) peer: Option<PeerId>,
    /// Drawn at random; in all messages of the way.
    pub(crate) key: u64,
    /// Who the peer must be.
    pub(crate) identity: Identity,
    /// The names of the peer's endpoints, by their numbers.
    pub(crate) names: Vec<Bytes>,
    /// What [`Reach`] says.
    pub(crate) address: Address,
    pub(crate) links: Vec<Link>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) regions: Vec<Place>,
    /// Bytes of data that writes may carry to the peer; none if writes cannot be counted.
    pub(crate) immediate: usize,
    pub(crate) life: Life,
    pub(crate) stage: Stage,
    /// The number by which the peer knows this side's writes.
    pub(crate) slot: u32,
    /// What the peer calls this side, as long as it does not forget it.
    pub(crate) guest: u32,
    /// Messages that wait, the next one first, and the bytes of the frames among them.
    pub(crate) outgoing: VecDeque<Outgoing>,
    pub(crate) frame_bytes: usize,
    /// Posts whose bytes are in place, and whose notify frames wait for room.
    pub(crate) parked: VecDeque<(TransferId, Bytes)>,
    pub(crate) turns: Turns,
    /// Until when the peer permits writes.
    pub(crate) permitted: Time,
    /// Counted posts that have not ended, the bytes of their frames, and the number of the next.
    pub(crate) announced: usize,
    pub(crate) announced_bytes: usize,
    pub(crate) sequence: u32,
    /// How many frames were sent ahead, how many of them the peer is known to have, and for how many it was asked.
    pub(crate) ahead: u32,
    pub(crate) confirmed: u32,
    pub(crate) asked: u32,
    /// Messages under way; and questions whether lanes lead to the peer, which may wait behind what is stuck there.
    pub(crate) messages: usize,
    pub(crate) asks: usize,
    /// When the peer was heard last; until it is, when the way was made.
    pub(crate) heard: Time,
    /// When the next greeting is due.
    pub(crate) greet_at: Time,
}

impl Way {
    pub(crate) fn new(
        peer: PeerId,
        key: u64,
        identity: Identity,
        (metadata, reach): (Metadata, Reach),
        life: Life,
        immediate: usize,
        now: Time,
    ) -> Way {
        Way {
            peer: Some(peer),
            key,
            identity,
            names: metadata.ports.into_iter().map(|port| port.name).collect(),
            address: reach.address,
            links: reach.links,
            lanes: reach.lanes,
            regions: metadata.regions,
            immediate: immediate.min(usize::from(metadata.immediate)),
            life,
            stage: Stage::Greeting,
            slot: 0,
            guest: 0,
            outgoing: VecDeque::new(),
            frame_bytes: 0,
            parked: VecDeque::new(),
            turns: Turns::default(),
            permitted: Time::ZERO,
            announced: 0,
            announced_bytes: 0,
            sequence: 0,
            ahead: 0,
            confirmed: 0,
            asked: 0,
            messages: 0,
            asks: 0,
            heard: now,
            greet_at: now,
        }
    }

    /// True if frames and posts are taken.
    pub(crate) fn is_usable(&self) -> bool {
        self.peer.is_some() && matches!(self.stage, Stage::Greeting | Stage::Open)
    }

    /// Operations of this peer that are under way.
    pub(crate) fn under_way(&self) -> usize {
        let probes = self.links.iter().filter(|link| link.probe == Probe::UnderWay).count();
        self.messages + self.asks + self.moving() + probes
    }

    /// Slices that are under way, over all devices.
    pub(crate) fn moving(&self) -> usize {
        self.lanes.iter().map(Lane::moving).sum()
    }

    /// True once nothing of a dead peer can arrive any more, whichever connection it has used.
    pub(crate) fn is_drained(&self) -> bool {
        self.links.iter().all(|link| link.probe == Probe::Drained)
    }

    /// Throws away what waits.
    pub(crate) fn drop_outgoing(&mut self) {
        self.outgoing.clear();
        self.frame_bytes = 0;
    }

    /// Adds a frame, or a message without a frame, to those that wait.
    pub(crate) fn push(&mut self, header: Header, body: Bytes) {
        self.frame_bytes += body.len();
        self.outgoing.push_back(Outgoing { header, body, sent: 0 });
    }
}
