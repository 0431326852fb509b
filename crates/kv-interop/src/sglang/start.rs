//! How a worker that speaks SGLang's protocol starts.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use kv_bootstrap::SglangRank;
use kv_core::trace::KvWhat;
use kv_core::{BootstrapClient, Incarnation, KvArgs, RankRecord, Transport, TransportError, WorkerRole};
use kv_poll::worker::{Listener, Setup};
use kv_poll::{StartError, Worker};

use super::aux_rows::{AuxBuffers, AuxRooms};
use super::config::{SglangConfig, SglangConfigError, SglangLimits, SglangTiming};
use super::machine::SglangMachine;
use crate::agents::Agents;
use crate::transport::InteropTransport;

/// What a worker among SGLang's workers is started with, beside its `KvArgs`.
#[non_exhaustive]
pub struct SglangSettings {
    /// Prefill or decode.
    pub role: WorkerRole,
    /// The bootstrap server (`host:port`) at which a prefill worker registers; `None` for a worker that does not
    /// register.
    pub bootstrap: Option<String>,
    /// The host name or address by which peers reach this worker's PULL socket; `None` for the address to which
    /// the socket is bound.
    pub host: Option<String>,
    /// As [`SglangConfig::kv_cache_dtype`].
    pub kv_cache_dtype: Option<String>,
    /// As [`SglangConfig::kv_layout`].
    pub kv_layout: Option<String>,
    /// As [`SglangConfig::aux`].
    pub aux: AuxBuffers,
    /// As [`SglangConfig::aux_rooms`]: a decode worker needs the reader.
    pub aux_rooms: Option<Box<dyn AuxRooms>>,
    /// Deadlines and intervals of the protocol.
    pub timing: SglangTiming,
    /// Bounds on what peers can make the worker remember.
    pub limits: SglangLimits,
    /// Most sessions open at once (default 131 072).
    pub max_sessions: usize,
    /// Most commands that wait for the worker before session handles see backpressure (default 4096).
    pub command_queue: usize,
    /// The listeners to which the worker's thread gives events.
    pub listeners: Vec<Listener<KvWhat>>,
}

/// Why a worker among SGLang's workers did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SglangStartError {
    /// SGLang's protocol cannot express the worker.
    #[error(transparent)]
    Config(#[from] SglangConfigError),
    /// The transport has no PULL socket, or the socket is bound to no address that peers can reach. Set
    /// [`ChannelConfig::listen`](crate::ChannelConfig::listen), or [`SglangSettings::host`].
    #[error("peers cannot reach the PULL socket, which is bound to {bound}")]
    Address {
        /// The address to which the socket is bound, or `nothing`.
        bound: String,
    },
    /// The transport's agent has no metadata.
    #[error("the NIXL agent has no metadata: {0}")]
    Metadata(TransportError),
    /// The worker's thread could not start.
    #[error(transparent)]
    Start(#[from] StartError),
}

impl SglangSettings {
    /// The default settings for a worker in this role.
    pub fn new(role: WorkerRole) -> SglangSettings {
        SglangSettings {
            role,
            bootstrap: None,
            host: None,
            kv_cache_dtype: None,
            kv_layout: None,
            aux: AuxBuffers::default(),
            aux_rooms: None,
            timing: SglangTiming::default(),
            limits: SglangLimits::default(),
            max_sessions: 131_072,
            command_queue: 4096,
            listeners: Vec::new(),
        }
    }

    /// The same with some fields changed: `settings.with(|settings| settings.host = Some(name))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl std::fmt::Debug for SglangSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SglangSettings { role, bootstrap, host, .. } = self;
        let mut text = f.debug_struct("SglangSettings");
        text.field("role", role).field("bootstrap", bootstrap).field("host", host).finish_non_exhaustive()
    }
}

/// Registers the regions of `args` with the transport, whose PULL socket must listen, and starts the worker. A
/// prefill worker then registers with the bootstrap server, so that SGLang's decode workers find the worker.
/// Schedulers use the worker like every other.
pub fn start<A: Agents + Send + 'static>(
    settings: SglangSettings,
    args: KvArgs,
    mut transport: InteropTransport<A>,
    client: Box<dyn BootstrapClient>,
) -> Result<Worker, SglangStartError> {
    for (region, registered) in args.regions().iter().enumerate() {
        let refused = |error| StartError::Register { region, error };
        transport.register(registered).map_err(refused)?;
    }
    let pull = pull(&settings, &transport)?;
    let agents = transport.agents();
    let agent = (agents.agent_name(), agents.agent_metadata().map_err(SglangStartError::Metadata)?);
    let (role, bootstrap) = (settings.role, settings.bootstrap);
    let config = SglangConfig::new(role, agent, pull.clone(), random()).with(|config| {
        config.kv_cache_dtype = settings.kv_cache_dtype;
        config.kv_layout = settings.kv_layout;
        config.aux = settings.aux;
        config.aux_rooms = settings.aux_rooms;
        config.timing = settings.timing;
        config.limits = settings.limits;
    });
    let cache = config.check(&args)?;
    let machine = SglangMachine::of(&args, config, cache.clone());
    let (who, parallel) = (args.worker().clone(), args.geometry().parallel);
    let incarnation = Incarnation::from_random(random());
    let mut setup = Setup::new(who.clone());
    (setup.max_sessions, setup.command_queue) = (settings.max_sessions, settings.command_queue);
    setup.listeners = settings.listeners;
    if let Some(addr) = bootstrap.filter(|_| role == WorkerRole::Prefill) {
        let rank = SglangRank::new(pull.0, pull.1, u64::from(args.geometry().page_size)).with(|rank| {
            rank.parallel = parallel;
            rank.kv_cache_dtype = Some(cache.dtype);
            rank.kv_layout = cache.kv_layout;
        });
        let record = RankRecord::new((who, incarnation), role, parallel, Vec::new(), vec![rank.offer()]);
        setup.publish = Some((addr, record.map_err(StartError::from)?));
    }
    Ok(Worker::with_machine(Box::new(machine), (args, incarnation), setup, transport, client)?)
}

/// The address by which peers reach the PULL socket.
fn pull<A: Agents>(
    settings: &SglangSettings,
    transport: &InteropTransport<A>,
) -> Result<(String, u16), SglangStartError> {
    let bound = transport.local_addr();
    let host = settings
        .host
        .clone()
        .or_else(|| bound.filter(|bound| !bound.ip().is_unspecified()).map(|bound| bound.ip().to_string()));
    match (host, bound) {
        (Some(host), Some(bound)) => Ok((host, bound.port())),
        _ => {
            let bound = bound.map_or_else(|| "nothing".to_owned(), |bound| bound.to_string());
            Err(SglangStartError::Address { bound })
        }
    }
}

/// Random bits from the operating system, by way of the keys that the standard library draws for its hash maps.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
