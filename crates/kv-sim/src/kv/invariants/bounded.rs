//! No machine panics; no table exceeds its limit, no frame or post its bound; no timer rings without end; and
//! no frame of a peer costs more than its size allows.

use std::collections::BTreeMap;

use kv_core::proto::NodeGauges;
use kv_core::{MAX_FRAME, Time};

use crate::kv::fact::{Fact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::net::cost::Cost;
use crate::net::lives::LifeId;

/// The number of outputs that any input may cause, however small: a peer may ask about 256 attempts at once.
const OUTPUTS: usize = 320;
/// Outputs for each session of the own scheduler and each peer.
const OUTPUTS_EACH: usize = 8;
/// The size of one output of such a kind, in bytes: the largest is a registration of all pages of a simulated
/// host.
const BYTES_EACH: usize = 512;
/// How many posting windows of one peer all peers together may have.
const WINDOWS: usize = 4;
/// The number of timeouts of one machine that may fall on one moment.
const MAX_TIMEOUTS: u32 = 3;

#[derive(Default, Clone)]
pub(crate) struct Bounded {
    /// The moment of the last timeout of each life, and the number of timeouts at that moment.
    timeouts: BTreeMap<LifeId, (Time, u32)>,
}

impl Invariant for Bounded {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Panicked { life, message } => Err(format!("life {life} panics: {message}")),
            Fact::Sent { life, bytes } if bytes > MAX_FRAME => {
                Err(format!("life {life} sends a frame of {bytes} bytes"))
            }
            Fact::BadDescriptor { life, what } => Err(format!("life {life} posts {what}")),
            Fact::Posted { life, post, to_peer, in_flight } => {
                let params = view.params;
                let window = params.max_inflight;
                // What a peer holds up counts among its own only.
                let all = window.saturating_mul(WINDOWS + view.lives.len());
                if to_peer > window || in_flight > all {
                    return Err(format!(
                        "life {life} has {in_flight} posts in flight, {to_peer} of them to one peer: allowed are {window} to each",
                    ));
                }
                if post.descriptors.len() > params.max_sge {
                    return Err(format!(
                        "life {life} posts {} descriptors, allowed are {}",
                        post.descriptors.len(),
                        params.max_sge
                    ));
                }
                let bytes: u64 = post.descriptors.iter().map(|descriptor| descriptor.len).sum();
                let allowed = params.limits.max_post_bytes;
                if bytes > allowed {
                    return Err(format!("life {life} posts {bytes} bytes, allowed are {allowed}"));
                }
                Ok(())
            }
            Fact::Cost { life, input, cost } => affordable(view, life, input, &cost),
            Fact::Stepped { life, input, now, next, gauges } => {
                if input == "timeout" {
                    let (at, times) = self.timeouts.entry(life).or_insert((now, 0));
                    (*at, *times) = if *at == now { (now, *times + 1) } else { (now, 1) };
                    let spins = next.is_some_and(|next| next <= now);
                    if spins && *times > MAX_TIMEOUTS {
                        return Err(format!(
                            "life {life} wants a timeout at {next:?}, and has just had {times} at {now:?}"
                        ));
                    }
                }
                within_limits(view, life, &gauges)
            }
            _ => Ok(()),
        }
    }
}

/// Checks that an input costs no more than a constant times its own bytes, and what the host's own scheduler
/// has asked for. What peers have left at the host may cost something once, when its time is over.
fn affordable(view: &View<'_>, life: LifeId, input: &str, cost: &Cost) -> Verdict {
    let Cost { input: bytes, of_peer, outputs, bytes: told, held } = *cost;
    let window = view.params.max_inflight.min(outputs) * (1 + held.peers);
    let record = &view.lives[life];
    let own = held.sessions.max(record.open_sessions) + record.holds_out + held.peers;
    let left = if of_peer { 0 } else { held.of_peers };
    let most = OUTPUTS + OUTPUTS_EACH * own + window + left + bytes / 4;
    let most_bytes = most * BYTES_EACH + 8 * bytes;
    if outputs > most || told > most_bytes {
        return Err(format!(
            "life {life} answers {input} of {bytes} bytes with {outputs} outputs of {told} bytes; allowed are {most} of {most_bytes}, for {held:?}"
        ));
    }
    Ok(())
}

fn within_limits(view: &View<'_>, life: LifeId, gauges: &NodeGauges) -> Verdict {
    let limits = &view.params.limits;
    let record = &view.lives[life];
    let lives = view.lives.len();
    // A session is kept while it is open or holds pages.
    let sessions = record.open_sessions + record.holds_out + MAX_LINGERING;
    let timers = 3 * sessions + 2 * gauges.peers + gauges.registrations + gauges.lookups + 1;
    for (what, got, max) in [
        ("peers", gauges.peers, limits.max_peers),
        ("registrations", gauges.registrations, limits.max_registrations),
        ("failed rooms", gauges.failed_rooms, limits.max_failed_rooms.saturating_mul(1 + lives)),
        ("runs of waiting pages", gauges.waiting_runs, limits.max_waiting_runs),
        ("results", gauges.results, RESULTS.saturating_mul(gauges.peers)),
        ("runs of attempts", gauges.closed_runs, CLOSED.saturating_mul(gauges.peers)),
        ("targets", gauges.targets, gauges.senders.saturating_mul(lives)),
        ("sources", gauges.sources, gauges.receivers.saturating_mul(limits.max_peers)),
        ("granted runs", gauges.granted_runs, gauges.sources.saturating_mul(MAX_FRAME)),
        // Those of sessions that have ended leave the line when it is their turn.
        ("targets in line", gauges.queued, view.ledger.legs.len().saturating_mul(lives)),
        ("addresses", gauges.addresses, limits.max_addresses),
        ("numbers of questions", gauges.numbers, NUMBERS.saturating_mul(gauges.peers)),
        ("posts", gauges.posts, view.params.max_inflight.saturating_mul(WINDOWS + view.lives.len())),
        ("incoming attempts", gauges.incoming, limits.max_peers.saturating_mul(limits.max_attempts as usize)),
        ("sessions", gauges.senders + gauges.receivers, sessions),
        ("lookups", gauges.lookups, record.open_sessions),
        ("ended lease_refs", gauges.ended_leases, limits.max_ended_leases),
        ("timers", gauges.timers, timers),
    ] {
        if got > max {
            return Err(format!("life {life} has {got} {what}, allowed are {max}"));
        }
    }
    Ok(())
}

/// The number of results that a machine keeps for one peer, at most.
const RESULTS: usize = 1024;
/// The number of runs of ended attempts that a machine keeps for one peer, at most.
const CLOSED: usize = 1 << 14;
/// The number of unanswered questions to one peer that a machine remembers, at most.
const NUMBERS: usize = 120_000;
/// Sessions without pages that are kept until their abort is acknowledged or their posts end.
const MAX_LINGERING: usize = 64;
