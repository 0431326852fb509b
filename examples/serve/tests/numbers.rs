//! What the server tells of itself: numbers for Prometheus that fit the dashboard, and lines.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek};
use std::time::{Duration, Instant};

use kv_observe::{Kind, METRICS};
use serde_json::Value;

use crate::support::{COMPLETIONS, Serve, ask, completion, post, prompt, send};

/// Numbers that a run need not have: those of queues and pools of the library, which this server has of its own, and those
/// of what has not happened.
const MAY_LACK: [&str; 9] = [
    "kv_transfer_ways_failed_total",
    "kv_transfer_queue_requests",
    "kv_transfer_pool_pages",
    "kv_transfer_posts_failed_total",
    "kv_transfer_leases_expired_total",
    "kv_transfer_lease_renewals_total",
    "kv_transfer_frames_ignored_total",
    "kv_transfer_quarantine_seconds",
    "kv_transfer_events_lost_total",
];

/// The names in a scrape, each with the labels that some sample has.
fn scraped(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_once('{').unwrap_or_else(|| panic!("no labels: {line}"));
        let labels =
            rest.rsplit_once('}').unwrap().0.split(',').map(|label| label.split('=').next().unwrap());
        names.entry(name.to_owned()).or_default().extend(labels.map(str::to_owned));
    }
    names
}

/// The queries of the dashboard.
fn queries() -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/grafana.json");
    let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
}

/// The words of a query.
fn words(query: &str) -> impl Iterator<Item = &str> {
    query.split(|byte: char| !byte.is_ascii_alphanumeric() && byte != '_')
}

#[test]
fn numbers_of_a_run_with_kills_are_those_of_the_document_and_of_the_dashboard() {
    // With several transports, because a worker with one lacks the numbers of several.
    let serve = Serve::start(&["--transport", "auto", "--decode-ranks", "2", "--deadline", "10"]);
    for len in 1..20 {
        ask(&serve.addr, COMPLETIONS, &completion(&prompt(len * 10), 3));
    }
    // One process of each side is killed, and a client hangs up while its prompt is computed.
    for name in ["decode/1", "prefill/0"] {
        serve.kill(name);
        post(&serve.addr, COMPLETIONS, &completion(&prompt(900), 3).to_string());
        while serve.health()["status"] != "ok" {}
    }
    let long = completion(&prompt(3000), 8).to_string();
    let early = send(&serve.addr, "POST", COMPLETIONS, "", long.as_bytes());
    while serve.rank("prefill/0")["pages"]["requests"] == 0 {}
    drop(early);
    // On both decode processes, because requests with the same beginning stay on one.
    let decodes =
        |name: &str| serve.count("kv_transfer_request_bytes_count", &[&format!("process=\"{name}\"")]) > 0;
    let more = (40..200).find(|len| {
        ask(&serve.addr, COMPLETIONS, &completion(&prompt(*len), 3));
        decodes("decode/0") && decodes("decode/1")
    });
    assert!(more.is_some(), "one decode process has got no request");
    serve.quiet();
    let text = serve.metrics();
    let names = scraped(&text);
    for process in ["router", "prefill/0", "decode/0", "decode/1"] {
        assert!(text.contains(&format!("process=\"{process}\"")), "{process} is missing");
    }

    let mut expected: BTreeMap<String, &[&str]> = BTreeMap::new();
    for metric in METRICS {
        let ends = if metric.kind == Kind::Histogram { &["_bucket", "_sum", "_count"][..] } else { &[""] };
        for end in ends {
            let name = format!("{}{end}", metric.name);
            assert!(names.contains_key(&name) || MAY_LACK.contains(&metric.name), "no {name}:\n{text}");
            expected.insert(name, metric.labels);
        }
    }
    for (name, labels) in names.iter().filter(|(name, _)| name.starts_with("kv_transfer_")) {
        let known = expected.get(name).unwrap_or_else(|| panic!("{name} is in no document"));
        let told: BTreeSet<&str> =
            labels.iter().map(String::as_str).filter(|label| !["process", "le"].contains(label)).collect();
        assert_eq!(told, known.iter().copied().collect(), "{name}");
    }

    let queries = queries();
    assert!(queries.len() > 20, "{queries:?}");
    for query in queries {
        let name = words(&query).find(|word| word.starts_with("kv_transfer_")).unwrap();
        assert!(expected.contains_key(name), "{query}");
        let Some(labels) = names.get(name) else { continue };
        let by = query.split_once("by (").unwrap().1.split_once(')').unwrap().0;
        for label in words(by).filter(|word| !word.is_empty()) {
            assert!(labels.contains(label), "{query} groups by {label}, which {name} lacks");
        }
    }
    // The document of the server's own numbers.
    let own = include_str!("../metrics.rs");
    for name in names.keys().filter(|name| name.starts_with("serve_")) {
        let family =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        assert!(own.contains(&format!("`{family}")), "{family} is in no table");
    }
}

#[test]
fn peers_are_counted_by_the_transport_over_which_they_are_connected() {
    let serve = Serve::start(&["--transport", "auto", "--prefill-tp", "2"]);
    let peers = |worker: &str, transport: &str| {
        let labels = [format!("worker=\"{worker}\""), format!("transport=\"{transport}\"")];
        serve.count("kv_transfer_peers", &[&labels[0], &labels[1]])
    };
    // Of three workers on one host, each of the two transports that every host has.
    let counts = || {
        let workers = ["decode/0", "prefill/0", "prefill/1"];
        ["local", "tcp"].map(|transport| workers.map(|worker| peers(worker, transport)))
    };
    assert!(serve.metrics().contains("kv_transfer_peers{"));
    assert_eq!(counts(), [[0, 0, 0], [0, 0, 0]], "before the first request");
    ask(&serve.addr, COMPLETIONS, &completion(&prompt(30), 3));
    serve.quiet();
    assert_eq!(counts(), [[2, 1, 1], [0, 0, 0]]);
    serve.kill("prefill/0");
    let patience = Instant::now() + Duration::from_secs(60);
    while counts()[0][0] > 0 {
        assert!(Instant::now() < patience, "dead peers are connected: {:?}", counts());
    }
    while serve.health()["status"] != "ok" {}
    ask(&serve.addr, COMPLETIONS, &completion(&prompt(31), 3));
    serve.quiet();
    assert_eq!(counts(), [[2, 1, 1], [0, 0, 0]], "with the prefill process that was started again");
    // A worker with one transport has none to tell apart.
    let serve = Serve::start(&[]);
    ask(&serve.addr, COMPLETIONS, &completion(&prompt(30), 3));
    serve.quiet();
    assert!(!serve.metrics().contains("kv_transfer_peers"));
}

#[test]
fn with_log_each_half_of_a_request_is_a_line() {
    let mut log = std::fs::File::options();
    let path = std::env::temp_dir().join(format!("serve-log-{}", std::process::id()));
    let mut log = log.create(true).truncate(true).read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let serve = Serve::start_with(&["--log"], log.try_clone().unwrap().into());
    for _ in 0..3 {
        ask(&serve.addr, COMPLETIONS, &completion(&prompt(30), 3));
    }
    serve.quiet();
    let (ended_well, _) = serve.terminate();
    assert!(ended_well);
    let mut text = String::new();
    log.rewind().unwrap();
    log.read_to_string(&mut text).unwrap();
    for half in ["sender", "receiver"] {
        let lines = text.lines().filter(|line| line.contains("kv_request") && line.contains(half)).count();
        assert_eq!(lines, 3, "{half}:\n{text}");
    }
}
