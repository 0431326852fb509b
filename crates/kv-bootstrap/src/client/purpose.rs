//! What the client's requests are for.

use kv_core::{LookupId, RankQuery, WorkerId};

use super::sglang::Step;

/// A publication, by the address of its server and its worker.
pub(super) type Key = (String, WorkerId);

/// The purpose for which a request was made.
#[derive(Debug)]
pub(super) enum Purpose {
    /// To find ranks in this library's registry. Equal lookups share the request.
    Lookup { query: RankQuery, lookups: Vec<LookupId> },
    /// To take the step `serial` of a publication.
    Step { key: Key, serial: u64 },
    /// To withdraw a publication, whatever the answer is.
    Withdraw,
    /// To take a step of a lookup of SGLang's.
    Sglang(Step),
}
