//! How a worker that speaks SGLang's protocol starts.

use kv_bootstrap::SglangRank;
use kv_core::{BootstrapClient, Incarnation, KvArgs, RankRecord, TransportError, WorkerRole};
use kv_poll::worker::attach;
use kv_poll::{StartError, Worker};

use super::config::{SglangAgent, SglangConfig, SglangConfigError};
use super::machine::SglangMachine;
use crate::agents::Agents;
use crate::starting::{random_bits, setup};
use crate::transport::InteropTransport;

/// Why a worker among SGLang's workers did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SglangStartError {
    /// SGLang's protocol cannot express the worker.
    #[error(transparent)]
    Config(#[from] SglangConfigError),
    /// The transport has no PULL socket, or the socket is bound to no address that peers can reach. Set
    /// [`ChannelConfig::listen`](crate::ChannelConfig::listen), or [`SglangConfig::host`].
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

/// Starts the worker of one rank among SGLang 0.5.23's workers: the decode side of SGLang's prefill engines, or the
/// prefill side of SGLang's decode engines. Schedulers use the worker like every other.
///
/// Registers the regions of `args` with the transport, whose PULL socket must listen. A prefill worker then registers
/// with the bootstrap server, so that SGLang's decode workers find the worker.
///
/// # As the decode side
///
/// - A room is a number above 0, and a room has one session at a time. A room whose former session is in
///   quarantine cannot be opened.
/// - Every receiver needs an aux row. A receiver succeeds when all prefill ranks have said that their pages are in
///   place and the row holds the room of the request. A row that holds the room already is refused: a server that
///   uses a room again clears the row first.
/// - Pages of a session that failed come back when each prefill rank that may write has acknowledged the abort,
///   or is proven dead. SGLang's prefill rank acknowledges no abort after a write that NIXL refused; such pages
///   stay in quarantine until that process has ended.
/// - SGLang's prefill engine does not tell when its scheduler aborts a request: the deadline ends the session.
///
/// # As the prefill side
///
/// - The scheduler gives all pages of a request, as with the native protocol; the pages of the decode rank's
///   prefix are not written.
/// - Every sender needs an aux row, in which the server has written the room ([`write_room`](super::write_room)).
/// - A chunk is written when all its layers are final.
/// - A decode rank is told of a success or a failure, and its abort is acknowledged, once no post of this worker
///   writes for the request any more.
///
/// # Errors
///
/// [`SglangStartError`] if SGLang's protocol cannot express the worker, if peers cannot reach the PULL socket, if the
/// agent has no metadata, or if the worker's thread cannot start or register the regions.
pub fn start<A: Agents + Send + 'static>(
    mut config: SglangConfig,
    args: KvArgs,
    mut transport: InteropTransport<A>,
    client: Box<dyn BootstrapClient>,
) -> Result<Worker, SglangStartError> {
    attach(&mut transport, args.regions())?;
    let pull = pull(config.host.as_deref(), &transport)?;
    let agents = transport.agents();
    let metadata = agents.agent_metadata().map_err(SglangStartError::Metadata)?;
    let agent = SglangAgent { name: agents.agent_name(), metadata, pull };
    config.seed.get_or_insert(random_bits()?);
    let incarnation = Incarnation::from_random(random_bits()?);
    let mut setup = setup(&args, config.listener.take()).with(|setup| {
        setup.max_sessions = config.max_sessions;
        setup.command_queue = config.command_queue;
    });
    if let Some(addr) = config.bootstrap.take().filter(|_| config.role == WorkerRole::Prefill) {
        setup.publish = Some((addr, record(&config, &args, incarnation, agent.pull.clone())?));
    }
    let machine = SglangMachine::new(&args, config, agent)?;
    Ok(Worker::with_machine(Box::new(machine), (args, incarnation), setup, transport, client)?)
}

/// What SGLang's decode workers find at the bootstrap server.
fn record(
    config: &SglangConfig,
    args: &KvArgs,
    incarnation: Incarnation,
    (host, port): (String, u16),
) -> Result<RankRecord, StartError> {
    let geometry = args.geometry();
    let rank = SglangRank::new(host, port, u64::from(geometry.page_size)).with(|rank| {
        rank.parallel = geometry.parallel;
        rank.kv_cache_dtype = Some(config.dtype(geometry));
        rank.kv_layout = config.kv_layout.clone();
    });
    let who = (args.worker().clone(), incarnation);
    Ok(RankRecord::new(who, config.role, geometry.parallel, Vec::new(), vec![rank.offer()])?)
}

/// The host and port by which peers reach the PULL socket.
fn pull<A: Agents>(
    host: Option<&str>,
    transport: &InteropTransport<A>,
) -> Result<(String, u16), SglangStartError> {
    let bound = transport.local_addr();
    let shown = bound.filter(|bound| !bound.ip().is_unspecified()).map(|bound| bound.ip().to_string());
    match (host.map(str::to_owned).or(shown), bound) {
        (Some(host), Some(bound)) => Ok((host, bound.port())),
        _ => {
            let bound = bound.map_or_else(|| "nothing".to_owned(), |bound| bound.to_string());
            Err(SglangStartError::Address { bound })
        }
    }
}
