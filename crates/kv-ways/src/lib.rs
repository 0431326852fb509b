//! Several transports in one worker, as one transport: each peer is reached by a transport that both sides
//! have, and stays on that transport for the whole conversation.
//!
//! What this crate is: [`Ways`], a [`Transport`](kv_core::Transport) over one to sixteen other transports,
//! its *members*. An engine whose peers are partly on the same host and partly on others gives `Ways` the
//! transports of kv-local, then of kv-nixl, kv-ucx or kv-fabric, and last of kv-tcp, in this order. What this
//! crate is not: a bond of several connections. A transfer is not striped over members, and a conversation
//! does not move to another member when its own fails: the frames, posts, permissions and write fences of a
//! conversation all belong to one member, because only that member knows when its writes have ended.
//!
//! * **How peers meet.** Each member has an [offer](kv_core::TransportOffer) of its own in the rank record
//!   and in hellos. So a worker with several transports can meet a worker that has only one of them, which
//!   does not need this crate. The decode side chooses, in the order of its list: the first member that both
//!   sides have, that leads to the peer, and that both writes and reads; if none does both (NIXL over TCP only
//!   writes), the first that leads to the peer. The prefill side answers over the transport that the hello
//!   names. A member that cannot reach the peer, because the peer is on another host, refuses to connect, and
//!   the next common one is tried.
//! * **When a member fails.** A conversation stays with its member. The worker's machine leaves a member that has
//!   failed for a peer alone for a while, lets new requests go by the next common member, and returns to the
//!   preferred one once the peer answers there again. [`Standing`] counts what has failed, and over which member
//!   each peer is connected.
//! * **How a conversation ends.** The owner is told [`PeerGone`](kv_core::TransportEvent::PeerGone), and what
//!   fences the peer's last writes, as the member of the conversation reports them. What other members know
//!   about the same process does not count: their connections carry nothing of this conversation.
//! * **Memory.** Every region is registered with every member. A member that refuses a region (device memory,
//!   for instance) is left out from then on; [`Standing`] tells why.
//!
//! ```
//! use kv_core::Transport;
//! use kv_local::{LocalConfig, LocalTransport};
//! use kv_ways::{Member, Ways};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let near = LocalTransport::new(LocalConfig::default())?;
//! let far = LocalTransport::new(LocalConfig::default())?; // in a real engine: that of kv-tcp or kv-nixl
//! let ways = Ways::new(vec![Member::new(Box::new(near)), Member::named("far", Box::new(far))])?;
//! let standing = ways.standing();
//! // let worker = Worker::start(config, ways, client)?;
//! assert!(standing.refusals().is_empty());
//! # Ok(())
//! # }
//! ```

mod contract;
mod error;
mod member;
mod metadata;
mod standing;
mod way;
mod ways;

pub use error::WaysError;
pub use member::Member;
pub use standing::{MemberStanding, Standing};
pub use ways::{MAX_MEMBERS, Ways};
