//! [`Way`]: this side's way to a connected peer.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_core::{PeerId, Time};
use kv_host::{Token, TransferId, Turns};

use crate::metadata::{Hash, Place};
use crate::remote::RemoteId;

/// Number of a way; never used again.
pub(crate) type WayId = u64;

/// One way: from the `connect` of a peer to its end.
#[derive(Debug)]
pub(crate) struct Way {
    pub(crate) peer: PeerId,
    pub(crate) remote: RemoteId,
    /// The way's name in messages, which nobody can guess.
    pub(crate) token: Token,
    /// The hash of the peer's metadata, and its regions.
    pub(crate) hash: Hash,
    pub(crate) regions: Vec<Place>,
    pub(crate) stage: Stage,
    /// Until when the peer permits writes.
    pub(crate) permitted: Time,
    /// Frames that wait until the way is open.
    pub(crate) frames: VecDeque<Bytes>,
    pub(crate) frame_bytes: usize,
    /// Posts whose bytes are in place, and whose notify frames wait for room.
    pub(crate) parked: VecDeque<(TransferId, Bytes)>,
    pub(crate) turns: Turns,
}

/// | from | to | when |
/// |---|---|---|
/// | | Opening | `connect`; the hello was sent |
/// | Opening | Open | the peer's welcome has come |
/// | Opening, Open | Leaving | `disconnect` |
/// | Opening | removed | the time for opening is over |
/// | Leaving | removed | the last post has ended; the goodbye was sent |
/// | any | removed | the remote has ended |
#[derive(Debug)]
pub(crate) enum Stage {
    Opening { until: Time },
    Open(Session),
    Leaving(Option<Session>),
}

/// What the peer has given this side for the way.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) token: Token,
    /// The keys of the peer's regions, as they came.
    pub(crate) packed: Vec<Bytes>,
    /// The number of each key that UCX has unpacked.
    pub(crate) keys: Vec<Option<u32>>,
}

impl Way {
    pub(crate) fn new(
        peer: PeerId,
        remote: RemoteId,
        token: Token,
        hash: Hash,
        regions: Vec<Place>,
        until: Time,
    ) -> Way {
        Way {
            peer,
            remote,
            token,
            hash,
            regions,
            stage: Stage::Opening { until },
            permitted: Time::ZERO,
            frames: VecDeque::new(),
            frame_bytes: 0,
            parked: VecDeque::new(),
            turns: Turns::default(),
        }
    }

    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.stage, Stage::Leaving(_))
    }

    pub(crate) fn session(&self) -> Option<&Session> {
        match &self.stage {
            Stage::Open(session) | Stage::Leaving(Some(session)) => Some(session),
            Stage::Opening { .. } | Stage::Leaving(None) => None,
        }
    }

    /// Where a region of the peer lies.
    pub(crate) fn place_of(&self, region: u32) -> Option<&Place> {
        self.regions.get(region as usize)
    }

    /// The length of a region of the peer, in bytes.
    pub(crate) fn len_of(&self, region: u32) -> Option<u64> {
        self.place_of(region).map(|place| place.len)
    }

    /// Nothing more is sent: the remote has ended, or the peer is left.
    pub(crate) fn clear(&mut self) {
        self.frames.clear();
        self.frame_bytes = 0;
        self.parked.clear();
        self.turns.clear();
    }
}
