//! Events: what happens in a machine, with the time, the session, the peer and the phase.
//!
//! An [`Event`] consists of a header that all services share and of a description in the words of
//! one service: a type that implements [`What`]. The KV cache has [`KvWhat`]; a machine that tells
//! no events has [`Infallible`](std::convert::Infallible).
//!
//! A machine tells events only while somebody [listens](crate::machine::Machine::listen). Without a
//! listener an event costs one branch, because its description is not even put together. Events
//! hold ids and counts but no lists, and a [`Log`] keeps a bounded number of them. So neither a
//! peer's frames nor a listener that fetches nothing makes events expensive.
//!
//! ```
//! use std::convert::Infallible;
//! use kv_core::trace::{KvWhat, Log, Message, Who};
//! use kv_core::{Attempt, PeerId, SessionId, Time};
//!
//! let mut log = Log::default();
//! let mut who = Who::default();
//! (who.session, who.peer, who.attempt) = (Some(SessionId(7)), Some(PeerId(2)), Some(Attempt(1)));
//! log.tell(Time::ZERO, who, || unreachable!("nobody listens"));
//! log.listen(true);
//! log.tell(Time::from_nanos(1_500_000_000), who, || KvWhat::Heard(Message::Registered));
//! let event = log.next().unwrap();
//! assert_eq!(
//!     event.to_string(),
//!     "1.500000 s, session 7, peer 2, attempt 1, rendezvous: hears that the registration has arrived"
//! );
//! # let silent: Log<Infallible> = Log::default();
//! # assert!(!silent.is_heard());
//! ```

mod dropped;
mod event;
mod kv;
mod log;
mod message;

pub use dropped::{Dropped, DroppedFrames};
pub use event::{Event, What, Who};
pub use kv::{Half, KvWhat, WayFault};
pub use log::{Log, MAX_EVENTS};
pub use message::Message;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Phase;
    use crate::id::{Attempt, PeerId, SessionId};
    use crate::time::Time;

    #[test]
    fn an_event_prints_only_the_ids_that_are_known() {
        let event =
            |who, missed| Event { at: Time::from_nanos(12_000_345_678), who, what: KvWhat::Closed, missed };
        assert_eq!(
            event(SessionId(3).into(), 0).to_string(),
            "12.000345 s, session 3: is closed, and nothing is left of it"
        );
        let who = (SessionId(3), PeerId(1), Attempt(9)).into();
        assert_eq!(
            event(who, 2).to_string(),
            "12.000345 s, session 3, peer 1, attempt 9: is closed, and nothing is left of it (2 events before this one are lost)"
        );
        let lost = Event { at: Time::ZERO, who: PeerId(4).into(), what: KvWhat::WayLost, missed: 0 };
        assert_eq!(lost.to_string(), "0.000000 s, peer 4: the way to it is lost");
        assert_eq!(lost.phase(), None);
        let said = KvWhat::Said(Message::Acquire { room: 5.into() });
        assert_eq!((said.phase(), said.name()), (Some(Phase::Rendezvous), "said"));
        assert_eq!(said.to_string(), "says that the pages of room 5 will be read");
    }
}
