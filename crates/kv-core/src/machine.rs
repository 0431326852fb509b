//! What a worker drives: the machine of one service, and the words that all services share.
//!
//! A service (a KV cache, an encoder cache, a foreign dialect) is a [`Machine`] and the handles on top of
//! its worker. The transport's half of [`Input`] and [`Output`] is the same for every service; commands,
//! states and what goes into a session and comes back are types of the machine.

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

/// The sans-IO machine of one service on one worker.
///
/// # Contract
///
/// - **Inputs**: [`handle`](Machine::handle), one at a time, with the time now. Times never go back.
/// - **Outputs**: after every input, [`poll_output`](Machine::poll_output) is called until it returns
///   `None`, and each output is carried out in order, before the next input.
/// - **Time**: [`Input::Timeout`] is due at [`next_timeout`](Machine::next_timeout). Late is allowed, early
///   does nothing. The machine reads no clock of its own.
/// - **Ends**: every session that a command opened gets exactly one terminal [`Output::Status`], as its
///   last status; every resource that went in with a command comes out in exactly one
///   [`Output::Release`], once no wire can touch it.
///
/// The same machine runs under a worker's thread over real transports, and under a simulator in virtual
/// time.
pub trait Machine: Send {
    /// What handles ask of the machine.
    type Command: SessionCommand<Resource = Self::Resource>;
    /// The states of a session.
    type Status: SessionStatus;
    /// What is lent to a session and comes back.
    type Resource: SessionResource;
    /// Why a session failed.
    type Failure: Error + Clone + Send + Sync + 'static;
    /// One line of the report on what resources in quarantine wait for.
    type Quarantine: Clone + Send + 'static;
    /// What whoever listens is told of what happens in the machine; [`Infallible`](std::convert::Infallible)
    /// if it tells nothing.
    type Trace: What;

    /// Takes one input; the outputs are to be drained afterwards.
    fn handle(&mut self, now: Time, input: Input<Self::Command>);

    /// The next output; `None` when drained.
    fn poll_output(&mut self) -> Option<Output<Self::Status, Self::Resource, Self::Failure>>;

    /// When [`Input::Timeout`] is due; `None` if nothing waits for time to pass.
    fn next_timeout(&self) -> Option<Time>;

    /// How much of what it holds, in the first of its [kinds](SessionResource::KINDS), is complete and
    /// pinned for readers under a lease.
    fn leased(&self) -> usize {
        0
    }

    /// What the resources of ended sessions wait for.
    fn quarantine(&self) -> Vec<Self::Quarantine> {
        Vec::new()
    }

    /// Begins to keep events for [`poll_trace`](Machine::poll_trace), from now on, or stops. A machine begins
    /// with nobody listening, and then spends one branch on an event, and no memory.
    fn listen(&mut self, on: bool) {
        let _ = on;
    }

    /// The next event; `None` when drained, and while nobody listens. Events are fetched after any input, or
    /// never: a machine keeps a bounded number of them, and says [how many](Event::missed) it has lost. A
    /// [`Log`](crate::trace::Log) does so.
    fn poll_trace(&mut self) -> Option<Event<Self::Trace>> {
        None
    }

    /// The transport of a peer in whose name a frame speaks, if the frame introduces its sender. The worker
    /// drops the frame if the connection on which it came [may not speak](crate::Transport::may_speak_by) for
    /// that transport.
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

    fn listen(&mut self, on: bool) {
        (**self).listen(on);
    }

    fn poll_trace(&mut self) -> Option<Event<M::Trace>> {
        (**self).poll_trace()
    }

    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        (**self).transport_in(frame)
    }
}

/// A command to a machine, as far as a worker must understand it.
pub trait SessionCommand: fmt::Debug + Send + Sized + 'static {
    /// What it may lend to its session.
    type Resource: SessionResource;

    /// The command that ends a session early.
    fn abort(session: SessionId) -> Self;

    /// The command that ends all sessions and tells the peers; the machine takes no new ones.
    fn shutdown() -> Self;

    /// Addresses the command to this session, whatever session was named before. False if it is no command
    /// to an open session: it opens one, or concerns all of them.
    fn address(&mut self, session: SessionId) -> bool;

    /// How much the command lends to its session; `None` if it lends nothing. A resource of nothing is
    /// `Some`: it comes back like any other.
    fn lends(&self) -> Option<Amounts>;

    /// What the command lends, taken out of a command that no machine has seen.
    fn into_resource(self) -> Option<Self::Resource>;

    /// Takes the event out of the command that must have passed before the machine sees it. What the
    /// session is told afterwards waits behind it, except an abort.
    fn take_ready(&mut self) -> Option<Box<dyn ReadyEvent>> {
        None
    }

    /// What the machine is told in place of a command whose event will never pass.
    fn not_ready(self, error: ReadyEventError) -> Self {
        let _ = error;
        self
    }
}

/// The states of a session, in the order of progress.
///
/// Ranks that hold one request agree on the minimum of their states.
pub trait SessionStatus: Copy + Ord + fmt::Display + fmt::Debug + Send + Sync + 'static {
    /// The state of a session that its machine has said nothing about.
    const OPENED: Self;
    /// The terminal state of a session whose worker has stopped.
    const FAILED: Self;

    /// True for states that never change again.
    fn is_terminal(self) -> bool;

    /// The state as a number, 0 to 126.
    fn to_u8(self) -> u8;

    /// The state with this number.
    fn from_u8(number: u8) -> Option<Self>;
}

/// Memory, or whatever else a session is lent and hands back at its end.
pub trait SessionResource: fmt::Debug + Send + 'static {
    /// Names of the kinds that are counted apart, in the plural, at most [`MAX_KINDS`]: what a log says.
    const KINDS: &'static [&'static str];

    /// How much of each kind it is.
    fn amounts(&self) -> Amounts;
}

/// Most kinds of resource that a service counts apart.
pub const MAX_KINDS: usize = 4;

/// How much of each kind of [`SessionResource`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amounts(pub [usize; MAX_KINDS]);

impl Amounts {
    /// So much of the n-th kind, and nothing of the others. Nothing at all if there is no such kind.
    pub fn of(kind: usize, amount: usize) -> Amounts {
        let mut amounts = Amounts::default();
        if let Some(place) = amounts.0.get_mut(kind) {
            *place = amount;
        }
        amounts
    }

    /// How much of the n-th kind.
    pub fn kind(&self, kind: usize) -> usize {
        self.0.get(kind).copied().unwrap_or(0)
    }

    /// True if there is nothing of any kind.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|amount| *amount == 0)
    }

    /// Both together.
    pub fn plus(self, other: Amounts) -> Amounts {
        self.join(other, usize::saturating_add)
    }

    /// What is left without the other, never less than nothing.
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

/// The way by which handles submit commands: to the session of one worker, or to those of all ranks of an
/// engine.
pub trait Submit<C> {
    /// Gives a command to whoever carries it out, [addressed](SessionCommand::address) to the session that
    /// this handle stands for. A full queue gives the command back, and so does every handle a command that
    /// is not for an open session; nothing of it has happened then.
    fn submit(&mut self, command: C) -> Result<(), C>;
}

/// Everything that a [`Machine`] is told.
#[derive(Debug, PartialEq, Eq)]
pub enum Input<C> {
    /// A handle, or the worker on its behalf, wants something.
    Command(C),
    /// A frame arrived. One that introduces its sender only if the connection on which it came may speak for
    /// the transport in it (see [`Machine::transport_in`]).
    Frame {
        /// The transport connection on which it came.
        from: Origin,
        /// The frame.
        frame: Bytes,
    },
    /// A post ended; its memory is quiet.
    Posted {
        /// Which.
        post: PostId,
        /// How it went.
        result: Result<(), TransportError>,
    },
    /// The transport has opened the way to a peer, and says what it is good for. Until it does, both
    /// directions are taken to be.
    Connected {
        /// Which.
        peer: PeerId,
        /// What the way is good for.
        directions: Directions,
        /// What ends the danger of the peer's last writes.
        fence: WriteFence,
    },
    /// The transport could not open the way to a peer.
    ConnectFailed {
        /// Which.
        peer: PeerId,
        /// Why.
        error: TransportError,
    },
    /// The way to a peer has ended.
    PeerGone {
        /// Which.
        peer: PeerId,
        /// Whose end it is.
        end: WayEnd,
    },
    /// No write of the peer arrives any more: answers [`Output::Revoke`].
    Revoked {
        /// Which.
        peer: PeerId,
    },
    /// The bootstrap server answered.
    Found {
        /// The question.
        lookup: LookupId,
        /// All ranks of the replica, in rank order.
        ranks: Vec<RankRecord>,
    },
    /// The bootstrap server did not answer, or has no such ranks.
    LookupFailed {
        /// The question.
        lookup: LookupId,
        /// Why.
        error: BootstrapError,
    },
    /// Time has passed: [`Machine::next_timeout`] is due.
    Timeout,
}

/// Everything that a [`Machine`] wants done. Carried out in order.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
pub enum Output<S, R, F> {
    /// Open the way to a peer. On failure: [`Input::ConnectFailed`].
    Connect {
        /// The id under which the transport shall know it.
        peer: PeerId,
        /// Which of its transports it is to be reached by.
        transport: TransportOffer,
    },
    /// Forget a peer.
    Disconnect {
        /// Which.
        peer: PeerId,
    },
    /// Send a frame. It may be lost: failures need not be reported.
    Send {
        /// To whom.
        peer: PeerId,
        /// The frame.
        frame: Bytes,
    },
    /// Start a data operation. If the transport refuses it, that is an [`Input::Posted`] with the
    /// error.
    Post {
        /// To or from whom.
        peer: PeerId,
        /// The operation.
        post: Post,
    },
    /// The peer allows writes into its memory until then.
    Permit {
        /// Which.
        peer: PeerId,
        /// Until when.
        until: Time,
    },
    /// Take from the peer, for good, the right to write into this worker's memory. Answered by
    /// [`Input::Revoked`], or by [`Input::PeerGone`] with [`WayEnd::Dead`].
    Revoke {
        /// Which.
        peer: PeerId,
    },
    /// Ask for an early end of a post.
    Cancel {
        /// Which.
        post: PostId,
    },
    /// Ask a bootstrap server. Answered by [`Input::Found`] or [`Input::LookupFailed`].
    Lookup {
        /// The question.
        lookup: LookupId,
        /// The server.
        addr: String,
        /// What is asked.
        query: RankQuery,
    },
    /// A session changed its state. The terminal one comes exactly once and last.
    Status {
        /// Which.
        session: SessionId,
        /// The new state.
        poll: S,
        /// Why, if it failed.
        failure: Option<Box<F>>,
    },
    /// What a session was lent comes back: no wire can touch it any more. Each resource that went in with a
    /// command comes out exactly once, after the final status.
    Release {
        /// Which session it had been lent to. It may be one that the machine does not know (any more).
        session: SessionId,
        /// The resource.
        resource: R,
    },
}
