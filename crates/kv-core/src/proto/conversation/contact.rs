//! The state of a conversation with a peer: the way to the peer, what both sides have told each
//! other, and whether the peer is heard. These three are independent of each other: a peer may
//! greet this worker while this side's way to the peer is lost, or may fall silent before the two
//! have met.
//!
//! | way | from | when |
//! |---|---|---|
//! | `Open` | – | the way is open, or is being opened for the first time |
//! | `Lost` | `Open` | this side's way is lost, and is being opened again |
//! | `Lost` | – | the peer is known only to be told again of failures |
//! | `Open` | `Lost` | the way is open again |
//!
//! A peer that no session on this worker has looked for may have a lost way, too.
//!
//! | terms | from | when |
//! |---|---|---|
//! | `Unmet` | – | neither side has accepted or refused a hello of the other side |
//! | `Met` | `Unmet`, `Met` | the peer's hello was answered, with a welcome or a refusal, or the peer has answered ours in this way; the last answer of each side counts; `agreed` once the peer has answered ours, until it names another conversation |
//!
//! | voice | from | when |
//! |---|---|---|
//! | `Heard` | – | the peer is known |
//! | `GivenUp` | `Heard` | nothing was heard for so long that the peer's sessions were failed, or another incarnation answers for the peer |
//! | `Heard` | `GivenUp` | the peer is heard again |

use std::time::Duration;

use crate::error::Cause;
use crate::time::Time;
use crate::wire::ConversationId;

/// The state of a conversation.
#[derive(Debug, Clone)]
pub(super) struct Contact {
    /// True once a session on this worker has looked for the peer. Otherwise the peer is known by its hello only.
    is_wanted: bool,
    way: Way,
    terms: Terms,
    voice: Voice,
    /// The hello that was sent to the peer and not answered yet.
    hello: Option<HelloSaid>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Open,
    Lost,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Terms {
    Unmet,
    Met {
        /// The id that the peer wants in our frames.
        conversation: ConversationId,
        /// True if the peer does not fit, and was told so.
        refused: bool,
        /// True once the peer has answered a hello of ours in this conversation. Until then the peer may still use an
        /// earlier one: the answer to the peer's own hello may have been lost.
        agreed: bool,
        /// Why the peer refuses this worker; its receivers on this worker fail with this cause.
        refuses: Option<Cause>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Voice {
    Heard,
    GivenUp,
}

/// A hello that was sent and not answered yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HelloSaid {
    pub(super) nonce: u64,
    pub(super) first_said: Time,
    pub(super) times: u32,
    /// True once the way has been blamed for the silence.
    blamed: bool,
}

/// What happens to a conversation.
#[derive(Debug, Clone)]
pub(super) enum Event {
    /// A session on this worker looks for the peer.
    Wanted,
    /// This side's way to the peer is lost, or is open again.
    WayLost,
    WayOpened,
    /// This worker answers the peer's hello: from now on this worker's frames carry this id.
    HelloAnswered {
        conversation: ConversationId,
        refused: bool,
    },
    /// The peer has answered a hello of ours: with a welcome, or with a refusal and its cause.
    Welcomed {
        conversation: ConversationId,
    },
    Refused {
        conversation: ConversationId,
        cause: Cause,
    },
    /// This worker does not repeat its hello any more.
    HelloOver,
    /// The peer was heard, or was silent for too long.
    Heard,
    Silent,
}

impl Contact {
    /// The state of a conversation in which nothing was said yet.
    pub(super) fn new() -> Contact {
        Contact { is_wanted: false, way: Way::Open, terms: Terms::Unmet, voice: Voice::Heard, hello: None }
    }

    /// Applies the tables at the top.
    pub(super) fn turn(&mut self, event: Event) {
        match event {
            Event::Wanted => self.is_wanted = true,
            Event::WayLost => self.way = Way::Lost,
            Event::WayOpened => self.way = Way::Open,
            Event::HelloAnswered { conversation, refused } => {
                let agreed = self.has_agreed() && self.conversation() == Some(conversation);
                self.terms = Terms::Met { conversation, refused, agreed, refuses: self.refuses().cloned() };
                self.voice = Voice::Heard;
            }
            Event::Welcomed { conversation } => {
                let refused = self.is_refused();
                self.terms = Terms::Met { conversation, refused, agreed: true, refuses: None };
            }
            Event::Refused { conversation, cause } => {
                let refused = self.is_refused();
                self.terms = Terms::Met { conversation, refused, agreed: true, refuses: Some(cause) };
            }
            Event::HelloOver => self.hello = None,
            Event::Heard => self.voice = Voice::Heard,
            Event::Silent => self.voice = Voice::GivenUp,
        }
    }

    /// Notes that a hello is sent. A repetition has the same nonce, so that an answer to any
    /// repetition is accepted.
    pub(super) fn greet(&mut self, nonce: u64, now: Time) -> HelloSaid {
        let said = self.hello.get_or_insert(HelloSaid { nonce, first_said: now, times: 0, blamed: false });
        said.times += 1;
        *said
    }

    /// This worker received nothing for `deaf`: that time does not count as silence of the peer.
    pub(super) fn excuse(&mut self, deaf: Duration, now: Time) {
        if let Some(said) = &mut self.hello {
            said.first_said = (said.first_said + deaf).min(now);
        }
    }

    /// The time from which an answer to a hello that was said before is awaited.
    pub(super) fn date_hello(&mut self, now: Time) {
        if let Some(said) = &mut self.hello {
            said.first_said = now;
        }
    }

    /// Notes that the way is blamed for the silence after the hello. True for the first time, and if there is a hello.
    pub(super) fn blame_hello(&mut self) -> bool {
        self.hello.as_mut().is_some_and(|said| !std::mem::replace(&mut said.blamed, true))
    }

    /// The hello that is not answered yet; `None` if there is none.
    pub(super) fn hello(&self) -> Option<HelloSaid> {
        self.hello
    }

    /// The id that the peer wants in our frames; `None` before the two have met.
    pub(super) fn conversation(&self) -> Option<ConversationId> {
        match self.terms {
            Terms::Met { conversation, .. } => Some(conversation),
            Terms::Unmet => None,
        }
    }

    /// The id that the peer wants in our frames; `None` also while the way to the peer is lost.
    pub(super) fn open_conversation(&self) -> Option<ConversationId> {
        self.conversation().filter(|_| !self.is_lost())
    }

    /// True if the peer has been met, fits, and is in touch.
    pub(super) fn is_good(&self) -> bool {
        matches!(self.terms, Terms::Met { refused: false, .. }) && !self.is_out_of_touch()
    }

    /// True if the peer has answered a hello of ours in this conversation: both sides go on in the same one.
    pub(super) fn has_agreed(&self) -> bool {
        matches!(self.terms, Terms::Met { agreed: true, .. })
    }

    /// True if a session on this worker has looked for the peer.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// True if this side's way to the peer is lost, and is being opened again.
    pub(super) fn is_lost(&self) -> bool {
        self.way == Way::Lost
    }

    /// True if nothing was heard for so long that the peer's sessions were failed.
    pub(super) fn is_given_up(&self) -> bool {
        self.voice == Voice::GivenUp
    }

    /// True if the way to the peer is lost, or if the peer was given up.
    pub(super) fn is_out_of_touch(&self) -> bool {
        self.is_lost() || self.is_given_up()
    }

    /// True if the peer was told that it does not fit.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.terms, Terms::Met { refused: true, .. })
    }

    /// Why the peer refuses this worker; `None` if it does not.
    pub(super) fn refuses(&self) -> Option<&Cause> {
        match &self.terms {
            Terms::Met { refuses, .. } => refuses.as_ref(),
            Terms::Unmet => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(sequence: u32) -> ConversationId {
        ConversationId::new(sequence, 7)
    }

    fn after(events: &[Event]) -> Contact {
        let mut contact = Contact::new();
        events.iter().for_each(|event| contact.turn(event.clone()));
        contact
    }

    #[test]
    fn a_lost_way_is_lost_until_it_is_open_again_whoever_wants_it() {
        use Event::{Wanted, WayLost, WayOpened};
        let rows: [(&[Event], bool, bool); 5] = [
            (&[], false, false),
            (&[WayLost], false, true),
            (&[Wanted, WayLost], true, true),
            (&[WayLost, Wanted], true, true),
            (&[WayLost, WayOpened], false, false),
        ];
        for (events, is_wanted, is_lost) in rows {
            let contact = after(events);
            assert_eq!((contact.is_wanted(), contact.is_lost()), (is_wanted, is_lost), "{events:?}");
        }
    }

    #[test]
    fn both_sides_agree_on_a_conversation_once_a_hello_of_ours_is_answered_in_it() {
        let heard = |of| Event::HelloAnswered { conversation: conversation(of), refused: false };
        let welcomed = |of| Event::Welcomed { conversation: conversation(of) };
        let refused = |of| Event::Refused { conversation: conversation(of), cause: Cause::Protocol("unfit") };
        let rows: [(&[Event], bool); 7] = [
            (&[], false),
            (&[heard(1)], false),
            (&[welcomed(1)], true),
            (&[refused(1)], true),
            (&[heard(1), welcomed(2)], true),
            (&[welcomed(1), heard(1)], true),
            (&[welcomed(1), heard(2)], false),
        ];
        for (events, agreed) in rows {
            assert_eq!(after(events).has_agreed(), agreed, "{events:?}");
        }
    }

    #[test]
    fn the_last_message_about_a_peer_decides_its_state() {
        let fits = Event::HelloAnswered { conversation: conversation(1), refused: false };
        let unfit = Event::HelloAnswered { conversation: conversation(1), refused: true };
        let welcomed = Event::Welcomed { conversation: conversation(2) };
        let cause = || Cause::Protocol("unfit");
        let refused = Event::Refused { conversation: conversation(2), cause: cause() };
        type Row<'a> = (&'a [&'a Event], Option<ConversationId>, bool, bool, bool);
        let rows: [Row; 9] = [
            (&[], None, false, false, false),
            (&[&fits], Some(conversation(1)), false, false, true),
            (&[&unfit], Some(conversation(1)), true, false, false),
            (&[&welcomed], Some(conversation(2)), false, false, true),
            (&[&refused], Some(conversation(2)), false, true, true),
            (&[&unfit, &refused], Some(conversation(2)), true, true, false),
            (&[&refused, &unfit, &fits], Some(conversation(1)), false, true, true),
            (&[&refused, &welcomed], Some(conversation(2)), false, false, true),
            (&[&unfit, &welcomed], Some(conversation(2)), true, false, false),
        ];
        for (events, theirs, is_refused, refuses, good) in rows {
            let events: Vec<Event> = events.iter().map(|&event| event.clone()).collect();
            let contact = after(&events);
            let found =
                (contact.conversation(), contact.is_refused(), contact.refuses().cloned(), contact.is_good());
            assert_eq!(found, (theirs, is_refused, refuses.then(cause), good), "{events:?}");
        }
    }

    #[test]
    fn a_peer_that_is_given_up_or_has_no_way_is_out_of_touch() {
        let met = Event::HelloAnswered { conversation: conversation(1), refused: false };
        let mut contact = after(&[Event::Wanted, met.clone(), Event::Silent, Event::WayLost]);
        assert!(contact.is_given_up() && contact.is_lost() && contact.open_conversation().is_none());
        contact.turn(met);
        assert!(!contact.is_given_up(), "its hello is a word of it");
        assert!(contact.is_out_of_touch() && !contact.is_good(), "and opens no way of ours");
        contact.turn(Event::WayOpened);
        assert!(contact.is_good() && contact.open_conversation() == Some(conversation(1)));
        contact.turn(Event::Silent);
        assert!(!contact.is_good());
        contact.turn(Event::Heard);
        assert!(contact.is_good());
    }

    #[test]
    fn a_repeated_hello_keeps_its_nonce_and_its_first_time() {
        let mut contact = Contact::new();
        let [early, late] = [1, 2].map(Time::from_nanos);
        contact.greet(7, early);
        assert_eq!(
            contact.greet(8, late),
            HelloSaid { nonce: 7, first_said: early, times: 2, blamed: false }
        );
        assert_eq!([contact.blame_hello(), contact.blame_hello()], [true, false], "once for each hello");
        contact.turn(Event::HelloOver);
        assert_eq!((contact.hello(), contact.blame_hello()), (None, false));
        let again = HelloSaid { nonce: 8, first_said: late, times: 1, blamed: false };
        assert_eq!(contact.greet(8, late), again);
    }
}
