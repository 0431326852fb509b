//! Which frames a world has seen delivered.

use std::collections::BTreeSet;

use crate::net::lives::LifeId;

/// Frames about attempts that were delivered: by and to whom, kind, attempt, part.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen(pub(super) BTreeSet<(LifeId, LifeId, u8, u64, u32)>);
