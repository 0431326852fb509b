//! The interface between a simulated world and the service whose machines run in it.

use std::fmt::Debug;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::trace::Event;
use kv_core::{Op, PeerId, SessionId};

use crate::net::cost::Held;
use crate::net::drains::Ties;
use crate::net::fact::Fact;
use crate::net::flight::Piece;
use crate::net::lives::{LifeId, Slot};
use crate::net::memory::Memory;
use crate::net::world::World;
use crate::violation::Violation;

/// The inputs of the service's machines.
pub type InputOf<S> = Input<<<S as Service>::Machine as Machine>::Command>;
/// Why a session of the service failed.
pub type FailureOf<S> = <<S as Service>::Machine as Machine>::Failure;
/// The states of the service's sessions.
pub type StatusOf<S> = <<S as Service>::Machine as Machine>::Status;
/// What the sessions of the service own until they hand it back, such as pages.
pub type ResourceOf<S> = <<S as Service>::Machine as Machine>::Resource;
/// The trace events of the service's machines.
pub type EventOf<S> = Event<<<S as Service>::Machine as Machine>::Trace>;
/// The outputs of the service's machines.
pub type OutputOf<S> = Output<StatusOf<S>, ResourceOf<S>, FailureOf<S>>;

/// A service in a simulated world: its workload, its ledger, its invariants.
///
/// The network is the same for every service: hosts, connections, frames, reads and writes, clocks, crashes,
/// pauses and partitions. Methods with a body need not be implemented.
pub trait Service: Sized {
    /// The machine of one host.
    type Machine: Machine + 'static;
    /// The memory of one host.
    type Memory: Memory;
    /// What the service's schedulers and checks do at moments of their own.
    type Act: Debug;
    /// What a machine reports that it holds.
    type Gauges: Copy + Default + Debug + Send + 'static;
    /// Facts in the worlds of this service that no other service knows.
    type Own<'a>: Debug;
    /// A peer that speaks the service's protocol without a machine; `()` if there is none.
    type Stranger: Debug;

    /// Starts a new life in a slot that is down, by [`World::start`].
    fn boot(world: &mut World<Self>, slot: Slot);

    /// The moment of an act has come.
    fn act(world: &mut World<Self>, act: Self::Act);

    /// A session has changed its state.
    fn status(
        world: &mut World<Self>,
        life: LifeId,
        session: SessionId,
        to: StatusOf<Self>,
        why: Option<&FailureOf<Self>>,
    );

    /// A session has handed back what it owned.
    fn release(world: &mut World<Self>, life: LifeId, session: SessionId, resource: ResourceOf<Self>);

    /// What a machine holds.
    fn gauges(machine: &Self::Machine) -> Self::Gauges;

    /// The sizes of a machine's tables on which the cost of its steps may depend.
    fn held(gauges: &Self::Gauges) -> Held;

    /// Checks whether a fact breaks a promise, before the ledger shows its effect.
    fn observe(
        world: &mut World<Self>,
        fact: &Fact<'_, Self::Gauges, Self::Own<'_>>,
    ) -> Result<(), Violation>;

    /// A machine has reported a trace event, before its outputs are carried out.
    fn told(_world: &mut World<Self>, _life: LifeId, _event: &EventOf<Self>) {}

    /// A frame in one line, for the trace of the world.
    fn show(frame: &[u8]) -> String {
        format!("{frame:02x?}")
    }

    /// Enters into the calendar what is planned from the beginning, as soon as all hosts live.
    fn begin(_world: &mut World<Self>) {}

    /// The life that carries out an act; while the life is stopped, the act waits.
    fn place(_world: &World<Self>, _act: &Self::Act) -> Option<LifeId> {
        None
    }

    /// Nothing will happen any more by itself: true if something new was begun.
    fn go_on(_world: &mut World<Self>) -> bool {
        false
    }

    /// How many times the usual limit a healed world may take to come to rest.
    fn patience(_world: &World<Self>) -> u64 {
        1
    }

    /// True if, at rest, no machine has a reason to remember a peer whose last frames were lost.
    fn is_gentle(_world: &World<Self>) -> bool {
        true
    }

    /// True if hosts do not fail: one that drains is stopped once it is empty, and not before.
    fn spares_hosts(world: &World<Self>) -> bool {
        Self::is_gentle(world)
    }

    /// Faults stop for good: first of all.
    fn heal(_world: &mut World<Self>) {}

    /// Faults have stopped, and every host lives.
    fn healed(_world: &mut World<Self>) {}

    /// A scheduler shuts its host down.
    fn shut_down(_world: &mut World<Self>, _life: LifeId) {}

    /// A scheduler tells its host to drain.
    fn drain(_world: &mut World<Self>, _life: LifeId) {}

    /// A host that drains awaits no peer any more.
    fn left(_world: &mut World<Self>, _life: LifeId) {}

    /// What still ties a machine that drains to its peers.
    fn ties(_gauges: &Self::Gauges) -> Ties {
        Ties::default()
    }

    /// True if the clock of a host may jump forward.
    fn may_jump(_world: &World<Self>, _slot: Slot) -> bool {
        false
    }

    /// A machine has sent a frame.
    fn sent(_world: &mut World<Self>, _life: LifeId, _frame: &Bytes) {}

    /// A frame is on its way to a life.
    fn overheard(_world: &mut World<Self>, _from: Slot, _to: LifeId, _frame: &Bytes) {}

    /// A frame has arrived at a peer without a machine.
    fn tell_stranger(_world: &mut World<Self>, _from: LifeId, _stranger: LifeId, _frame: &Bytes) {}

    /// A frame is about to be given to a machine.
    fn arrives(_world: &mut World<Self>, _from: LifeId, _at: LifeId, _frame: &Bytes) {}

    /// Gives noise the beginning of a frame.
    fn disguise(_noise: &mut [u8]) {}

    /// Lets a planted bug change the outputs of a machine.
    fn spoil_outputs(
        _world: &mut World<Self>,
        _life: LifeId,
        outputs: Vec<OutputOf<Self>>,
    ) -> Vec<OutputOf<Self>> {
        outputs
    }

    /// Lets a planted bug change the trace events of a machine.
    fn spoil_events(
        _world: &mut World<Self>,
        _life: LifeId,
        events: Vec<EventOf<Self>>,
    ) -> Vec<EventOf<Self>> {
        events
    }

    /// Lets a planted bug change what a machine reports that it holds.
    fn spoil_gauges(_world: &World<Self>, _gauges: &mut Self::Gauges) {}

    /// Lets a planted bug change a frame from one life to another, which is this peer of the first, as it is sent;
    /// `None` loses the frame.
    fn spoil_sent(
        _world: &mut World<Self>,
        (_from, _to): (LifeId, LifeId),
        _peer: PeerId,
        frame: Bytes,
    ) -> Option<Bytes> {
        Some(frame)
    }

    /// Lets a planted bug change a frame as it arrives, at the life for which it was sent or at another;
    /// `None` loses the frame.
    fn spoil_arrival(
        _world: &mut World<Self>,
        (_from, _to): (LifeId, LifeId),
        _at: LifeId,
        frame: Bytes,
    ) -> Option<Bytes> {
        Some(frame)
    }

    /// Lets a planted bug change the bytes that a post of one life moves to or from another.
    fn spoil_pieces(
        _world: &World<Self>,
        (_life, _target): (LifeId, LifeId),
        _op: Op,
        _pieces: &mut [Piece],
    ) {
    }

    /// A planted bug loses a piece of a post.
    fn loses(_world: &World<Self>, _life: LifeId, _piece: &Piece) -> bool {
        false
    }

    /// Lets a planted bug keep the timers of a machine from ringing.
    fn is_deaf(_world: &World<Self>, _life: LifeId) -> bool {
        false
    }
}
