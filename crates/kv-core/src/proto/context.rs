//! The parts that sending and receiving share: conversations with peers, lookups, the meeting place
//! of rooms, posts, and the effects of an input.

use bytes::Bytes;

use super::conversation::Peers;
use super::directory::Directory;
use super::effects::Effects;
use super::io::{NodeConfig, Output};
use super::posts::{InFlight, Posting};
use super::rendezvous::Rendezvous;
use crate::id::SessionId;
use crate::meter::each;
use crate::transport::{Descriptor, Post};

/// The shared parts of a machine, each with its own state.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(super) struct Context {
    pub(super) config: NodeConfig,
    pub(super) admits: Admits,
    pub(super) fx: Effects,
    pub(super) peers: Peers,
    pub(super) lookups: Directory,
    pub(super) rendezvous: Rendezvous,
    pub(super) posts: Posting,
}

/// What the worker still takes on, of its scheduler and of its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admits {
    /// New sessions, and requests of peers that may wait for a session.
    All,
    /// Requests of peers for sessions that are open: the worker drains.
    OpenRooms,
    /// Nothing: the worker is stopping.
    Nothing,
}

impl Context {
    pub(super) fn is_stopping(&self) -> bool {
        self.admits == Admits::Nothing
    }

    /// A context in which every part is empty.
    pub(super) fn new(mut config: NodeConfig) -> Context {
        config.timing = config.timing.sane();
        // Two incarnations of a worker draw different conversation ids, even with the same seed.
        let seed = config.seed ^ config.incarnation.get().rotate_left(32);
        Context {
            admits: Admits::All,
            fx: Effects::new(seed, config.timing.retry_max),
            peers: Peers::default(),
            lookups: Directory::default(),
            rendezvous: Rendezvous::default(),
            posts: Posting::new(config.args.max_inflight(), config.timing.keepalive),
            config,
        }
    }

    /// Starts a data operation, and counts it for its peer until the operation has ended. `notify`
    /// is the frame that the peer gets when all bytes are in place.
    pub(super) fn start_post(&mut self, post: InFlight, descriptors: Vec<Descriptor>, notify: Option<Bytes>) {
        let (peer, op) = (post.peer, post.op);
        let id = self.posts.start(post, self.fx.now());
        self.peers.post_started(peer);
        self.fx.post_started(id, &post, &descriptors);
        self.fx.output(Output::Post { peer, post: Post { id, op, descriptors, notify } });
    }

    /// Asks for an early end of all posts of a session.
    pub(super) fn cancel_posts(&mut self, session: SessionId) {
        for post in each(self.posts.of(session)) {
            self.fx.output(Output::Cancel { post });
        }
    }
}
