//! What the two services of a machine, sending and receiving, stand on: conversations with peers, lookups,
//! the meeting place of rooms, posts, and the effects of an input.

use super::conversation::Peers;
use super::effects::Effects;
use super::io::NodeConfig;
use super::lookups::Directory;
use super::posts::Posting;
use super::rendezvous::Rendezvous;

/// The parts below sending and receiving, each with its own state.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(super) struct Context {
    pub(super) config: NodeConfig,
    /// The worker takes no new sessions.
    pub(super) stopping: bool,
    pub(super) fx: Effects,
    pub(super) peers: Peers,
    pub(super) lookups: Directory,
    pub(super) rendezvous: Rendezvous,
    pub(super) posts: Posting,
}
