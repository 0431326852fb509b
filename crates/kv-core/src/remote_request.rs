//! Where a router says that the KV of a request is, in the words of vLLM's `kv_transfer_params`.

use std::time::Duration;

use crate::id::{EngineId, RequestId};
use crate::lease::TransferMode;
use crate::page_list::PageList;

/// What a receiver needs from the router if the KV of its request is at an engine that speaks another
/// framework's protocol: the engine, the request's id there, and what the engine has said of its pages.
///
/// Workers of this library do not look at these words: between two of them, the room and the
/// [lease references](crate::SessionOptions::lease_refs) say everything. A receiver of another dialect
/// (crate `kv-interop`) needs them, because vLLM's engines tell a reader nothing more: a reader that does not
/// know the numbers of the holder's pages cannot ask for them.
///
/// ```
/// use kv_core::{EngineId, PageList, RemoteRequest, RequestId, SessionOptions};
///
/// let remote = RemoteRequest::new(EngineId::new("p-0")?, RequestId::new("cmpl-7-0-0123abcd")?);
/// let pages = PageList::from_pages([4, 5, 9])?;
/// let remote = remote.with(|remote| remote.block_ids = vec![pages]);
/// let options = SessionOptions::default().with(|options| options.remote = Some(Box::new(remote)));
/// assert_eq!(options.remote.map(|remote| remote.block_ids[0].len()), Some(3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteRequest {
    /// The engine that holds the KV, or in push mode the engine that computes the KV (`remote_engine_id`).
    pub engine: EngineId,
    /// The id of the request at the holder, with the holder's suffix (`remote_request_id`). In push mode
    /// nobody knows the holder's suffix yet, and the two engines compare the ids without suffixes.
    pub request: RequestId,
    /// The mode of the holder (`transfer_mode`); `None` if the holder did not say. vLLM's dialect refuses a session
    /// of another mode, and registers no pages at an engine that has not said push, unless the session's own
    /// options do.
    pub mode: Option<TransferMode>,
    /// The numbers of the request's pages at the holder, one list for each of the holder's cache groups
    /// (`remote_block_ids`). No list at all in push mode, where the holder writes.
    pub block_ids: Vec<PageList>,
    /// Tensor-parallel ranks of the holder (`tp_size`), from 1.
    pub tp_size: u32,
    /// Pipeline stages of the holder (`pp_size`), from 1.
    pub pp_size: u32,
    /// Decode-context-parallel ranks of the holder (`dcp_size`), from 1.
    pub dcp_size: u32,
    /// Tokens whose KV the holder has (`remote_num_tokens`); `None` if the holder did not say.
    pub num_tokens: Option<u32>,
    /// How often the holder had registered its memory when it gave out the pages
    /// (`remote_registration_generation`): a holder that has registered again since then has lost the pages.
    pub registration_generation: Option<u64>,
    /// When the holder frees the pages, as the reading of the holder's own clock
    /// (`remote_blocks_expiry_time`); `None` if the reader's heartbeats keep the pages, or if the holder did
    /// not say.
    pub expires_at: Option<Duration>,
}

impl RemoteRequest {
    /// A request of an engine with one rank, of whose pages nothing is known: set the fields that are known.
    pub fn new(engine: EngineId, request: RequestId) -> RemoteRequest {
        RemoteRequest {
            engine,
            request,
            mode: None,
            block_ids: Vec::new(),
            tp_size: 1,
            pp_size: 1,
            dcp_size: 1,
            num_tokens: None,
            registration_generation: None,
            expires_at: None,
        }
    }

    /// The same with some fields changed: `remote.with(|remote| remote.tp_size = 2)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
