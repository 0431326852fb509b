//! How the parameters of a world are drawn from its seed.

use std::time::Duration;

use kv_core::proto::{Limits, Timing};

use crate::clock::{MS, SEC, US};
use crate::kv::params::{Faults, Params, SchedParams, Topology};
use crate::kv::unequal::Unequal;
use crate::net::params::Physics;
use crate::net::params::{ChaosParams, DmaParams, LookupParams, NetParams, WayParams};
use crate::rng::Rng;

impl Params {
    /// The parameters of the world of a seed.
    pub fn draw(seed: u64) -> Params {
        let rng = &mut Rng::new(seed ^ 0x5eed_0000_cafe);
        let lossless = rng.chance(200);
        let topology = draw_topology(rng);
        // Drawn apart: worlds with and without state, or context-parallel ranks, are otherwise the same.
        let state_items = Rng::new(seed ^ 0x5eed_57a7_e000).pick(&[0, 0, 3, 6]);
        let apart = &mut Rng::new(seed ^ 0x5eed_c0de_7e87);
        let unequal = (topology == Topology::Unequal).then(|| Unequal::draw(rng));
        let unequal = unequal.map(|pair| pair.spread(apart, state_items > 0));
        let (prefills, decodes) = draw_sides(rng, topology, unequal.as_ref());
        let hosts = prefills + decodes;
        let timing = draw_way_retries(seed, draw_timing(rng));
        let tiny = !lossless && unequal.is_none() && rng.chance(300);
        let limits = draw_limits(rng, tiny);
        let fault_span = rng.between(50 * MS, 800 * MS);
        let small = [8, 16, 24, 32, 48];
        let sched = draw_sched(rng, lossless);
        let params = Params {
            faults: if lossless { Faults::None } else { Faults::All },
            topology,
            misfit: (unequal.is_none() && rng.chance(40)).then(|| rng.index(hosts)),
            unequal,
            suffixed: false,
            kv_regions: 1 + rng.index(3),
            item_len: rng.pick(&[8, 12, 16]),
            num_pages: (0..hosts).map(|_| rng.pick(&small)).collect(),
            aux_rows: rng.pick(&[0, 2, 4, 8]),
            state_items,
            requests: 1 + rng.index(12),
            heal_requests: 1 + rng.index(3),
            heal_eager: !tiny && rng.chance(500),
            limits,
            max_inflight: rng.pick(&[1, 1, 2, 4, 32]),
            max_sge: rng.pick(&[1, 2, 4, 64]),
            physics: Physics {
                seed,
                prefills,
                decodes,
                driven: Rng::new(seed ^ 0x5eed_d21e_e200).chance(200),
                timing,
                fault_span,
                // Leases and permissions are good for clocks that differ by a thirty-second part.
                drift_ppm: rng.pick(&[0, 100, 10_000, 15_000]),
                lateness: rng.pick(&[0, 50 * US, MS]),
                net: draw_net(rng, lossless, &timing),
                dma: draw_dma(rng, lossless, &timing),
                ways: draw_ways(seed, lossless),
                lookup: draw_lookup(rng, lossless),
                chaos: if lossless { ChaosParams::default() } else { draw_chaos(rng) },
            },
            sched,
        };
        params.refined(rng, tiny)
    }

    /// The same world with the parameters that are drawn last.
    fn refined(mut self, rng: &mut Rng, tiny: bool) -> Params {
        if self.unequal.is_some() {
            // Thousands of pieces of a byte each: one by one they would take longer than anybody waits.
            self.max_sge = self.max_sge.max(16);
            self.limits.max_post_bytes = self.limits.max_post_bytes.max(40);
        }
        // Drawn apart: worlds are otherwise the same.
        let later = &mut Rng::new(self.physics.seed ^ 0x5eed_9e21_1550);
        self.physics.timing.write_permission = Duration::from_millis(later.pick(&[20, 50, 100, 400, 2000]));
        self.suffixed = later.chance(600);
        if self.faults == Faults::All {
            self.draw_late_faults(later);
        }
        let is_spared = self.faults == Faults::None || tiny || rng.chance(750);
        let mut params = if is_spared { self } else { self.only_losses(rng) };
        // Drawn apart: worlds are otherwise the same.
        let apart = &mut Rng::new(params.physics.seed ^ 0x5eed_d2a1_4000);
        if apart.chance(250) {
            params.physics.chaos.drains = 1 + apart.below(2);
        }
        let apart = &mut Rng::new(params.physics.seed ^ 0x5eed_f4a7_ed00);
        if params.faults == Faults::All && !tiny && apart.chance(100) {
            params.fray(apart);
        }
        params
    }

    /// The same world without lost frames and without faults of hosts, in which connections between living hosts break.
    pub(in crate::kv) fn fray(&mut self, rng: &mut Rng) {
        self.faults = Faults::Breaks;
        let timing = &mut self.physics.timing;
        timing.peer_timeout = a_dozen_repetitions(timing);
        // The deadline is later than the latest moment at which an end may be told.
        timing.session_deadline = timing.peer_timeout * 8;
        // A room that has failed is remembered until a broken connection is noticed.
        timing.failed_room_ttl = timing.peer_timeout * 4;
        self.physics.net = draw_net(rng, true, timing);
        self.physics.dma = DmaParams { connect_fail: 0, ..self.physics.dma };
        self.physics.ways.stuck = 0;
        self.physics.ways.refused_max = rng.pick(&[0, 0, 20 * MS, 100 * MS]);
        self.physics.lookup = LookupParams { fail: 0, stale: 0, ..self.physics.lookup };
        self.physics.chaos = ChaosParams {
            breaks: 1 + rng.below(4),
            detect_max: rng.pick(&[MS, 20 * MS, 100 * MS]),
            ..ChaosParams::default()
        };
        if rng.chance(300) {
            self.physics.chaos.drains = 1 + rng.below(2);
        }
        self.sched.retry = 0;
    }

    fn draw_late_faults(&mut self, rng: &mut Rng) {
        let Timing {
            write_permission,
            session_deadline,
            peer_timeout,
            failed_room_ttl,
            kv_lease_duration,
            ..
        } = self.physics.timing;
        let longest = session_deadline
            .max(peer_timeout)
            .max(failed_room_ttl)
            .max(kv_lease_duration)
            .max(write_permission);
        let roomy = self.limits.max_peers > 100 && self.unequal.is_none();
        self.physics.net.liars = if roomy { rng.pick(&[0, 0, 0, 0, 0, 0, 0, 100]) } else { 0 };
        self.physics.chaos.stops = rng.pick(&[0, 0, 1, 2]);
        // Whoever waits for the stopped one asks a thousand times meanwhile, not a million times.
        let most = self.physics.timing.retry_max.as_nanos() as u64 * 3000;
        let longest = longest.as_nanos() as u64;
        self.physics.chaos.stop_max = (longest * rng.pick(&[2, 2, 2, 10, 60])).min(most).max(2 * longest);
        self.sched.twins = if self.suffixed { 0 } else { rng.pick(&[0, 0, 300]) };
    }

    /// The same world with no worse fault than lost, duplicated or late frames.
    fn only_losses(mut self, rng: &mut Rng) -> Params {
        self.faults = Faults::Losses;
        self.requests = 1 + rng.index(4);
        self.num_pages.fill(48);
        self.aux_rows = rng.pick(&[0, 8]);
        self.state_items *= 8;
        self.misfit = None;
        self.physics.timing.peer_timeout = a_dozen_repetitions(&self.physics.timing);
        self.physics.net = NetParams {
            drop: rng.pick(&[10, 50, 150]),
            duplicate: rng.pick(&[0, 50, 300]),
            tail: rng.pick(&[0, 50, 300]),
            delay_max: 50 * MS,
            ..self.physics.net
        };
        self.physics.ways.stuck = 0;
        self.physics.dma =
            DmaParams { error: 0, refuse: 0, connect_fail: 0, time_max: 50 * MS, ..self.physics.dma };
        self.physics.chaos = ChaosParams::default();
        let SchedParams {
            early_init,
            request_ids,
            two_receivers,
            pause,
            pull,
            auto,
            referenced,
            layered,
            ..
        } = self.sched;
        self.sched = SchedParams {
            early_init,
            request_ids,
            two_receivers,
            pull,
            auto,
            referenced,
            layered,
            pause,
            pause_max: 50 * MS,
            ..Default::default()
        };
        self
    }
}

/// How long a peer is silent whose answers were lost a dozen times.
fn a_dozen_repetitions(timing: &Timing) -> Duration {
    (timing.keepalive * 20).max(timing.retry_max * 12)
}

fn draw_topology(rng: &mut Rng) -> Topology {
    match rng.below(10) {
        0 => Topology::DataParallel,
        1 => Topology::TensorParallel,
        2 | 3 => Topology::Unequal,
        _ => Topology::Plain,
    }
}

/// How many hosts there are of either kind.
fn draw_sides(rng: &mut Rng, topology: Topology, unequal: Option<&Unequal>) -> (usize, usize) {
    match topology {
        Topology::Unequal => {
            let ranks = |side: usize| unequal.map_or(1, |pair| pair.engines[side].ranks());
            (ranks(0), ranks(1))
        }
        Topology::Plain => (1 + rng.index(3), 1 + rng.index(3)),
        Topology::DataParallel => (2, 1 + rng.index(2)),
        Topology::TensorParallel => (2, 2),
    }
}

pub(crate) fn draw_timing(rng: &mut Rng) -> Timing {
    let ms = Duration::from_millis;
    let retry_first = rng.between(2, 30);
    let keepalive = rng.between(10, 150);
    Timing::default().with(|timing| {
        timing.session_deadline = ms(rng.between(100, 3000));
        timing.retry_first = ms(retry_first);
        timing.retry_max = ms(retry_first * rng.between(1, 8));
        timing.keepalive = ms(keepalive);
        timing.peer_timeout = ms(keepalive * rng.between(2, 8));
        timing.write_permission = Timing::default().write_permission;
        timing.lookup_retry = ms(rng.between(2, 30));
        timing.failed_room_ttl = ms(rng.between(20, 2000));
        timing.kv_lease_duration = ms(rng.pick(&[3, 30, 100, 400, 2000]));
    })
}

/// The same with the pauses after which failed ways are tried again, some of them no longer than a world's faults.
/// They are drawn apart, so that the draws of the other parameters do not depend on them.
pub(crate) fn draw_way_retries(seed: u64, timing: Timing) -> Timing {
    let rng = &mut Rng::new(seed ^ 0x5eed_3a75_9a05);
    timing.with(|timing| {
        timing.way_retry_first = Duration::from_millis(rng.pick(&[2, 20, 200, 1000]));
        timing.way_retry_max = timing.way_retry_first * rng.pick(&[1, 4, 60]);
    })
}

fn draw_limits(rng: &mut Rng, tiny: bool) -> Limits {
    let max_post_bytes = rng.pick(&[5, 8, 16, 40, 100, 1 << 20]);
    if !tiny {
        return Limits::default().with(|limits| limits.max_post_bytes = max_post_bytes);
    }
    Limits::default().with(|limits| {
        limits.max_peers = rng.pick(&[1, 2, 3, 100]);
        limits.max_registrations = rng.pick(&[1, 2, 4, 100]);
        limits.max_waiting_runs = rng.pick(&[12, 40, 1000]);
        limits.max_failed_rooms = rng.pick(&[1, 2, 100]);
        limits.max_post_bytes = max_post_bytes;
        limits.max_attempts = rng.pick(&[1, 2, 4, 100]);
        limits.max_ended_leases = rng.pick(&[1, 2, 100]);
        limits.connections_share = 1;
    })
}

/// A rate that is often zero, often mild, sometimes wild.
fn rate(rng: &mut Rng) -> u32 {
    rng.pick(&[0, 0, 5, 20, 60, 150, 400])
}

pub(crate) fn draw_net(rng: &mut Rng, lossless: bool, timing: &Timing) -> NetParams {
    let delay = rng.between(20 * US, 2 * MS);
    let retry = timing.retry_first.as_nanos() as u64;
    if lossless {
        let delay_max = delay + rng.below(retry);
        let (duplicate, tail) = (rate(rng), rate(rng));
        return NetParams {
            duplicate,
            tail,
            delay,
            delay_max,
            spurious: rng.pick(&[0, 20]),
            ..NetParams::default()
        };
    }
    NetParams {
        drop: rate(rng),
        duplicate: rate(rng),
        tail: rate(rng),
        delay,
        delay_max: rng.pick(&[5 * MS, 50 * MS, 500 * MS]),
        misdeliver: rng.pick(&[0, 300, 1000]),
        garbage: rng.pick(&[0, 0, 10]),
        liars: 0,
        spurious: rng.pick(&[0, 0, 20]),
    }
}

pub(crate) fn draw_dma(rng: &mut Rng, lossless: bool, timing: &Timing) -> DmaParams {
    let deadline = timing.session_deadline.as_nanos() as u64;
    DmaParams {
        error: rng.pick(&[0, 0, 10, 50, 200]),
        slow: rate(rng),
        time: rng.between(20 * US, 5 * MS),
        time_max: rng.pick(&[10 * MS, 100 * MS, deadline, 2 * deadline]).min(4 * SEC),
        cancel: rng.pick(&[0, 300, 1000]),
        connect_fail: if lossless { 0 } else { rng.pick(&[0, 0, 50, 300]) },
        refuse: rng.pick(&[0, 0, 50]),
    }
}

/// The parameters of ways, drawn from a generator of their own, so that the draws of the other parameters do
/// not depend on them.
pub(crate) fn draw_ways(seed: u64, lossless: bool) -> WayParams {
    let rng = &mut Rng::new(seed ^ 0x5eed_fe2c_e000);
    WayParams {
        kinds: rng.pick(&[[10, 0, 0], [0, 10, 0], [0, 0, 10], [3, 4, 3]]),
        bound: rng.pick(&[US, 2 * MS, 50 * MS, 300 * MS]),
        long: rng.pick(&[0, 50, 300]),
        slice_max: rng.pick(&[100 * US, 5 * MS, 50 * MS]),
        unproven: rng.pick(&[0, 300]),
        stuck: if lossless { 0 } else { rng.pick(&[0, 0, 0, 20, 200]) },
        refused_max: rng.pick(&[0, 20 * MS, 500 * MS]),
        several: Rng::new(seed ^ 0x5eed_3a75_e7e3).chance(200),
    }
}

pub(crate) fn draw_lookup(rng: &mut Rng, lossless: bool) -> LookupParams {
    LookupParams {
        fail: if lossless { 0 } else { rate(rng) },
        delay: rng.between(50 * US, 3 * MS),
        delay_max: rng.pick(&[5 * MS, 100 * MS]),
        lease: rng.pick(&[0, 20 * MS, 300 * MS, 2 * SEC]),
        stale: if lossless { 0 } else { rng.pick(&[0, 100, 400]) },
    }
}

pub(crate) fn draw_chaos(rng: &mut Rng) -> ChaosParams {
    let some = |rng: &mut Rng| match rng.below(4) {
        0 | 1 => 1 + rng.below(4),
        _ => 0,
    };
    ChaosParams {
        crashes: some(rng),
        pauses: some(rng),
        stops: 0,
        stop_max: 0,
        partitions: some(rng),
        breaks: some(rng),
        shutdowns: u64::from(rng.chance(100)),
        drains: 0,
        detect_max: rng.pick(&[MS, 20 * MS, 500 * MS]),
    }
}

fn draw_sched(rng: &mut Rng, lossless: bool) -> SchedParams {
    let loud = |rng: &mut Rng| rng.pick(&[0, 50, 200, 500]);
    SchedParams {
        abort: loud(rng),
        one_sided: rng.pick(&[0, 0, 60, 200]),
        disagree: rng.pick(&[0, 0, 50, 200]),
        early_init: rng.pick(&[0, 100, 1000]),
        misuse: rng.pick(&[0, 0, 0, 100]),
        request_ids: rng.pick(&[0, 500, 1000]),
        twins: 0,
        retry: if lossless { 0 } else { rng.pick(&[0, 300, 1000]) },
        two_receivers: rng.pick(&[0, 100, 500]),
        pull: rng.pick(&[0, 500, 1000]),
        auto: rng.pick(&[0, 0, 300]),
        referenced: rng.pick(&[0, 500, 1000]),
        own_deadline: rng.pick(&[0, 100, 500]),
        layered: rng.pick(&[0, 300, 1000]),
        pause: rng.between(10 * US, 5 * MS),
        pause_max: rng.pick(&[5 * MS, 50 * MS, 300 * MS]),
    }
}
