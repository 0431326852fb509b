//! The frames that were delivered in a world, to notice repetitions.

use std::collections::BTreeSet;

use crate::net::lives::LifeId;

/// The frames about attempts that were delivered: to and from whom, kind, attempt, part.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen(pub(super) BTreeSet<(LifeId, LifeId, u8, u64, u32)>);
