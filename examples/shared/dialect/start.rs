//! How the workers of vLLM's and SGLang's dialects start, over NIXL.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use kv_transfer::bootstrap::HttpBootstrapClient;
use kv_transfer::interop::sglang::{self, SglangConfig, SglangTiming};
use kv_transfer::interop::vllm::{self, VllmConfig, VllmTiming};
use kv_transfer::interop::{ChannelConfig, InteropTransport, SideChannel};
use kv_transfer::nixl::{Nixl, NixlTransport, Search};
use kv_transfer::{AuxIndex, KvArgs, Worker, WorkerRole};

use super::{Dialect, Presence};
use crate::aux::sglang_room;
use crate::cli::Pace;
use crate::error::ExampleError;
use crate::heartbeats::Heartbeats;
use crate::rank::RankSpec;
use crate::rank_kv::RankKv;
use crate::transport::{self, Memory};
use crate::wire::{TimedTransport, WireLog};

/// Bytes of notifications of other programs' agents that may wait to be taken.
const FOREIGN_BYTES: usize = 16 << 20;
/// Where a rank without `--side-channel` listens.
const ANY_PORT: &str = "127.0.0.1:0";

type Notes<'a> = (&'a WireLog, &'a Heartbeats);

/// An engine with a side channel. Its name is new in every life of the process, because a vLLM engine does not
/// shake hands again with a name that it knows.
pub fn vllm_presence(spec: &RankSpec) -> Result<Presence, ExampleError> {
    let side_channel = SideChannel::bind(spec.dialect.side_channel.as_deref().unwrap_or(ANY_PORT))?;
    Ok(Presence {
        engine: format!("{}-{:016x}", spec.side, RandomState::new().hash_one(0)),
        addr: side_channel.local_addr().to_string(),
        dialect: Dialect::Vllm,
        side_channel: Some(side_channel),
    })
}

/// Starts a worker that speaks vLLM's dialect.
pub fn vllm(
    presence: &Presence,
    spec: &RankSpec,
    rank: &RankKv,
    args: KvArgs,
    notes: Notes<'_>,
) -> Result<Worker, ExampleError> {
    let pace = spec.hand_over.timing;
    let config = VllmConfig::default().with(|config| {
        config.timing = VllmTiming::default().with(|timing| {
            for time in [
                &mut timing.session_deadline,
                &mut timing.read_bound,
                &mut timing.registration_ttl,
                &mut timing.handshake_timeout,
            ] {
                *time = pace.at_most_a_second(*time);
            }
            timing.kv_lease_duration = spec.hand_over.lease().duration();
        });
    });
    let transport = InteropTransport::new(agents(rank, pace, notes)?, ChannelConfig::default())?;
    Ok(vllm::start(config, args, transport, presence.side_channel.as_ref())?)
}

/// Starts a worker that speaks SGLang's dialect. A prefill worker registers with the bootstrap server.
pub fn sglang(
    spec: &RankSpec,
    rank: &RankKv,
    (args, role): (KvArgs, WorkerRole),
    notes: Notes<'_>,
    client: HttpBootstrapClient,
) -> Result<Worker, ExampleError> {
    let pace = spec.hand_over.timing;
    let listen = match spec.dialect.side_channel.as_deref() {
        Some(addr) => port_of(addr, args.geometry().parallel.tp_rank)?,
        None => ANY_PORT.to_owned(),
    };
    let channels = ChannelConfig::default().with(|config| config.listen = Some(listen));
    let transport = InteropTransport::new(agents(rank, pace, notes)?, channels)?;
    let rows = rank.clone();
    let config = SglangConfig::new(role).with(|config| {
        config.bootstrap = Some(spec.bootstrap.clone());
        config.timing = timing(pace);
        // A row that is none of the memory holds no room.
        config.aux_rooms =
            Some(Box::new(move |row: AuxIndex| rows.read_aux(row.0).map_or(0, |bytes| sglang_room(&bytes))));
    });
    Ok(sglang::start(config, args, transport, Box::new(client))?)
}

fn timing(pace: Pace) -> SglangTiming {
    let mut timing = SglangTiming::default();
    for time in [
        &mut timing.session_deadline,
        &mut timing.lookup_lifetime,
        &mut timing.lookup_retry,
        &mut timing.reconnect,
        &mut timing.abort_repeat,
        &mut timing.unclaimed,
    ] {
        *time = pace.at_most_a_second(*time);
    }
    timing.lookup_retry = timing.lookup_retry.min(Duration::from_millis(200));
    timing
}

/// The address for the worker of this tensor-parallel rank. Port 0 is any free port for every rank.
fn port_of(addr: &str, tp_rank: u32) -> Result<String, ExampleError> {
    let wrong = || ExampleError::Address { addr: addr.to_owned(), tp_rank };
    let (host, port) = addr.rsplit_once(':').ok_or_else(wrong)?;
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let after = u16::try_from(if port == 0 { 0 } else { tp_rank }).map_err(|_| wrong())?;
    Ok(format!("{host}:{}", port.checked_add(after).ok_or_else(wrong)?))
}

/// A NIXL agent that reaches the memory of the rank, and works together with agents of other programs.
fn agents(
    rank: &RankKv,
    pace: Pace,
    (log, heartbeats): Notes<'_>,
) -> Result<TimedTransport<NixlTransport>, ExampleError> {
    let config = transport::nixl_config(pace).with(|config| {
        config.foreign_bytes = FOREIGN_BYTES;
        // The other side may be one of our own workers.
        config.uuid_name = true;
    });
    let mut agents = NixlTransport::new(&Nixl::load(&Search::default())?, config)?;
    match rank.memory() {
        Memory::Pool(pool) => agents.add_memory(pool)?,
        _ => return Err(ExampleError::NotNixl),
    }
    Ok(TimedTransport::new(agents, log.clone(), heartbeats.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_listen_at_ports_one_after_the_other_or_at_any() {
        let of = |addr, rank| port_of(addr, rank).map_err(|error| error.to_string());
        assert_eq!(of("10.0.0.7:9000", 3), Ok("10.0.0.7:9003".to_owned()));
        assert_eq!(of("[::1]:0", 3), Ok("[::1]:0".to_owned()));
        for (addr, rank) in [("10.0.0.7", 0), ("10.0.0.7:x", 0), ("10.0.0.7:65535", 1)] {
            assert!(of(addr, rank).unwrap_err().contains(addr), "{addr}");
        }
    }
}
