//! What went wrong, in one list.

use crate::lane::Outcome;
use crate::note::What;
use crate::timeline::Timeline;

/// Something that went wrong, or that a reader of the picture wants to know of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incident {
    /// When, in nanoseconds of the timeline.
    pub at: i64,
    /// The kind of the incident.
    pub kind: IncidentKind,
    /// The worker that has noticed: its position among the timeline's workers.
    pub worker: usize,
    /// The peer that is meant: its position among the timeline's workers.
    pub peer: Option<usize>,
    /// The request: its position among the timeline's requests, and the lane.
    pub request: Option<(usize, usize)>,
    /// What happened, without a subject.
    pub text: String,
}

/// The kinds of incidents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum IncidentKind {
    /// A session has failed.
    Failed,
    /// A lease has run out before its pages were read.
    LeaseExpired,
    /// A peer is dead or was restarted.
    PeerLost,
    /// A peer cannot be reached, refuses, is silent, or was given up.
    PeerTrouble,
    /// A peer that was given up speaks again.
    PeerBack,
    /// Something was asked once more, because an answer was missing.
    Repeated,
    /// The pages of a failed session went into quarantine.
    Quarantine,
}

impl IncidentKind {
    /// A name for the table of incidents.
    pub fn name(self) -> &'static str {
        match self {
            IncidentKind::Failed => "failed",
            IncidentKind::LeaseExpired => "lease expired",
            IncidentKind::PeerLost => "peer lost",
            IncidentKind::PeerTrouble => "peer trouble",
            IncidentKind::PeerBack => "peer back",
            IncidentKind::Repeated => "asked again",
            IncidentKind::Quarantine => "quarantine",
        }
    }
}

fn kind(what: &What) -> Option<IncidentKind> {
    Some(match what {
        What::Failed(_) => IncidentKind::Failed,
        What::LeaseExpired => IncidentKind::LeaseExpired,
        What::PeerDead | What::PeerRestarted => IncidentKind::PeerLost,
        What::PeerSilent { .. }
        | What::PeerGivenUp { .. }
        | What::WayLost
        | What::ConnectFailed { .. }
        | What::PeerRefuses { .. }
        | What::NotAnswered { .. } => IncidentKind::PeerTrouble,
        What::PeerBack => IncidentKind::PeerBack,
        What::Asked { again: true } => IncidentKind::Repeated,
        What::QuarantineBegan { .. } => IncidentKind::Quarantine,
        _ => return None,
    })
}

/// All incidents of a timeline, in the order of time.
pub(crate) fn all(timeline: &Timeline) -> Vec<Incident> {
    let mut all = Vec::new();
    for (worker, actor) in timeline.actors.iter().enumerate() {
        let Some(recorded) = &actor.recorded else { continue };
        for (note, peer) in &recorded.others {
            let Some(kind) = kind(&note.what) else { continue };
            let recorded_later =
                peer.and_then(|peer| timeline.actors.get(peer)).is_some_and(|actor| actor.recorded.is_some());
            if note.what == What::PeerDead && recorded_later {
                // A worker that is dead gives no record: this one stopped once its record was taken.
                continue;
            }
            let at = timeline.time(recorded, note);
            all.push(Incident { at, kind, worker, peer: *peer, request: None, text: note.what.to_string() });
        }
    }
    for (number, request) in timeline.requests.iter().enumerate() {
        for (place, lane) in request.lanes.iter().enumerate() {
            let failure = match &lane.outcome {
                Outcome::Failed(failure) => Some(failure),
                Outcome::Succeeded | Outcome::Open => None,
            };
            let named = failure.and_then(|failure| failure.peer.as_ref());
            let of_name = |&(peer, ..): &(usize, i64, i64)| {
                timeline.actors.get(peer).is_some_and(|actor| Some(&actor.worker) == named)
            };
            let peer = lane.peers.iter().find(|peer| of_name(peer)).or(lane.peers.last());
            for note in &lane.notes {
                let Some(kind) = kind(&note.what) else { continue };
                let text = note.what.to_string();
                let (at, worker) = (lane.time(note), lane.worker);
                let (peer, request) = (peer.map(|(peer, ..)| *peer), Some((number, place)));
                all.push(Incident { at, kind, worker, peer, request, text });
            }
            for &at in &lane.repeats {
                let (kind, worker) = (IncidentKind::Repeated, lane.worker);
                let (peer, request) = (peer.map(|(peer, ..)| *peer), Some((number, place)));
                let text = "the registration is sent again, because no answer has come".to_owned();
                all.push(Incident { at, kind, worker, peer, request, text });
            }
        }
    }
    all.sort_by_key(|incident| incident.at);
    all
}
