//! What the workers of a run did, for a picture: each rank records the events of its workers, and hands the records
//! to the router at the end. The record of a rank that was killed is lost.

use std::path::Path;

use kv_timeline::{Record, Recorder, Timeline};
use kv_transfer::{Listener, Room, Worker, WorkerId};

use super::control::Event;
use super::error::ExampleError;
use super::router::{Purpose, Run};

/// The recorders of a rank's workers; none unless the router has asked for records.
#[derive(Default)]
pub struct Recording {
    recorders: Vec<Recorder>,
}

impl Recording {
    /// The listener of the rank's next worker.
    pub fn listener(&mut self, worker: &WorkerId) -> Listener {
        let recorder = Recorder::new(worker);
        let listener = recorder.listener();
        self.recorders.push(recorder);
        listener
    }

    /// The events that carry the records to the router. The workers are those of the listeners, in the same order.
    pub fn events(&self, workers: &[Worker]) -> Result<Vec<Event>, ExampleError> {
        let recorded = self.recorders.iter().zip(workers);
        let event = |(recorder, worker): (&Recorder, &Worker)| -> Result<Event, ExampleError> {
            let record = recorder.record(worker.incarnation()).to_json()?;
            Ok(Event::Recorded { record })
        };
        recorded.map(event).collect()
    }
}

/// Joins the records of a run, and adds what only the router knows: which request is which, and what became of them.
pub fn timeline(run: &Run) -> Result<Timeline, ExampleError> {
    let records: Result<Vec<Record>, _> =
        run.records.iter().map(|record| Record::from_json(record.as_bytes())).collect();
    let mut timeline = Timeline::join(records?)?;
    if let Some(harmed) = &run.harm {
        timeline.remark(format!("The router {harmed}."));
    }
    let mut first: Vec<usize> = (0..run.requests.len()).collect();
    for (number, routed) in run.requests.iter().enumerate() {
        // A request that is sent again comes later, and keeps its number.
        let number = first.get(number).copied().unwrap_or(number);
        if let Some(again) = routed.again.and_then(|again| first.get_mut(again)) {
            *again = number;
        }
        let label = match routed.purpose {
            Purpose::Answer => format!("request {number}"),
            Purpose::AnswerAgain { attempt } => format!("request {number}, try {attempt}"),
            Purpose::Proof => format!("request {number}, proof"),
        };
        let room = Room::Number(routed.room);
        timeline.label(&room, label);
        if let Some(again) = routed.again.and_then(|again| run.requests.get(again)) {
            timeline.retried(&room, &Room::Number(again.room));
        }
    }
    Ok(timeline)
}

/// The form of a timeline's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A page for a browser: `.html`.
    Page,
    /// A trace for <https://ui.perfetto.dev>: `.json`.
    Perfetto,
}

impl Form {
    /// The form that the name of a file asks for, by its extension.
    pub fn of(path: &Path) -> Option<Form> {
        match path.extension()?.to_str()? {
            "html" => Some(Form::Page),
            "json" => Some(Form::Perfetto),
            _ => None,
        }
    }

    /// The timeline in this form.
    pub fn write(self, timeline: &Timeline) -> Result<String, ExampleError> {
        let written = match self {
            Form::Page => timeline.html(),
            Form::Perfetto => timeline.perfetto(),
        };
        written.map_err(ExampleError::Timeline)
    }
}
