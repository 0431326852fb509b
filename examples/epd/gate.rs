//! The prefill process: a gate that gets the embeddings of a prompt's images, and behind it the prefill rank
//! that all examples share.
//!
//! A prompt waits in front of the gate until the rows of all its images are here. The gate never blocks on an
//! image: prompts whose images are here pass those that wait. If an image cannot be fetched, the gate
//! computes the embedding itself, or ends the request with the error of the fetch.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kv_examples::control::{Command, Event, NamedError, Prefilled, millis};
use kv_examples::error::ExampleError;
use kv_examples::inputs::Inputs;
use kv_examples::link::Link;
use kv_examples::model::InputRows;
use kv_examples::prefill::PrefillRank;
use serde_json::Value;

use crate::error::EpdError;
use crate::messages::{Arrived, EpdEvent, Item, PrefillCommand, Way};
use crate::spec::PrefillSpec;
use crate::store::{Answer, EmbeddingStore};
use crate::vision::{Embedding, VisionTower};

/// How long the gate sleeps if nothing happens.
const IDLE: Duration = Duration::from_secs(60);
/// How long the gate waits at the end for blocks that a peer may still touch.
const FINISH_WITHIN: Duration = Duration::from_secs(20);
/// How often the gate looks at these blocks.
const FINISH_EVERY: Duration = Duration::from_millis(20);

/// The gate of a prefill process.
struct Gate {
    store: EmbeddingStore,
    /// Computes embeddings that cannot be fetched; `None` if the process is told not to.
    tower: Option<VisionTower>,
    waiting: BTreeMap<u64, Waiting>,
    inputs: Inputs,
    rank: Link,
    /// Set by the command to finish.
    finishing: bool,
}

/// A prompt that waits for images.
struct Waiting {
    command: Command,
    since: Instant,
    items: Vec<(Item, Place)>,
}

/// How far an image of a prompt is.
enum Place {
    /// The embedding is on its way.
    Coming(Way),
    /// The embedding is here.
    Here(Embedding, Arrived),
}

/// Runs the prefill process that `spec` describes, with its router at the other end of `link`.
pub fn run(spec: &PrefillSpec, mut link: Link) -> Result<(), EpdError> {
    let inputs = Inputs::default();
    let rank = PrefillRank::start(&spec.rank)?.with_inputs(inputs.clone());
    let (here, there) = UnixStream::pair().map_err(ExampleError::io("make a socket pair"))?;
    let rank_link = Link::unix(there)?;
    let thread = std::thread::spawn(move || rank.run(rank_link));
    let width = spec.rank.model.load()?.config().hidden_size;
    let tower = VisionTower::new(spec.rank.model.seed, width);
    let mut gate = Gate {
        store: EmbeddingStore::start(&spec.store, &tower)?,
        tower: spec.encode_here.then_some(tower),
        waiting: BTreeMap::new(),
        inputs,
        rank: Link::unix(here)?,
        finishing: false,
    };
    let served = gate.serve(&mut link);
    let Gate { store, rank, .. } = gate;
    // The end of its commands tells the rank to stop.
    drop(rank);
    store.stop();
    let ended = match thread.join() {
        Ok(ended) => ended,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    match served {
        Err(EpdError::Shared(ExampleError::LinkClosed)) => Ok(ended?),
        served => served.and(Ok(ended?)),
    }
}

impl Gate {
    /// Passes commands to the rank and events to the router until the connection to either ends.
    fn serve(&mut self, link: &mut Link) -> Result<(), EpdError> {
        loop {
            for command in link.receive()? {
                self.accept(command, link)?;
            }
            self.take_arrived(link)?;
            for event in self.rank.receive::<Event>()? {
                link.send(&event)?;
                if self.finishing && matches!(event, Event::Finished(_)) {
                    self.close(link)?;
                }
            }
            let others: [BorrowedFd<'_>; 2] = [self.rank.readable(), self.store.readable()];
            link.wait(&others, IDLE)?;
        }
    }

    fn accept(&mut self, command: PrefillCommand, link: &mut Link) -> Result<(), EpdError> {
        let (room, prompt, items, ec_transfer_params, deadline_ms, params) = match command {
            PrefillCommand::Finish => {
                self.finishing = true;
                return Ok(self.rank.send(&Command::Finish)?);
            }
            PrefillCommand::Prefill { room, prompt, items, ec_transfer_params, deadline_ms, params } => {
                (room, prompt, items, ec_transfer_params, deadline_ms, params)
            }
        };
        let since = Instant::now();
        let mut places = Vec::new();
        for item in items {
            match self.look(&item, &ec_transfer_params, since) {
                Ok(place) => places.push((item, place)),
                Err(error) => return self.refuse(room, error, link),
            }
        }
        let command = Command::Prefill { room, prompt, deadline_ms, params };
        self.waiting.insert(room, Waiting { command, since, items: places });
        self.pass(room, link)
    }

    /// Looks for an embedding in the cache, or begins to fetch it.
    fn look(&mut self, item: &Item, params: &Value, since: Instant) -> Result<Place, NamedError> {
        match self.store.ask(&item.image, params) {
            Answer::Here(embedding) => Ok(here(embedding, Way::LocalHit, since, None)),
            Answer::Coming { joined } => Ok(Place::Coming(if joined { Way::Joined } else { Way::Fetched })),
            Answer::Refused(error) => self.encode(item, error, since),
        }
    }

    /// Computes an embedding in this process, because of `error`, and keeps it for later requests.
    fn encode(&mut self, item: &Item, error: NamedError, since: Instant) -> Result<Place, NamedError> {
        let Some(tower) = &self.tower else { return Err(error) };
        let embedding = tower.embed(&item.image).map_err(|failed| NamedError::new("NotEncoded", failed))?;
        // A cache without room for it changes nothing for this request.
        let _ = self.store.save(&item.image, &embedding);
        Ok(here(embedding, Way::EncodedHere, since, Some(error)))
    }

    /// Gives embeddings that have arrived to the prompts that wait for them.
    fn take_arrived(&mut self, link: &mut Link) -> Result<(), EpdError> {
        for (hash, result) in self.store.take_arrived() {
            let waits =
                |waiting: &&Waiting| waiting.items.iter().any(|(item, place)| place.waits_for(item, &hash));
            let rooms: Vec<u64> =
                self.waiting.iter().filter(|(_, waiting)| waits(waiting)).map(|(room, _)| *room).collect();
            for room in rooms {
                let Some(mut waiting) = self.waiting.remove(&room) else { continue };
                match self.arrive(&mut waiting, &hash, &result) {
                    Ok(()) => {
                        self.waiting.insert(room, waiting);
                        self.pass(room, link)?;
                    }
                    Err(error) => self.refuse(room, error, link)?,
                }
            }
        }
        Ok(())
    }

    /// Notes the end of a fetch in one prompt.
    fn arrive(
        &mut self,
        waiting: &mut Waiting,
        hash: &str,
        result: &Result<Embedding, NamedError>,
    ) -> Result<(), NamedError> {
        let since = waiting.since;
        for (item, place) in &mut waiting.items {
            let Place::Coming(way) = *place else { continue };
            if item.image.hash == hash {
                *place = match result {
                    Ok(embedding) => here(embedding.clone(), way, since, None),
                    Err(error) => self.encode(item, error.clone(), since)?,
                };
            }
        }
        Ok(())
    }

    /// Gives the prompt to the rank, if all its images are here.
    fn pass(&mut self, room: u64, link: &mut Link) -> Result<(), EpdError> {
        let complete =
            |waiting: &Waiting| waiting.items.iter().all(|(_, place)| matches!(place, Place::Here(..)));
        if !self.waiting.get(&room).is_some_and(complete) {
            return Ok(());
        }
        let Some(waiting) = self.waiting.remove(&room) else { return Ok(()) };
        let mut rows: Vec<InputRows> = Vec::new();
        let mut items = Vec::new();
        for (item, place) in waiting.items {
            if let Place::Here(embedding, arrived) = place {
                rows.push(embedding.into_inputs(item.start));
                items.push(arrived);
            }
        }
        self.inputs.put(room, rows);
        link.send(&EpdEvent::Inputs { room, items })?;
        Ok(self.rank.send(&waiting.command)?)
    }

    /// Ends a request that an image is missing for.
    fn refuse(&mut self, room: u64, error: NamedError, link: &mut Link) -> Result<(), EpdError> {
        let ended = Prefilled { room, error: Some(error), ..Prefilled::default() };
        Ok(link.send(&Event::Prefilled(ended))?)
    }

    /// Reports the cache, when no peer can touch its blocks any more or the wait was in vain.
    fn close(&mut self, link: &mut Link) -> Result<(), EpdError> {
        let end = Instant::now() + FINISH_WITHIN;
        while self.store.blocks().leaked() > 0 && Instant::now() < end {
            link.wait(&[self.store.readable()], FINISH_EVERY)?;
            let _ = self.store.take_arrived();
        }
        Ok(link.send(&EpdEvent::Closed(self.store.blocks()))?)
    }
}

impl Place {
    fn waits_for(&self, item: &Item, hash: &str) -> bool {
        matches!(self, Place::Coming(_)) && item.image.hash == hash
    }
}

/// An embedding that is here since now.
fn here(embedding: Embedding, way: Way, since: Instant, error: Option<NamedError>) -> Place {
    let bytes = size_of_val(embedding.rows.as_slice()) as u64;
    Place::Here(embedding, Arrived { way, bytes, ready_ms: millis(since.elapsed()), error })
}
