//! The small worlds that the exhaustive check goes through, and how many steps deep.

use std::time::Duration;

use kv_core::proto::{Limits, Timing};

use crate::kv::params::{Faults, Params, SchedParams, Topology};
use crate::net::params::{Physics, WayParams};

/// The duration of the lease in every small world.
pub(super) const LEASE: Duration = Duration::from_secs(6);
/// The size of a page, in bytes.
pub(super) const PAGE: u64 = 16;

/// How the clocks of decode hosts run beside that of the prefill host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drift {
    /// The clock runs slower by a thirty-second part, so that a lease seems to last longer than it does.
    Slow,
    /// The clocks of both hosts run at the same rate.
    Equal,
    /// The clock runs faster by a thirty-second part.
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

/// A small world: its hosts, and the faults that may happen in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// The name of the world on the command line (`--scope`).
    pub name: &'static str,
    /// What the world is there to show, in a few words for people.
    pub about: &'static str,
    /// The number of decode hosts, each with one receiver.
    pub decodes: usize,
    /// The number of receivers that the sender waits for. If there are more decode hosts, the others bring a
    /// lease id that is used up.
    pub readers: u32,
    /// The pages of the request; each is read by a post of its own.
    pub pages: u32,
    /// True if heartbeats do not renew the lease.
    pub fixed: bool,
    /// Receivers acquire by room, without a reference to the lease.
    pub by_room: bool,
    /// Peers are given up after half a lease of silence, not after ten.
    pub impatient: bool,
    /// True if every history begins when the lease is granted and the reads are in flight, and not with the
    /// message that acquires the lease.
    pub reading: bool,
    /// How the clocks of the decode hosts run, beside that of the prefill host.
    pub drift: Drift,
    /// How many frames may be delivered twice in one history.
    pub duplicates: u8,
    /// How many sessions may be aborted in one history.
    pub aborts: u8,
    /// How many reads may fail in one history.
    pub failures: u8,
    /// How often the prefill host may restart in one history.
    pub restarts: u8,
    /// How many decode hosts may die in one history.
    pub deaths: u8,
    /// Most frames in flight; beyond, the oldest is lost.
    pub frames: usize,
    /// The number of steps of the longest history.
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

    /// All small worlds. Their depths are chosen for a test build: all of them together take well under a
    /// minute.
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

    /// The parameters of the simulated world, which draws no faults of its own.
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
            limits: Limits::default().with(|limits| limits.max_post_bytes = PAGE),
            max_inflight: 64,
            max_sge: 1024,
            faults: Faults::All,
            sched: SchedParams { pull: 1000, ..SchedParams::default() },
            ..Params::draw(0)
        }
    }

    fn timing(&self) -> Timing {
        Timing::default().with(|timing| {
            timing.session_deadline = LEASE * 8;
            timing.retry_first = LEASE / 3;
            timing.retry_max = LEASE;
            timing.keepalive = if self.impatient { LEASE / 6 } else { LEASE * 10 / 3 };
            timing.peer_timeout = if self.impatient { LEASE / 2 } else { LEASE * 10 };
            timing.kv_lease_duration = LEASE;
        })
    }
}
