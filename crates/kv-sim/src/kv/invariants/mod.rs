//! The five promises of this library, as checks of every step.
//!
//! | invariant | promise it serves |
//! |---|---|
//! | [`success_means_right_bytes`] | 1: success means the bytes are right |
//! | [`each_sends_its_share`] | 1: … and no byte is sent twice |
//! | [`only_final_bytes_move`] | 1: … and only content that its sender has announced as final |
//! | [`pages_quiet_when_released`] | 2: pages come back only when no data operation can touch them |
//! | [`pages_come_back`] | 2: … and they do come back, each page exactly once |
//! | [`pages_come_back_with_the_lease`] | 2: … pages that wait for readers no later than the lease allows |
//! | [`ends_once_in_time`] | 3: every session ends, exactly once, inside its deadline, with a reason |
//! | [`reason_is_true`] | 3: … that names the cause |
//! | [`drains_lose_nothing`] | 3: a worker that drains ends its sessions as ever, refuses others at once, and is empty in time |
//! | [`ends_are_told`] | 3: how one half of a request ends is told to the other half, not left to its deadline |
//! | [`incarnation_fence`] | 4: a restarted peer is a different peer |
//! | [`bounded`] | 5: no panic, no unbounded table, no spinning |
//! | [`idle_is_quiet`] | 5: when there is nothing to do, nothing is done, and nothing is kept |
//! | [`events_tell_the_story`] | 3, 5: the trace reports every end and every post |
//! | [`requests_are_served`] | all: once faults stop, and where frames are merely lost, requests succeed |
//!
//! Invariants judge facts that the simulator sees from outside of the machines, at a cost that grows only
//! with what has changed. The trace of the machines is judged by [`events_tell_the_story`] alone, which
//! compares it with these facts.

mod bounded;
mod drains_lose_nothing;
mod each_sends_its_share;
mod ends_are_told;
mod ends_once_in_time;
mod events_tell_the_story;
mod idle_is_quiet;
mod incarnation_fence;
mod only_final_bytes_move;
mod pages_come_back;
mod pages_come_back_with_the_lease;
mod pages_quiet_when_released;
mod reason_is_true;
mod requests_are_served;
mod shares;
mod success_means_right_bytes;

use crate::kv::fact::{Fact, View};
use crate::kv::invariant::Invariant;
use crate::violation::Violation;

/// All invariants of one world, each with its name.
#[derive(Clone)]
pub(crate) struct Invariants(Vec<(&'static str, Box<dyn Invariant>)>);

macro_rules! invariants {
    ($($name:ident::$type:ident,)*) => {
        impl Invariants {
            pub(crate) fn all() -> Invariants {
                Invariants(vec![$((stringify!($name), Box::new($name::$type::default()) as Box<dyn Invariant>)),*])
            }
        }
    };
}

invariants! {
    success_means_right_bytes::SuccessMeansRightBytes,
    each_sends_its_share::EachSendsItsShare,
    only_final_bytes_move::OnlyFinalBytesMove,
    pages_quiet_when_released::PagesQuietWhenReleased,
    pages_come_back::PagesComeBack,
    pages_come_back_with_the_lease::PagesComeBackWithTheLease,
    drains_lose_nothing::DrainsLoseNothing,
    ends_once_in_time::EndsOnceInTime,
    ends_are_told::EndsAreTold,
    incarnation_fence::IncarnationFence,
    bounded::Bounded,
    idle_is_quiet::IdleIsQuiet,
    reason_is_true::ReasonIsTrue,
    requests_are_served::RequestsAreServed,
    events_tell_the_story::EventsTellTheStory,
}

impl Invariants {
    /// For a world without sessions, in which there is nothing to promise.
    pub(crate) fn none() -> Invariants {
        Invariants(Vec::new())
    }

    /// The invariant of this name without the others, for a search for a planted bug.
    pub(crate) fn only(wanted: &str) -> Invariants {
        let mut all = Invariants::all();
        all.0.retain(|(name, _)| *name == wanted);
        all
    }

    pub(crate) fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Result<(), Violation> {
        for (name, invariant) in &mut self.0 {
            invariant.observe(view, fact).map_err(|what| Violation { invariant: name, what })?;
        }
        Ok(())
    }
}
