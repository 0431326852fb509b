//! Registrations of vLLM receivers that have come before their sender was opened.
//!
//! vLLM's engines add a suffix of their own to the id of a request, so the two sides are compared without
//! suffixes: by the *base* of the id. A second attempt of a client has the base of the first one, and nothing in
//! a registration says for which attempt the registration is. The rules that keep an attempt's KV from the
//! receiver of another attempt:
//!
//! - Of several registrations with one base, the newest counts, and those that it replaces count no more, whichever
//!   rank of their receiver repeats them.
//! - A registration is for the sender that is open when the registration comes, or for the next sender that is
//!   opened before the registration expires. The heartbeats of its receiver renew a registration.
//! - When a sender ends, every registration of its base is dropped, and the receiver's id of the request is
//!   remembered: other ranks of the receiver may register late, and are not kept for the next sender.

use std::time::Duration;

use kv_core::{RequestId, Time};

use crate::vllm::expiring::Expiring;
use crate::vllm::notification::PushRegistration;

/// Most bytes of registrations that wait: everybody can send registrations, each as long as a frame.
const MAX_BYTES: usize = 128 << 20;

/// A registration, and the agent that sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Registered {
    pub(super) agent: String,
    pub(super) registration: PushRegistration,
}

impl Registered {
    /// Bytes of memory that the registration takes, without what every registration takes.
    fn bytes(&self) -> usize {
        let PushRegistration { request_id, decode_engine_id, decode_host, .. } = &self.registration;
        let PushRegistration { remote_engine_id, remote_host, local_block_ids, .. } = &self.registration;
        let texts = [&self.agent, request_id, decode_engine_id, decode_host, remote_engine_id, remote_host];
        let blocks: usize = local_block_ids.iter().map(Vec::capacity).sum();
        texts.iter().map(|text| text.len()).sum::<usize>() + 4 * blocks
    }
}

/// Registrations that wait for a sender, and receivers whose sender has ended.
#[derive(Debug)]
pub(super) struct Registrations {
    waiting: Expiring<String, Registered>,
    /// The receivers' ids of requests that have been served, or whose sender has failed.
    over: Expiring<String, ()>,
    ttl: Duration,
}

impl Registrations {
    pub(super) fn new(limit: usize, ttl: Duration) -> Registrations {
        let (waiting, over) = (Expiring::new(limit, MAX_BYTES), Expiring::new(limit, MAX_BYTES));
        Registrations { waiting, over, ttl }
    }

    /// Keeps a registration for the next sender. Returns how many other registrations had to go, for lack of room.
    pub(super) fn keep(&mut self, now: Time, registered: Registered) -> usize {
        let receiver = &registered.registration.request_id;
        let (base, bytes) = (RequestId::base_of(receiver).to_owned(), registered.bytes());
        let before = self.waiting.remove(&base).map(|before| before.registration.request_id);
        if let Some(before) = before.filter(|before| before != receiver) {
            // Another rank of the earlier attempt's receiver may register late.
            self.note_over(now, before);
        }
        self.waiting.insert(base, now + self.ttl, bytes, registered)
    }

    /// The registration for a request, which does not wait any more.
    pub(super) fn take(&mut self, request: &str) -> Option<Registered> {
        self.waiting.remove(&RequestId::base_of(request).to_owned())
    }

    /// The receiver of a request still waits.
    pub(super) fn renew(&mut self, now: Time, request: &str) {
        self.waiting.extend(&RequestId::base_of(request).to_owned(), now + self.ttl);
    }

    /// The sender of a request has ended: nothing is kept for the next sender of the request.
    pub(super) fn end(&mut self, now: Time, request: &str, receiver: Option<String>) {
        let waiting = self.take(request).map(|registered| registered.registration.request_id);
        for receiver in receiver.into_iter().chain(waiting) {
            self.note_over(now, receiver);
        }
    }

    /// This receiver's request is served by no sender any more.
    pub(super) fn note_over(&mut self, now: Time, receiver: String) {
        self.over.insert(receiver.clone(), now + self.ttl, receiver.len(), ());
    }

    /// True if the sender that this receiver's request was for has ended.
    pub(super) fn is_over(&self, receiver: &str) -> bool {
        self.over.get(&receiver.to_owned()).is_some()
    }

    /// Forgets what has expired. Returns how many registrations found no sender.
    pub(super) fn expire(&mut self, now: Time) -> usize {
        self.over.expire(now);
        self.waiting.expire(now)
    }

    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.waiting.next_expiry().into_iter().chain(self.over.next_expiry()).min()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> (usize, usize) {
        (self.waiting.len(), self.over.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::notification::tests::registration;
    use crate::vllm::rig::{SECOND, at};

    fn of(receiver: &str) -> Registered {
        let registration = PushRegistration { request_id: receiver.to_owned(), ..registration() };
        Registered { agent: "d".to_owned(), registration }
    }

    #[test]
    fn the_newest_registration_of_a_base_is_taken_once() {
        let mut waiting = Registrations::new(8, 10 * SECOND);
        assert_eq!(waiting.keep(at(0), of("r-00000001")), 0);
        assert_eq!(waiting.keep(at(1), of("r-00000002")), 0);
        assert_eq!(waiting.keep(at(1), of("other")), 0);
        assert_eq!(waiting.len(), (2, 1));
        assert_eq!(waiting.take("r-ffffffff"), Some(of("r-00000002")));
        assert_eq!((waiting.take("r-ffffffff"), waiting.take("r")), (None, None));
        assert_eq!(waiting.take("other-12345678"), Some(of("other")));
    }

    #[test]
    fn a_registration_expires_unless_its_receiver_sends_heartbeats() {
        let mut waiting = Registrations::new(8, 10 * SECOND);
        waiting.keep(at(0), of("a"));
        waiting.keep(at(0), of("b"));
        waiting.renew(at(5), "a-00000001");
        waiting.renew(at(3), "a");
        assert_eq!(waiting.next_expiry(), Some(at(10)));
        assert_eq!((waiting.expire(at(9)), waiting.expire(at(10))), (0, 1));
        assert_eq!(waiting.next_expiry(), Some(at(15)));
        assert_eq!(waiting.expire(at(15)), 1);
        assert_eq!((waiting.next_expiry(), waiting.len()), (None, (0, 0)));
    }

    #[test]
    fn a_full_table_forgets_what_would_expire_first() {
        let mut waiting = Registrations::new(2, 10 * SECOND);
        waiting.keep(at(0), of("a"));
        waiting.keep(at(1), of("b"));
        assert_eq!(waiting.keep(at(2), of("c")), 1);
        assert_eq!((waiting.take("a"), waiting.len().0), (None, 2));
        assert_eq!(waiting.keep(at(2), of("c-00000009")), 0, "the same base takes the place of the first");
    }

    #[test]
    fn registrations_take_a_bounded_number_of_bytes_however_many_there_may_be() {
        let mut waiting = Registrations::new(1 << 20, 10 * SECOND);
        let mut long = of("a");
        long.registration.local_block_ids = vec![vec![7; 1 << 20]];
        let kept = MAX_BYTES / long.bytes();
        for number in 0..kept + 5 {
            long.registration.request_id = format!("{number:04}");
            assert_eq!(waiting.keep(at(0), long.clone()), usize::from(number >= kept));
        }
        assert_eq!((waiting.len().0, waiting.take("0004").is_none()), (kept, true));
        assert!(waiting.take("0005").is_some());
        assert_eq!(waiting.keep(at(0), of("b")), 0, "there is room again");
    }

    #[test]
    fn nothing_of_an_ended_request_is_kept_and_its_receivers_are_known_for_a_while() {
        let mut waiting = Registrations::new(8, 10 * SECOND);
        waiting.keep(at(0), of("r-00000002"));
        waiting.end(at(1), "r-ffffffff", Some("r-00000001".to_owned()));
        assert!(waiting.is_over("r-00000001") && waiting.is_over("r-00000002") && !waiting.is_over("r"));
        assert_eq!(waiting.take("r"), None);
        waiting.expire(at(11));
        assert!(!waiting.is_over("r-00000001"));
        assert_eq!(waiting.len(), (0, 0));
    }
}
