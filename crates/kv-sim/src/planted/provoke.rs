//! What a planted bug changes of the parameters: what nodes believe, and what gives the bug an occasion.

use std::time::Duration;

use kv_core::proto::Limits;

use super::{Planted, ranks};
use crate::params::Params;

impl Planted {
    /// Changes what nodes believe their parameters are.
    pub(crate) fn loosen(self, params: &mut Params) {
        match self {
            Planted::Boundless => {
                params.limits = Limits { max_post_bytes: params.limits.max_post_bytes, ..Limits::default() };
            }
            Planted::Overposted => params.max_inflight = 1024,
            Planted::StageOffByOne => ranks::count_stages_wrongly(params),
            _ => {}
        }
    }

    /// Changes what a world's seed decided, so that the bug has an occasion.
    pub(crate) fn provoke(self, params: &mut Params) {
        if matches!(self, Planted::WriteIntoSuccessor | Planted::FenceDropped | Planted::HealedInName) {
            (params.lossless, params.drizzle) = (false, false);
        }
        match self {
            Planted::WriteIntoSuccessor => {
                params.dma.slow = 400;
                params.dma.time_max = params.dma.time_max.max(100_000_000);
                params.chaos.crashes = params.chaos.crashes.max(3);
            }
            Planted::FenceDropped => {
                params.chaos.crashes = 6;
                params.requests = 12;
                (params.net.tail, params.net.duplicate) = (600, 600);
                params.net.delay_max = 500_000_000;
                params.timing.session_deadline = std::time::Duration::from_secs(2);
            }
            Planted::LeaseInflated | Planted::HeartbeatForged | Planted::ClocksBeyondMargin => {
                (params.lossless, params.drizzle) = (false, false);
                params.sched.pull = 1000;
                params.requests = 12;
                params.timing.kv_lease_duration = Duration::from_millis(30);
                (params.dma.slow, params.dma.time_max) = (600, 200_000_000);
                params.net.drop = params.net.drop.max(150);
                if self == Planted::ClocksBeyondMargin {
                    (params.drift_ppm, params.net.drop) = (400_000, 500);
                }
            }
            Planted::PermissionFromAnswer => {
                (params.lossless, params.drizzle) = (false, false);
                (params.sched.pull, params.requests) = (0, 12);
                (params.ways.kinds, params.ways.bound) = ([0, 0, 10], 1_000);
                (params.net.tail, params.net.delay_max) = (600, 200_000_000);
                (params.dma.slow, params.dma.time_max) = (600, 200_000_000);
                params.timing.write_permission = Duration::from_millis(50);
                params.chaos.breaks = 6;
            }
            Planted::RoomsConfused => {
                (params.lossless, params.drizzle, params.suffixed) = (false, false, false);
                (params.sched.twins, params.sched.abort) = (1000, 0);
            }
            Planted::EventsAsOfBefore => {
                (params.lossless, params.drizzle, params.driven) = (false, false, true);
                (params.sched.pull, params.requests) = (1000, 12);
                params.timing.kv_lease_duration = Duration::from_millis(30);
                (params.dma.slow, params.dma.time_max) = (600, 200_000_000);
                // That the lease is over may not be heard, either.
                (params.chaos.pauses, params.net.drop) = (8, 500);
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
                params.net.drop = 950;
            }
            _ => {}
        }
    }
}
