//! No panic, no table over its limit, no frame or post over its bound, no timer that spins.

use std::collections::BTreeMap;

use kv_core::proto::NodeGauges;
use kv_core::{MAX_FRAME, Time};

use super::{Invariant, Verdict};
use crate::fact::{Fact, View};
use crate::ledger::LifeId;

/// Most outputs of one input, for the sizes of a simulated world.
const MAX_OUTPUTS: usize = 2_000;
/// Most timeouts of one node at one moment.
const MAX_TIMEOUTS: u32 = 3;

#[derive(Default)]
pub(crate) struct Bounded {
    /// The moment of the last timeout of each life, and how many there were in it.
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
            Fact::Posted { life, post, in_flight } => {
                let params = view.params;
                if in_flight > params.max_inflight {
                    return Err(format!(
                        "life {life} has {in_flight} posts in flight, allowed are {}",
                        params.max_inflight
                    ));
                }
                if post.descs.len() > params.max_sge {
                    return Err(format!(
                        "life {life} posts {} descriptors, allowed are {}",
                        post.descs.len(),
                        params.max_sge
                    ));
                }
                let bytes: u64 = post.descs.iter().map(|desc| desc.len).sum();
                let allowed = params.limits.max_post_bytes;
                if bytes > allowed {
                    return Err(format!("life {life} posts {bytes} bytes, allowed are {allowed}"));
                }
                Ok(())
            }
            Fact::Stepped { life, input, outputs, now, next, gauges } => {
                if outputs > MAX_OUTPUTS {
                    return Err(format!("life {life} answers {input} with {outputs} outputs"));
                }
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

fn within_limits(view: &View<'_>, life: LifeId, gauges: &NodeGauges) -> Verdict {
    let limits = &view.params.limits;
    let record = &view.ledger.lives[life];
    // A session is kept while it is open or holds pages.
    let sessions = record.open_sessions + record.tokens_out + MAX_LINGERING;
    let timers = 3 * sessions + 2 * gauges.peers + gauges.registrations + gauges.lookups + 1;
    for (what, got, max) in [
        ("peers", gauges.peers, limits.max_peers),
        ("registrations", gauges.registrations, limits.max_registrations),
        ("failed rooms", gauges.failed_rooms, limits.max_failed_rooms.saturating_mul(2)),
        ("posts", gauges.posts, view.params.max_inflight),
        ("incoming attempts", gauges.incoming, limits.max_peers.saturating_mul(limits.max_attempts as usize)),
        ("sessions", gauges.senders + gauges.receivers, sessions),
        ("lookups", gauges.lookups, record.open_sessions),
        ("ended grants", gauges.ended_grants, limits.max_ended_grants),
        ("timers", gauges.timers, timers),
    ] {
        if got > max {
            return Err(format!("life {life} has {got} {what}, allowed are {max}"));
        }
    }
    Ok(())
}

/// Sessions without pages that are kept until their abort is acknowledged or their posts end.
const MAX_LINGERING: usize = 64;
