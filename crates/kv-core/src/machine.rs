//! The trait of a service's machine, and the inputs and outputs that a worker exchanges with a
//! machine.
//!
//! A service (a KV cache, an encoder cache, a foreign dialect) consists of a [`Machine`] and of the
//! handles that servers use. Frames, posts, peers and lookups in [`Input`] and [`Output`] are the
//! same for every service. Commands, states of sessions, and the resources that sessions borrow are
//! types of the machine.

mod within;

use std::error::Error;
use std::fmt;

use bytes::Bytes;

use crate::announce::{ReadyEvent, ReadyEventError};
use crate::bootstrap::{LookupId, RankQuery};
use crate::error::BootstrapError;
use crate::id::{PeerId, PostId, SessionId};
use crate::record::{RankRecord, TransportOffer};
use crate::time::Time;
use crate::trace::{Event, What};
use crate::transport::{Directions, Origin, Post, TransportError, WayEnd, WriteFence};

pub use within::OfSession;

/// The sans-IO machine of one service on one worker.
///
/// # Contract
///
/// - **Inputs**: [`handle`](Machine::handle), one at a time, with the time now. Times never go
///   back.
/// - **Outputs**: after every input, [`poll_output`](Machine::poll_output) is called until it returns
///   `None`, and each output is carried out in order, before the next input.
/// - **Time**: [`Input::Timeout`] is due at [`next_timeout`](Machine::next_timeout). A late timeout
///   is allowed, and an early one does nothing. The machine reads no clock of its own.
/// - **Ends**: every session that a command opened gets exactly one terminal [`Output::Status`], as
///   its last status. Every resource that went in with a command comes out in exactly one
///   [`Output::Release`], once no data operation can touch the resource.
///
/// The same machine runs under a worker's thread over real transports, and under a simulator in virtual
/// time.
pub trait Machine: Send {
    /// The commands that handles give to the machine.
    type Command: SessionCommand<Resource = Self::Resource>;
    /// The states of a session.
    type Status: SessionStatus;
    /// The resource that commands lend to a session, and that the session hands back.
    type Resource: SessionResource;
    /// The error of a session that failed.
    type Failure: Error + Clone + Send + Sync + 'static;
    /// One line of the report on what resources in quarantine wait for.
    type Quarantine: Clone + Send + 'static;
    /// The events that the machine tells to a listener; [`Infallible`](std::convert::Infallible)
    /// for a machine that tells none.
    type Trace: What;

    /// Takes one input. The caller must drain the outputs afterwards.
    fn handle(&mut self, now: Time, input: Input<Self::Command>);

    /// The next output; `None` when drained.
    fn poll_output(&mut self) -> Option<Output<Self::Status, Self::Resource, Self::Failure>>;

    /// When [`Input::Timeout`] is due; `None` if nothing waits for time to pass.
    fn next_timeout(&self) -> Option<Time>;

    /// How much of its resources, in the first of their [kinds](SessionResource::KINDS), is
    /// complete and pinned for readers under a lease.
    fn leased(&self) -> usize {
        0
    }

    /// What the resources of ended sessions wait for, in as many entries as there are peers and
    /// reasons.
    fn quarantine(&self) -> Vec<Self::Quarantine> {
        Vec::new()
    }

    /// True while a session is open whose peers have not all come, so that a peer may still look for this
    /// worker at the bootstrap server. A worker that drains leaves the server as soon as this is false.
    fn awaits_peers(&self) -> bool {
        false
    }

    /// True while a peer that is not given up has yet to hear, or to acknowledge, how a session has ended that
    /// is over here. A worker that drains is not empty as long as this is true.
    fn owes_answers(&self) -> bool {
        false
    }

    /// True while something is under way that belongs to no session of the worker: a request of a peer is being
    /// served, or what a given-up transfer used is not quiet yet. A worker that drains is not empty as long as this
    /// is true, and a worker that stops waits for the end within its grace.
    fn is_busy(&self) -> bool {
        false
    }

    /// With `true`, the machine keeps events for [`poll_trace`](Machine::poll_trace) from now on;
    /// with `false`, it stops. A machine begins without a listener. An event then costs one branch
    /// and no memory.
    fn listen(&mut self, on: bool) {
        let _ = on;
    }

    /// The next event; `None` when drained, and while nobody listens. Events may be fetched after
    /// any input. A machine keeps a bounded number of events, and [`Event::missed`] tells how many
    /// were lost. [`Log`](crate::trace::Log) is such a bounded list.
    fn poll_trace(&mut self) -> Option<Event<Self::Trace>> {
        None
    }

    /// The one peer that is told something as soon as this command is carried out, and how many bytes are written there
    /// before: the worker [rouses](crate::Transport::rouse) that peer, whose processor wakes while this one works. A guess,
    /// which may be wrong in either direction; `None` where nothing, or nothing certain, can be said at once.
    fn addressee(&self, now: Time, command: &Self::Command) -> Option<(PeerId, u64)> {
        let _ = (now, command);
        None
    }

    /// The transport of the worker in whose name a frame speaks, if the frame introduces its
    /// sender; otherwise `None`. The worker drops the frame if the connection on which the frame
    /// came [may not speak](crate::Transport::may_speak_by) for that transport.
    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        let _ = frame;
        None
    }
}

impl<M: Machine + ?Sized> Machine for Box<M> {
    type Command = M::Command;
    type Status = M::Status;
    type Resource = M::Resource;
    type Failure = M::Failure;
    type Quarantine = M::Quarantine;
    type Trace = M::Trace;

    fn handle(&mut self, now: Time, input: Input<Self::Command>) {
        (**self).handle(now, input);
    }

    fn poll_output(&mut self) -> Option<Output<Self::Status, Self::Resource, Self::Failure>> {
        (**self).poll_output()
    }

    fn next_timeout(&self) -> Option<Time> {
        (**self).next_timeout()
    }

    fn leased(&self) -> usize {
        (**self).leased()
    }

    fn quarantine(&self) -> Vec<Self::Quarantine> {
        (**self).quarantine()
    }

    fn awaits_peers(&self) -> bool {
        (**self).awaits_peers()
    }

    fn owes_answers(&self) -> bool {
        (**self).owes_answers()
    }

    fn is_busy(&self) -> bool {
        (**self).is_busy()
    }

    fn listen(&mut self, on: bool) {
        (**self).listen(on);
    }

    fn poll_trace(&mut self) -> Option<Event<M::Trace>> {
        (**self).poll_trace()
    }

    fn addressee(&self, now: Time, command: &M::Command) -> Option<(PeerId, u64)> {
        (**self).addressee(now, command)
    }

    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        (**self).transport_in(frame)
    }
}

/// A command to a machine: the questions that a worker asks of every command.
pub trait SessionCommand: fmt::Debug + Send + Sized + 'static {
    /// The resource that a command may lend to its session.
    type Resource: SessionResource;

    /// The command that ends a session early.
    fn abort(session: SessionId) -> Self;

    /// The command that ends all sessions and tells the peers. The machine opens no session afterwards.
    fn shutdown() -> Self;

    /// The command after which the machine opens no session, lets the open ones end as they would have, and
    /// refuses requests of peers for which no session is open. `None` for a service whose peers ask for
    /// nothing but open sessions: the worker itself opens no session while it drains.
    fn drain() -> Option<Self> {
        None
    }

    /// Addresses the command to this session, in place of the session that was named before. False
    /// if the command is not for an open session, because it opens one or is for all of them.
    fn address(&mut self, session: SessionId) -> bool;

    /// How much the command lends to its session; `None` if the command lends nothing. An empty
    /// resource is `Some`: the session hands it back like any other.
    fn lends(&self) -> Option<Amounts>;

    /// The resource that the command lends, taken out of a command that no machine has seen.
    fn into_resource(self) -> Option<Self::Resource>;

    /// Takes the ready event out of the command. The machine sees the command only after the event
    /// has passed. Later commands to the session wait behind it, except an abort.
    fn take_ready(&mut self) -> Option<Box<dyn ReadyEvent>> {
        None
    }

    /// The command that the machine gets in place of a command whose ready event has failed.
    fn not_ready(self, error: ReadyEventError) -> Self {
        let _ = error;
        self
    }
}

/// The states of a session, in the order of progress.
///
/// Ranks that hold one request agree on the minimum of their states.
pub trait SessionStatus: Copy + Ord + fmt::Display + fmt::Debug + Send + Sync + 'static {
    /// The state of a session about which its machine has reported nothing yet.
    const OPENED: Self;
    /// The terminal state of a session whose worker has stopped.
    const FAILED: Self;

    /// True for states that never change again.
    fn is_terminal(self) -> bool;

    /// The state as a number, 0 to 126, the same in every process.
    fn to_u8(self) -> u8;

    /// The state with this number; `None` if no state has the number.
    fn from_u8(number: u8) -> Option<Self>;
}

/// Memory, or another resource, that a command lends to a session and that the session hands back
/// at its end.
pub trait SessionResource: fmt::Debug + Send + 'static {
    /// The names of the kinds that are counted apart, in the plural, for logs; at most
    /// [`MAX_KINDS`].
    const KINDS: &'static [&'static str];

    /// How much of each kind the resource is.
    fn amounts(&self) -> Amounts;
}

/// Most kinds of resource that one service may count apart.
pub const MAX_KINDS: usize = 4;

/// An amount of each kind of a [`SessionResource`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amounts(pub [usize; MAX_KINDS]);

impl Amounts {
    /// `amount` of the kind at position `kind`, and zero of the others. All zero if there is no
    /// such kind.
    pub fn of(kind: usize, amount: usize) -> Amounts {
        let mut amounts = Amounts::default();
        if let Some(place) = amounts.0.get_mut(kind) {
            *place = amount;
        }
        amounts
    }

    /// The amount of the kind at position `kind`; zero if there is no such kind.
    pub fn kind(&self, kind: usize) -> usize {
        self.0.get(kind).copied().unwrap_or(0)
    }

    /// True if there is nothing of any kind.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|amount| *amount == 0)
    }

    /// The sum of both, for each kind.
    pub fn plus(self, other: Amounts) -> Amounts {
        self.join(other, usize::saturating_add)
    }

    /// The amounts without those of `other`, at least zero for each kind.
    pub fn minus(self, other: Amounts) -> Amounts {
        self.join(other, usize::saturating_sub)
    }

    /// The smaller amount of each kind.
    pub fn least(self, other: Amounts) -> Amounts {
        self.join(other, usize::min)
    }

    fn join(mut self, other: Amounts, join: fn(usize, usize) -> usize) -> Amounts {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = join(*mine, theirs);
        }
        self
    }
}

/// The way by which handles submit commands: to a session of one worker, or to the sessions of all
/// ranks of an engine.
pub trait Submit<C> {
    /// Queues a command, [addressed](SessionCommand::address) to the session of this handle. `Err`
    /// gives the command back, and nothing of it has happened: the queue was full, or the command
    /// is not for an open session.
    fn submit(&mut self, command: C) -> Result<(), C>;
}

impl<C, S: Submit<C> + ?Sized> Submit<C> for Box<S> {
    fn submit(&mut self, command: C) -> Result<(), C> {
        (**self).submit(command)
    }
}

/// Everything that a worker tells a [`Machine`].
#[derive(Debug, PartialEq, Eq)]
pub enum Input<C> {
    /// A command of a handle, or of the worker on behalf of a handle.
    Command(C),
    /// A frame arrived. The worker has checked a frame that introduces its sender: the connection
    /// on which the frame came may speak for the transport in the frame (see
    /// [`Machine::transport_in`]).
    Frame {
        /// The transport connection on which the frame came.
        from: Origin,
        /// The bytes of the frame, at most [`MAX_FRAME`](crate::MAX_FRAME).
        frame: Bytes,
    },
    /// A post ended: no data operation touches the memory of the post any more.
    Posted {
        /// The post that ended.
        post: PostId,
        /// Whether all bytes are in place.
        result: Result<(), TransportError>,
    },
    /// The transport has opened the way to a peer, and tells its properties. Before this input,
    /// both directions are assumed to be usable.
    Connected {
        /// The peer that can be reached now.
        peer: PeerId,
        /// The directions that the transport recommends for this peer.
        directions: Directions,
        /// What ends the danger of the peer's last writes into this worker's memory.
        fence: WriteFence,
    },
    /// The transport could not open the way to a peer.
    ConnectFailed {
        /// The peer that cannot be reached.
        peer: PeerId,
        /// The error of the transport.
        error: TransportError,
    },
    /// The way to a peer has ended.
    PeerGone {
        /// The peer whose way has ended.
        peer: PeerId,
        /// Whether the peer is dead, or only the way is lost.
        end: WayEnd,
    },
    /// No write of the peer arrives any more. This is the answer to [`Output::Revoke`].
    Revoked {
        /// The peer that may not write any more.
        peer: PeerId,
    },
    /// The bootstrap server answered a lookup.
    Found {
        /// The lookup that is answered.
        lookup: LookupId,
        /// All ranks of the replica, in rank order.
        ranks: Vec<RankRecord>,
    },
    /// A lookup failed: the bootstrap server did not answer, or has no such ranks.
    LookupFailed {
        /// The lookup that failed.
        lookup: LookupId,
        /// The error of the bootstrap server or of its client.
        error: BootstrapError,
    },
    /// Time has passed: [`Machine::next_timeout`] is due.
    Timeout,
}

/// Everything that a [`Machine`] asks its worker to do. Outputs are carried out in order.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
pub enum Output<S, R, F> {
    /// Open the way to a peer. The answer is [`Input::Connected`] or [`Input::ConnectFailed`].
    Connect {
        /// The id by which the transport and the machine name the peer from now on.
        peer: PeerId,
        /// The one of the peer's transports by which the peer is to be reached.
        transport: TransportOffer,
    },
    /// Forget a peer: nothing will be sent to it or posted any more.
    Disconnect {
        /// The peer to forget.
        peer: PeerId,
    },
    /// Send a frame. The frame may be lost; failures need not be reported.
    Send {
        /// The peer to which the frame goes.
        peer: PeerId,
        /// The bytes of the frame, at most [`MAX_FRAME`](crate::MAX_FRAME).
        frame: Bytes,
    },
    /// Start a data operation. If the transport refuses the operation, the answer is an
    /// [`Input::Posted`] with the error.
    Post {
        /// The peer whose memory is written or read.
        peer: PeerId,
        /// The descriptors, the direction and the frame that follows the bytes.
        post: Post,
    },
    /// Tell the transport until when the peer allows writes into its memory.
    Permit {
        /// The peer that allows writes.
        peer: PeerId,
        /// The moment after which no write may begin, by this worker's clock.
        until: Time,
    },
    /// Take from the peer, for good, the right to write into this worker's memory. The answer is
    /// [`Input::Revoked`], or [`Input::PeerGone`] with [`WayEnd::Dead`].
    Revoke {
        /// The peer that may not write any more.
        peer: PeerId,
    },
    /// Ask for an early end of a post. [`Input::Posted`] still follows.
    Cancel {
        /// The post to end.
        post: PostId,
    },
    /// Ask a bootstrap server. The answer is [`Input::Found`] or [`Input::LookupFailed`].
    Lookup {
        /// The id of the lookup, which the answer repeats.
        lookup: LookupId,
        /// The address (`host:port`) of the bootstrap server.
        addr: String,
        /// The ranks that are asked for.
        query: RankQuery,
    },
    /// A session changed its state. The terminal state comes exactly once, and last.
    Status {
        /// The session whose state changed.
        session: SessionId,
        /// The new state of the session.
        poll: S,
        /// The error, if the session failed.
        failure: Option<Box<F>>,
    },
    /// A resource that a session was lent comes back: no data operation can touch it any more. Each resource
    /// that went in with a command comes out exactly once, after the final status.
    Release {
        /// The session to which the resource had been lent, even if the machine has forgotten the
        /// session, or never knew it.
        session: SessionId,
        /// The resource, as it was lent.
        resource: R,
    },
}
