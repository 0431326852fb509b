//! The data of the page, as `page/data.js` reads it: short names, and times in microseconds.

use std::collections::BTreeMap;

use kv_core::Room;
use serde::Serialize;

use crate::lane::{Lane, Outcome, Phase};
use crate::note::{Message, Side, What};
use crate::text::Text;
use crate::timeline::{Actor, Request, Timeline};

/// A time or a duration in microseconds.
type Micros = f64;

#[derive(Serialize)]
pub(crate) struct View<'a> {
    end: Micros,
    remarks: &'a [String],
    workers: Vec<WorkerView<'a>>,
    requests: Vec<RequestView<'a>>,
    incidents: Vec<IncidentView<'a>>,
    /// The texts of all events, each once.
    texts: Vec<String>,
}

/// An event: time, peer, and the place of its text.
type EventView = (Micros, Option<usize>, usize);

/// The texts of events, most of which are said of each request.
#[derive(Default)]
struct Texts(BTreeMap<String, usize>);

impl Texts {
    fn place(&mut self, text: String) -> usize {
        let next = self.0.len();
        *self.0.entry(text).or_insert(next)
    }

    fn in_order(self) -> Vec<String> {
        let mut all: Vec<(String, usize)> = self.0.into_iter().collect();
        all.sort_by_key(|(_, place)| *place);
        all.into_iter().map(|(text, _)| text).collect()
    }
}

#[derive(Serialize)]
struct WorkerView<'a> {
    name: String,
    life: String,
    record: Option<RecordView<'a>>,
}

#[derive(Serialize)]
struct RecordView<'a> {
    /// Added to the worker's own times.
    shift: Micros,
    /// By how much the shift may be wrong, if that is known.
    unsure: Option<Micros>,
    messages: usize,
    through: Option<usize>,
    contradicted: bool,
    events: usize,
    lost: &'a crate::record::Lost,
    /// Heartbeats: time, peer, whether heard (a question) or answered, number of leases.
    beats: Vec<(Micros, Option<usize>, bool, u64)>,
}

#[derive(Serialize)]
struct RequestView<'a> {
    room: String,
    label: Option<&'a str>,
    /// The position of the request in whose place this one was sent.
    retry_of: Option<usize>,
    lanes: Vec<LaneView<'a>>,
    /// Sides without a record: worker, first and last time it was heard of.
    unrecorded: Vec<(usize, Micros, Micros)>,
}

/// A data operation: from, to, bytes, peer, whether written, error.
type PostView<'a> = (Micros, Option<Micros>, u64, Option<usize>, bool, Option<&'a str>);

#[derive(Serialize)]
struct LaneView<'a> {
    worker: usize,
    session: u64,
    sends: bool,
    from: Micros,
    to: Micros,
    pages: u64,
    bytes: u64,
    peers: Vec<usize>,
    /// The transport by which each of the peers was reached, if that is recorded.
    transports: Vec<Option<&'a str>>,
    /// The phases: name, from, to.
    spans: Vec<(&'static str, Micros, Micros)>,
    posts: Vec<PostView<'a>>,
    lease: Option<(Micros, Micros)>,
    expired: Option<Micros>,
    repeats: Vec<Micros>,
    /// "ok", "failed" or "open".
    outcome: &'static str,
    /// Name, cause, advice and phase of a failure.
    failure: Option<[String; 4]>,
    events: Vec<EventView>,
}

#[derive(Serialize)]
struct IncidentView<'a> {
    at: Micros,
    kind: &'static str,
    worker: usize,
    peer: Option<usize>,
    request: Option<(usize, usize)>,
    text: &'a str,
}

fn micros(nanos: i64) -> Micros {
    nanos as f64 / 1e3
}

impl<'a> View<'a> {
    pub(crate) fn of(timeline: &'a Timeline) -> View<'a> {
        let places: BTreeMap<&Room, usize> =
            timeline.requests.iter().map(|request| &request.room).zip(0..).collect();
        let mut texts = Texts::default();
        let mut view = View {
            end: micros(timeline.end),
            remarks: &timeline.remarks,
            workers: timeline.actors.iter().map(|actor| worker(timeline, actor)).collect(),
            requests: timeline
                .requests
                .iter()
                .map(|request| {
                    let first = request.retry_of.as_ref().and_then(|first| places.get(first));
                    of_request(request, first.copied(), &mut texts)
                })
                .collect(),
            incidents: timeline
                .incidents
                .iter()
                .map(|incident| IncidentView {
                    at: micros(incident.at),
                    kind: incident.kind.name(),
                    worker: incident.worker,
                    peer: incident.peer,
                    request: incident.request,
                    text: &incident.text,
                })
                .collect(),
            texts: Vec::new(),
        };
        view.texts = texts.in_order();
        view
    }
}

fn worker<'a>(timeline: &Timeline, actor: &'a Actor) -> WorkerView<'a> {
    let record = actor.recorded.as_ref().map(|recorded| {
        let mut beats = Vec::new();
        for (note, peer) in &recorded.others {
            let at = micros(timeline.time(recorded, note));
            match &note.what {
                What::Said(Message::Heartbeat { leases, .. }) => beats.push((at, *peer, false, *leases)),
                What::Heard(Message::Heartbeat { leases, .. }) => beats.push((at, *peer, true, *leases)),
                _ => {}
            }
        }
        RecordView {
            shift: recorded.clock.shift as f64 / 1e3,
            unsure: recorded.clock.uncertainty.map(|unsure| unsure as f64 / 1e3),
            messages: recorded.clock.messages,
            through: recorded.clock.through,
            contradicted: recorded.clock.contradicted,
            events: recorded.events,
            lost: &recorded.lost,
            beats,
        }
    });
    WorkerView { name: actor.worker.to_string(), life: actor.incarnation.to_string(), record }
}

fn of_request<'a>(request: &'a Request, retry_of: Option<usize>, texts: &mut Texts) -> RequestView<'a> {
    RequestView {
        room: request.room.to_string(),
        label: request.label.as_deref(),
        retry_of,
        lanes: request.lanes.iter().map(|lane| of_lane(lane, texts)).collect(),
        unrecorded: request
            .unrecorded
            .iter()
            .map(|&(worker, first, last)| (worker, micros(first), micros(last)))
            .collect(),
    }
}

fn of_lane<'a>(lane: &'a Lane, texts: &mut Texts) -> LaneView<'a> {
    let expired = lane.notes.iter().find(|note| note.what == What::LeaseExpired);
    let peer = |number: Option<u64>| lane.actor_of(number);
    LaneView {
        worker: lane.worker,
        session: lane.session,
        sends: lane.side == Side::Sender,
        from: micros(lane.from),
        to: micros(lane.to),
        pages: lane.pages,
        bytes: lane.bytes(),
        peers: lane.peers.iter().map(|&(peer, ..)| peer).collect(),
        transports: lane.peers.iter().map(|(peer, ..)| lane.transports.get(peer).map(Text::as_str)).collect(),
        spans: lane
            .spans
            .iter()
            .map(|span| (phase_name(span.phase), micros(span.from), micros(span.to)))
            .collect(),
        posts: lane
            .posts
            .iter()
            .map(|post| {
                let to = post.to.map(micros);
                (micros(post.from), to, post.bytes, post.peer, post.write, post.error.as_deref())
            })
            .collect(),
        lease: lane.lease.map(|(from, to)| (micros(from), micros(to))),
        expired: expired.map(|note| micros(lane.time(note))),
        repeats: lane.repeats.iter().copied().map(micros).collect(),
        outcome: match lane.outcome {
            Outcome::Succeeded => "ok",
            Outcome::Failed(_) => "failed",
            Outcome::Open => "open",
        },
        failure: match &lane.outcome {
            Outcome::Failed(failure) => Some([
                failure.name.to_string(),
                failure.why.to_string(),
                failure.advice.to_string(),
                failure.phase.to_string(),
            ]),
            Outcome::Succeeded | Outcome::Open => None,
        },
        events: lane
            .notes
            .iter()
            .map(|note| (micros(lane.time(note)), peer(note.peer), texts.place(note.what.to_string())))
            .collect(),
    }
}

/// The name of a phase in the page and in the trace.
pub(crate) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Bootstrapping => "Bootstrapping",
        Phase::WaitingForInput => "WaitingForInput",
        Phase::Transferring => "Transferring",
        Phase::Closing => "Closing",
        Phase::Failing => "Failing",
        Phase::Quarantine => "Quarantine",
    }
}
