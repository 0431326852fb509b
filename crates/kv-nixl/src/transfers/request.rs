//! A request to NIXL that is on its way.

use std::time::Instant;

use kv_core::{Op, PostId};
use nixl_sys::XferRequest;

use crate::connections::id::RemoteId;

/// A request to NIXL that was started and has not ended.
pub(crate) struct Request {
    /// NIXL's handle; `None` once the connection was closed.
    pub(crate) handle: Option<XferRequest>,
    pub(crate) parts: Parts,
    /// When the request failed; parts of the request may still be on their way.
    pub(crate) failed: Option<Instant>,
}

/// The content of a request.
pub(crate) struct Parts {
    pub(crate) remote: RemoteId,
    pub(crate) posts: Vec<PostId>,
    pub(crate) op: Op,
    pub(crate) weight: u64,
    /// The expected share of a slice's time.
    pub(crate) load: u64,
    pub(crate) started: Instant,
}
