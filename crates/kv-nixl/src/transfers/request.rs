//! A request to NIXL on its way.

use std::time::Instant;

use kv_core::{Op, PostId};
use nixl_sys::XferRequest;

use crate::connections::id::RemoteId;

/// A request on its way.
pub(crate) struct Request {
    /// `None` once its connection was closed.
    pub(crate) handle: Option<XferRequest>,
    pub(crate) parts: Parts,
    /// When it failed; parts of it may still be on their way.
    pub(crate) failed: Option<Instant>,
}

/// What a request carries.
pub(crate) struct Parts {
    pub(crate) remote: RemoteId,
    pub(crate) posts: Vec<PostId>,
    pub(crate) op: Op,
    pub(crate) weight: u64,
    /// The part of a slice's time that it was taken for.
    pub(crate) load: u64,
    pub(crate) started: Instant,
}
