//! What it costs that somebody watches: a whole request on both sides, without a listener and with each of the
//! listeners of kv-observe.
//!
//! `cargo bench --bench observe`
//!
//! The machines of both sides are driven by this thread, so the times are processor time of the two workers: the
//! protocol, the events, and the listeners. Neither copies nor wake-ups are in them. The table at the end is taken
//! in rounds in which the listeners take turns, because the machine's speed changes; it shows the fastest round.

#![allow(clippy::print_stdout)]

mod pair;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use kv_observe::{METRICS, Metrics};
use kv_transfer::trace::KvWhat;
use kv_transfer::unstable::worker::Listener;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use pair::Pair;
use tracing::{Dispatch, Level};

type Error = Box<dyn std::error::Error>;

/// Somebody who watches: a listener for each side, and the subscriber of the thread.
struct Watcher {
    name: &'static str,
    listeners: Option<[Listener<KvWhat>; 2]>,
    subscriber: Dispatch,
    /// Called now and then, outside of the time that is taken.
    tidy: Box<dyn FnMut()>,
}

fn watchers() -> Result<Vec<Watcher>, Error> {
    let nobody = || Dispatch::new(tracing::subscriber::NoSubscriber::default());
    // A log that formats each line and throws the text away.
    let log = |level: Level| {
        Dispatch::new(tracing_subscriber::fmt().with_max_level(level).with_writer(io::sink).finish())
    };
    let watcher =
        |name, listeners, subscriber| Watcher { name, listeners, subscriber, tidy: Box::new(|| {}) };
    let spans = || Some([kv_observe::spans(), kv_observe::spans()]);
    let dropped = || Listener::new(|_, _| {});
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS.iter().filter(|metric| !metric.buckets.is_empty()) {
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), metric.buckets)?;
    }
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    let metrics = Metrics::to(Arc::new(recorder));
    let counted = Watcher {
        tidy: Box::new(move || handle.run_upkeep()),
        ..watcher(
            "metrics, in a Prometheus recorder",
            Some([metrics.listener(), metrics.listener()]),
            nobody(),
        )
    };
    let ((one, mut first), (other, mut second)) = (kv_observe::queued(1 << 16), kv_observe::queued(1 << 16));
    let queued = Watcher {
        tidy: Box::new(move || {
            first.drain();
            second.drain();
        }),
        ..watcher("spans, put into a queue", Some([one, other]), nobody())
    };
    Ok(vec![
        watcher("nobody listens", None, nobody()),
        watcher("a listener that does nothing", Some([dropped(), dropped()]), nobody()),
        counted,
        queued,
        watcher("spans, no subscriber", spans(), nobody()),
        watcher("spans, a log at info", spans(), log(Level::INFO)),
        watcher("spans, a log at debug", spans(), log(Level::DEBUG)),
        watcher("spans, a log at trace", spans(), log(Level::TRACE)),
    ])
}

fn main() -> Result<(), Error> {
    let mut criterion = Criterion::default().configure_from_args();
    let testing = kv_benches::is_trial();
    let mut watchers = watchers()?;
    let mut pair = Pair::new()?;
    let mut failure = None;
    let mut group = criterion.benchmark_group("request, both sides");
    for watcher in &mut watchers {
        pair.listen(watcher.listeners.clone());
        let (name, subscriber) = (watcher.name, watcher.subscriber.clone());
        tracing::dispatcher::with_default(&subscriber, || {
            group.bench_function(name, |b| {
                b.iter_custom(|requests| {
                    timed(&mut pair, requests, watcher).unwrap_or_else(|error| {
                        failure = Some(error);
                        Duration::MAX
                    })
                });
            });
        });
    }
    group.finish();
    criterion.final_summary();
    match failure {
        Some(error) => Err(error),
        None => table(&mut pair, &mut watchers, testing),
    }
}

/// The time of this many requests.
fn timed(pair: &mut Pair, requests: u64, watcher: &mut Watcher) -> Result<Duration, Error> {
    let mut time = Duration::ZERO;
    for begin in (0..requests).step_by(1000) {
        (watcher.tidy)();
        let began = Instant::now();
        for _ in begin..requests.min(begin + 1000) {
            pair.request()?;
        }
        time += began.elapsed();
    }
    Ok(time)
}

/// Prints what each watcher adds to a request and to an event.
fn table(pair: &mut Pair, watchers: &mut [Watcher], testing: bool) -> Result<(), Error> {
    let (rounds, requests) = if testing { (1, 10) } else { (15, 2000) };
    let mut fastest = vec![Duration::MAX; watchers.len()];
    let mut events = 0;
    for _ in 0..rounds {
        for (watcher, fastest) in watchers.iter_mut().zip(&mut fastest) {
            pair.listen(watcher.listeners.clone());
            let (before, subscriber) = (pair.events(), watcher.subscriber.clone());
            let time = tracing::dispatcher::with_default(&subscriber, || timed(pair, requests, watcher))?;
            *fastest = time.min(*fastest);
            events = events.max(pair.events() - before);
        }
    }
    let nanos = |time: Duration| time.as_nanos() as f64 / requests as f64;
    let (each, base) = (events as f64 / requests as f64, fastest.first().copied().map_or(0.0, nanos));
    println!("\nA request of {} pages has {each:.1} events on both sides together.", pair::PAGES);
    println!("{:<36}{:>14}{:>14}{:>14}", "", "ns a request", "more", "ns an event");
    for (watcher, time) in watchers.iter().zip(&fastest) {
        let (time, name) = (nanos(*time), watcher.name);
        println!("{name:<36}{time:>14.0}{:>14.0}{:>14.0}", time - base, (time - base) / each);
    }
    Ok(())
}
