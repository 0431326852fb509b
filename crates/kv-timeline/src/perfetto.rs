//! The timeline in Chrome's trace event format, which <https://ui.perfetto.dev> opens.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use crate::incident::IncidentKind;
use crate::lane::{Lane, Outcome};
use crate::note::Side;
use crate::timeline::{Request, Timeline};
use crate::view::phase_name;

/// One event of the trace event format. Times are in microseconds.
#[derive(Serialize)]
struct TraceEvent {
    name: String,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Value::is_null")]
    args: Value,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    trace_events: Vec<TraceEvent>,
    display_time_unit: &'static str,
    other_data: Value,
}

impl Timeline {
    /// The timeline as JSON in Chrome's trace event format, for <https://ui.perfetto.dev> and
    /// `chrome://tracing`: a process for each worker, and in the process a track for each session, with its
    /// phases, its data operations and its events; what went wrong with peers as instants; and the bytes per second
    /// to each peer as counters.
    pub fn perfetto(&self) -> Result<String, serde_json::Error> {
        let mut trace_events = Vec::new();
        for (worker, actor) in self.actors.iter().enumerate() {
            let name = match actor.recorded {
                Some(_) => actor.worker.to_string(),
                None => format!("{} (no record)", actor.worker),
            };
            let mut say =
                |what: &str, args| trace_events.push(event(what, "__metadata", "M", 0, worker, args));
            say("process_name", json!({ "name": name }));
            say("process_sort_index", json!({ "sort_index": worker }));
            let clock = actor.recorded.as_ref().map(|recorded| recorded.clock.uncertainty);
            match clock {
                Some(Some(0)) | None => {}
                Some(Some(unsure)) => {
                    let label = format!("clock ± {:?}", Duration::from_micros(unsure.div_ceil(1000)));
                    say("process_labels", json!({ "labels": label }));
                }
                Some(None) => say("process_labels", json!({ "labels": "clock not known" })),
            }
        }
        for request in &self.requests {
            for lane in &request.lanes {
                self.session(request, lane, &mut trace_events);
            }
        }
        for incident in &self.incidents {
            let of_session = matches!(
                incident.kind,
                IncidentKind::Failed | IncidentKind::LeaseExpired | IncidentKind::Quarantine
            );
            if of_session {
                continue;
            }
            let peer = incident.peer.and_then(|peer| self.actors.get(peer));
            let peer = peer.map(|peer| format!("{}: ", peer.worker)).unwrap_or_default();
            let name = format!("{peer}{}", incident.text);
            let mut instant = event(&name, "peer", "i", incident.at, incident.worker, Value::Null);
            instant.s = Some("p");
            trace_events.push(instant);
        }
        self.rates(&mut trace_events);
        // What ends comes before what begins at the same time, as it was put in.
        trace_events.sort_by(|a, b| a.ts.total_cmp(&b.ts));
        let clocks: Vec<Value> = self
            .actors
            .iter()
            .filter_map(|actor| {
                let clock = actor.recorded.as_ref()?.clock;
                Some(json!({
                    "worker": actor.worker.to_string(),
                    "incarnation": actor.incarnation.to_string(),
                    "shift_us": clock.shift as f64 / 1e3,
                    "uncertainty_us": clock.uncertainty.map(|unsure| unsure as f64 / 1e3),
                }))
            })
            .collect();
        let other_data = json!({ "clocks": clocks, "remarks": self.remarks });
        serde_json::to_string(&Trace { trace_events, display_time_unit: "ms", other_data })
    }

    fn session(&self, request: &Request, lane: &Lane, events: &mut Vec<TraceEvent>) {
        let id = format!("{}.{}", lane.worker, lane.session);
        let does = if lane.side == Side::Sender { "sends" } else { "receives" };
        let name = match &request.label {
            Some(label) => format!("{label}, room {} {does}", request.room),
            None => format!("room {} {does}", request.room),
        };
        let mut push = |name: &str, cat, ph, at, args, id: &str| {
            let mut event = event(name, cat, ph, at, lane.worker, args);
            event.id = Some(id.to_owned());
            events.push(event);
        };
        let outcome = match &lane.outcome {
            Outcome::Succeeded => json!("succeeded"),
            Outcome::Open => json!("open at the end of the record"),
            Outcome::Failed(failure) => {
                json!({ "failed": failure.why.as_str(), "advice": failure.advice.as_str() })
            }
        };
        let peers: Vec<String> = lane
            .peers
            .iter()
            .filter_map(|(peer, ..)| {
                let worker = &self.actors.get(*peer)?.worker;
                Some(match lane.transports.get(peer) {
                    Some(transport) => format!("{worker} by {transport}"),
                    None => worker.to_string(),
                })
            })
            .collect();
        let mut args =
            json!({ "outcome": outcome, "pages": lane.pages, "bytes": lane.bytes(), "peers": peers });
        if let Some(first) = &request.retry_of {
            args["in the place of room"] = json!(first.to_string());
        }
        push(&name, "session", "b", lane.from, args, &id);
        for span in &lane.spans {
            push(phase_name(span.phase), "session", "b", span.from, Value::Null, &id);
            push(phase_name(span.phase), "session", "e", span.to, Value::Null, &id);
        }
        for note in &lane.notes {
            push(&note.what.to_string(), "session", "n", lane.time(note), Value::Null, &id);
        }
        push(&name, "session", "e", lane.to, Value::Null, &id);
        for post in &lane.posts {
            let id = format!("{id}.{}", post.post);
            let op = if post.write { "WRITE" } else { "READ" };
            let to = post.to.unwrap_or(self.end);
            let seconds = (to - post.from) as f64 / 1e9;
            let rate = if seconds > 0.0 { post.bytes as f64 / seconds / 1e9 } else { 0.0 };
            let name = format!("{op} of room {}", request.room);
            let args = json!({ "bytes": post.bytes, "GB/s": rate, "error": post.error });
            push(&name, "post", "b", post.from, args, &id);
            push(&name, "post", "e", to, Value::Null, &id);
        }
    }

    /// The bytes per second to each peer, as steps where a data operation begins or ends.
    fn rates(&self, events: &mut Vec<TraceEvent>) {
        let mut steps: Vec<(usize, Option<usize>, i64, f64)> = Vec::new();
        for lane in self.requests.iter().flat_map(|request| &request.lanes) {
            for post in &lane.posts {
                let Some(to) = post.to.filter(|&to| to > post.from && post.error.is_none()) else { continue };
                let rate = post.bytes as f64 / (to - post.from) as f64;
                steps.push((lane.worker, post.peer, post.from, rate));
                steps.push((lane.worker, post.peer, to, -rate));
            }
        }
        steps.sort_by_key(|&(worker, peer, at, _)| (worker, peer, at));
        for of_peer in steps.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let mut now = 0.0;
            for &(worker, peer, at, step) in of_peer {
                now = f64::max(0.0, now + step);
                let peer = peer.and_then(|peer| self.actors.get(peer)).map(|peer| peer.worker.to_string());
                let name = format!("GB/s with {}", peer.unwrap_or_default());
                events.push(event(&name, "rate", "C", at, worker, json!({ "GB/s": now })));
            }
        }
    }
}

fn event(name: &str, cat: &'static str, ph: &'static str, at: i64, worker: usize, args: Value) -> TraceEvent {
    let (name, ts) = (name.to_owned(), at as f64 / 1e3);
    TraceEvent { name, cat, ph, ts, pid: worker + 1, tid: 0, id: None, s: None, args }
}
