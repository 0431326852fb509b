//! What a planted bug changes in the parameters of a world: limits that machines believe in, and occasions
//! for the bug to show.

use std::time::Duration;

use kv_core::proto::Limits;

use super::ranks;
use crate::kv::params::{Faults, Params};
use crate::planted::Planted;
use crate::rng::Rng;

impl Planted {
    /// Changes the parameters that machines believe in.
    pub(crate) fn loosen(self, params: &mut Params) {
        match self {
            Planted::Boundless => {
                params.limits =
                    Limits::default().with(|limits| limits.max_post_bytes = params.limits.max_post_bytes);
            }
            Planted::Overposted => params.max_inflight = 1024,
            Planted::StageOffByOne => ranks::count_stages_wrongly(params),
            _ => {}
        }
    }

    /// Changes the parameters of a world so that the bug has an occasion to show.
    pub(crate) fn provoke(self, params: &mut Params) {
        if matches!(
            self,
            Planted::WriteIntoSuccessor
                | Planted::FenceDropped
                | Planted::HealedInName
                | Planted::DrainInvented
        ) {
            params.faults = Faults::All;
        }
        match self {
            Planted::WriteIntoSuccessor => {
                params.physics.dma.slow = 400;
                params.physics.dma.time_max = params.physics.dma.time_max.max(100_000_000);
                params.physics.chaos.crashes = params.physics.chaos.crashes.max(3);
            }
            Planted::FenceDropped => {
                params.physics.chaos.crashes = 6;
                params.requests = 12;
                (params.physics.net.tail, params.physics.net.duplicate) = (600, 600);
                params.physics.net.delay_max = 500_000_000;
                params.physics.timing.session_deadline = Duration::from_secs(2);
            }
            Planted::RoomsConfused => {
                params.faults = Faults::All;
                params.suffixed = false;
                (params.sched.twins, params.sched.abort) = (1000, 0);
            }
            Planted::LostState
            | Planted::StateSwallowed
            | Planted::StateAtFailure
            | Planted::SkippedInWord => {
                params.state_items = 6;
            }
            Planted::AuxOfFirstStage | Planted::AuxOfLastSibling => {
                (params.aux_rows, params.sched.pull) = (8, 0);
            }
            Planted::NeighboursShare => params.state_items = 6,
            Planted::OneSourceEnough
            | Planted::OneSiblingEnough
            | Planted::RangeOneShort
            | Planted::FirstNotShifted
            | Planted::SiblingsSendAll => params.sched.pull = 0,
            Planted::PlaceForgotten => params.sched.layered = 0,
            Planted::StageOffByOne => params.state_items = 0,
            Planted::WrittenEarly => (params.sched.layered, params.sched.pull) = (1000, 0),
            Planted::GrantedEarly => (params.sched.layered, params.sched.pull) = (1000, 1000),
            Planted::HealedInName => {
                params.physics.net.drop = 950;
            }
            Planted::DrainUnheard
            | Planted::DrainAborts
            | Planted::LeavesAwaited
            | Planted::NamedAfterLeaving => {
                params.physics.chaos.drains = 3;
                params.requests = 12;
            }
            Planted::SaidInVain => {
                fray_wide(params);
                (params.sched.abort, params.requests) = (300, 12);
            }
            Planted::StopsInDebt => {
                params.physics.chaos.drains = 3;
                params.physics.net.drop = params.physics.net.drop.max(100);
                if params.faults != Faults::Losses {
                    params.faults = Faults::All;
                }
            }
            Planted::NotOwedWhileLost => {
                fray_wide(params);
                (params.physics.chaos.drains, params.requests) = (3, 12);
            }
            _ => self.provoke_leases(params),
        }
    }

    /// The same for bugs in leases and permissions.
    fn provoke_leases(self, params: &mut Params) {
        match self {
            Planted::LeaseInflated | Planted::HeartbeatForged | Planted::ClocksBeyondMargin => {
                params.faults = Faults::All;
                params.sched.pull = 1000;
                params.requests = 12;
                params.physics.timing.kv_lease_duration = Duration::from_millis(30);
                (params.physics.dma.slow, params.physics.dma.time_max) = (600, 200_000_000);
                params.physics.net.drop = params.physics.net.drop.max(150);
                if self == Planted::ClocksBeyondMargin {
                    (params.physics.drift_ppm, params.physics.net.drop) = (400_000, 500);
                    params.requests = 40;
                }
            }
            Planted::PermissionFromAnswer => {
                params.faults = Faults::All;
                (params.sched.pull, params.requests) = (0, 12);
                (params.physics.ways.kinds, params.physics.ways.bound) = ([0, 0, 10], 1_000);
                (params.physics.net.tail, params.physics.net.delay_max) = (600, 200_000_000);
                (params.physics.dma.slow, params.physics.dma.time_max) = (600, 200_000_000);
                params.physics.timing.write_permission = Duration::from_millis(50);
                params.physics.chaos.breaks = 6;
            }
            Planted::FirstWayIsAll | Planted::WayChanged => {
                params.faults = Faults::All;
                (params.sched.pull, params.requests) = (0, 12);
                (params.physics.ways.several, params.physics.ways.kinds) = (true, [0, 10, 0]);
                params.physics.ways.refused_max = 0;
                (params.physics.dma.slow, params.physics.dma.time_max) = (600, 200_000_000);
                params.physics.chaos.breaks = 12;
                if self == Planted::WayChanged {
                    // The way that is lost and the one that is opened differ in what ends their writes, and
                    // little is heard by the second.
                    params.physics.ways.kinds = [5, 5, 0];
                    (params.physics.chaos.pauses, params.physics.chaos.partitions) = (8, 30);
                    (params.physics.ways.long, params.physics.ways.slice_max) = (300, 50_000_000);
                }
            }
            Planted::EventsAsOfBefore => {
                params.faults = Faults::All;
                params.physics.driven = true;
                (params.sched.pull, params.requests) = (1000, 30);
                (params.sched.abort, params.sched.misuse, params.sched.one_sided) = (0, 0, 0);
                params.physics.timing.kv_lease_duration = Duration::from_millis(30);
                (params.physics.dma.slow, params.physics.dma.time_max) = (600, 200_000_000);
                // That the lease is over may not be heard, either.
                (params.physics.chaos.pauses, params.physics.net.drop) = (8, 500);
            }
            _ => {}
        }
    }
}

/// Connections break. Limits are wide: small ones forget what is to be told.
fn fray_wide(params: &mut Params) {
    let max_post_bytes = params.limits.max_post_bytes;
    params.limits = Limits::default().with(|limits| limits.max_post_bytes = max_post_bytes);
    params.fray(&mut Rng::new(params.physics.seed));
}
