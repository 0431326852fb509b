//! Hosts with an encoder cache over kv-local, and the bytes of their entries.
#![allow(dead_code)]

pub mod process;
pub mod requests;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
use kv_core::trace::{KvWhat, Message};
use kv_core::{ContentHash, PeerCause, Transport};
use kv_ec::{
    Availability, EcConfig, EcConnector, EcError, EcPoll, EcRegion, EcWorker, EntryGuard, Eviction, Fetch,
    FetchFailure, Reservation, Want,
};
use kv_local::{LocalConfig, LocalTransport};
use kv_poll::worker::Listener;

/// Bytes of one block.
pub const BLOCK: u64 = 4096;
/// How long anything may take that must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A bootstrap server that all hosts of a test use.
pub struct Server {
    server: KvBootstrapServer,
    pub addr: String,
}

impl Server {
    pub fn start() -> Server {
        let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
        let addr = server.local_addr().to_string();
        Server { server, addr }
    }

    /// What a consumer wants of the producer at this server.
    pub fn want(&self, seed: u64, bytes: u64) -> Want {
        Want::new(hash(seed), bytes, &*self.addr)
    }
}

/// A process with a worker of the encoder cache.
pub struct Host {
    worker: EcWorker,
    pub connector: EcConnector,
    seen: Arc<Mutex<Vec<Message>>>,
}

impl Host {
    pub fn producer(server: &Server, engine: &str, blocks: u32) -> Host {
        Host::start(engine, blocks, |config| config.publish = Some(server.addr.clone()))
    }

    pub fn consumer(engine: &str, blocks: u32) -> Host {
        Host::start(engine, blocks, |_| ())
    }

    pub fn evicting(engine: &str, blocks: u32, eviction: Eviction) -> Host {
        Host::start(engine, blocks, |config| config.eviction = eviction)
    }

    pub fn with_compatibility(engine: &str, blocks: u32, compatibility: &str) -> Host {
        Host::start(engine, blocks, |config| config.machine.compatibility = compatibility.to_owned())
    }

    pub fn start(engine: &str, blocks: u32, change: impl FnOnce(&mut EcConfig)) -> Host {
        let region = EcRegion::create(blocks, BLOCK as u32).unwrap();
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        transport.add_arena(region.arena().unwrap()).unwrap();
        Host::over(engine, region, transport, change)
    }

    pub fn over(
        engine: &str,
        region: EcRegion,
        transport: impl Transport + Send + 'static,
        change: impl FnOnce(&mut EcConfig),
    ) -> Host {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&seen);
        let listener = Listener::new(move |_, event| {
            if let KvWhat::Heard(message) = &event.what {
                heard.lock().unwrap().push(message.clone());
            }
        });
        let config =
            EcConfig::new(engine, "one model").with(change).with(|config| config.listeners.push(listener));
        let published = config.publish.is_some();
        let client = Box::new(HttpBootstrapClient::new(ClientConfig::default()).unwrap());
        let worker = EcWorker::start(config, &region, transport, client).unwrap();
        let connector = worker.connector();
        let host = Host { worker, connector, seen };
        if published {
            until("the registration", || {
                host.connector.port().publication() == kv_poll::Publication::Published
            });
        }
        host
    }

    /// A reserved entry with its bytes in place.
    pub fn written(&self, seed: u64, bytes: u64) -> Reservation {
        let reservation = self.connector.reserve(&hash(seed), bytes).unwrap();
        self.connector.write(&reservation, 0, &content(seed, bytes)).unwrap();
        reservation
    }

    pub fn save(&self, seed: u64, bytes: u64) {
        self.connector.save(self.written(seed, bytes)).unwrap();
    }

    pub fn deferred(&self, want: Want) -> Fetch {
        match self.connector.ensure_cache_available(want).unwrap() {
            Availability::Deferred(fetch) => fetch,
            Availability::Here(entry) => panic!("{entry:?} is here"),
        }
    }

    /// The entry, however long it takes.
    pub fn fetched(&self, want: Want) -> EntryGuard {
        let mut fetch = self.deferred(want);
        until("the entry", || {
            assert_ne!(fetch.poll(), EcPoll::Failed, "{:?}", fetch.failure());
            fetch.poll() == EcPoll::Ready
        });
        fetch.entry().unwrap()
    }

    /// The error of a session that must fail.
    pub fn refused(&self, want: Want) -> EcError {
        let mut fetch = self.deferred(want);
        until("the refusal", || fetch.poll() == EcPoll::Failed);
        match fetch.failure().unwrap() {
            FetchFailure::Machine(error) => *error,
            other => panic!("{other}"),
        }
    }

    pub fn bytes(&self, entry: &EntryGuard) -> Vec<u8> {
        let mut bytes = vec![0; entry.bytes() as usize];
        self.connector.read(entry, 0, &mut bytes).unwrap();
        bytes
    }

    /// Waits until this many blocks are cached and every other block is free.
    pub fn until_cached(&self, blocks: u32) {
        until("the books", || {
            let cache = self.connector.gauges().cache;
            (cache.cached, cache.free) == (blocks, cache.blocks - blocks)
        });
    }

    /// How many requests of peers this host has heard, repetitions not counted.
    pub fn answers(&self) -> usize {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|message| matches!(message, Message::AskedForEntry { .. })).count()
    }

    /// How many times peers have refused for this cause.
    pub fn failures(&self, cause: PeerCause) -> usize {
        let seen = self.seen.lock().unwrap();
        seen.iter()
            .filter(|message| matches!(message, Message::Failed { cause: told, .. } if **told == cause))
            .count()
    }
}

/// The hash of an entry's content.
pub fn hash(seed: u64) -> ContentHash {
    ContentHash::new(&format!("image-{seed}")).unwrap()
}

/// The bytes of an entry.
pub fn content(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(31) ^ at >> 8 ^ seed.wrapping_mul(97)) as u8).collect()
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: waited in vain");
        std::thread::yield_now();
    }
}
