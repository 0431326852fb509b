//! The ranks behind each address, as bootstrap servers have told them: asked once, and remembered.

use std::collections::{BTreeMap, BTreeSet};

use crate::bootstrap::{LookupId, RankQuery, Replica};
use crate::error::BootstrapError;
use crate::hash::Fnv1a;
use crate::id::{PeerId, Room, SessionId};
use crate::meter::each;
use crate::record::WorkerRole;

/// A question: the address of a bootstrap server, and the query.
pub(super) type Question = (String, RankQuery);

/// The lookups under way, and the answers that are remembered.
#[derive(Debug, Clone, Default)]
pub(super) struct Directory {
    asking: BTreeMap<LookupId, Asking>,
    by_question: BTreeMap<Question, LookupId>,
    known: BTreeMap<Question, Vec<PeerId>>,
    /// How many data-parallel replicas the engine at an address has.
    replicas: BTreeMap<(String, WorkerRole), u32>,
    next: u64,
}

/// A lookup under way.
#[derive(Debug, Clone)]
struct Asking {
    question: Question,
    waiting: BTreeSet<SessionId>,
    /// How often the lookup has failed.
    failures: u32,
    last_error: Option<BootstrapError>,
}

/// What follows when a lookup has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AfterFailure {
    /// The lookup is repeated; it has failed this often.
    Again { failures: u32 },
    /// The lookup is over, and these sessions wait in vain.
    GiveUp(BTreeSet<SessionId>),
}

impl Directory {
    /// The question that a receiver of `room` asks at `addr` about a service. Numbered rooms are spread over
    /// replicas as SGLang does (number modulo replicas), request ids by the FNV-1a hash of their
    /// base.
    pub(super) fn question(
        &self,
        (addr, service): (String, &str),
        role: WorkerRole,
        room: &Room,
        dp_rank: Option<u32>,
    ) -> Question {
        let number = match room {
            Room::Number(number) => *number,
            Room::Request(id) => Fnv1a::of(id.base().as_bytes()),
        };
        let engine = (addr, role);
        let replica = match (dp_rank, self.replicas.get(&engine)) {
            (Some(rank), _) => Replica::Rank(rank),
            (None, Some(&replicas)) => Replica::Rank((number % u64::from(replicas.max(1))) as u32),
            (None, None) => Replica::Modulo(number),
        };
        (engine.0, RankQuery { role, service: service.to_owned(), replica })
    }

    /// The peers that answer the question; `None` if no answer is remembered.
    pub(super) fn known(&self, question: &Question) -> Option<&[PeerId]> {
        self.known.get(question).map(Vec::as_slice)
    }

    /// Joins a lookup under way, or starts one. `Some` with the id of the new lookup if it was
    /// started.
    pub(super) fn ask(&mut self, question: Question, session: SessionId) -> Option<LookupId> {
        if let Some(lookup) = self.by_question.get(&question)
            && let Some(asking) = self.asking.get_mut(lookup)
        {
            asking.waiting.insert(session);
            return None;
        }
        let lookup = LookupId(self.next);
        self.next += 1;
        self.by_question.insert(question.clone(), lookup);
        let waiting = BTreeSet::from([session]);
        self.asking.insert(lookup, Asking { question, waiting, failures: 0, last_error: None });
        Some(lookup)
    }

    /// The question of a lookup that is to be repeated; `None` if no session waits for the answer
    /// any more.
    pub(super) fn again(&mut self, lookup: LookupId) -> Option<&Question> {
        if self.asking.get(&lookup)?.waiting.is_empty() {
            self.finish(lookup);
        }
        self.asking.get(&lookup).map(|asking| &asking.question)
    }

    /// Notes that a lookup has failed, and says what follows.
    pub(super) fn failed(&mut self, lookup: LookupId, error: &BootstrapError) -> AfterFailure {
        let Some(asking) = self.asking.get_mut(&lookup) else { return AfterFailure::GiveUp(BTreeSet::new()) };
        asking.failures += 1;
        asking.last_error = Some(error.clone());
        if !asking.waiting.is_empty() && error.is_retryable() {
            return AfterFailure::Again { failures: asking.failures };
        }
        AfterFailure::GiveUp(self.finish(lookup).map(|(_, waiting)| waiting).unwrap_or_default())
    }

    /// The last error of this question; `None` if no lookup for it is under way.
    pub(super) fn last_error(&self, question: &Question) -> Option<BootstrapError> {
        self.asking.get(self.by_question.get(question)?)?.last_error.clone()
    }

    /// Ends a lookup, and returns its question and the sessions that waited for the answer.
    pub(super) fn finish(&mut self, lookup: LookupId) -> Option<(Question, BTreeSet<SessionId>)> {
        let Asking { question, waiting, .. } = self.asking.remove(&lookup)?;
        self.by_question.remove(&question);
        Some((question, waiting))
    }

    /// A session stops waiting for the answer to this question. Returns the lookup if no session
    /// waits for it any more: the lookup is then over.
    pub(super) fn leave(&mut self, question: &Question, session: SessionId) -> Option<LookupId> {
        let &lookup = self.by_question.get(question)?;
        let asking = self.asking.get_mut(&lookup)?;
        asking.waiting.remove(&session);
        let over = asking.waiting.is_empty();
        over.then(|| self.finish(lookup)).map(|_| lookup)
    }

    /// Remembers the answer to a question, under the replica's rank. If more than `max` answers are
    /// remembered, one of them is forgotten, and will be asked for again.
    pub(super) fn learn(
        &mut self,
        question: &Question,
        (dp_rank, dp_size): (u32, u32),
        peers: Vec<PeerId>,
        max: usize,
    ) {
        let (addr, RankQuery { role, .. }) = question;
        while self.known.len() >= max.max(1)
            && let Some(((addr, RankQuery { role, .. }), _)) = self.known.pop_first()
        {
            self.replicas.remove(&(addr, role));
        }
        self.replicas.insert((addr.clone(), *role), dp_size);
        let query = RankQuery { replica: Replica::Rank(dp_rank), ..question.1.clone() };
        self.known.insert((addr.clone(), query), peers);
    }

    /// Forgets all answers that name a peer, and the number of replicas of its engine.
    pub(super) fn forget(&mut self, peer: PeerId) {
        let stale: Vec<Question> = each(self.known.iter())
            .filter(|(_, peers)| peers.contains(&peer))
            .map(|(q, _)| q.clone())
            .collect();
        for question in each(stale) {
            self.replicas.remove(&(question.0.clone(), question.1.role));
            self.known.remove(&question);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.asking.len()
    }

    /// How many answers are remembered.
    pub(super) fn addresses(&self) -> usize {
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_with_the_same_lookup_share_one_question() {
        let mut directory = Directory::default();
        let question =
            directory.question(("a:1".to_owned(), "kv"), WorkerRole::Prefill, &Room::Number(5), None);
        assert_eq!(question.1.replica, Replica::Modulo(5));
        let lookup = directory.ask(question.clone(), SessionId(1)).unwrap();
        assert_eq!(directory.ask(question.clone(), SessionId(2)), None);
        assert_eq!(directory.leave(&question, SessionId(1)), None);
        assert_eq!(directory.leave(&question, SessionId(2)), Some(lookup));
        assert_eq!(directory.len(), 0);
        assert!(directory.by_question.is_empty());

        directory.learn(&question, (1, 2), vec![PeerId(7)], 1);
        let question =
            directory.question(("a:1".to_owned(), "kv"), WorkerRole::Prefill, &Room::Number(5), None);
        assert_eq!(question.1.replica, Replica::Rank(1));
        assert_eq!(directory.known(&question), Some(&[PeerId(7)][..]));
        directory.forget(PeerId(7));
        assert_eq!(directory.known(&question), None);
    }

    /// A decode worker that meets ever new engines would remember each of them.
    #[test]
    fn the_number_of_replicas_is_forgotten_with_the_answer_of_an_engine() {
        let (mut directory, max) = (Directory::default(), 4);
        for engine in 0..10 * max {
            let addr = format!("{engine}:1");
            let question = directory.question((addr, "kv"), WorkerRole::Prefill, &Room::Number(5), None);
            directory.learn(&question, (0, 1), vec![PeerId(7)], max);
        }
        assert_eq!((directory.known.len(), directory.replicas.len()), (max, max));
    }

    #[test]
    fn a_failed_lookup_is_repeated_while_sessions_wait_and_may_succeed() {
        let (busy, wrong) = (BootstrapError::UnknownRank, BootstrapError::Unauthorized);
        assert!(busy.is_retryable() && !wrong.is_retryable());
        let mut directory = Directory::default();
        let question =
            directory.question(("a:1".to_owned(), "kv"), WorkerRole::Prefill, &Room::Number(5), None);
        let lookup = directory.ask(question.clone(), SessionId(1)).unwrap();
        for failures in 1..=2 {
            assert_eq!(directory.failed(lookup, &busy), AfterFailure::Again { failures });
            assert_eq!(directory.again(lookup), Some(&question));
        }
        assert_eq!(directory.last_error(&question), Some(busy));
        let waiting = BTreeSet::from([SessionId(1)]);
        assert_eq!(directory.failed(lookup, &wrong), AfterFailure::GiveUp(waiting));
        assert_eq!(
            (directory.len(), directory.last_error(&question), directory.again(lookup)),
            (0, None, None)
        );
    }

    #[test]
    fn request_ids_are_spread_by_the_published_hash() {
        let question = Directory::default().question(
            ("a:1".to_owned(), "kv"),
            WorkerRole::Prefill,
            &Room::request("foobar").unwrap(),
            None,
        );
        assert_eq!(question.1.replica, Replica::Modulo(0x8594_4171_f739_67e8));
    }

    #[test]
    fn both_suffixes_of_a_request_lead_to_one_replica() {
        let directory = Directory::default();
        let one = directory.question(
            ("a:1".to_owned(), "kv"),
            WorkerRole::Prefill,
            &Room::request("r-0000000a").unwrap(),
            None,
        );
        let other = directory.question(
            ("a:1".to_owned(), "kv"),
            WorkerRole::Prefill,
            &Room::request("r-0000000b").unwrap(),
            None,
        );
        assert_eq!(one, other);
    }
}
