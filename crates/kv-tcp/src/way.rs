//! [`Way`]: this side's connections to one peer, and what is to go over them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use kv_core::{Op, PeerId, Time, WayEnd};
use kv_host::{Latency, Token, TransferId, Turns};

use crate::connection::ConnectionId;
use crate::metadata::Identity;
use crate::peer_clock::PeerClock;
use crate::transfer::Slice;

/// Number of a way; never used again.
pub(crate) type WayId = u64;

/// How far a way is.
///
/// | from | to | when |
/// |---|---|---|
/// | – | `Dialing` | `connect` |
/// | `Dialing` | `Open` | the peer has welcomed this transport |
/// | `Dialing` | `Ending` | every address says that the peer is gone, or the time is over |
/// | `Open` | `Leaving` | `disconnect`: slices under way are awaited |
/// | `Open` | `Proving` | the peer's kernel has closed a connection: is the peer's transport still there? |
/// | `Open` | `Ending` | a connection has failed otherwise |
/// | `Proving` | `Ending` | the peer has answered, is gone, or cannot be asked |
/// | `Leaving` | `Ending` | a connection has ended |
/// | `Leaving`, `Ending` | – | no slice can touch memory any more |
#[derive(Debug)]
pub(crate) enum Stage {
    Dialing(Dial),
    Open,
    Leaving { at: Time },
    Proving(Dial),
    Ending { end: WayEnd, at: Time },
}

/// A search for the peer at its addresses.
#[derive(Debug)]
pub(crate) struct Dial {
    /// When the search is given up.
    pub(crate) deadline: Time,
    /// Position of the address that is tried.
    pub(crate) address: usize,
    /// When the present address is given up; or, between two rounds, when the next one begins.
    pub(crate) next: Time,
    /// The connection that is being opened.
    pub(crate) connection: Option<ConnectionId>,
    /// True if an address of this round has not said clearly that the peer is gone.
    pub(crate) unclear: bool,
    /// The pause before the next round.
    pub(crate) pause: Duration,
}

impl Dial {
    pub(crate) fn new(now: Time, most: Duration) -> Dial {
        let pause = Duration::from_millis(2);
        Dial { deadline: now + most, address: 0, next: now, connection: None, unclear: false, pause }
    }
}

/// One connection of a way, and the slices that are under way on it.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) connection: Option<ConnectionId>,
    /// True once the peer has welcomed the connection.
    pub(crate) open: bool,
    pub(crate) flights: VecDeque<Flight>,
    /// Bytes of the flights.
    pub(crate) bytes: u64,
    /// Most bytes of flights: fewer after slices that came too late.
    pub(crate) window: u64,
    pub(crate) latency: Latency,
    /// Number of the next slice.
    pub(crate) next: u32,
}

impl Lane {
    fn new(window: u64) -> Lane {
        Lane {
            connection: None,
            open: false,
            flights: VecDeque::new(),
            bytes: 0,
            window,
            latency: Latency::default(),
            next: 0,
        }
    }
}

/// A slice that is under way: its answer has not come.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) number: u32,
    /// The post; `None` if it has ended, because the slice can touch no memory any more.
    pub(crate) transfer: Option<TransferId>,
    pub(crate) op: Op,
    pub(crate) slice: Slice,
    /// Ranges of the slice.
    pub(crate) ranges: usize,
    /// The frame that travels with the slice.
    pub(crate) notify: Option<Bytes>,
    pub(crate) begun: Time,
    /// Until when the slice may touch memory, by this host's clock.
    pub(crate) until: Time,
    /// True if the bytes of a read have come.
    pub(crate) landed: bool,
}

/// This side's connections to one peer.
#[derive(Debug)]
pub(crate) struct Way {
    /// The owner's name of the peer; `None` after `disconnect`.
    pub(crate) peer: Option<PeerId>,
    /// The name of this way in all its greetings.
    pub(crate) number: Token,
    /// Who the peer must be.
    pub(crate) identity: Identity,
    pub(crate) addresses: Vec<SocketAddr>,
    /// Lengths of the peer's regions, in bytes.
    pub(crate) regions: Vec<u64>,
    pub(crate) stage: Stage,
    /// The first lane carries frames; the others, if there are any, carry slices.
    pub(crate) lanes: Vec<Lane>,
    /// The address at which the peer was found.
    pub(crate) address: usize,
    pub(crate) clock: Option<PeerClock>,
    /// Frames that wait until the first lane is open, and their bytes.
    pub(crate) frames: VecDeque<Bytes>,
    pub(crate) frame_bytes: usize,
    /// Posts whose bytes are in place, and whose notify frames wait for room.
    pub(crate) parked: VecDeque<(TransferId, Bytes)>,
    pub(crate) turns: Turns,
    /// Until when the peer permits writes.
    pub(crate) permitted: Time,
    /// True if the peer has revoked the right to write.
    pub(crate) revoked: bool,
    /// Why the peer was not trusted, if it was not.
    pub(crate) distrust: Option<&'static str>,
}

impl Way {
    /// Window of a lane before anything is known about the network, in bytes.
    const FIRST_WINDOW: u64 = 1 << 20;

    pub(crate) fn new(
        peer: PeerId,
        number: Token,
        identity: Identity,
        (addresses, regions): (Vec<SocketAddr>, Vec<u64>),
        dial: Dial,
        (lanes, window): (usize, usize),
    ) -> Way {
        let window = Way::FIRST_WINDOW.min(window as u64);
        Way {
            peer: Some(peer),
            number,
            identity,
            addresses,
            regions,
            stage: Stage::Dialing(dial),
            lanes: (0..=lanes).map(|_| Lane::new(window)).collect(),
            address: 0,
            clock: None,
            frames: VecDeque::new(),
            frame_bytes: 0,
            parked: VecDeque::new(),
            turns: Turns::default(),
            permitted: Time::ZERO,
            revoked: false,
            distrust: None,
        }
    }

    /// True if frames and posts are taken.
    pub(crate) fn is_usable(&self) -> bool {
        self.peer.is_some() && matches!(self.stage, Stage::Dialing(_) | Stage::Open)
    }

    /// The first lane that carries slices.
    pub(crate) fn first_for_slices(&self) -> usize {
        usize::from(self.lanes.len() > 1)
    }

    /// The latest moment at which a slice that is under way may touch memory; `Time::ZERO` for none.
    pub(crate) fn last_flight(&self) -> Time {
        let flights = self.lanes.iter().flat_map(|lane| &lane.flights);
        flights
            .filter(|flight| flight.transfer.is_some())
            .map(|flight| flight.until)
            .max()
            .unwrap_or(Time::ZERO)
    }

    /// All connections, open or not.
    pub(crate) fn connections(&mut self) -> Vec<ConnectionId> {
        let dial = match &mut self.stage {
            Stage::Dialing(dial) | Stage::Proving(dial) => dial.connection.take(),
            _ => None,
        };
        let lanes = self.lanes.iter_mut().filter_map(|lane| {
            lane.open = false;
            lane.connection.take()
        });
        dial.into_iter().chain(lanes).collect()
    }
}
