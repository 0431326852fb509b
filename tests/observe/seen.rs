//! What a subscriber and a recorder have taken, in forms that tests compare.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex};

use kv_observe::Metrics;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// The fields of a span or an event, as text.
pub type Fields = BTreeMap<String, String>;

/// A line for which a subscriber was called, with the fields of its span.
#[derive(Debug, Clone)]
pub struct Line {
    pub level: Level,
    pub target: String,
    pub fields: Fields,
    pub span: Option<Fields>,
}

/// Everything that the process's subscriber has taken. Tests run side by side: each looks only at the workers that
/// it has named.
#[derive(Debug, Default)]
struct Taken {
    open: HashMap<u64, Fields>,
    closed: Vec<Fields>,
    lines: Vec<Line>,
}

static TAKEN: LazyLock<Mutex<Taken>> = LazyLock::new(|| {
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Taking)).unwrap();
    Mutex::default()
});

/// Begins to take what the workers of this process tell.
pub fn take() {
    drop(TAKEN.lock().unwrap());
}

/// The lines of a worker, oldest first.
pub fn lines(worker: &str) -> Vec<Line> {
    let of = |line: &&Line| line.fields.get("worker").is_some_and(|name| name == worker);
    TAKEN.lock().unwrap().lines.iter().filter(of).cloned().collect()
}

/// The spans of a worker that are closed, oldest first.
pub fn closed(worker: &str) -> Vec<Fields> {
    let of = |span: &&Fields| span.get("worker").is_some_and(|name| name == worker);
    TAKEN.lock().unwrap().closed.iter().filter(of).cloned().collect()
}

/// The lines of a worker that are as loud as `info`, with the names of their events. How long a quarantine lasts,
/// and so whether its end is loud, is a matter of time; and so is whether a worker that is stopped hears before that
/// its peer has stopped.
pub fn loud(worker: &str) -> Vec<(Level, String)> {
    let loud = lines(worker).into_iter().filter(|line| line.level <= Level::INFO);
    let loud = loud.map(|line| (line.level, line.fields["what"].clone()));
    loud.filter(|(_, what)| !["quarantine_ended", "peer_dead"].contains(&what.as_str())).collect()
}

struct Taking;

struct Texts<'a>(&'a mut Fields);

impl Visit for Texts<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let before = self.0.insert(field.name().to_owned(), format!("{value:?}"));
        assert_eq!(before, None, "{field} is recorded twice");
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Taking {
    fn on_new_span(&self, span: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        let mut fields = Fields::new();
        span.record(&mut Texts(&mut fields));
        TAKEN.lock().unwrap().open.insert(id.into_u64(), fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut taken = TAKEN.lock().unwrap();
        values.record(&mut Texts(taken.open.get_mut(&id.into_u64()).unwrap()));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::new();
        event.record(&mut Texts(&mut fields));
        let span = context.event_span(event).map(|span| span.id().into_u64());
        let mut taken = TAKEN.lock().unwrap();
        let span = span.and_then(|id| taken.open.get(&id)).cloned();
        let (level, target) = (*event.metadata().level(), event.metadata().target().to_owned());
        taken.lines.push(Line { level, target, fields, span });
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        let mut taken = TAKEN.lock().unwrap();
        let fields = taken.open.remove(&id.into_u64()).unwrap();
        taken.closed.push(fields);
    }
}

/// A recorder of one test, and the metrics that go to it.
pub struct Counted {
    recorder: Arc<DebuggingRecorder>,
    pub metrics: Metrics,
}

impl Counted {
    pub fn new() -> Counted {
        let recorder = Arc::new(DebuggingRecorder::new());
        Counted { metrics: Metrics::to(Arc::clone(&recorder) as _), recorder }
    }

    /// Takes all values out of the recorder, which begins anew.
    pub fn values(&self) -> Values {
        let entries = self.recorder.snapshotter().snapshot().into_vec().into_iter();
        Values(
            entries
                .map(|(key, _, _, value)| {
                    let labels = key.key().labels().map(|label| label.value()).collect::<Vec<_>>().join(" ");
                    let name = key.key().name().strip_prefix("kv_transfer_").unwrap().to_owned();
                    let values = match value {
                        DebugValue::Counter(count) => vec![count as f64],
                        DebugValue::Gauge(value) => vec![value.0],
                        DebugValue::Histogram(values) => values.iter().map(|value| value.0).collect(),
                    };
                    ((name, labels), values)
                })
                .collect(),
        )
    }
}

/// The values of metrics, by name without `kv_transfer_` and by the values of the labels.
#[derive(Debug)]
pub struct Values(BTreeMap<(String, String), Vec<f64>>);

impl Values {
    /// The value of a counter or gauge; 0 if nothing was counted.
    pub fn number(&self, name: &str, labels: &str) -> u64 {
        self.distribution(name, labels).first().map_or(0, |value| *value as u64)
    }

    /// The values of a histogram.
    pub fn distribution(&self, name: &str, labels: &str) -> &[f64] {
        self.0.get(&(name.to_owned(), labels.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// The labels and numbers of all series of a metric whose labels begin like this.
    pub fn all(&self, name: &str, begin: &str) -> Vec<(&str, u64)> {
        let of = self.0.iter().filter(|((known, labels), _)| known == name && labels.starts_with(begin));
        of.map(|((_, labels), values)| (labels.as_str(), values[0] as u64)).collect()
    }
}
