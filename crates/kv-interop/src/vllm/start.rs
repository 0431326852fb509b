//! How a worker that speaks vLLM's dialect starts.

use std::os::fd::RawFd;

use kv_core::{
    BootstrapClient, BootstrapError, BootstrapEvent, Incarnation, KvArgs, LookupId, RankQuery, RankRecord,
    Time, TransferMode, TransportError,
};
use kv_poll::worker::attach;
use kv_poll::{StartError, Worker};

use super::config::{SideChannelAddr, VllmConfig};
use super::geometry::{CacheError, own_metadata};
use super::machine::VllmMachine;
use super::metadata::NixlHandshakePayload;
use super::side_channel::SideChannel;
use crate::agents::Agents;
use crate::starting::{random_bits, setup};
use crate::transport::InteropTransport;

/// Why a worker that speaks vLLM's dialect did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VllmStartError {
    /// vLLM's protocol cannot express the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The transport's agent has no metadata.
    #[error("the NIXL agent has no metadata: {0}")]
    Metadata(TransportError),
    /// The worker's thread could not start.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// Starts the worker of one rank towards vLLM engines. Schedulers use the worker like every other, with vLLM's
/// names for things:
///
/// - The room of a sender is this engine's id of the request, which routers carry as `remote_request_id`. The
///   room of a receiver is the `remote_request_id`, and its bootstrap address is the side channel of the engine
///   that has the KV; the rest of what a router says goes into
///   [`SessionOptions::remote`](kv_core::SessionOptions::remote).
/// - Sessions do what [`KvArgs::transfer_mode`] says unless their options say otherwise. With
///   [`Auto`](TransferMode::Auto) a sender is read, and a receiver does what the engine's parameters say
///   ([`RemoteRequest::mode`](kv_core::RemoteRequest::mode)); where they say nothing, the receiver reads if the router
///   names the pages (`remote_block_ids`). The mode of the arguments is a part of the hash that vLLM compares.
/// - A receiver of another mode than the engine's is refused with both modes. A receiver in push mode registers its
///   pages only at an engine whose parameters say push, or if the session's own options say push: a registration ends
///   the step of an engine in pull mode.
/// - The numbers of a sender's pages are the block ids that routers carry.
///
/// Registers the regions of `args` with the transport, and publishes the rank at the side channel, which ranks of
/// one process share, once the worker has started: a start that fails leaves nothing published. The rank stays there
/// after the worker has stopped: [`SideChannel::withdraw`] ends that. A worker that only receives in pull mode needs no
/// side channel, and then its cache need not be arranged as vLLM's ranks would read it.
///
/// # Errors
///
/// [`VllmStartError`] if vLLM's protocol cannot express the cache, if the agent has no metadata, or if the worker's
/// thread cannot start or register the regions.
pub fn start<A: Agents + Send + 'static>(
    mut config: VllmConfig,
    args: KvArgs,
    mut transport: InteropTransport<A>,
    side_channel: Option<&SideChannel>,
) -> Result<Worker, VllmStartError> {
    attach(&mut transport, args.regions())?;
    config.seed.get_or_insert(random_bits()?);
    let incarnation = Incarnation::from_random(random_bits()?);
    let published = if let Some(side_channel) = side_channel {
        config.side_channel = config.side_channel.or_else(|| reachable(side_channel));
        let agent = transport.agents().agent_metadata().map_err(VllmStartError::Metadata)?;
        let metadata = own_metadata(&args, agent, config.compatibility.attn_backend_name())?;
        let payload = NixlHandshakePayload {
            compatibility_hash: config.compatibility.shown(shown_mode(&args)),
            agent_metadata_bytes: metadata.encode(),
        };
        Some((side_channel, args.geometry().parallel, payload.encode()))
    } else {
        None
    };
    let machine = VllmMachine::new(&args, &config)?;
    let setup = setup(&args, config.listener).with(|setup| {
        setup.max_sessions = config.max_sessions;
        setup.command_queue = config.command_queue;
    });
    let server = Box::new(NoServer::default());
    let worker = Worker::with_machine(Box::new(machine), (args, incarnation), setup, transport, server)?;
    // Only now: whoever is shown the metadata of a rank may write to the rank.
    if let Some((side_channel, place, payload)) = published {
        side_channel.publish(place.pp_rank, place.tp_rank, payload);
    }
    Ok(worker)
}

/// The mode in the hash. vLLM knows no mode besides these two.
fn shown_mode(args: &KvArgs) -> TransferMode {
    match args.transfer_mode() {
        TransferMode::Push => TransferMode::Push,
        TransferMode::Pull | TransferMode::Auto => TransferMode::Pull,
    }
}

/// The address of a side channel, if the address is one that peers can be told.
fn reachable(side_channel: &SideChannel) -> Option<SideChannelAddr> {
    let bound = side_channel.local_addr();
    let addr = SideChannelAddr { host: bound.ip().to_string(), port: bound.port() };
    (!bound.ip().is_unspecified()).then_some(addr)
}

/// The client of a worker without a bootstrap server: vLLM's routers say where an engine is.
#[derive(Debug, Default)]
struct NoServer {
    asked: Vec<LookupId>,
}

impl BootstrapClient for NoServer {
    fn publish(&mut self, _now: Time, _addr: &str, _record: RankRecord) {}

    fn withdraw(&mut self, _now: Time) {}

    fn lookup(&mut self, _now: Time, lookup: LookupId, _addr: &str, _query: &RankQuery) {
        self.asked.push(lookup);
    }

    fn poll(&mut self, _now: Time) -> Option<BootstrapEvent> {
        let lookup = self.asked.pop()?;
        Some(BootstrapEvent::Failed { lookup, error: BootstrapError::UnknownRank })
    }

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn as_raw_fd(&self) -> Option<RawFd> {
        None
    }
}

#[cfg(test)]
mod tests {
    use kv_core::Region;
    use kv_core::layout::{Holds, RegionRole};

    use super::*;
    use crate::channels::ChannelConfig;
    use crate::transport::tests::Script;
    use crate::vllm::geometry::tests::args;

    /// Keys and values apart, as no vLLM rank has them.
    fn apart() -> KvArgs {
        let region = |at: u64, holds| {
            Region::dram(RegionRole::Kv, at * 0x10_0000, 10 * 1024, 1024).holds(holds).layer(0)
        };
        let builder = KvArgs::builder("d-0", 0).pages(10, 16).heads(4, 8).dtype("bf16");
        builder.region(region(1, Holds::Key)).region(region(2, Holds::Value)).build().unwrap()
    }

    #[test]
    fn a_start_that_fails_publishes_nothing_and_one_that_succeeds_publishes_the_rank() {
        let side_channel = SideChannel::bind("127.0.0.1:0").unwrap();
        let refusal = || TransportError::Unsupported("a refusal");
        let (quiet, config) = (Script::default, VllmConfig::default);
        let fails = [
            (args((1, 0), false), Script::without_regions(refusal()), config()),
            (args((1, 0), false), Script::without_metadata(refusal()), config()),
            (apart(), quiet(), config()),
            (args((1, 0), false), quiet(), config().with(|config| config.command_queue = 0)),
            (args((1, 0), false), quiet(), config().with(|config| config.max_sessions = 0)),
        ];
        let start = |args, agents, config| {
            let transport = InteropTransport::new(agents, ChannelConfig::default()).unwrap();
            start(config, args, transport, Some(&side_channel))
        };
        let mut errors = Vec::new();
        for (args, agents, config) in fails {
            errors.push(start(args, agents, config).unwrap_err().to_string());
            assert_eq!(side_channel.published(), 0, "{errors:?}");
        }
        let said = ["a refusal", "a refusal", "layout.axes", "command_queue", "max_sessions"];
        assert!(errors.iter().zip(said).all(|(error, said)| error.contains(said)), "{errors:?}");
        let worker = start(args((1, 0), false), quiet(), config()).unwrap();
        assert_eq!(side_channel.published(), 1);
        drop(worker);
    }
}
