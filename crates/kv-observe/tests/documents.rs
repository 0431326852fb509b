//! The documents say what the table says: `docs/METRICS.md` and the dashboard `docs/grafana.json`.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_core::trace::{Dropped, KvWhat, Log, Message, WayFault};
use kv_core::{
    Cause, EngineId, Incarnation, PeerCause, PeerId, QuarantineReason, Time, TransportError, WorkerId,
};
use kv_observe::{Kind, METRICS, Metric, Metrics};
use metrics_util::debugging::DebuggingRecorder;
use serde_json::Value;

/// A file of the folder `docs`.
fn document(name: &str) -> String {
    let path = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The row of a metric in the table of `docs/METRICS.md`.
fn row(metric: &Metric) -> String {
    let list = |names: &str| match names {
        "" => "–".to_owned(),
        names => names.split(", ").map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
    };
    let kind = match metric.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
        kind => panic!("{kind:?}"),
    };
    let labels = metric.labels.join(", ");
    let Metric { name, help, vllm, sglang, .. } = metric;
    format!("| `{name}` | {kind} | {labels} | {help} | {} | {} |", list(vllm), list(sglang))
}

#[test]
fn the_document_has_one_row_for_each_metric_in_the_words_of_the_table() {
    let document = document("METRICS.md");
    let rows: Vec<&str> = document.lines().filter(|line| line.starts_with("| `kv_transfer_")).collect();
    let expected: Vec<String> = METRICS.iter().map(|metric| row(metric)).collect();
    assert_eq!(rows, expected, "docs/METRICS.md must have these rows:\n{}", expected.join("\n"));
}

/// The names in a row of the table of names.
fn listed(place: &str) -> Vec<String> {
    let (document, begin) = (document("METRICS.md"), format!("| {place} | `"));
    let (_, names) = document.split_once("## Names").unwrap();
    let row = names.lines().find(|line| line.starts_with(&begin)).unwrap_or_else(|| panic!("{place}"));
    let list = row.split(" | ").nth(1).unwrap().trim_end_matches(" |");
    list.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()
}

#[test]
fn the_document_lists_every_name_of_causes_messages_events_and_reasons() {
    let causes: BTreeSet<&str> = Cause::NAMES.iter().chain(PeerCause::NAMES).copied().collect();
    assert_eq!(listed("`cause`"), causes.into_iter().collect::<Vec<_>>());
    assert_eq!(listed("`message`"), Message::NAMES);
    assert_eq!(listed("field `what`"), KvWhat::NAMES);
    assert_eq!(
        listed("`reason` of ignored frames"),
        Dropped::ALL.iter().map(|why| why.name()).collect::<Vec<_>>()
    );
    let reasons: Vec<&str> = QuarantineReason::ALL.iter().map(|reason| reason.name()).collect();
    assert_eq!(listed("`reason` of quarantine"), reasons);
}

#[test]
fn the_document_lists_the_events_of_peers_that_are_counted() {
    let worker = WorkerId { engine: EngineId::new("here").unwrap(), rank: 0 };
    let silent_for = Duration::from_secs(1);
    let events = [
        KvWhat::PeerMet { worker: worker.clone(), incarnation: Incarnation::from_random(1) },
        KvWhat::WayChosen { transport: "tcp".to_owned() },
        KvWhat::PeerAnswers,
        KvWhat::PeerRefuses(Box::new(Cause::PeerLost)),
        KvWhat::WayOpened,
        KvWhat::ConnectFailed(TransportError::PeerGone),
        KvWhat::WayFailed { transport: "local".to_owned(), fault: WayFault::Lost, pause: Some(silent_for) },
        KvWhat::WayLost,
        KvWhat::PeerSilent { silent_for },
        KvWhat::PeerGivenUp { silent_for },
        KvWhat::PeerBack,
        KvWhat::PeerDead { quiet_after: silent_for },
        KvWhat::PeerRestarted,
        KvWhat::PeerForgotten,
        // These two are of permissions, and are not counted.
        KvWhat::PermissionBegan { lasts: silent_for },
        KvWhat::PermissionEnded,
        KvWhat::Revoking,
        KvWhat::WritesOver,
    ];
    // From the first event of peers on, the names are all of peers.
    let first = KvWhat::NAMES.iter().position(|name| *name == "peer_met").unwrap();
    let told: Vec<&str> = events.iter().map(KvWhat::name).collect();
    assert_eq!(told, KvWhat::NAMES[first..], "an event of peers that this test does not know");
    let recorder = Arc::new(DebuggingRecorder::new());
    let listener = Metrics::to(Arc::clone(&recorder) as _).listener();
    let mut log = Log::default();
    log.listen(true);
    for event in events {
        log.tell(Time::ZERO, PeerId(1), || event);
        listener.tell(&worker, &log.next().unwrap());
    }
    let counted = recorder.snapshotter().snapshot().into_vec().into_iter().filter_map(|(key, ..)| {
        let label = key.key().labels().find(|label| label.key() == "event")?;
        Some(label.value().to_owned())
    });
    assert_eq!(counted.collect::<BTreeSet<_>>(), listed("`event`").into_iter().collect());
}

/// The names of this crate's metrics in a text, without the endings that Prometheus gives to histograms.
fn names_in(text: &str) -> BTreeSet<String> {
    let word = |byte: char| byte.is_ascii_alphanumeric() || byte == '_';
    let words = text.split(|byte: char| !word(byte)).filter(|word| word.starts_with("kv_transfer_"));
    let histogram = |name: &str| METRICS.iter().any(|m| m.name == name && m.kind == Kind::Histogram);
    let name = |word: &str| {
        let ends = ["_bucket", "_sum", "_count"].iter().filter_map(|end| word.strip_suffix(end));
        ends.into_iter().find(|name| histogram(name)).unwrap_or(word).to_owned()
    };
    words.map(name).collect()
}

/// All texts in a JSON value, with the keys under which they stand.
fn texts<'a>(key: &'a str, value: &'a Value, found: &mut Vec<(&'a str, &'a str)>) {
    match value {
        Value::String(text) => found.push((key, text)),
        Value::Array(values) => values.iter().for_each(|value| texts(key, value, found)),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| texts(key, value, found)),
        _ => {}
    }
}

#[test]
fn the_dashboard_shows_every_metric_of_the_table_and_no_other() {
    let dashboard: Value = serde_json::from_str(&document("grafana.json")).unwrap();
    let mut found = Vec::new();
    texts("", &dashboard, &mut found);
    let asked: String = found
        .iter()
        .filter(|(key, _)| matches!(*key, "expr" | "query"))
        .map(|(_, text)| format!("{text}\n"))
        .collect();
    let listed: BTreeSet<String> = METRICS.iter().map(|metric| metric.name.to_owned()).collect();
    assert_eq!(names_in(&asked), listed);
}

#[test]
fn a_distribution_is_shown_by_its_buckets_and_never_by_its_bare_name() {
    let text = document("grafana.json");
    let word = |byte: char| byte.is_ascii_alphanumeric() || byte == '_';
    let words: BTreeSet<&str> = text.split(|byte: char| !word(byte)).collect();
    for metric in METRICS {
        let bare = words.contains(metric.name);
        assert_eq!(bare, metric.kind != Kind::Histogram, "{}", metric.name);
    }
}

#[test]
fn names_labels_and_buckets_follow_the_rules_of_the_table() {
    let names: BTreeSet<&str> = METRICS.iter().map(|metric| metric.name).collect();
    assert_eq!(names.len(), METRICS.len(), "a name is used twice");
    for metric in METRICS {
        let Metric { name, kind, labels, buckets, .. } = metric;
        assert!(name.starts_with("kv_transfer_"), "{name}");
        assert_eq!(labels.first(), Some(&"worker"), "{name}");
        assert!(!labels.iter().any(|label| matches!(*label, "room" | "request" | "session")), "{name}");
        assert_eq!(*kind == Kind::Counter, name.ends_with("_total"), "{name}");
        assert_eq!(*kind == Kind::Histogram, !buckets.is_empty(), "{name}");
        assert!(buckets.is_sorted_by(|low, high| low < high), "{name}: {buckets:?}");
    }
}
