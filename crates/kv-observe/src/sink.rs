//! Where numbers go: a recorder, and the handles that were registered with it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use kv_core::WorkerId;
use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString};

use crate::peers::{Peers, Slot, Way};
use crate::table::{Kind, METRICS, Metric};

/// The recorder that takes the numbers.
#[derive(Clone)]
pub(crate) enum Sink {
    /// The recorder of the process, when a handle is registered.
    Global,
    /// This recorder.
    Own(Arc<dyn Recorder + Send + Sync>),
}

impl Sink {
    fn with<T>(&self, register: impl FnOnce(&dyn Recorder) -> T) -> T {
        match self {
            Sink::Global => metrics::with_recorder(register),
            Sink::Own(recorder) => register(recorder.as_ref()),
        }
    }

    /// Tells the recorder the unit and the meaning of each metric.
    pub(crate) fn describe(&self) {
        self.with(|recorder| {
            for Metric { name, kind, unit, help, .. } in METRICS {
                let (name, unit, help) = ((*name).into(), Some(*unit), SharedString::from(*help));
                match kind {
                    Kind::Counter => recorder.describe_counter(name, unit, help),
                    Kind::Gauge => recorder.describe_gauge(name, unit, help),
                    Kind::Histogram => recorder.describe_histogram(name, unit, help),
                }
            }
        });
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Sink::Global => "Global",
            Sink::Own(_) => "Own",
        })
    }
}

/// Where the numbers of one worker go.
#[derive(Debug, Clone)]
pub(crate) struct Home {
    sink: Sink,
    worker: SharedString,
}

impl Home {
    pub(crate) fn new(sink: Sink, worker: &WorkerId) -> Home {
        Home { sink, worker: worker.to_string().into() }
    }

    /// The handle of a metric with these values of its labels, `worker` left out.
    pub(crate) fn handle<H: Handle>(&self, metric: &'static Metric, values: Vec<SharedString>) -> H {
        let values = std::iter::once(self.worker.clone()).chain(values);
        let labels: Vec<Label> =
            metric.labels.iter().zip(values).map(|(name, value)| Label::new(*name, value)).collect();
        let key = Key::from_parts(metric.name, labels);
        self.sink.with(|recorder| H::register(recorder, &key))
    }
}

const METADATA: Metadata<'static> = Metadata::new("kv_transfer", Level::INFO, Some(module_path!()));

/// A handle of a recorder.
pub(crate) trait Handle {
    fn register(recorder: &dyn Recorder, key: &Key) -> Self;
}

impl Handle for Counter {
    fn register(recorder: &dyn Recorder, key: &Key) -> Counter {
        recorder.register_counter(key, &METADATA)
    }
}

impl Handle for Gauge {
    fn register(recorder: &dyn Recorder, key: &Key) -> Gauge {
        recorder.register_gauge(key, &METADATA)
    }
}

impl Handle for Histogram {
    fn register(recorder: &dyn Recorder, key: &Key) -> Histogram {
        recorder.register_histogram(key, &METADATA)
    }
}

/// The handles of one metric, by the values of its labels. A handle is registered when it is first needed.
#[derive(Debug)]
pub(crate) struct Family<K, H> {
    metric: &'static Metric,
    handles: BTreeMap<K, H>,
}

impl<K: Labels, H: Handle> Family<K, H> {
    pub(crate) const fn new(metric: &'static Metric) -> Family<K, H> {
        Family { metric, handles: BTreeMap::new() }
    }

    pub(crate) fn at(&mut self, home: &Home, peers: &Peers, values: K) -> &H {
        let Family { metric, handles } = self;
        handles.entry(values).or_insert_with(|| home.handle(metric, values.texts(peers)))
    }
}

/// The value of one label: a text of this library, or the place of a peer among those that have a name.
pub(crate) trait Value: Copy + Ord {
    fn text(self, peers: &Peers) -> SharedString;
}

impl Value for &'static str {
    fn text(self, _: &Peers) -> SharedString {
        self.into()
    }
}

impl Value for Slot {
    fn text(self, peers: &Peers) -> SharedString {
        peers.name(self)
    }
}

impl Value for Way {
    fn text(self, peers: &Peers) -> SharedString {
        peers.transport(self)
    }
}

/// The values of all labels but `worker`.
pub(crate) trait Labels: Copy + Ord {
    fn texts(self, peers: &Peers) -> Vec<SharedString>;
}

macro_rules! labels {
    ($($value:ident)*) => {
        impl<$($value: Value),*> Labels for ($($value,)*) {
            #[allow(non_snake_case, unused_variables, reason = "a tuple of any length, the empty one included")]
            fn texts(self, peers: &Peers) -> Vec<SharedString> {
                let ($($value,)*) = self;
                vec![$($value.text(peers)),*]
            }
        }
    };
}

labels!();
labels!(A);
labels!(A B);
labels!(A B C);
labels!(A B C D);
