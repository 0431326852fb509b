//! Which small world is gone through, and how far.

use std::time::Duration;

use kv_core::proto::{Limits, Timing};

use crate::kv::params::{Params, SchedParams, Topology};
use crate::net::params::{Physics, WayParams};

/// The lease of the pages.
pub(super) const LEASE: Duration = Duration::from_secs(6);
/// Bytes of a page.
pub(super) const PAGE: u64 = 16;

/// How the clocks of decode hosts run beside that of the prefill host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drift {
    /// Slower by a thirty-second part: a lease seems longer than it is.
    Slow,
    /// Alike.
    Equal,
    /// Faster by a thirty-second part.
    Fast,
}

impl Drift {
    /// The rate of such a clock, in parts per million of that of the prefill host.
    pub(super) fn rate_ppm(self) -> u64 {
        match self {
            Drift::Slow => 968_750,
            Drift::Equal => 1_000_000,
            Drift::Fast => 1_031_250,
        }
    }
}

/// A small world, and what may happen in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// Its name, for the command line.
    pub name: &'static str,
    /// What it is there for.
    pub about: &'static str,
    /// Decode hosts, with one receiver each.
    pub decodes: usize,
    /// Receivers that the sender waits for. With fewer than there are decode hosts, some of them
    /// come with a reference that is used up.
    pub readers: u32,
    /// Pages of the request; each is read by a post of its own.
    pub pages: u32,
    /// The lease is not renewed.
    pub fixed: bool,
    /// Receivers acquire by room, without a reference to the lease.
    pub by_room: bool,
    /// Peers are given up after half a lease of silence, not after ten.
    pub impatient: bool,
    /// Everything starts with the lease told and the reads in flight, not with the acquire message.
    pub reading: bool,
    /// Clocks.
    pub drift: Drift,
    /// Frames that are delivered twice.
    pub duplicates: u8,
    /// Sessions that are aborted.
    pub aborts: u8,
    /// Reads that fail.
    pub failures: u8,
    /// Restarts of the prefill host.
    pub restarts: u8,
    /// Deaths of decode hosts.
    pub deaths: u8,
    /// Most frames in flight; beyond, the oldest is lost.
    pub frames: usize,
    /// Most steps of one history.
    pub depth: u8,
}

impl Scope {
    const BASE: Scope = Scope {
        name: "one-reader",
        about: "one lease, one reader with a slow clock, late and doubled frames, an abort on either side",
        decodes: 1,
        readers: 1,
        pages: 1,
        fixed: false,
        by_room: false,
        impatient: false,
        reading: false,
        drift: Drift::Slow,
        duplicates: 1,
        aborts: 1,
        failures: 0,
        restarts: 0,
        deaths: 0,
        frames: 6,
        depth: 5,
    };

    /// All of them. The depths are for a test build: together well under a minute.
    pub const ALL: &[Scope] = &[
        Scope {
            name: "plain",
            about: "one lease, one reader with a slow clock; frames are late or lost, nothing else goes wrong",
            aborts: 0,
            duplicates: 0,
            depth: 6,
            ..Scope::BASE
        },
        Scope {
            name: "reading",
            about: "the same from the moment at which the read is in flight",
            aborts: 0,
            duplicates: 0,
            reading: true,
            depth: 6,
            ..Scope::BASE
        },
        Scope::BASE,
        Scope {
            name: "equal-clocks",
            about: "the same with equal clocks",
            drift: Drift::Equal,
            ..Scope::BASE
        },
        Scope { name: "fast-clock", about: "the same with a fast clock", drift: Drift::Fast, ..Scope::BASE },
        Scope { name: "fixed-lease", about: "a lease that no heartbeat extends", fixed: true, ..Scope::BASE },
        Scope {
            name: "two-reads",
            reading: true,
            about: "two pages in two reads, of which one may fail",
            pages: 2,
            failures: 1,
            duplicates: 0,
            ..Scope::BASE
        },
        Scope {
            name: "restart",
            reading: true,
            about: "a prefill host that comes back with the same room, session number and pages",
            restarts: 1,
            aborts: 0,
            duplicates: 0,
            ..Scope::BASE
        },
        Scope {
            name: "restart-by-room",
            about: "the same, for a receiver that has no reference",
            restarts: 1,
            by_room: true,
            aborts: 0,
            duplicates: 0,
            ..Scope::BASE
        },
        Scope {
            name: "death",
            reading: true,
            about: "a reader that dies at any step",
            deaths: 1,
            duplicates: 0,
            ..Scope::BASE
        },
        Scope {
            name: "impatient",
            about: "peers that are given up sooner than the lease is over",
            impatient: true,
            duplicates: 0,
            ..Scope::BASE
        },
        Scope {
            name: "two-readers",
            reading: true,
            about: "two readers, both of which must release",
            decodes: 2,
            readers: 2,
            aborts: 0,
            duplicates: 0,
            ..Scope::BASE
        },
        Scope {
            name: "used-twice",
            about: "one lease, two readers that both want it",
            decodes: 2,
            aborts: 0,
            duplicates: 0,
            ..Scope::BASE
        },
    ];

    /// The scope with this name.
    pub fn named(name: &str) -> Option<Scope> {
        Scope::ALL.iter().copied().find(|scope| scope.name == name)
    }

    /// The world of this scope, without a fault of its own.
    pub(super) fn params(&self) -> Params {
        let hosts = 1 + self.decodes;
        Params {
            topology: Topology::Plain,
            physics: Physics {
                timing: self.timing(),
                ways: WayParams { kinds: [10, 0, 0], ..WayParams::default() },
                ..Physics::calm(0, (1, self.decodes))
            },
            unequal: None,
            suffixed: false,
            kv_regions: 1,
            item_len: PAGE as usize,
            num_pages: vec![self.pages * 2; hosts],
            aux_rows: 0,
            state_items: 0,
            misfit: None,
            limits: Limits { max_post_bytes: PAGE, ..Limits::default() },
            max_inflight: 64,
            max_sge: 1024,
            lossless: false,
            drizzle: false,
            sched: SchedParams { pull: 1000, ..SchedParams::default() },
            ..Params::draw(0)
        }
    }

    fn timing(&self) -> Timing {
        Timing {
            session_deadline: LEASE * 8,
            retry_first: LEASE / 3,
            retry_max: LEASE,
            keepalive: if self.impatient { LEASE / 6 } else { LEASE * 10 / 3 },
            peer_timeout: if self.impatient { LEASE / 2 } else { LEASE * 10 },
            kv_lease_duration: LEASE,
            ..Timing::default()
        }
    }
}
