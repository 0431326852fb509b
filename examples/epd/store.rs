//! The encoder cache of a process, as a server would use it: an encoder saves embeddings, and a prefill
//! process asks for them by content hash.
//!
//! A worker of the encoder cache has memory, a transport and a thread of its own, beside those of the KV
//! cache. A process of either kind may save and ask. Each encoder also has a bootstrap server of its own: its
//! address is the `peer_host` and `peer_port` that routers carry to prefill processes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use kv_ec::params::{EcTransferParams, Held, Item};
use kv_ec::{
    Availability, Compatibility, ContentHash, EcConfig, EcConnector, EcError, EcGauges, EcPoll, EcRegion,
    EcWorker, EntryGuard, Fetch, FetchFailure, ReserveError, Want,
};
use kv_examples::cli::{Mode, TransportKind};
use kv_examples::control::NamedError;
use kv_examples::error::ExampleError;
use kv_examples::transport;
use kv_transfer::bootstrap::{HttpBootstrapClient, KvBootstrapServer};
use serde_json::{Value, json};

use crate::error::EpdError;
use crate::images::{Grid, ImageRef, PATCH};
use crate::messages::Blocks;
use crate::spec::StoreSpec;
use crate::vision::{Embedding, VisionTower};

/// Bytes of one element of an embedding.
const ELEMENT: u32 = size_of::<f32>() as u32;
/// How long the worker may take to end open sessions when it is stopped.
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// The encoder cache of a process.
pub struct EmbeddingStore {
    worker: EcWorker,
    connector: EcConnector,
    /// The bootstrap server of an encoder, with which its worker is registered.
    server: Option<KvBootstrapServer>,
    /// Elements of a row.
    width: u32,
    mode: Mode,
    budget: Duration,
    coming: Vec<Coming>,
}

/// An embedding that is being fetched.
struct Coming {
    image: ImageRef,
    fetch: Fetch,
}

/// The answer to a question for an embedding.
pub enum Answer {
    /// The embedding is in the cache of this process.
    Here(Embedding),
    /// The embedding is being fetched: [`EmbeddingStore::take_arrived`] will have it.
    Coming {
        /// True if an earlier question had begun the fetch.
        joined: bool,
    },
    /// The embedding cannot be fetched.
    Refused(NamedError),
}

impl EmbeddingStore {
    /// Starts the worker of an encoder cache for embeddings of `tower`.
    pub fn start(spec: &StoreSpec, tower: &VisionTower) -> Result<EmbeddingStore, EpdError> {
        let width = tower.output_width() as u32;
        let region = EcRegion::create(spec.blocks, width * ELEMENT)?;
        let server = match spec.serves {
            true => Some(KvBootstrapServer::start("127.0.0.1:0").map_err(ExampleError::Server)?),
            false => None,
        };
        let (model, revision) = tower.revision();
        let compatibility = Compatibility::new(&model, "f32", width, region.block_bytes())
            .revision(&revision)
            .processor("patch", &PATCH.to_string())
            .processor("image_tokens", &spec.image_tokens.to_string());
        let config = EcConfig::new(&spec.name, compatibility.hash()).with(|config| {
            config.publish = server.as_ref().map(|server| server.local_addr().to_string());
            config.machine.mode = spec.mode.into();
            config.timing = spec.timing.timing();
        });
        let worker = start(spec, config, &region)?;
        let (connector, budget) = (worker.connector(), Duration::from_secs(spec.budget_seconds));
        Ok(EmbeddingStore { worker, connector, server, width, mode: spec.mode, budget, coming: Vec::new() })
    }

    /// Stops the worker, and the bootstrap server of an encoder.
    pub fn stop(self) {
        self.worker.stop(STOP_WITHIN);
        if let Some(server) = self.server {
            server.stop();
        }
    }

    // ---- an encoder -----------------------------------------------------------------------------

    /// True if the cache has the embedding of this image.
    pub fn has(&self, image: &ImageRef) -> bool {
        hash(image).is_ok_and(|hash| self.connector.store().contains(&hash) == Some(true))
    }

    /// Puts an embedding into the cache, where prefill processes find it from now on.
    pub fn save(&self, image: &ImageRef, embedding: &Embedding) -> Result<(), NamedError> {
        let bytes = embedding.to_bytes();
        let reservation = match self.connector.reserve(&hash(image)?, bytes.len() as u64) {
            Ok(reservation) => reservation,
            Err(ReserveError::Known { .. }) => return Ok(()),
            Err(error) => return Err(NamedError::new("NoRoom", error)),
        };
        if let Err(error) = self.connector.write(&reservation, 0, &bytes) {
            self.connector.discard(reservation);
            return Err(NamedError::new("NotSaved", error));
        }
        self.connector.save(reservation).map_err(|refused| NamedError::new("NotSaved", refused))
    }

    /// The `ec_transfer_params` that lead a prefill process to an image, which is number `index` of its
    /// request.
    pub fn params(&self, image: &ImageRef, index: u32) -> Result<Value, NamedError> {
        let Grid { rows, columns } = image.grid;
        let mut item = Item::new("image", [index]);
        item.metadata.insert("image_grid_thw".to_owned(), json!([1, rows, columns]));
        if let Some(server) = self.server.as_ref().filter(|_| self.has(image)) {
            let (at, tokens) = (server.local_addr(), image.grid.tokens() as u32);
            let block_bytes = self.connector.region().block_bytes();
            let host = at.ip().to_string();
            item = item.held(Held::new(&host, at.port(), tokens, self.width, ELEMENT, block_bytes));
        }
        let mut params = EcTransferParams::default();
        params.items.insert(hash(image)?, item);
        Ok(params.to_value())
    }

    // ---- a prefill process ----------------------------------------------------------------------

    /// Looks for the embedding of an image here; begins to fetch it from the encoder that `params` name
    /// (`ec_transfer_params`) if it is not here. Never waits.
    pub fn ask(&mut self, image: &ImageRef, params: &Value) -> Answer {
        match self.look(image, params) {
            Ok(Availability::Here(entry)) => match self.read(&entry, image) {
                Ok(embedding) => Answer::Here(embedding),
                Err(error) => Answer::Refused(error),
            },
            Ok(Availability::Deferred(fetch)) => {
                let joined = self.coming.iter().any(|coming| coming.image.hash == image.hash);
                self.coming.push(Coming { image: image.clone(), fetch });
                Answer::Coming { joined }
            }
            Err(error) => Answer::Refused(error),
        }
    }

    fn look(&self, image: &ImageRef, params: &Value) -> Result<Availability, NamedError> {
        let hash = hash(image)?;
        let params =
            EcTransferParams::from_value(params).map_err(|error| NamedError::new("BadParams", error))?;
        let Some(held) = params.items.get(&hash).and_then(|item| item.held.as_ref()) else {
            let entry = self.connector.local(&hash);
            let nobody = |_| NamedError::new("NoEncoder", "no encoder has the embedding");
            return entry.map(Availability::Here).map_err(nobody);
        };
        let (tokens, block_bytes) = (image.grid.tokens() as u32, self.connector.region().block_bytes());
        let shape = held.check(tokens, self.width, ELEMENT, block_bytes);
        let shape = shape.map_err(|error| NamedError::new("BadParams", error))?;
        let want = Want::held(hash, shape, held).with(|want| {
            want.mode = Some(self.mode.into());
            want.budget = Some(self.budget);
        });
        self.connector.ensure_cache_available(want).map_err(|error| NamedError::new("NotOpened", error))
    }

    /// The embeddings whose fetch has ended, or the errors of their fetches.
    pub fn take_arrived(&mut self) -> Vec<(String, Result<Embedding, NamedError>)> {
        self.connector.poll_set().drain(|_| {});
        let ended = |coming: &mut Coming| matches!(coming.fetch.poll(), EcPoll::Ready | EcPoll::Failed);
        let ended: Vec<Coming> = self.coming.extract_if(.., ended).collect();
        let result = |mut coming: Coming| {
            let embedding = match coming.fetch.entry() {
                // The entry stays pinned until its bytes are copied.
                Some(entry) => self.read(&entry, &coming.image),
                None => Err(coming.fetch.failure().map_or_else(
                    || NamedError::new("Aborted", "the fetch was ended"),
                    |failure| named(&failure),
                )),
            };
            (coming.image.hash, embedding)
        };
        ended.into_iter().map(result).collect()
    }

    fn read(&self, entry: &EntryGuard, image: &ImageRef) -> Result<Embedding, NamedError> {
        let mut bytes = vec![0; entry.bytes() as usize];
        let failed = |error: &dyn std::fmt::Display| NamedError::new("NotRead", error);
        self.connector.read(entry, 0, &mut bytes).map_err(|error| failed(&error))?;
        let embedding = Embedding::from_bytes(&bytes, image.grid.tokens(), self.width as usize);
        embedding.map_err(|error| failed(&error))
    }

    /// Readable when a fetch may have ended.
    pub fn readable(&self) -> BorrowedFd<'_> {
        self.connector.poll_set().as_fd()
    }

    // ---- both -----------------------------------------------------------------------------------

    /// The blocks of the cache now.
    pub fn blocks(&self) -> Blocks {
        let EcGauges { cache, traffic, .. } = self.connector.gauges();
        Blocks {
            blocks: cache.blocks.into(),
            free: cache.free.into(),
            cached: cache.cached.into(),
            entries: cache.entries as u64,
            evictions: cache.evictions,
            served: traffic.served,
            fetched: traffic.fetched,
        }
    }
}

/// Starts a worker over the transport that `spec` names.
fn start(spec: &StoreSpec, config: EcConfig, region: &EcRegion) -> Result<EcWorker, EpdError> {
    let client = HttpBootstrapClient::new(spec.timing.client()).map_err(ExampleError::Client)?;
    let client = Box::new(client);
    match spec.transport {
        TransportKind::Local => {
            let mut transport = transport::local(spec.timing)?;
            if let Some(arena) = region.arena() {
                transport.add_arena(arena).map_err(ExampleError::Local)?;
            }
            Ok(EcWorker::start(config, region, transport, client)?)
        }
        TransportKind::Tcp => {
            let mut transport = transport::tcp(spec.timing)?;
            transport.add_memory(region.memory()).map_err(ExampleError::Tcp)?;
            Ok(EcWorker::start(config, region, transport, client)?)
        }
        #[cfg(feature = "nixl")]
        TransportKind::Nixl => {
            let mut transport = transport::nixl(spec.timing)?;
            transport.add_memory(region.memory()).map_err(ExampleError::Nixl)?;
            Ok(EcWorker::start(config, region, transport, client)?)
        }
        #[cfg(not(feature = "nixl"))]
        TransportKind::Nixl => Err(ExampleError::NotBuilt { feature: "nixl" }.into()),
        TransportKind::Auto => {
            let ways = transport::several(region.memory(), region.arena(), spec.timing)?;
            Ok(EcWorker::start(config, region, ways, client)?)
        }
        #[cfg(feature = "ucx")]
        TransportKind::Ucx => {
            let mut transport = transport::ucx(spec.timing)?;
            transport.add_memory(region.memory()).map_err(ExampleError::Ucx)?;
            Ok(EcWorker::start(config, region, transport, client)?)
        }
        #[cfg(not(feature = "ucx"))]
        TransportKind::Ucx => Err(ExampleError::NotBuilt { feature: "ucx" }.into()),
        #[cfg(feature = "fabric")]
        TransportKind::Fabric => {
            let mut transport = transport::fabric(spec.timing)?;
            transport.add_memory(region.memory()).map_err(ExampleError::Fabric)?;
            Ok(EcWorker::start(config, region, transport, client)?)
        }
        #[cfg(not(feature = "fabric"))]
        TransportKind::Fabric => Err(ExampleError::NotBuilt { feature: "fabric" }.into()),
    }
}

fn hash(image: &ImageRef) -> Result<ContentHash, NamedError> {
    ContentHash::new(&image.hash).map_err(|error| NamedError::new("BadHash", error))
}

/// The error of a fetch, with its name for tables.
fn named(failure: &FetchFailure) -> NamedError {
    let error = match failure {
        FetchFailure::Machine(error) => error,
        FetchFailure::WorkerStopped { .. } => return NamedError::new("WorkerStopped", failure),
    };
    let name = match &**error {
        EcError::Transfer(error) => return NamedError::from(&**error),
        EcError::Budget { .. } => "Budget",
        EcError::Room(_) => "NoRoom",
        EcError::OtherLength { .. } => "OtherLength",
        EcError::Aborted => "Aborted",
        EcError::WorkerStopped => "WorkerStopped",
        _ => "Other",
    };
    NamedError::new(name, error)
}
