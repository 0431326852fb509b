//! How the workers of our ranks start: the transport, the side channel and the machine of the peer's dialect.

use kv_interop::sglang::{self, SglangConfig};
use kv_interop::vllm::{self, Compatibility, Factors, NIXL_CONNECTOR_VERSION, VllmConfig};
use kv_interop::{ChannelConfig, InteropTransport, SideChannel};
use kv_transfer::bootstrap::{ClientConfig, HttpBootstrapClient};
use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::{AuxIndex, KvArgs, Worker, WorkerRole};

use crate::cache::{AUX_ROWS, RankCache};
use crate::error::PairError;
use crate::options::{CacheOptions, Dialect, Mode, Options, Role};

/// Bytes of notifications of foreign agents that may wait to be taken.
const FOREIGN_BYTES: usize = 16 << 20;

/// The workers of our ranks.
pub struct Started {
    /// One worker for each rank.
    pub workers: Vec<Worker>,
    /// Where vLLM's workers shake hands with our engine. The side channel ends with this value.
    pub side_channel: Option<SideChannel>,
}

/// Starts a worker for each rank. Prefill workers that speak SGLang's dialect register with the bootstrap
/// server.
pub fn start(
    options: &Options,
    bootstrap: &str,
    caches: &[RankCache],
    args: Vec<KvArgs>,
) -> Result<Started, PairError> {
    match options.cache.dialect {
        Dialect::Sglang => sglang(options, bootstrap, caches, args),
        Dialect::Vllm => vllm(options, caches, args),
    }
}

fn vllm(options: &Options, caches: &[RankCache], args: Vec<KvArgs>) -> Result<Started, PairError> {
    // An engine that only reads is asked for nothing.
    let asked = options.role == Role::Prefill || options.mode == Mode::Push;
    let addr = format!("127.0.0.1:{}", options.port);
    let side_channel = asked.then(|| SideChannel::bind(&addr)).transpose()?;
    let mut workers = Vec::new();
    for (cache, args) in caches.iter().zip(args) {
        let transport = InteropTransport::new(agents(cache)?, ChannelConfig::default())?;
        let config = VllmConfig::default().with(|config| {
            config.compatibility = Compatibility::Factors(Box::new(factors(&options.cache)));
        });
        workers.push(vllm::start(config, args, transport, side_channel.as_ref())?);
    }
    Ok(Started { workers, side_channel })
}

/// Everything over which vLLM computes its compatibility hash, for the engine that the peer's driver makes.
fn factors(cache: &CacheOptions) -> Factors {
    Factors {
        vllm_version: "0.33.0".to_owned(),
        nixl_connector_version: NIXL_CONNECTOR_VERSION,
        model: cache.model.clone(),
        dtype: "torch.bfloat16".to_owned(),
        num_kv_heads: cache.heads as u32,
        head_size: cache.head_dim as u32,
        num_hidden_layers: cache.layers as u32,
        attn_backend_name: "FLASH_ATTN".to_owned(),
        cache_dtype: "auto".to_owned(),
        is_hma_enabled: true,
        speculative_config: serde_json::Value::Null,
    }
}

fn sglang(
    options: &Options,
    bootstrap: &str,
    caches: &[RankCache],
    args: Vec<KvArgs>,
) -> Result<Started, PairError> {
    let mut workers = Vec::new();
    for (cache, args) in caches.iter().zip(args) {
        let channels = ChannelConfig::default().with(|config| config.listen = Some("127.0.0.1:0".to_owned()));
        let transport = InteropTransport::new(agents(cache)?, channels)?;
        let config = SglangConfig::new(role(options)).with(|config| {
            config.bootstrap = Some(bootstrap.to_owned());
            config.aux_rooms = Some(Box::new(room_reader(cache)));
        });
        workers.push(sglang::start(config, args, transport, client()?)?);
    }
    Ok(Started { workers, side_channel: None })
}

/// Reads the room in an aux row: the last of SGLang's metadata buffers.
fn room_reader(cache: &RankCache) -> impl Fn(AuxIndex) -> u64 + Send + 'static {
    let (memory, at) = (cache.memory().clone(), cache.aux_row_at(AUX_ROWS.len() - 1));
    move |AuxIndex(row)| {
        let mut room = [0; size_of::<u64>()];
        // A row that is none of the memory holds no room.
        let read = memory.read(at(row as usize), &mut room);
        if read.is_ok() { u64::from_le_bytes(room) } else { 0 }
    }
}

/// A NIXL agent that reaches the cache, and takes notifications of agents of other programs.
fn agents(cache: &RankCache) -> Result<NixlTransport, PairError> {
    let config = NixlConfig::default().with(|config| config.foreign_bytes = FOREIGN_BYTES);
    let mut agents = NixlTransport::new(&Nixl::load(&Search::default())?, config)?;
    agents.add_memory(cache.memory())?;
    Ok(agents)
}

fn client() -> Result<Box<HttpBootstrapClient>, PairError> {
    Ok(Box::new(HttpBootstrapClient::new(ClientConfig::default())?))
}

fn role(options: &Options) -> WorkerRole {
    match options.role {
        Role::Prefill => WorkerRole::Prefill,
        Role::Decode => WorkerRole::Decode,
    }
}
