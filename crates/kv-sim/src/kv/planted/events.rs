//! Planted bugs in the trace events of machines.

use kv_core::trace::{Event, KvWhat};

use crate::kv::service::KvWorld;
use crate::planted::Planted;

impl KvWorld {
    pub(crate) fn sabotage_events(&mut self, mut events: Vec<Event<KvWhat>>) -> Vec<Event<KvWhat>> {
        match self.planted {
            Some(Planted::EndUntold) => {
                events.retain(|event| !matches!(event.what, KvWhat::Ended | KvWhat::Failed(_)));
                events
            }
            Some(Planted::PostToldTwice) => {
                let twice = |event: Event<KvWhat>| {
                    let again = matches!(event.what, KvWhat::PostStarted { .. }).then(|| event.clone());
                    again.into_iter().chain([event])
                };
                events.into_iter().flat_map(twice).collect()
            }
            _ => events,
        }
    }
}
