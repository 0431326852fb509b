//! Which ranks serve which address: answers of bootstrap servers, asked once and remembered.

use std::collections::{BTreeMap, BTreeSet};

use crate::bootstrap::{LookupId, RankQuery, Replica};
use crate::error::BootstrapError;
use crate::hash::Fnv1a;
use crate::id::{PeerId, Room, SessionId};
use crate::kv_offer::KV_SERVICE;
use crate::meter::each;
use crate::record::WorkerRole;

/// A question: a server and what it is asked.
pub(super) type Question = (String, RankQuery);

/// Questions under way and answers known.
#[derive(Debug, Clone, Default)]
pub(super) struct Directory {
    asking: BTreeMap<LookupId, Asking>,
    by_question: BTreeMap<Question, LookupId>,
    known: BTreeMap<Question, Vec<PeerId>>,
    /// How many replicas the engine at an address has.
    replicas: BTreeMap<(String, WorkerRole), u32>,
    next: u64,
}

/// A question under way.
#[derive(Debug, Clone)]
pub(super) struct Asking {
    pub(super) question: Question,
    pub(super) waiting: BTreeSet<SessionId>,
    /// How often it has failed.
    pub(super) failures: u32,
    pub(super) last_error: Option<BootstrapError>,
}

impl Directory {
    /// The question that a receiver of `room` asks at `addr`. Rooms are spread over replicas as
    /// SGLang does: number modulo replicas; request ids by the FNV-1a hash of their base.
    pub(super) fn question(
        &self,
        addr: &str,
        role: WorkerRole,
        room: &Room,
        dp_rank: Option<u32>,
    ) -> Question {
        let number = match room {
            Room::Number(number) => *number,
            Room::Request(id) => Fnv1a::of(id.base().as_bytes()),
        };
        let replica = match (dp_rank, self.replicas.get(&(addr.to_owned(), role))) {
            (Some(rank), _) => Replica::Rank(rank),
            (None, Some(&replicas)) => Replica::Rank((number % u64::from(replicas.max(1))) as u32),
            (None, None) => Replica::Modulo(number),
        };
        (addr.to_owned(), RankQuery { role, service: KV_SERVICE.to_owned(), replica })
    }

    /// The peers that answer the question, if that is known.
    pub(super) fn known(&self, question: &Question) -> Option<&[PeerId]> {
        self.known.get(question).map(Vec::as_slice)
    }

    /// Joins a question under way, or starts it: then the new number comes back.
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

    pub(super) fn asking_mut(&mut self, lookup: LookupId) -> Option<&mut Asking> {
        self.asking.get_mut(&lookup)
    }

    /// The last error of the question that a session waits for.
    pub(super) fn last_error(&self, lookup: LookupId) -> Option<BootstrapError> {
        self.asking.get(&lookup).and_then(|asking| asking.last_error.clone())
    }

    pub(super) fn lookup_of(&self, question: &Question) -> Option<LookupId> {
        self.by_question.get(question).copied()
    }

    /// Ends a question.
    pub(super) fn finish(&mut self, lookup: LookupId) -> Option<Asking> {
        let asking = self.asking.remove(&lookup)?;
        self.by_question.remove(&asking.question);
        Some(asking)
    }

    /// A session waits no more. True if nobody waits for that question any more.
    pub(super) fn leave(&mut self, lookup: LookupId, session: SessionId) -> bool {
        let Some(asking) = self.asking.get_mut(&lookup) else { return false };
        asking.waiting.remove(&session);
        asking.waiting.is_empty()
    }

    /// Remembers the answer to a question, under the replica's rank. Of more than `max` answers any one is
    /// forgotten: it will be asked for again.
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

    /// Forgets all answers that name a peer, and how many replicas its engine has.
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
    fn one_question_is_asked_once_however_many_sessions_wait() {
        let mut directory = Directory::default();
        let question = directory.question("a:1", WorkerRole::Prefill, &Room::Number(5), None);
        assert_eq!(question.1.replica, Replica::Modulo(5));
        let lookup = directory.ask(question.clone(), SessionId(1)).unwrap();
        assert_eq!(directory.ask(question.clone(), SessionId(2)), None);
        assert!(!directory.leave(lookup, SessionId(1)));
        assert!(directory.leave(lookup, SessionId(2)));
        directory.finish(lookup);
        assert_eq!(directory.len(), 0);
        assert!(directory.by_question.is_empty());

        directory.learn(&question, (1, 2), vec![PeerId(7)], 1);
        let question = directory.question("a:1", WorkerRole::Prefill, &Room::Number(5), None);
        assert_eq!(question.1.replica, Replica::Rank(1));
        assert_eq!(directory.known(&question), Some(&[PeerId(7)][..]));
        directory.forget(PeerId(7));
        assert_eq!(directory.known(&question), None);
    }

    #[test]
    fn request_ids_are_spread_by_the_published_hash() {
        let question = Directory::default().question(
            "a:1",
            WorkerRole::Prefill,
            &Room::request("foobar").unwrap(),
            None,
        );
        assert_eq!(question.1.replica, Replica::Modulo(0x8594_4171_f739_67e8));
    }

    #[test]
    fn both_suffixes_of_a_request_lead_to_one_replica() {
        let directory = Directory::default();
        let one = directory.question("a:1", WorkerRole::Prefill, &Room::request("r-0000000a").unwrap(), None);
        let other =
            directory.question("a:1", WorkerRole::Prefill, &Room::request("r-0000000b").unwrap(), None);
        assert_eq!(one, other);
    }
}
