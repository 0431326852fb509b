//! Fuzz targets: plain functions of bytes that panic if a promise is broken.
//!
//! | target | bytes are |
//! |---|---|
//! | `wire` | a frame between two workers |
//! | `machine` | a script of commands, frames of several peers, ends of posts, answers to lookups, and time; see [`machine`] |
//! | `entries` | the same for the machine of the encoder cache: entries are saved, wanted, asked for and refused |
//! | `vllm_machine`, `sglang_machine` | the same for the machines of foreign dialects, whose peers are vLLM's and SGLang's engines |
//! | `http_requests`, `http_responses`, `rank_record` | what a bootstrap server and its client read |
//! | `local_metadata`, `local_hello`, `local_messages` | what kv-local reads |
//! | `tcp_metadata`, `tcp_greetings`, `tcp_requests`, `tcp_replies` | what kv-tcp reads |
//! | `nixl_metadata`, `nixl_notification`, `nixl_datagram`, `nixl_agent` | what kv-nixl reads (feature `nixl`) |
//! | `fabric_metadata`, `fabric_messages` | what kv-fabric reads (feature `fabric`) |
//! | `ucx_metadata`, `ucx_messages` | what kv-ucx reads (feature `ucx`) |
//! | `aux_row` | an aux row that a peer has written, after the layout of the reader and a wish to seal the row |
//! | `params`, `ec_params` | transfer parameters that a router carries: of the KV cache, of the encoder cache |
//! | `ec_host` | what the server of a host's encoder cache and its ranks read |
//! | `timeline` | what workers have recorded of requests, one record a line |
//! | `zmtp`, `side_channel` | what the ZeroMQ sockets of foreign dialects read, and the server of vLLM's handshake |
//! | `vllm_answer`, `vllm_notification` | what vLLM's side channels and agents send |
//! | `sglang_message` | what SGLang's workers push to each other's sockets |
//!
//! The targets are run in two ways: by cargo-fuzz, guided by coverage, from the directory `fuzz` at the root of the
//! repository; and by the tests of this crate on a stable toolchain, which mutate the corpus in `fuzz/corpus` with a
//! printed seed ([`driver`]).
//!
//! The targets of machines also count costs: steps of loops whose length others decide, bytes that are allocated, and
//! bytes that are sent. After every input the costs are compared with a budget for the bytes of that input and for
//! what the worker's own scheduler has asked for ([`machine::Budget`]).
//!
//! The crate is not a model of two workers that talk to each other: that is `kv-sim`. The words of its
//! documentation are explained in `docs/GLOSSARY.md`.

pub mod alloc;
mod decoders;
pub mod driver;
pub mod machine;
pub mod worst;

pub use decoders::*;

/// A decoder: its name, and a function of bytes that panics if a promise is broken, and returns true if the bytes are
/// accepted.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// All decoders that this build has.
pub const DECODERS: &[Target] = &[
    ("wire", wire),
    ("http_requests", http_requests),
    ("http_responses", http_responses),
    ("rank_record", rank_record),
    ("local_metadata", local_metadata),
    ("local_hello", local_hello),
    ("local_messages", local_messages),
    #[cfg(feature = "fabric")]
    ("fabric_metadata", fabric_metadata),
    #[cfg(feature = "fabric")]
    ("fabric_messages", fabric_messages),
    ("tcp_metadata", tcp_metadata),
    ("tcp_greetings", tcp_greetings),
    ("tcp_requests", tcp_requests),
    ("tcp_replies", tcp_replies),
    #[cfg(feature = "nixl")]
    ("nixl_metadata", nixl_metadata),
    #[cfg(feature = "nixl")]
    ("nixl_notification", nixl_notification),
    #[cfg(feature = "nixl")]
    ("nixl_datagram", nixl_datagram),
    #[cfg(feature = "nixl")]
    ("nixl_agent", nixl_agent),
    #[cfg(feature = "ucx")]
    ("ucx_metadata", ucx_metadata),
    #[cfg(feature = "ucx")]
    ("ucx_messages", ucx_messages),
    ("aux_row", aux_row),
    ("params", params),
    ("ec_params", ec_params),
    ("ec_host", ec_host),
    ("timeline", timeline),
    ("zmtp", zmtp),
    ("side_channel", side_channel),
    ("vllm_answer", vllm_answer),
    ("vllm_notification", vllm_notification),
    ("sglang_message", sglang_message),
];
