//! While no session is open and no page is held, machines send nothing and set no timers for long. When the
//! world has come to rest, their tables are empty.

use crate::clock::SEC;
use crate::kv::fact::{Fact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::net::lives::is_idle;

#[derive(Default, Clone)]
pub(crate) struct IdleIsQuiet;

impl Invariant for IdleIsQuiet {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Sent { life, .. } if is_long_idle(view) => {
                Err(format!("life {life} sends a frame long after everything has ended"))
            }
            Fact::Stepped { life, input: "timeout", .. } if is_long_idle(view) => {
                Err(format!("life {life} still has timers long after everything has ended"))
            }
            Fact::Restless => Err("the world does not come to rest".to_owned()),
            Fact::Settled { gauges, gently } => {
                // Results are kept for a peer that was given up, until it speaks again.
                for &(life, gauges, next) in gauges {
                    let kept = [
                        ("senders", gauges.senders),
                        ("receivers", gauges.receivers),
                        ("registrations", gauges.registrations),
                        ("incoming attempts", if gently { gauges.incoming } else { 0 }),
                        ("failed rooms", gauges.failed_rooms),
                        ("posts", gauges.posts),
                        ("lookups", gauges.lookups),
                        ("timers", gauges.timers),
                        ("leased pages", gauges.pages_leased),
                        ("releases", if gently { gauges.draining } else { 0 }),
                    ];
                    if let Some((what, count)) = kept.into_iter().find(|&(_, count)| count > 0) {
                        return Err(format!("life {life} keeps {count} {what} when all is still"));
                    }
                    if next.is_some() {
                        return Err(format!("life {life} wants a timeout at {next:?} when all is still"));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// True if even the entries that a machine keeps for a while after the last session must be gone by now.
fn is_long_idle(view: &View<'_>) -> bool {
    let timing = &view.params.physics.timing;
    let memory = timing.kv_lease_duration
        + timing.failed_room_ttl
        + timing.peer_timeout * 3
        + timing.retry_max * 4
        + timing.session_deadline;
    let lives = view.lives.iter();
    let resumed = lives.filter(|life| life.alive).map(|life| life.paused_until).max().unwrap_or(0);
    let since = view.last_change.max(resumed) + memory.as_nanos() as u64 * 2 + SEC;
    view.healed && view.now > since && is_idle(view.lives)
}
