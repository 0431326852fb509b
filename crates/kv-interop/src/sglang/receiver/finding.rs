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
    /// The sessions that wait for an answer.
    waiting: Vec<SessionId>,
    in_flight: bool,
    retry: Option<(Time, Replica)>,
    error: Option<BootstrapError>,
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

impl Finder {
    /// The ranks that serve, if they are known; otherwise the session is put on the list of those that are looked
    /// at again with the next answer.
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
        address.waiting.push(session);
        if !address.in_flight && address.retry.is_none() {
            self.ask(effects, addr, replica);
        }
        None
    }

    fn ask(&mut self, effects: &mut Effects, addr: &str, replica: Replica) {
        self.last += 1;
        let lookup = LookupId(self.last);
        let Some(address) = self.addresses.get_mut(addr) else { return };
        (address.in_flight, address.retry) = (true, None);
        self.asked.insert(lookup, (addr.to_owned(), replica));
        let query = SglangQuery::Ranks(replica).into();
        effects.push(Output::Lookup { lookup, addr: addr.to_owned(), query });
    }

    /// Takes an answer; the sessions that have to look again.
    pub(super) fn found(
        &mut self,
        now: Time,
        lifetime: Duration,
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
        std::mem::take(&mut address.waiting)
    }

    /// Takes a failure. If asking again may help, the sessions go on waiting; otherwise they are returned.
    pub(super) fn failed(
        &mut self,
        retry_at: Time,
        lookup: LookupId,
        error: &BootstrapError,
    ) -> Vec<SessionId> {
        let Some((addr, replica)) = self.asked.remove(&lookup) else { return Vec::new() };
        let Some(address) = self.addresses.get_mut(&addr) else { return Vec::new() };
        address.in_flight = false;
        address.error = Some(error.clone());
        if error.is_retryable() {
            address.retry = Some((retry_at, replica));
            return Vec::new();
        }
        std::mem::take(&mut address.waiting)
    }

    /// The error of the last lookup at an address, if that failed.
    pub(super) fn last_error(&self, addr: &str) -> Option<BootstrapError> {
        self.addresses.get(addr)?.error.clone()
    }

    /// A session asks no more.
    pub(super) fn leave(&mut self, addr: &str, session: SessionId) {
        let Some(address) = self.addresses.get_mut(addr) else { return };
        address.waiting.retain(|waiting| *waiting != session);
    }

    /// What was known of an address is out of date.
    pub(super) fn forget(&mut self, addr: &str) {
        if let Some(address) = self.addresses.get_mut(addr) {
            address.known = None;
        }
    }

    /// Asks again where the time for that has come, and forgets addresses that nobody needs.
    pub(super) fn tick(&mut self, effects: &mut Effects, now: Time) {
        let due = |address: &Address| address.retry.filter(|(at, _)| *at <= now).map(|(_, replica)| replica);
        let asks: Vec<(String, Replica)> = self
            .addresses
            .iter()
            .filter(|(_, address)| !address.waiting.is_empty())
            .filter_map(|(addr, address)| Some((addr.clone(), due(address)?)))
            .collect();
        for (addr, replica) in asks {
            self.ask(effects, &addr, replica);
        }
        self.addresses.retain(|_, address| {
            address.known.take_if(|known| known.until <= now);
            address.in_flight || address.known.is_some() || !address.waiting.is_empty()
        });
    }

    /// When `tick` is due.
    pub(super) fn next_due(&self) -> Option<Time> {
        let due = |address: &Address| {
            let retry = address.retry.map(|(at, _)| at);
            let known = address.known.as_ref().map(|known| known.until);
            retry.into_iter().chain(known).min()
        };
        self.addresses.values().filter_map(due).min()
    }
}
