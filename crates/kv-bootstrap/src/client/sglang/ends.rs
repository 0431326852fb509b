//! The events with which lookups end.

use std::collections::VecDeque;

use kv_core::{BootstrapError, BootstrapEvent, LookupId};

pub(super) type Events = VecDeque<BootstrapEvent>;

/// The end of a lookup that asks for no ranks.
pub(super) fn found(lookup: LookupId) -> BootstrapEvent {
    BootstrapEvent::Found { lookup, ranks: Vec::new() }
}

/// Ends all these lookups with one error.
pub(super) fn fail(events: &mut Events, lookups: impl IntoIterator<Item = LookupId>, error: &BootstrapError) {
    let failed = |lookup| BootstrapEvent::Failed { lookup, error: error.clone() };
    events.extend(lookups.into_iter().map(failed));
}
