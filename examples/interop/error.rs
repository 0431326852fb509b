//! What goes wrong in this example.

use kv_interop::ChannelError;
use kv_interop::sglang::SglangStartError;
use kv_interop::vllm::VllmStartError;
use kv_transfer::bootstrap::{BootstrapClientError, BootstrapServerError};
use kv_transfer::nixl::{DiscoveryError, MemoryError, NixlError};
use kv_transfer::params::ParamsError;
use kv_transfer::{
    AdoptError, ArgsError, EngineGroupError, IdError, OpenError, PagesError, ReleaseError, StartError,
    TransportError,
};

/// Why our side of a pair cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// The sizes on the command line fit no cache.
    #[error("--{option} {got}: {why}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// The value on the command line.
        got: String,
        /// What the value must be.
        why: String,
    },
    /// A command to the control of our side, or an answer of the peer's control, has another form.
    #[error("{what}: {field} is missing, or of another type, in {json}")]
    Json {
        /// Whose JSON it is.
        what: &'static str,
        /// The key.
        field: &'static str,
        /// The JSON, shortened.
        json: String,
    },
    /// The peer's control does not answer, or answers with an error.
    #[error("{url}: {why}")]
    Control {
        /// The address of the command.
        url: String,
        /// What is wrong with the answer.
        why: String,
    },
    /// Blocks that a command names are in use, or are none of the cache.
    #[error(transparent)]
    Blocks(#[from] AdoptError),
    /// A command names a block twice.
    #[error(transparent)]
    Pages(#[from] PagesError),
    /// Pages came back that are none of the allocator's: a bug.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// The operating system refuses something.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The error.
        error: std::io::Error,
    },
    /// An id has no possible length.
    #[error(transparent)]
    Id(#[from] IdError),
    /// The cache is none that a worker can have.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// NIXL is not installed.
    #[error(transparent)]
    Nixl(#[from] DiscoveryError),
    /// NIXL refuses the agent.
    #[error(transparent)]
    Agent(#[from] NixlError),
    /// The transport refuses the memory.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A worker does not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A worker among SGLang's workers does not start.
    #[error(transparent)]
    Sglang(#[from] SglangStartError),
    /// A worker that speaks vLLM's dialect does not start.
    #[error(transparent)]
    Vllm(#[from] VllmStartError),
    /// The side channels do not start.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The workers are no ranks of one engine.
    #[error(transparent)]
    Group(#[from] EngineGroupError),
    /// A session does not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The bootstrap server does not start.
    #[error(transparent)]
    Server(#[from] BootstrapServerError),
    /// The bootstrap client does not start.
    #[error(transparent)]
    Client(#[from] BootstrapClientError),
    /// The peer's transfer parameters are none.
    #[error(transparent)]
    Params(#[from] ParamsError),
}

impl PairError {
    /// The error of an operation of the operating system.
    pub fn io(what: &'static str) -> impl Fn(std::io::Error) -> PairError {
        move |error| PairError::Io { what, error }
    }
}

impl PairError {
    /// A worker has no room for a command, although few sessions are open.
    pub fn full(what: &'static str) -> PairError {
        PairError::Io { what, error: std::io::ErrorKind::WouldBlock.into() }
    }
}
