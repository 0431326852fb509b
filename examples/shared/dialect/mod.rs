//! The protocol of the examples `prefill` and `decode`: their own, or that of a fleet that they join.
//!
//! A dialect changes how the worker of a rank starts, how its pages and aux rows lie in memory, and where the
//! other side's sessions find the engine. The scheduler loops are the same.

mod checks;
mod notes;
#[cfg(feature = "interop")]
mod start;

use std::time::Duration;

use clap::{Args, ValueEnum};
use kv_transfer::bootstrap::HttpBootstrapClient;
use kv_transfer::{KvArgsBuilder, Listener, TransferMode, Worker, WorkerConfig, WorkerRole};
use serde::{Deserialize, Serialize};

use super::aux::AuxForm;
use super::control::Reach;
use super::error::ExampleError;
use super::heartbeats::Heartbeats;
use super::rank::RankSpec;
use super::rank_kv::RankKv;
use super::router::Side;
use super::transport;
use super::wire::WireLog;

pub use notes::notes;

/// The protocol between prefill and decode ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// The protocol of this project: every mode, layout and transport.
    #[default]
    Native,
    /// vLLM 0.33's NixlConnector. Needs a build with --features interop. Implies --transport nixl, --layout
    /// packed and --mode pull; --mode push is the other one.
    Vllm,
    /// SGLang 0.5.23's disaggregation over NIXL. Needs a build with --features interop, the same --page-size
    /// on both sides, and a bootstrap server. Implies --transport nixl and --mode push.
    Sglang,
}

/// The protocol, and where peers of that protocol reach the rank.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
pub struct DialectOptions {
    /// The protocol between prefill and decode ranks.
    #[arg(long, value_enum, default_value = "native")]
    pub dialect: Dialect,

    /// With --dialect vllm: the address at which vLLM's workers shake hands with the rank. With --dialect sglang:
    /// the address to which SGLang's workers send their messages; further tensor-parallel ranks use the ports
    /// after it [default: any free port of 127.0.0.1].
    #[arg(long, value_name = "HOST:PORT")]
    pub side_channel: Option<String>,
}

impl std::fmt::Display for Dialect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Dialect::Native => "native",
            Dialect::Vllm => "vllm",
            Dialect::Sglang => "sglang",
        })
    }
}

impl Dialect {
    /// The form of aux rows in this dialect.
    pub fn aux(self) -> AuxForm {
        match self {
            Dialect::Native => AuxForm::Native,
            Dialect::Vllm => AuxForm::Nothing,
            #[cfg(feature = "interop")]
            Dialect::Sglang => AuxForm::Sglang,
            #[cfg(not(feature = "interop"))]
            Dialect::Sglang => AuxForm::Nothing,
        }
    }
}

/// An engine as the other side finds it. The side channel ends with this value.
pub struct Presence {
    /// The name of the engine.
    pub engine: String,
    /// The bootstrap server of the engine, or its side channel.
    pub addr: String,
    dialect: Dialect,
    #[cfg(feature = "interop")]
    side_channel: Option<kv_transfer::interop::SideChannel>,
}

impl Presence {
    /// Gives the engine its name, and opens the side channel of an engine that speaks vLLM's dialect.
    pub fn new(spec: &RankSpec) -> Result<Presence, ExampleError> {
        spec.check_dialect()?;
        let dialect = spec.dialect.dialect;
        #[cfg(feature = "interop")]
        if dialect == Dialect::Vllm {
            return start::vllm_presence(spec);
        }
        Ok(Presence {
            engine: spec.side.to_string(),
            addr: spec.bootstrap.clone(),
            dialect,
            #[cfg(feature = "interop")]
            side_channel: None,
        })
    }

    /// What a router must know to write the parameters of decode ranks itself, if the bootstrap server does not
    /// know it.
    pub fn reach(&self) -> Option<Reach> {
        let Presence { engine, addr, .. } = self;
        (self.dialect == Dialect::Vllm).then(|| Reach { engine: engine.clone(), addr: addr.clone() })
    }

    /// When a lease ends that begins now and is not renewed, in seconds of the clock that the side channel tells.
    /// `None` for an engine without a side channel, whose leases say how long they are.
    pub fn expiry_time(&self, lease: Duration) -> Option<f64> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now = now.tv_sec as f64 + now.tv_nsec as f64 / 1e9;
        (self.dialect == Dialect::Vllm).then_some(now + lease.as_secs_f64())
    }

    /// Starts the worker of one rank of the engine. Workers of other dialects have no listener.
    pub fn start(
        &self,
        spec: &RankSpec,
        rank: &RankKv,
        args: KvArgsBuilder,
        notes: (&WireLog, &Heartbeats),
        listener: Option<Listener>,
    ) -> Result<Worker, ExampleError> {
        let pace = spec.hand_over.timing;
        let args = args.transfer_mode(TransferMode::from(spec.hand_over.mode)).build()?;
        let client = HttpBootstrapClient::new(pace.client())?;
        let role = match spec.side {
            Side::Decode => WorkerRole::Decode,
            Side::Prefill => WorkerRole::Prefill,
        };
        match self.dialect {
            #[cfg(feature = "interop")]
            Dialect::Vllm => start::vllm(self, spec, rank, args, notes),
            #[cfg(feature = "interop")]
            Dialect::Sglang => start::sglang(spec, rank, (args, role), notes, client),
            _ => {
                // Decode ranks look prefill ranks up, and on the next turn prefill ranks decode ranks.
                let config = WorkerConfig::new(args, role).with(|config| {
                    config.bootstrap = Some(spec.bootstrap.clone());
                    config.timing = pace.timing();
                    config.listener = listener;
                });
                let (worker, _) = transport::start(rank.memory(), config, Some(notes), client, pace)?;
                Ok(worker)
            }
        }
    }
}
