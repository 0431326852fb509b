//! Several transports under one worker, as one transport: a peer is reached by whichever transport both sides
//! have, and stays on it for as long as the two speak with each other.
//!
//! What it is: [`Ways`], a [`Transport`](kv_core::Transport) over one to sixteen others, its *members*. An engine
//! whose peers are partly on the same host and partly elsewhere gives it the embedded transport and the NIXL
//! transport, in this order, and each peer gets the faster one that leads to it. What it is not: a bond of
//! links. Nothing is striped, and nothing moves to another member when one fails: frames, posts,
//! permissions and fences of a conversation are all of one member, because only that member can say when
//! its writes have ended.
//!
//! * **Who is met how.** Each member is a [transport](kv_core::TransportOffer) of its own in the rank record
//!   and in hellos. So a worker with several transports meets one that has a single one of them, and needs
//!   no word of its own for that. The decode side chooses, by the order in which it was given its members
//!   ([`Ways::new`]); the prefill side answers by the transport in the hello. A member that cannot reach the
//!   peer at all, because the peer is on another host, refuses to connect, and the next one is tried.
//! * **What ends.** [`PeerGone`](kv_core::TransportEvent::PeerGone) is told when the way of the conversation has
//!   ended, as the member of this way says it, and so is what fences its writes. What another member knows
//!   of its own connection to the same process says nothing about them, and ends nothing.
//! * **Memory.** Every region is registered with every member. One that refuses a region (device memory, say)
//!   is left out from then on; [`Standing`] tells why.
//!
//! ```
//! use kv_core::Transport;
//! use kv_local::{LocalConfig, LocalTransport};
//! use kv_ways::{Member, Ways};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let near = LocalTransport::new(LocalConfig::default())?;
//! let far = LocalTransport::new(LocalConfig::default())?; // the NIXL transport, say
//! let ways = Ways::new(vec![Member::new(Box::new(near)), Member::named("far", Box::new(far))])?;
//! let standing = ways.standing();
//! // let worker = Worker::start(config, ways, client)?;
//! assert!(standing.refusals().is_empty());
//! # Ok(())
//! # }
//! ```

mod contract;
mod error;
mod form;
mod member;
mod way;
mod ways;

pub use error::WaysError;
pub use member::{Member, Standing};
pub use ways::{MAX_MEMBERS, Ways};
