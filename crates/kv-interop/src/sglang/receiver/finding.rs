//! Lookups of prefill engines: one at a time for each address, and each answer is used for a while.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_bootstrap::{SglangQuery, SglangRank};
use kv_core::machine::Output;
use kv_core::{BootstrapError, LookupId, RankRecord, Replica, SessionId, Time};

use crate::effects::Effects;

/// The addresses that sessions have asked.
#[derive(Debug, Default)]
pub(crate) struct Finder {
    addresses: BTreeMap<String, Address>,
    asked: BTreeMap<LookupId, (String, Replica)>,
    last: u64,
}

#[derive(Debug, Default)]
struct Address {
    /// The ranks of each replica that was asked for, and until when they count.
    known: Option<Known>,
    waiting: Vec<Waiting>,
    in_flight: bool,
    /// Until when nothing is asked, after a lookup that the server did not answer.
    pause: Option<Time>,
    error: Option<BootstrapError>,
}

/// A session that waits for an answer.
#[derive(Debug)]
struct Waiting {
    session: SessionId,
    replica: Replica,
    /// When the replica may be asked for. A replica that the server does not know holds up no other one.
    at: Time,
}

#[derive(Debug)]
struct Known {
    until: Time,
    /// The number of replicas, if the room tells which one serves a request; otherwise each room is asked for.
    replicas: Option<u32>,
    ranks: BTreeMap<Replica, Vec<RankRecord>>,
}

/// The replica by its number, where the number of replicas tells the number.
fn numbered(replica: Replica, replicas: Option<u32>) -> Replica {
    match (replica, replicas) {
        (Replica::Modulo(room), Some(replicas)) => Replica::Rank((room % u64::from(replicas.max(1))) as u32),
        (replica, _) => replica,
    }
}

impl Address {
    /// Which replica is to be asked for now: the one that has waited longest.
    fn next(&self, now: Time) -> Option<Replica> {
        let next = self.waiting.iter().min_by_key(|waiting| waiting.at)?;
        self.may_ask(now).then_some(next.replica).filter(|_| next.at <= now)
    }

    fn may_ask(&self, now: Time) -> bool {
        !self.in_flight && self.pause.is_none_or(|until| until <= now)
    }

    /// When [`next`](Address::next) has a replica, if only time is missing.
    fn next_due(&self) -> Option<Time> {
        let next = self.waiting.iter().map(|waiting| waiting.at).min().filter(|_| !self.in_flight)?;
        Some(self.pause.map_or(next, |until| until.max(next)))
    }

    /// Takes out the sessions whose ranks are known now.
    fn served(&mut self) -> Vec<SessionId> {
        let Some(known) = &self.known else { return Vec::new() };
        for waiting in &mut self.waiting {
            waiting.replica = numbered(waiting.replica, known.replicas);
        }
        let served = |waiting: &mut Waiting| known.ranks.contains_key(&waiting.replica);
        self.waiting.extract_if(.., served).map(|waiting| waiting.session).collect()
    }
}

impl Finder {
    /// The ranks that serve, if they are known; otherwise the session is put on the list of those that are looked
    /// at again with an answer for them.
    pub(super) fn find(
        &mut self,
        effects: &mut Effects,
        now: Time,
        (session, addr, replica): (SessionId, &str, Replica),
    ) -> Option<Vec<RankRecord>> {
        let address = self.addresses.entry(addr.to_owned()).or_default();
        address.known.take_if(|known| known.until <= now);
        let mut replica = replica;
        if let Some(known) = &address.known {
            replica = numbered(replica, known.replicas);
            if let Some(ranks) = known.ranks.get(&replica) {
                return Some(ranks.clone());
            }
        }
        address.waiting.push(Waiting { session, replica, at: Time::ZERO });
        self.ask_next(effects, now, addr);
        None
    }

    /// Asks for a replica, if one is to be asked for now.
    fn ask_next(&mut self, effects: &mut Effects, now: Time, addr: &str) {
        let Some(address) = self.addresses.get_mut(addr) else { return };
        let Some(replica) = address.next(now) else { return };
        (address.in_flight, address.pause) = (true, None);
        self.last += 1;
        let lookup = LookupId(self.last);
        self.asked.insert(lookup, (addr.to_owned(), replica));
        let query = SglangQuery::Ranks(replica).into();
        effects.push(Output::Lookup { lookup, addr: addr.to_owned(), query });
    }

    /// Takes an answer; the sessions that have to look again.
    pub(super) fn found(
        &mut self,
        effects: &mut Effects,
        (now, lifetime): (Time, Duration),
        lookup: LookupId,
        ranks: Vec<RankRecord>,
    ) -> Vec<SessionId> {
        let Some((addr, replica)) = self.asked.remove(&lookup) else { return Vec::new() };
        let Some(address) = self.addresses.get_mut(&addr) else { return Vec::new() };
        (address.in_flight, address.error) = (false, None);
        let rank = ranks.first().and_then(SglangRank::of).and_then(Result::ok);
        let follows = |rank: &SglangRank| rank.follow_bootstrap_room || rank.parallel.dp_size == 1;
        let replicas = rank.filter(follows).map(|rank| rank.parallel.dp_size);
        let until = now + lifetime;
        let known = address.known.get_or_insert_with(|| Known { until, replicas, ranks: BTreeMap::new() });
        if known.replicas != replicas {
            *known = Known { until, replicas, ranks: BTreeMap::new() };
        }
        known.ranks.insert(numbered(replica, replicas), ranks);
        let served = address.served();
        self.ask_next(effects, now, &addr);
        served
    }

    /// Takes a failure. If asking again may help, the sessions go on waiting; otherwise they are returned.
    pub(super) fn failed(
        &mut self,
        effects: &mut Effects,
        (now, retry): (Time, Duration),
        lookup: LookupId,
        error: &BootstrapError,
    ) -> Vec<SessionId> {
        let Some((addr, replica)) = self.asked.remove(&lookup) else { return Vec::new() };
        let Some(address) = self.addresses.get_mut(&addr) else { return Vec::new() };
        address.in_flight = false;
        address.error = Some(error.clone());
        if !error.is_retryable() {
            return std::mem::take(&mut address.waiting).into_iter().map(|waiting| waiting.session).collect();
        }
        match error {
            BootstrapError::UnknownRank => {
                let same = |waiting: &&mut Waiting| waiting.replica == replica;
                address.waiting.iter_mut().filter(same).for_each(|waiting| waiting.at = now + retry);
            }
            _ => address.pause = Some(now + retry),
        }
        self.ask_next(effects, now, &addr);
        Vec::new()
    }

    /// How many sessions wait for the replica that a lookup asks for.
    pub(super) fn waiting_for(&self, lookup: LookupId) -> usize {
        self.waiting(lookup).count()
    }

    /// The session for which a lookup is made, unless the lookup repeats one that has failed; and whether it does.
    pub(super) fn asks(&self, lookup: LookupId) -> (Option<SessionId>, bool) {
        let addr = self.asked.get(&lookup).and_then(|(addr, _)| self.addresses.get(addr));
        let again = addr.is_some_and(|address| address.error.is_some());
        let session = self.waiting(lookup).next().map(|waiting| waiting.session);
        (session.filter(|_| !again), again)
    }

    fn waiting(&self, lookup: LookupId) -> impl Iterator<Item = &Waiting> {
        let asked = self.asked.get(&lookup);
        let address = asked.and_then(|(addr, replica)| Some((self.addresses.get(addr)?, *replica)));
        address.into_iter().flat_map(|(address, replica)| {
            address.waiting.iter().filter(move |waiting| waiting.replica == replica)
        })
    }

    /// The error of the last lookup at an address, if that failed.
    pub(super) fn last_error(&self, addr: &str) -> Option<BootstrapError> {
        self.addresses.get(addr)?.error.clone()
    }

    /// A session asks no more.
    pub(super) fn leave(&mut self, addr: &str, session: SessionId) {
        let Some(address) = self.addresses.get_mut(addr) else { return };
        address.waiting.retain(|waiting| waiting.session != session);
    }

    /// What was known of an address is out of date.
    pub(super) fn forget(&mut self, addr: &str) {
        if let Some(address) = self.addresses.get_mut(addr) {
            address.known = None;
        }
    }

    /// Asks again where the time for that has come, and forgets addresses that nobody needs.
    pub(super) fn tick(&mut self, effects: &mut Effects, now: Time) {
        let due = |address: &Address| address.next(now).is_some();
        let asks: Vec<String> =
            self.addresses.iter().filter(|(_, address)| due(address)).map(|(addr, _)| addr.clone()).collect();
        for addr in asks {
            self.ask_next(effects, now, &addr);
        }
        self.addresses.retain(|_, address| {
            address.known.take_if(|known| known.until <= now);
            address.in_flight || address.known.is_some() || !address.waiting.is_empty()
        });
    }

    /// When `tick` is due.
    pub(super) fn next_due(&self) -> Option<Time> {
        let due = |address: &Address| {
            let known = address.known.as_ref().map(|known| known.until);
            address.next_due().into_iter().chain(known).min()
        };
        self.addresses.values().filter_map(due).min()
    }
}
