//! The records of any number of workers, joined: requests by room, with a lane for each session.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::{Incarnation, Room, WorkerId};

use crate::clocks::{Clock, estimate_all};
use crate::incident::{self, Incident};
use crate::lane::{Lane, Met, Outcome, is_closed};
use crate::note::{Message, Note, Side, What};
use crate::record::{Lost, PeerNote, Record, SessionNotes};

/// Most records that one timeline joins.
pub const MAX_RECORDS: usize = 1024;

/// What the workers of a service did, by request and in one clock. Times are in nanoseconds since the first event.
///
/// ```
/// use kv_core::{EngineId, Incarnation, WorkerId};
/// use kv_timeline::{Record, Timeline};
///
/// let worker = WorkerId { engine: EngineId::new("prefill").unwrap(), rank: 0 };
/// let record = Record::new(worker, Incarnation::from_random(7));
/// let timeline = Timeline::join(vec![record]).unwrap();
/// assert!(timeline.requests().is_empty());
/// assert!(timeline.html().unwrap().contains("prefill/0"));
/// ```
#[derive(Debug, Clone)]
pub struct Timeline {
    pub(crate) actors: Vec<Actor>,
    pub(crate) requests: Vec<Request>,
    pub(crate) incidents: Vec<Incident>,
    pub(crate) remarks: Vec<String>,
    /// The time of the first event in the clock of the timeline.
    start: i128,
    pub(crate) end: i64,
}

/// A worker, in one of its lives: one that has recorded, or one that is only known to others.
#[derive(Debug, Clone)]
pub struct Actor {
    /// The engine and the rank of the worker.
    pub worker: WorkerId,
    /// The life of the worker.
    pub incarnation: Incarnation,
    /// What the worker has recorded; `None` if its record is not there, because it was killed, say.
    pub recorded: Option<Recorded>,
}

/// The part of a record that is of no single request.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// How the worker's times were shifted into the clock of the timeline.
    pub clock: Clock,
    /// How many events the record has.
    pub events: usize,
    /// What is missing in the record.
    pub lost: Lost,
    /// Events of no session, and the position of the peer among the actors.
    pub(crate) others: Vec<(Note, Option<usize>)>,
}

/// One request: all sessions with the same room.
#[derive(Debug, Clone)]
pub struct Request {
    /// The room, as the sender's side knows it if both sides have recorded.
    pub room: Room,
    /// A name that the server gave to the request.
    pub label: Option<String>,
    /// The request in whose place this one was sent.
    pub retry_of: Option<Room>,
    /// The sessions, those that send first.
    pub lanes: Vec<Lane>,
    /// Workers that took part and whose side is not recorded: their position among the actors, and the first and
    /// the last time that a recorded side heard of them.
    pub unrecorded: Vec<(usize, i64, i64)>,
}

impl Request {
    /// True if a session of the request has failed.
    pub fn failed(&self) -> bool {
        self.lanes.iter().any(|lane| matches!(lane.outcome, Outcome::Failed(_)))
    }
}

/// Why records cannot be joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// There are too many records.
    #[error("{found} records are given, and at most {max} are joined")]
    TooManyRecords {
        /// How many records were given.
        found: usize,
        /// The most records that are joined.
        max: usize,
    },
}

impl Timeline {
    /// Joins the records of the workers of a service. Of two records of the same life of a worker, the one that
    /// ends later counts. The records may be of different moments, and of workers that go on serving: a session that
    /// is not closed lasts until the end of its record.
    pub fn join(records: Vec<Record>) -> Result<Timeline, JoinError> {
        Timeline::join_latest(records, usize::MAX)
    }

    /// Joins the records, and leaves out all but so many requests: those that are not over are kept first, then those
    /// that began last. The timeline begins with the first of them.
    pub fn join_latest(records: Vec<Record>, requests: usize) -> Result<Timeline, JoinError> {
        if records.len() > MAX_RECORDS {
            return Err(JoinError::TooManyRecords { found: records.len(), max: MAX_RECORDS });
        }
        let mut latest: BTreeMap<(WorkerId, Incarnation), Record> = BTreeMap::new();
        for record in records {
            let id = (record.worker.clone(), record.incarnation);
            if latest.get(&id).is_none_or(|other| other.last_at() < record.last_at()) {
                latest.insert(id, record);
            }
        }
        let mut ids: BTreeMap<(WorkerId, Incarnation), usize> = latest.keys().cloned().zip(0..).collect();
        let mut records: Vec<Record> = latest.into_values().collect();
        let recorded = |peer: &PeerNote| ids.get(&(peer.worker.clone(), peer.incarnation)).copied();
        let clocks = estimate_all(&records, recorded);
        for peer in records.iter().flat_map(|record| &record.peers) {
            let next = ids.len();
            ids.entry((peer.worker.clone(), peer.incarnation)).or_insert(next);
        }
        keep_latest(&mut records, &clocks, requests);
        let shifted = |node: usize, at: u64| clocks.get(node).map_or(0, |clock| i128::from(at) + clock.shift);
        let times = |node: usize, record: &Record| -> Vec<i128> {
            record.all_notes().map(|note| shifted(node, note.at)).collect()
        };
        let all: Vec<i128> =
            records.iter().enumerate().flat_map(|(node, record)| times(node, record)).collect();
        let (start, end) = (all.iter().min().copied().unwrap_or(0), all.iter().max().copied().unwrap_or(0));

        let mut actors: Vec<Actor> = Vec::new();
        let mut by_node: Vec<(&(WorkerId, Incarnation), &usize)> = ids.iter().collect();
        by_node.sort_by_key(|(_, node)| **node);
        for ((worker, incarnation), _) in by_node {
            actors.push(Actor { worker: worker.clone(), incarnation: *incarnation, recorded: None });
        }
        let mut lanes = Vec::new();
        for ((node, record), clock) in records.into_iter().enumerate().zip(&clocks) {
            let peers: BTreeMap<u64, Met> = record
                .peers
                .iter()
                .filter_map(|peer| {
                    let actor = *ids.get(&(peer.worker.clone(), peer.incarnation))?;
                    Some((peer.peer, Met { actor, transport: peer.transport.clone() }))
                })
                .collect();
            let (events, lost, last) = (record.events(), record.lost, record.last_at());
            let zero = start - clock.shift;
            lanes.extend(
                record.sessions.into_iter().filter_map(|session| Lane::of(node, session, &peers, zero, last)),
            );
            let of_peer = |note: Note| {
                let peer = note.peer.and_then(|peer| peers.get(&peer)).map(|met| met.actor);
                (note, peer)
            };
            let others = record.others.into_iter().map(of_peer).collect();
            if let Some(actor) = actors.get_mut(node) {
                actor.recorded = Some(Recorded { clock: *clock, events, lost, others });
            }
        }
        let requests = by_room(lanes, &actors);
        let mut timeline = Timeline {
            actors,
            requests,
            incidents: Vec::new(),
            remarks: Vec::new(),
            start,
            end: i64::try_from(end - start).unwrap_or(i64::MAX),
        };
        timeline.incidents = incident::all(&timeline);
        Ok(timeline)
    }

    /// The workers: first those that have recorded, by name, then those that are only known to others.
    pub fn workers(&self) -> &[Actor] {
        &self.actors
    }

    /// The requests, in the order of their first events.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// What went wrong, in the order of time: failures, expired leases, peers that were lost.
    pub fn incidents(&self) -> &[Incident] {
        &self.incidents
    }

    /// From the first event to the last one, in nanoseconds.
    pub fn duration(&self) -> i64 {
        self.end
    }

    /// Adds a sentence that stands above the picture: what an operator or a router did.
    pub fn remark(&mut self, text: impl Into<String>) {
        self.remarks.push(text.into());
    }

    /// Gives the request in this room a name. A room that is in no record is ignored.
    pub fn label(&mut self, room: &Room, label: impl Into<String>) {
        if let Some(request) = self.requests.iter_mut().find(|request| request.room == *room) {
            request.label = Some(label.into());
        }
    }

    /// Notes that the request in room `again` was sent in the place of that in room `first`. A room that is in no
    /// record is ignored.
    pub fn retried(&mut self, first: &Room, again: &Room) {
        if let Some(request) = self.requests.iter_mut().find(|request| request.room == *again) {
            request.retry_of = Some(first.clone());
        }
    }

    /// The time of a note of a recorded worker.
    pub(crate) fn time(&self, recorded: &Recorded, note: &Note) -> i64 {
        let at = i128::from(note.at) + recorded.clock.shift - self.start;
        i64::try_from(at).unwrap_or(i64::MAX)
    }
}

/// Leaves out the sessions of all but `count` requests, and what happened before the first of these.
fn keep_latest(records: &mut [Record], clocks: &[Clock], count: usize) {
    if count == usize::MAX {
        return;
    }
    // Of engines that add suffixes to ids, the sides of a request are equal before the suffix.
    let key = |room: &Room| room.base().map_or_else(|| room.to_string(), str::to_owned);
    let room = |session: &SessionNotes| match session.notes.first().map(|note| &note.what) {
        Some(What::Opened { room, .. }) => Some(key(room)),
        _ => None,
    };
    let mut requests: BTreeMap<String, (bool, i128)> = BTreeMap::new();
    for (record, clock) in records.iter().zip(clocks) {
        for session in &record.sessions {
            let (Some(room), Some(first)) = (room(session), session.notes.first()) else { continue };
            let (open, from) = (!is_closed(&session.notes), i128::from(first.at) + clock.shift);
            let request = requests.entry(room).or_insert((open, from));
            *request = (request.0 || open, request.1.min(from));
        }
    }
    if requests.is_empty() {
        return;
    }
    let mut chosen: Vec<(String, (bool, i128))> = requests.into_iter().collect();
    chosen.sort_by_key(|(_, latest)| std::cmp::Reverse(*latest));
    chosen.truncate(count);
    let start = chosen.iter().map(|(_, (_, from))| *from).min().unwrap_or(i128::MAX);
    let chosen: BTreeSet<String> = chosen.into_iter().map(|(room, _)| room).collect();
    for (record, clock) in records.iter_mut().zip(clocks) {
        record.sessions.retain(|session| room(session).is_some_and(|room| chosen.contains(&room)));
        record.others.retain(|note| i128::from(note.at) + clock.shift >= start);
    }
}

/// Puts the lanes of the same room together.
fn by_room(lanes: Vec<Lane>, actors: &[Actor]) -> Vec<Request> {
    // The receiver of an engine that adds suffixes to ids has another room than its sender, which has heard it.
    let mut same: BTreeMap<Room, Room> = BTreeMap::new();
    for lane in lanes.iter().filter(|lane| lane.side == Side::Sender) {
        for note in &lane.notes {
            let What::Heard(Message::Register { room, .. } | Message::Acquire { room }) = &note.what else {
                continue;
            };
            if *room != lane.room && room.base().is_some() && room.base() == lane.room.base() {
                same.insert(room.clone(), lane.room.clone());
            }
        }
    }
    let mut requests: BTreeMap<Room, Request> = BTreeMap::new();
    for lane in lanes {
        let room = same.get(&lane.room).unwrap_or(&lane.room).clone();
        let new = || Request {
            room: room.clone(),
            label: None,
            retry_of: None,
            lanes: Vec::new(),
            unrecorded: Vec::new(),
        };
        requests.entry(room.clone()).or_insert_with(new).lanes.push(lane);
    }
    let mut requests: Vec<Request> = requests.into_values().collect();
    for request in &mut requests {
        request.lanes.sort_by_key(|lane| (lane.side, lane.from));
        let mut unrecorded: BTreeMap<usize, (i64, i64)> = BTreeMap::new();
        for lane in &request.lanes {
            for &(peer, first, last) in &lane.peers {
                if actors.get(peer).is_some_and(|actor| actor.recorded.is_none()) {
                    let span = unrecorded.entry(peer).or_insert((first, last));
                    *span = (span.0.min(first), span.1.max(last));
                }
            }
        }
        request.unrecorded =
            unrecorded.into_iter().map(|(peer, (first, last))| (peer, first, last)).collect();
    }
    requests.sort_by_key(|request| request.lanes.iter().map(|lane| lane.from).min());
    requests
}
