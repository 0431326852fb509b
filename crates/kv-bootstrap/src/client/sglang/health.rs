//! The heartbeats of engines: `GET /health`, as SGLang's decode workers ask their prefill engines.

use std::collections::BTreeMap;

use kv_core::{BootstrapError, LookupId, Time};

use super::ends::{Events, fail, found};
use crate::config::ClientConfig;

/// The engines that are asked for their health, by their address.
#[derive(Debug, Default)]
pub(super) struct Heartbeats(BTreeMap<String, Watch>);

/// An engine that is asked for its health.
#[derive(Debug)]
struct Watch {
    /// The lookups that wait for the engine's death, each with the time at which the lookup ends otherwise.
    lookups: Vec<(LookupId, Time)>,
    /// Heartbeats in a row without the answer 200.
    failures: u32,
    /// When the next heartbeat is due; `None` while one is under way.
    due: Option<Time>,
}

impl Heartbeats {
    /// Watches the engine at an address for a lookup. The first heartbeat of an engine is due at once.
    pub(super) fn watch(&mut self, now: Time, addr: &str, lookup: LookupId, until: Time) {
        let watch = self.0.entry(addr.to_owned());
        let watch = watch.or_insert(Watch { lookups: Vec::new(), failures: 0, due: Some(now) });
        watch.lookups.push((lookup, until));
    }

    /// Ends the lookups whose engine has lived for their whole time, and returns the addresses to which the caller
    /// sends a heartbeat now. Each must be [answered](Heartbeats::answered).
    pub(super) fn due(&mut self, events: &mut Events, now: Time) -> Vec<String> {
        let mut due = Vec::new();
        self.0.retain(|addr, watch| {
            if watch.failures == 0 && watch.due.is_some() {
                let over = watch.lookups.extract_if(.., |(_, until)| *until <= now);
                events.extend(over.map(|(lookup, _)| found(lookup)));
            }
            if watch.due.is_some_and(|at| at <= now) && !watch.lookups.is_empty() {
                watch.due = None;
                due.push(addr.clone());
            }
            watch.due.is_none() || !watch.lookups.is_empty()
        });
        due
    }

    /// When [`due`](Heartbeats::due) has something to do.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let watches = self.0.values().filter_map(|watch| {
            let until = watch.lookups.iter().map(|(_, until)| *until).min().filter(|_| watch.failures == 0);
            watch.due.map(|due| until.map_or(due, |until| due.min(until)))
        });
        watches.min()
    }

    /// Takes the end of a heartbeat. [`ClientConfig::max_failures`] errors in a row end the lookups of the engine.
    pub(super) fn answered(
        &mut self,
        events: &mut Events,
        now: Time,
        config: &ClientConfig,
        addr: &str,
        answer: Result<(), BootstrapError>,
    ) {
        let Some(watch) = self.0.get_mut(addr) else { return };
        watch.due = Some(now + config.heartbeat);
        let Err(error) = answer else {
            watch.failures = 0;
            return;
        };
        watch.failures += 1;
        if watch.failures >= config.max_failures
            && let Some(watch) = self.0.remove(addr)
        {
            fail(events, watch.lookups.into_iter().map(|(lookup, _)| lookup), &error);
        }
    }
}
