//! What a world needs to know of the service whose machines run in it.

use std::fmt::Debug;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::trace::Event;
use kv_core::{Op, SessionId};

use crate::net::cost::Held;
use crate::net::fact::Fact;
use crate::net::flight::Piece;
use crate::net::lives::{LifeId, Slot};
use crate::net::memory::Memory;
use crate::net::world::World;
use crate::violation::Violation;

/// What a machine of the service is told.
pub type InputOf<S> = Input<<<S as Service>::Machine as Machine>::Command>;
/// Why a session of the service failed.
pub type FailureOf<S> = <<S as Service>::Machine as Machine>::Failure;
/// The states of its sessions.
pub type StatusOf<S> = <<S as Service>::Machine as Machine>::Status;
/// What its sessions are lent.
pub type ResourceOf<S> = <<S as Service>::Machine as Machine>::Resource;
/// What a machine of the service tells of what happens in it.
pub type EventOf<S> = Event<<<S as Service>::Machine as Machine>::Trace>;
/// What a machine of the service wants.
pub type OutputOf<S> = Output<StatusOf<S>, ResourceOf<S>, FailureOf<S>>;

/// A service in a simulated world: its workload, its ledger, its invariants.
///
/// The network is not its business: hosts, connections, frames, reads and writes, clocks, crashes, pauses and
/// partitions are the same for every service. Whatever has a body here may stay as it is.
pub trait Service: Sized {
    /// The machine of one host.
    type Machine: Machine + 'static;
    /// The memory of one host.
    type Memory: Memory;
    /// What its schedulers and oracles do at moments of their own.
    type Act: Debug;
    /// What a machine says that it holds.
    type Gauges: Copy + Default + Debug + Send + 'static;
    /// What happens in its worlds that no other service knows.
    type Own<'a>: Debug;
    /// Whoever speaks its protocol without a machine; `()` if nobody does.
    type Stranger: Debug;

    /// Starts a new life in a slot that is down, with [`World::start`].
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

    /// What a session was lent has come back.
    fn release(world: &mut World<Self>, life: LifeId, session: SessionId, resource: ResourceOf<Self>);

    /// What a machine holds.
    fn gauges(machine: &Self::Machine) -> Self::Gauges;

    /// The same, as far as the cost of its steps may depend on it.
    fn held(gauges: &Self::Gauges) -> Held;

    /// Looks whether something that has happened breaks a promise, before the ledger shows its effect.
    fn observe(
        world: &mut World<Self>,
        fact: &Fact<'_, Self::Gauges, Self::Own<'_>>,
    ) -> Result<(), Violation>;

    /// A machine has told what happens in it: before what it wants is carried out.
    fn told(_world: &mut World<Self>, _life: LifeId, _event: &EventOf<Self>) {}

    /// Says in one line what a frame says.
    fn show(frame: &[u8]) -> String {
        format!("{frame:02x?}")
    }

    /// Enters into the calendar what is known from the beginning on, as soon as all hosts live.
    fn begin(_world: &mut World<Self>) {}

    /// The life on which an act takes place: while that is stopped, the act waits.
    fn place(_world: &World<Self>, _act: &Self::Act) -> Option<LifeId> {
        None
    }

    /// Nothing will happen any more by itself: true if something new was begun.
    fn go_on(_world: &mut World<Self>) -> bool {
        false
    }

    /// How often a healed world may need the time that it needs to come to rest.
    fn patience(_world: &World<Self>) -> u64 {
        1
    }

    /// True if at rest no machine has a reason to remember a peer that has lost its last words.
    fn is_gentle(_world: &World<Self>) -> bool {
        true
    }

    /// Faults stop for good: first of all.
    fn heal(_world: &mut World<Self>) {}

    /// Faults have stopped, and everybody lives.
    fn healed(_world: &mut World<Self>) {}

    /// A scheduler shuts its host down.
    fn shut_down(_world: &mut World<Self>, _life: LifeId) {}

    /// True if the clock of a host may go on ahead of what it showed.
    fn may_jump(_world: &World<Self>, _slot: Slot) -> bool {
        false
    }

    /// A machine has sent a frame.
    fn sent(_world: &mut World<Self>, _life: LifeId, _frame: &Bytes) {}

    /// A frame goes over the wire, to a life.
    fn overheard(_world: &mut World<Self>, _from: Slot, _to: LifeId, _frame: &Bytes) {}

    /// A frame has come to somebody without a machine.
    fn tell_stranger(_world: &mut World<Self>, _from: LifeId, _stranger: LifeId, _frame: &Bytes) {}

    /// A machine is about to be told a frame.
    fn arrives(_world: &mut World<Self>, _from: LifeId, _at: LifeId, _frame: &Bytes) {}

    /// Gives noise the beginning of a frame.
    fn disguise(_noise: &mut [u8]) {}

    /// A planted bug changes what a machine wants.
    fn spoil_outputs(
        _world: &mut World<Self>,
        _life: LifeId,
        outputs: Vec<OutputOf<Self>>,
    ) -> Vec<OutputOf<Self>> {
        outputs
    }

    /// A planted bug changes what a machine tells.
    fn spoil_events(
        _world: &mut World<Self>,
        _life: LifeId,
        events: Vec<EventOf<Self>>,
    ) -> Vec<EventOf<Self>> {
        events
    }

    /// A planted bug changes what a machine says that it holds.
    fn spoil_gauges(_world: &World<Self>, _gauges: &mut Self::Gauges) {}

    /// A planted bug changes a frame from one life to another on its way out; `None` to lose it.
    fn spoil_sent(_world: &mut World<Self>, (_from, _to): (LifeId, LifeId), frame: Bytes) -> Option<Bytes> {
        Some(frame)
    }

    /// A planted bug changes a frame from one life for another that arrives at a third, or at that other;
    /// `None` if it does not arrive.
    fn spoil_arrival(
        _world: &mut World<Self>,
        (_from, _to): (LifeId, LifeId),
        _at: LifeId,
        frame: Bytes,
    ) -> Option<Bytes> {
        Some(frame)
    }

    /// A planted bug changes what a post of one life moves, from or to another.
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

    /// A planted bug keeps a machine from hearing its timers.
    fn is_deaf(_world: &World<Self>, _life: LifeId) -> bool {
        false
    }
}
