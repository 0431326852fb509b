//! The errors of the examples.

use kv_transfer::allocator::FreeError;
use kv_transfer::bootstrap::{BootstrapClientError, BootstrapServerError};
use kv_transfer::local::{LocalError, MemoryError};
use kv_transfer::{ArgsError, StartError};

/// Why an example cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ExampleError {
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What the example tried to do.
        what: &'static str,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The operating system refused something that a place was named for.
    #[error("{what} {at}: {source}")]
    At {
        /// What the example tried to do.
        what: &'static str,
        /// The address or the path.
        at: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The worker's arguments do not fit together.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// The bootstrap server did not start.
    #[error("bootstrap server: {0}")]
    Server(#[from] BootstrapServerError),
    /// The bootstrap client did not start.
    #[error("bootstrap client: {0}")]
    Client(#[from] BootstrapClientError),
    /// There is no memory for the cache, or it was used wrongly.
    #[error(transparent)]
    Arena(#[from] MemoryError),
    /// The transport could not be set up.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// The TCP transport could not be set up.
    #[error("{}{}", .0, tcp_variable(.0))]
    Tcp(#[from] kv_transfer::tcp::TcpError),
    /// The transports could not be combined.
    #[error(transparent)]
    Ways(#[from] kv_transfer::ways::WaysError),
    /// The certificates of the TCP transport cannot be used.
    #[cfg(feature = "tls")]
    #[error("{}{}", .0, tls_variables(.0))]
    Tls(#[from] kv_transfer::tcp::TlsError),
    /// Some of the variables for TLS have a value, and this one has none.
    #[error("{variable} is missing: TLS needs a certificate, its key, and the certificates of authorities")]
    TlsFile {
        /// The name of the environment variable.
        variable: &'static str,
    },
    /// A variable does not hold an address.
    #[cfg(feature = "fabric")]
    #[error("{variable} is {got:?}; it must be an address without a port, as 10.0.0.1 or fd00::1")]
    BareAddress {
        /// The name of the environment variable.
        variable: &'static str,
        /// The value of the variable.
        got: String,
    },
    /// Two variables do not name the same devices.
    #[cfg(feature = "fabric")]
    #[error(
        "KV_FABRIC_DEVICE has {names} devices and KV_FABRIC_ADDRESS has {addresses} addresses; it must be one for each"
    )]
    Devices {
        /// The number of devices.
        names: usize,
        /// The number of addresses.
        addresses: usize,
    },
    /// A variable does not hold an address and a port.
    #[error("{variable} is {got:?}; it must be an address with a port, as 10.0.0.1:0 or [fd00::1]:0")]
    Variable {
        /// The name of the environment variable.
        variable: &'static str,
        /// The value of the variable.
        got: String,
    },
    /// NIXL could not be loaded.
    #[cfg(feature = "nixl")]
    #[error(transparent)]
    Discovery(#[from] kv_transfer::nixl::DiscoveryError),
    /// The NIXL transport could not be set up.
    #[cfg(feature = "nixl")]
    #[error(transparent)]
    Nixl(#[from] kv_transfer::nixl::NixlError),
    /// UCX could not be loaded, or its transport could not be set up.
    #[cfg(feature = "ucx")]
    #[error(transparent)]
    Ucx(#[from] kv_transfer::ucx::UcxError),
    /// libfabric could not be loaded, or its transport could not be set up.
    #[cfg(feature = "fabric")]
    #[error(transparent)]
    Fabric(#[from] kv_transfer::fabric::FabricError),
    /// The worker did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The aux row of a request has no room for what it holds.
    #[error(transparent)]
    Aux(#[from] kv_transfer::queue::AuxRowError),
    /// Pages were given back that are not out.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// The checkpoint cannot be used.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Checkpoint(#[from] super::checkpoint::CheckpointError),
    /// The requests do not fit into the cache.
    #[error(
        "a request needs {needed} pages, and a rank has {pages}: raise --pages, or shorten prompts and answers"
    )]
    CacheTooSmall {
        /// Pages of one request, with what it grows by.
        needed: usize,
        /// Pages of a rank.
        pages: u32,
    },
    /// The model cannot be divided among this number of ranks and stages.
    #[error(
        "{tp} tensor-parallel ranks and {pp} pipeline stages cannot share {heads} heads of {layers} layers: \
         the ranks must divide the heads or be a multiple of them, and each stage needs a layer"
    )]
    Parallel {
        /// The number of tensor-parallel ranks.
        tp: usize,
        /// The number of pipeline stages.
        pp: usize,
        /// The number of KV heads of the model.
        heads: usize,
        /// The number of layers of the model.
        layers: usize,
    },
    /// The pages cannot be distributed over this number of ranks.
    #[error(
        "{tp} tensor-parallel ranks cannot hold pages in turn in groups of {dealt} (DCP): the first number must be \
         a multiple of the second, and the model must have latent attention (--mla)"
    )]
    Dealt {
        /// The number of tensor-parallel ranks.
        tp: u32,
        /// The number of ranks that are to hold pages in turn.
        dealt: u32,
    },
    /// The ranks of an engine cannot be driven together.
    #[error(transparent)]
    Group(#[from] kv_transfer::EngineGroupError),
    /// A prompt names a token that the model does not know.
    #[error("token {token} is out of range: the model knows {vocab} tokens")]
    Token {
        /// The token that the prompt names.
        token: u32,
        /// The number of tokens in the vocabulary.
        vocab: usize,
    },
    /// A position outside the pages of its request.
    #[error("token {position} is outside the request's {pages} pages")]
    Position {
        /// The position of the token in the request.
        position: usize,
        /// Pages of the request.
        pages: usize,
    },
    /// The transport or dialect was asked for by name, but is not in this binary.
    #[error(
        "this example was built without feature `{feature}`: add --features {feature} to the command of cargo"
    )]
    NotBuilt {
        /// The cargo features that have the transport or dialect.
        feature: &'static str,
    },
    /// The dialect does not have what an option asks for.
    #[error("--{option} {got} does not exist in --dialect {dialect}: use {instead} instead")]
    NotInDialect {
        /// The option.
        option: &'static str,
        /// The value of the option.
        got: String,
        /// The dialect of the rank.
        dialect: super::dialect::Dialect,
        /// What exists in the dialect.
        instead: &'static str,
    },
    /// A rank cannot listen there for the other side.
    #[error("--side-channel {addr}: tensor-parallel rank {tp_rank} needs a host and a port")]
    Address {
        /// The address as it was given.
        addr: String,
        /// The rank that was to listen there, or at a port after it.
        tp_rank: u32,
    },
    /// The cache lies in memory that NIXL does not reach.
    #[cfg(feature = "interop")]
    #[error("the dialects of other engines need memory for NIXL: use --transport nixl")]
    NotNixl,
    /// The side channel of the rank could not be opened.
    #[cfg(feature = "interop")]
    #[error("side channel: {0}")]
    Channel(#[from] kv_transfer::interop::ChannelError),
    /// The worker that speaks vLLM's dialect did not start.
    #[cfg(feature = "interop")]
    #[error(transparent)]
    Vllm(#[from] kv_transfer::interop::vllm::VllmStartError),
    /// The worker that speaks SGLang's dialect did not start.
    #[cfg(feature = "interop")]
    #[error(transparent)]
    Sglang(#[from] kv_transfer::interop::sglang::SglangStartError),
    /// A line between router and rank is not a valid message.
    #[error("a line from the router, or to the router, is not a valid message: {0}")]
    Command(serde_json::Error),
    /// A line from the router is longer than the limit.
    #[error("a line from the router has more than {max} bytes")]
    LineTooLong {
        /// The length of the longest line, in bytes.
        max: usize,
    },
    /// The router has closed the connection.
    #[error("the router has closed the connection")]
    LinkClosed,
    /// A text or number is not a valid id.
    #[error(transparent)]
    Id(#[from] kv_transfer::IdError),
    /// What a rank has recorded cannot be read.
    #[error("a record of a worker: {0}")]
    Record(#[from] kv_timeline::RecordError),
    /// The timeline cannot be written as JSON.
    #[error("the timeline: {0}")]
    Timeline(serde_json::Error),
    /// The records of the workers cannot be joined.
    #[error(transparent)]
    Join(#[from] kv_timeline::JoinError),
    /// A rank has ended, or was never ready.
    #[error("{rank} {how}")]
    Rank {
        /// The name of the rank, such as `prefill/0`.
        rank: String,
        /// What has become of the rank.
        how: String,
    },
}

/// The variable from which the example took what the error names as a field of the transport.
fn tcp_variable(error: &kv_transfer::tcp::TcpError) -> &'static str {
    match error {
        kv_transfer::tcp::TcpError::Bind { .. } => " (bind is KV_TCP_ADDRESS)",
        kv_transfer::tcp::TcpError::Advertise { .. } => {
            " (advertise is KV_TCP_ADVERTISE, or else KV_TCP_ADDRESS)"
        }
        _ => "",
    }
}

#[cfg(feature = "tls")]
fn tls_variables(error: &kv_transfer::tcp::TlsError) -> &'static str {
    match error {
        kv_transfer::tcp::TlsError::Name { .. } => " (the name is KV_TCP_TLS_NAME)",
        _ => " (the files are those in KV_TCP_TLS_CERT, KV_TCP_TLS_KEY and KV_TCP_TLS_CA)",
    }
}

impl ExampleError {
    /// Wraps an I/O error, for `map_err`.
    pub fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> ExampleError {
        move |source| ExampleError::Io { what, source }
    }

    /// Wraps an I/O error about an address or a path, for `map_err`.
    pub fn at(what: &'static str, at: impl ToString) -> impl FnOnce(std::io::Error) -> ExampleError {
        move |source| ExampleError::At { what, at: at.to_string(), source }
    }
}
