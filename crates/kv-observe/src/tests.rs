//! What is remembered of sessions goes away; and one listener for two workers keeps them apart.

use std::sync::Arc;
use std::time::Duration;

use kv_core::trace::{Event, Half, KvWhat, Log, Message, Who};
use kv_core::{
    Cause, EngineId, Op, PageList, PagePool, PeerCause, PeerId, Phase, PostId, Room, SessionId, Time,
    TransferError, WorkerId,
};
use kv_poll::queue::{DecodeCounts, PrefillCounts};
use metrics::Recorder;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

use crate::Metrics;
use crate::recording::{Recording, Recordings};
use crate::sink::Sink;
use crate::spans::Telling;

fn worker(engine: &str) -> WorkerId {
    WorkerId { engine: EngineId::new(engine).unwrap(), rank: 0 }
}

/// An event at this millisecond.
fn event(millis: u64, who: impl Into<Who>, what: KvWhat) -> Event<KvWhat> {
    let mut log = Log::default();
    log.listen(true);
    log.tell(Time::ZERO + Duration::from_millis(millis), who, || what);
    log.next().unwrap()
}

fn opened(session: u64, half: Half) -> Event<KvWhat> {
    event(0, SessionId(session), KvWhat::Opened { room: Room::from(session), half })
}

fn post(session: u64, post: u64) -> Event<KvWhat> {
    let what = KvWhat::PostStarted { post: PostId(post), op: Op::Write, bytes: 64, descriptors: 1 };
    event(1, (SessionId(session), PeerId(1)), what)
}

/// The values of a recorder's counters and gauges, and the counts of its histograms: `name{label values}`.
fn values(recorder: &DebuggingRecorder) -> Vec<(String, u64)> {
    let values = recorder.snapshotter().snapshot().into_vec().into_iter().map(|(key, _, _, value)| {
        let labels: Vec<&str> = key.key().labels().map(|label| label.value()).collect();
        let value = match value {
            DebugValue::Counter(count) => count,
            DebugValue::Gauge(value) => value.0 as u64,
            DebugValue::Histogram(values) => values.len() as u64,
        };
        (format!("{}{{{}}}", key.key().name(), labels.join(",")), value)
    });
    let mut values: Vec<(String, u64)> = values.collect();
    values.sort();
    values
}

fn recording(recorder: &Arc<DebuggingRecorder>) -> Recording {
    let recorder: Arc<dyn Recorder + Send + Sync> = Arc::clone(recorder) as _;
    Recording::new(Sink::Own(recorder), &worker("here"), 4)
}

#[test]
fn an_ended_session_and_its_posts_are_forgotten() {
    let mut recording = recording(&Arc::new(DebuggingRecorder::new()));
    for session in 0..1000 {
        recording.hear(&opened(session, Half::Sender));
        recording.hear(&post(session, session));
        assert_eq!(recording.remembered(), (1, 1));
        let ended = KvWhat::PostEnded { post: PostId(session), bytes: 64, took: Duration::ZERO, error: None };
        recording.hear(&event(2, (SessionId(session), PeerId(1)), ended));
        let last = if session % 2 == 0 { KvWhat::Ended } else { KvWhat::Closed };
        recording.hear(&event(2, SessionId(session), last));
        assert_eq!(recording.remembered(), (0, 0));
    }
}

#[test]
fn lost_events_empty_the_memory_and_later_ends_are_counted_without_a_half() {
    let recorder = Arc::new(DebuggingRecorder::new());
    let mut recording = recording(&recorder);
    for session in 0..100 {
        recording.hear(&opened(session, Half::Sender));
        recording.hear(&post(session, session));
    }
    assert_eq!(recording.remembered(), (100, 100));
    let mut gap = event(3, SessionId(7), KvWhat::Ended);
    gap.missed = 5;
    recording.hear(&gap);
    assert_eq!(recording.remembered(), (0, 0));
    recording.hear(&opened(200, Half::Receiver));
    recording.hear(&event(4, SessionId(200), KvWhat::Ended));
    let counted: Vec<(String, u64)> =
        values(&recorder).into_iter().filter(|(name, _)| name.contains("_total")).collect();
    let expected = [
        ("kv_transfer_events_lost_total{here/0}", 5),
        ("kv_transfer_requests_total{here/0,receiver,success}", 1),
        ("kv_transfer_requests_total{here/0,unknown,success}", 1),
    ];
    assert_eq!(counted, expected.map(|(name, count)| (name.to_owned(), count)));
}

#[test]
fn peers_that_choose_ever_new_names_and_causes_share_one_label() {
    let recorder = Arc::new(DebuggingRecorder::new());
    let mut recording = recording(&recorder);
    for number in 0..500 {
        let (session, name) = (SessionId(number), format!("engine-{number}"));
        recording.hear(&opened(number, Half::Sender));
        let mut failure = TransferError::new(
            Room::from(number),
            Phase::Transfer,
            Cause::ByPeer(PeerCause::Other { name: name.clone() }),
        );
        failure.peer = Some(worker(&name));
        recording.hear(&event(1, session, KvWhat::Failed(Box::new(failure))));
    }
    let failures: Vec<(String, u64)> =
        values(&recorder).into_iter().filter(|(name, _)| name.contains("failures_total")).collect();
    let failure =
        |peer: &str, count| (format!("kv_transfer_failures_total{{here/0,sender,other,peer,{peer}}}"), count);
    let first = (0..4).map(|number| failure(&format!("engine-{number}/0"), 1));
    let expected: Vec<(String, u64)> = first.chain([failure("other", 496)]).collect();
    assert_eq!(failures, expected);
}

#[test]
fn one_listener_for_two_workers_keeps_their_sessions_apart() {
    let recorder = Arc::new(DebuggingRecorder::new());
    let mut recordings = Recordings::new(Sink::Own(Arc::clone(&recorder) as _), 4);
    let workers = [(worker("here"), Half::Sender), (worker("there"), Half::Receiver)];
    for (worker, half) in &workers {
        recordings.hear(worker, &opened(1, *half));
    }
    for (worker, _) in &workers {
        recordings.hear(worker, &event(1, SessionId(1), KvWhat::Ended));
    }
    let requests: Vec<(String, u64)> =
        values(&recorder).into_iter().filter(|(name, _)| name.contains("requests_total")).collect();
    let expected = [
        ("kv_transfer_requests_total{here/0,sender,success}", 1),
        ("kv_transfer_requests_total{there/0,receiver,success}", 1),
    ];
    assert_eq!(requests, expected.map(|(name, count)| (name.to_owned(), count)));
}

#[test]
fn sampled_pools_and_queues_have_their_pages_and_lengths() {
    let recorder = Arc::new(DebuggingRecorder::new());
    let metrics = Metrics::to(Arc::clone(&recorder) as _);
    let pool = PagePool::new(8);
    let kept = pool.adopt(PageList::from_pages([1, 2]).unwrap()).unwrap();
    drop(pool.adopt(PageList::from_pages([5]).unwrap()).unwrap());
    let (mut prefill, mut decode) = (PrefillCounts::default(), DecodeCounts::default());
    (prefill.bootstrap, prefill.inflight, decode.transfer) = (3, 4, 5);
    let here = worker("here");
    metrics.sample(&here).prefill(&prefill).pool("kv", &pool);
    metrics.sample(&worker("there")).decode(&decode);
    let sampled: Vec<(String, u64)> = values(&recorder).into_iter().filter(|(_, value)| *value > 0).collect();
    let expected = [
        ("kv_transfer_pool_pages{here/0,kv,in}", 5),
        ("kv_transfer_pool_pages{here/0,kv,lost}", 1),
        ("kv_transfer_pool_pages{here/0,kv,out}", 2),
        ("kv_transfer_queue_requests{here/0,bootstrap}", 3),
        ("kv_transfer_queue_requests{here/0,inflight}", 4),
        ("kv_transfer_queue_requests{there/0,transfer}", 5),
    ];
    assert_eq!(sampled, expected.map(|(name, value)| (name.to_owned(), value)));
    assert_eq!(kept.len(), 2);
}

/// A subscriber that takes everything.
fn subscriber() -> tracing::subscriber::DefaultGuard {
    use tracing_subscriber::layer::SubscriberExt;
    tracing::subscriber::set_default(
        tracing_subscriber::registry().with(tracing_subscriber::fmt::layer().with_writer(std::io::sink)),
    )
}

#[test]
fn spans_close_with_their_sessions_and_with_lost_events() {
    let _guard = subscriber();
    let mut telling = Telling::default();
    for session in 0..50 {
        telling.hear(&worker("here"), &opened(session, Half::Sender));
    }
    for session in 0..20 {
        telling.hear(&worker("here"), &event(1, SessionId(session), KvWhat::Ended));
        telling.hear(&worker("here"), &event(1, SessionId(session), KvWhat::Closed));
    }
    assert_eq!(telling.open(), 30);
    let mut gap = event(2, SessionId(49), KvWhat::Heard(Message::Registered));
    gap.missed = 1;
    telling.hear(&worker("here"), &gap);
    assert_eq!(telling.open(), 0);
}

#[test]
fn without_a_subscriber_no_session_is_remembered_for_spans() {
    let _guard = tracing::subscriber::set_default(tracing::subscriber::NoSubscriber::default());
    let mut telling = Telling::default();
    telling.hear(&worker("here"), &opened(1, Half::Sender));
    assert_eq!(telling.open(), 0);
}
