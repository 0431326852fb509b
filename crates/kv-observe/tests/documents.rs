//! The documents say what the table says: `docs/METRICS.md` and the dashboard `docs/grafana.json`.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;

use kv_observe::{Kind, METRICS, Metric};
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
