//! An encode process: decodes images, computes their embeddings, and keeps the embeddings for prefill
//! processes.

use std::time::{Duration, Instant};

use kv_examples::control::{NamedError, millis};
use kv_examples::error::ExampleError;
use kv_examples::link::Link;

use crate::error::EpdError;
use crate::images::ImageRef;
use crate::messages::{EncodeCommand, Encoded, EpdEvent};
use crate::spec::EncoderSpec;
use crate::store::EmbeddingStore;
use crate::vision::VisionTower;

/// How long the encoder sleeps if nothing happens.
const IDLE: Duration = Duration::from_secs(60);
/// How long the encoder waits at the end for blocks that a peer may still touch.
const FINISH_WITHIN: Duration = Duration::from_secs(20);
/// How often the encoder looks at these blocks.
const FINISH_EVERY: Duration = Duration::from_millis(20);

/// Runs the encode process that `spec` describes, with its router at the other end of `link`.
pub fn run(spec: &EncoderSpec, mut link: Link) -> Result<(), EpdError> {
    let width = spec.model.load()?.config().hidden_size;
    let tower = VisionTower::new(spec.model.seed, width);
    let store = EmbeddingStore::start(&spec.store, &tower)?;
    let served = serve(&store, &tower, &mut link);
    store.stop();
    match served {
        Err(EpdError::Shared(ExampleError::LinkClosed)) => Ok(()),
        served => served,
    }
}

/// Serves the router until it disconnects. Prefill processes are served meanwhile, by the store's own thread.
fn serve(store: &EmbeddingStore, tower: &VisionTower, link: &mut Link) -> Result<(), EpdError> {
    link.send(&EpdEvent::EncoderReady)?;
    loop {
        for command in link.receive()? {
            match command {
                EncodeCommand::Encode { item, index, image } => {
                    let event = match encode(store, tower, item, (index, &image)) {
                        Ok(encoded) => EpdEvent::Encoded(encoded),
                        Err(error) => EpdEvent::NotEncoded { item, error },
                    };
                    link.send(&event)?;
                }
                EncodeCommand::Finish => {
                    let end = Instant::now() + FINISH_WITHIN;
                    while store.blocks().leaked() > 0 && Instant::now() < end {
                        std::thread::sleep(FINISH_EVERY);
                    }
                    link.send(&EpdEvent::Closed(store.blocks()))?;
                }
            }
        }
        link.wait(&[], IDLE)?;
    }
}

/// Computes the embedding of an image, unless the cache has it, and says where a prefill process finds it.
fn encode(
    store: &EmbeddingStore,
    tower: &VisionTower,
    item: usize,
    (index, image): (u32, &ImageRef),
) -> Result<Encoded, NamedError> {
    let started = Instant::now();
    let computed = !store.has(image);
    if computed {
        let embedding = tower.embed(image).map_err(|error| NamedError::new("NotEncoded", error))?;
        store.save(image, &embedding)?;
    }
    let ec_transfer_params = store.params(image, index)?;
    Ok(Encoded { item, computed, compute_ms: millis(started.elapsed()), ec_transfer_params })
}
