//! Metrics and spans of real pairs of workers have the true values: bytes, counts, causes, and one line for each
//! half of a request.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod seen;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use kv_observe::{REQUEST, WORKER};
use kv_transfer::prelude::*;
use kv_transfer::{AuxIndex, Cause, Lease, PeerCause};
use seen::{Counted, closed, lines, loud};
use support::host::Setup;
use support::memory::Shape;
use support::pair::Pair;
use support::process::{Process, keep, reader, setup};
use support::{PATIENCE, failed, reclaimed, server, until};
use tracing::Level;

const SHAPE: Shape = Shape { pages: 64, tensors: 4, piece: 128, page_major: false, rows: 8, aux_regions: 1 };
const PAGE: u64 = 512;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

/// Two hosts that have not met, whose engines are called `NAME-p` and `NAME-d`, and what they count. They say
/// nothing twice, however busy the machine is.
fn observed(name: &str) -> (Pair, Counted) {
    seen::take();
    let counted = Counted::new();
    let pair = Pair::strangers(SHAPE, |setup| {
        let half = if setup.role == WorkerRole::Prefill { "p" } else { "d" };
        setup.engine = format!("{name}-{half}");
        setup.timing.retry_first = PATIENCE;
        setup.timing.keepalive = PATIENCE;
        setup.listener = Some(counted.metrics.listener().and(kv_observe::spans()));
    });
    (pair, counted)
}

/// Stops both hosts, so that their listeners have heard everything.
fn stop(mut pair: Pair) {
    for host in [&mut pair.prefill, &mut pair.decode] {
        until("the end of all sessions", || host.gauges().sessions_open == 0);
        host.stop();
    }
    pair.server.stop();
}

/// The values of the label `phase` that have one value each, of a worker and half.
fn phases(values: &seen::Values, labels: &str) -> Vec<String> {
    let phase = |(all, _): (&str, u64)| all.rsplit(' ').next().unwrap().to_owned();
    let found: Vec<String> = values.all("phase_seconds", labels).into_iter().map(phase).collect();
    for phase in &found {
        assert_eq!(values.distribution("phase_seconds", &format!("{labels} {phase}")).len(), 1, "{phase}");
    }
    found
}

/// The one span of a worker.
fn only_span(worker: &str) -> seen::Fields {
    let mut spans = closed(worker);
    assert_eq!(spans.len(), 1, "{worker}: {spans:?}");
    spans.remove(0)
}

#[test]
fn a_push_is_counted_on_both_sides_with_its_bytes_and_phases() {
    let (mut pair, counted) = observed("push");
    let mut sender = pair.sender(7);
    sender.init(5, Some(AuxIndex(0))).unwrap();
    let mut receiver = pair.receiver(7);
    until("the welcome", || receiver.poll() == KvPoll::WaitingForInput);
    receiver.init(pair.decode.room_for(5), Some(AuxIndex(0))).unwrap();
    until("the receiver's registration", || sender.poll() == KvPoll::WaitingForInput);

    // Sampled while the receiver has its pages and the sender has none.
    let sample = |host: &support::host::Host| {
        counted.metrics.sample(host.manager.args().worker()).manager(&host.manager);
    };
    sample(&pair.prefill);
    sample(&pair.decode);
    let open = counted.values();
    assert_eq!(open.number("held_pages", "push-d/0 in_transfer"), 5);
    assert_eq!(open.number("held_bytes", "push-d/0 in_transfer"), 5 * PAGE);
    assert_eq!(open.number("held_bytes", "push-p/0 in_transfer"), 0);
    assert_eq!(open.all("sessions", "push-p/0"), [("push-p/0 lost", 0), ("push-p/0 open", 1)]);
    assert_eq!(open.all("published", ""), [("push-d/0", 1), ("push-p/0", 1)]);
    assert!(open.number("frames_total", "push-p/0 received") >= 2, "a hello and a registration");
    assert_eq!(open.number("messages_total", "push-d/0 sent register"), 1);
    assert_eq!(open.number("messages_total", "push-p/0 received register"), 1);
    assert_eq!(open.all("lookups_total", ""), [("push-d/0 answered", 1), ("push-d/0 asked", 1)]);
    assert_eq!(open.number("peer_events_total", "push-p/0 peer_met"), 1);

    sender.send(pair.prefill.prompt(5, 7)).unwrap();
    pair.complete(sender, receiver, 7);
    stop(pair);
    let values = counted.values();
    let bytes = 5 * PAGE + SHAPE.row_len() as u64;
    assert_eq!(values.all("bytes_total", ""), [("push-p/0 write push-d/0 local", bytes)]);
    assert_eq!(
        values.all("requests_total", ""),
        [("push-d/0 receiver success", 1), ("push-p/0 sender success", 1)]
    );
    assert!(values.all("failures_total", "").is_empty() && values.all("events_lost_total", "").is_empty());
    assert_eq!(values.distribution("request_bytes", "push-p/0 sender"), [bytes as f64]);
    let posts = values.distribution("post_bytes", "push-p/0 write");
    assert_eq!(posts.iter().sum::<f64>(), bytes as f64);
    assert_eq!(values.distribution("post_seconds", "push-p/0 write").len(), posts.len());
    assert_eq!(values.distribution("post_descriptors", "push-p/0 write").len(), posts.len());
    assert_eq!(values.distribution("request_bytes_per_second", "push-p/0 sender").len(), 1);
    assert_eq!(
        phases(&values, "push-d/0 receiver"),
        ["bootstrap", "handshake", "input", "rendezvous", "transfer", "whole"]
    );
    assert_eq!(phases(&values, "push-p/0 sender"), ["input", "rendezvous", "transfer", "whole"]);
    for labels in ["push-d/0 receiver", "push-p/0 sender"] {
        let time = |phase: &str| values.distribution("phase_seconds", &format!("{labels} {phase}"))[0];
        for phase in phases(&values, labels) {
            assert!(time(&phase) <= time("whole"), "{labels}: {phase}");
        }
    }

    for (worker, half, peer, moved) in
        [("push-p/0", "sender", "push-d/0", bytes), ("push-d/0", "receiver", "push-p/0", 0)]
    {
        let span = only_span(worker);
        let moved = moved.to_string();
        let expected = [
            ("room", "7"),
            ("half", half),
            ("peer", peer),
            ("outcome", "success"),
            ("bytes", moved.as_str()),
        ];
        for (field, value) in expected {
            assert_eq!(span[field], value, "{worker}: {field}");
        }
        assert!(!span.contains_key("cause") && !span.contains_key("phase"), "{span:?}");
        assert_eq!(loud(worker), [(Level::INFO, "ended".to_owned())], "one line for the request");
        let ended = lines(worker).into_iter().find(|line| line.fields["what"] == "ended").unwrap();
        assert_eq!(ended.span.unwrap()["outcome"], "success", "the line shows how the request ended");
        let met = lines(worker).into_iter().find(|line| line.fields["what"] == "peer_met").unwrap();
        assert_eq!((met.target.as_str(), met.fields["peer"].as_str(), met.span), (WORKER, peer, None));
        let outside = |line: &seen::Line| line.target == REQUEST && line.span.is_none();
        assert!(!lines(worker).iter().any(outside), "an event of the session is outside of its span");
    }
}

#[test]
fn sides_that_disagree_are_counted_with_the_cause_and_who_told_it() {
    let (mut pair, counted) = observed("disagree");
    let sender = pair.announced(9, 5);
    let receiver = pair.registered(9, 4);
    assert_eq!(failed(&sender), Cause::PageCount { sent: 5, registered: 4 });
    assert_eq!(failed(&receiver), Cause::ByPeer(PeerCause::PageCount { sent: 5, registered: 4 }));
    pair.end_sender(sender);
    pair.end_receiver(receiver, 0);
    stop(pair);
    let values = counted.values();
    let failures = [
        ("disagree-d/0 receiver page_count peer disagree-p/0", 1),
        ("disagree-p/0 sender page_count here disagree-d/0", 1),
    ];
    assert_eq!(values.all("failures_total", ""), failures);
    let requests = [("disagree-d/0 receiver failed", 1), ("disagree-p/0 sender failed", 1)];
    assert_eq!(values.all("requests_total", ""), requests);
    assert!(values.all("phase_seconds", "").is_empty(), "a failed session has no phases");
    assert_eq!(values.distribution("failed_after_seconds", "disagree-p/0 sender").len(), 1);
    for (worker, peer) in [("disagree-p/0", "disagree-d/0"), ("disagree-d/0", "disagree-p/0")] {
        let span = only_span(worker);
        let expected = [("outcome", "failed"), ("cause", "page_count"), ("peer", peer), ("bytes", "0")];
        for (field, value) in expected {
            assert_eq!(span[field], value, "{worker}: {field}");
        }
        assert_eq!(loud(worker), [(Level::WARN, "failed".to_owned())]);
    }
}

#[test]
fn an_abort_is_no_failure_on_either_side_and_its_line_is_no_warning() {
    seen::take();
    let counted = Counted::new();
    let (server, addr) = server();
    let prefill = Setup { engine: "abort-p".to_owned(), ..Setup::prefill(&addr, SHAPE) };
    let listener = Some(counted.metrics.listener().and(kv_observe::spans()));
    let prefill = Setup { listener, ..prefill }.start();
    // The decode side's spans are told when this test drains them.
    let (listener, mut queued) = kv_observe::queued(1 << 12);
    let listener = Some(counted.metrics.listener().and(listener));
    let decode = Setup { engine: "abort-d".to_owned(), listener, ..Setup::decode(&addr, SHAPE) }.start();
    let mut pair = Pair { prefill, decode, addr, server };
    let sender = pair.announced(3, 2);
    let mut receiver = pair.registered(3, 2);
    until("the registration", || sender.poll() == KvPoll::WaitingForInput);
    receiver.abort();
    assert_eq!(failed(&receiver), Cause::Aborted);
    assert_eq!(failed(&sender), Cause::ByPeer(PeerCause::Aborted));
    pair.end_sender(sender);
    pair.end_receiver(receiver, 0);
    stop(pair);
    let values = counted.values();
    assert_eq!(
        values.all("requests_total", ""),
        [("abort-d/0 receiver aborted", 1), ("abort-p/0 sender aborted", 1)]
    );
    let failures =
        [("abort-d/0 receiver aborted here abort-p/0", 1), ("abort-p/0 sender aborted peer abort-d/0", 1)];
    assert_eq!(values.all("failures_total", ""), failures);

    let worker = "abort-d/0";
    assert_eq!(
        (lines(worker).len(), closed(worker).len()),
        (0, 0),
        "spans were told before they were drained"
    );
    let waiting = queued.waiting();
    assert!(waiting > 10, "{waiting} events");
    assert_eq!((queued.drain(), queued.waiting()), (waiting, 0));
    for worker in [worker, "abort-p/0"] {
        let span = only_span(worker);
        assert_eq!((span["outcome"].as_str(), span["cause"].as_str()), ("aborted", "aborted"));
        assert_eq!(loud(worker), [(Level::INFO, "failed".to_owned())]);
    }
}

#[test]
fn a_pull_is_counted_by_its_reader_and_a_lease_that_runs_out_by_its_holder() {
    let (mut pair, counted) = observed("pull");
    let (sender, params) = keep(&mut pair.prefill, 1, 3, 1, Lease::Renewable(PATIENCE));
    let (_, mut receiver) = reader(&pair.decode, &params);
    receiver.init(pair.decode.room_for(3), None).unwrap();
    pair.complete(sender, receiver, 1);
    // Nobody reads this one.
    let (forgotten, _) = keep(&mut pair.prefill, 2, 4, 2, Lease::Renewable(Duration::from_millis(50)));
    assert_eq!(failed(&forgotten), Cause::LeaseExpired);
    assert_eq!(pair.end_sender(forgotten), 4);
    stop(pair);
    let values = counted.values();
    assert_eq!(values.all("bytes_total", ""), [("pull-d/0 read pull-p/0 local", 3 * PAGE)]);
    assert_eq!(values.distribution("request_bytes", "pull-d/0 receiver"), [3.0 * PAGE as f64]);
    assert_eq!(values.all("leases_expired_total", ""), [("pull-p/0", 1)]);
    assert_eq!(values.all("failures_total", ""), [("pull-p/0 sender lease_expired here unknown", 1)]);
    let requests =
        [("pull-d/0 receiver success", 1), ("pull-p/0 sender failed", 1), ("pull-p/0 sender success", 1)];
    assert_eq!(values.all("requests_total", ""), requests);
    assert_eq!(values.number("messages_total", "pull-p/0 sent granted"), 1);
    assert_eq!(values.number("messages_total", "pull-d/0 received granted"), 1);
    assert_eq!(phases(&values, "pull-p/0 sender"), ["input", "rendezvous", "transfer", "whole"]);
    let expected = [(Level::INFO, "ended".to_owned()), (Level::WARN, "failed".to_owned())];
    assert_eq!(loud("pull-p/0"), expected);
    let spans = closed("pull-p/0");
    let causes: Vec<_> = spans.iter().map(|span| span.get("cause").map(String::as_str)).collect();
    assert_eq!(causes, [None, Some("lease_expired")]);
}

#[test]
fn a_killed_peer_is_counted_as_dead_and_its_request_fails_with_its_name() {
    const MANY: usize = 192;
    seen::take();
    let counted = Counted::new();
    let (_server, addr) = server();
    let listener = Some(counted.metrics.listener().and(kv_observe::spans()));
    let mut host =
        Setup { engine: "killed-d".to_owned(), listener, ..setup(WorkerRole::Decode, &addr) }.start();
    let mut prefill = Process::start(WorkerRole::Prefill, &addr);
    prefill.tell(&format!("send 1 {MANY} 1 5"));
    let mut receiver = host.receiver(&addr, 1, SessionOptions::default());
    receiver.init(host.room_for(MANY), None).unwrap();
    until("the first bytes", || (0..host.memory.shape.pages).any(|page| host.memory.is_touched(page)));
    prefill.kill();
    assert_eq!(failed(&receiver), Cause::PeerLost);
    let pages = reclaimed(receiver);
    host.missed(pages.list(), 5, &"a failed request");
    host.free(pages);
    host.check_idle("after the kill");
    counted.metrics.sample(host.manager.args().worker()).manager(&host.manager);
    host.stop();
    let values = counted.values();
    assert_eq!(values.all("failures_total", ""), [("killed-d/0 receiver peer_lost here prefill/0", 1)]);
    assert_eq!(values.number("peer_events_total", "killed-d/0 peer_dead"), 1);
    assert_eq!(values.number("held_bytes", "killed-d/0 quarantined"), 0);
    assert!(values.all("bytes_total", "").is_empty(), "the receiver of a push moves nothing");
    let span = only_span("killed-d/0");
    let named = ["outcome", "cause", "peer"].map(|field| span[field].as_str());
    assert_eq!(named, ["failed", "peer_lost", "prefill/0"]);
    assert_eq!(loud("killed-d/0"), [(Level::WARN, "failed".to_owned())]);
    let of_death = |line: &seen::Line| line.fields["what"] == "peer_dead";
    let dead: Vec<seen::Line> = lines("killed-d/0").into_iter().filter(of_death).collect();
    assert_eq!(
        dead.iter().map(|line| (line.level, line.fields["peer"].as_str())).collect::<Vec<_>>(),
        [(Level::WARN, "prefill/0")]
    );
}
