//! The report as text for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};

use super::{Outcome, ProcessReport, Report, Round};
use crate::messages::{Arrived, Blocks, Way};
use crate::router::Killed;

impl Report {
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "{}", self.image_table());
        let _ = writeln!(
            text,
            "ready: from the request's arrival at the prefill process until the embedding is there"
        );
        for (round, number) in self.rounds.iter().zip(1..) {
            let Round { images, encoder_hits, local_hits, transfers, joined, encoded_here, slowest_ms } =
                round;
            let rate = |hits: &usize| 100.0 * *hits as f64 / (*images).max(1) as f64;
            let _ = writeln!(
                text,
                "round {number}: {images} images; {:.0} % local hits, {:.0} % hits at the encoders; {transfers} \
                 transfers, {joined} joined one, {encoded_here} encoded here; slowest ready after {slowest_ms:.1} ms",
                rate(local_hits),
                rate(encoder_hits)
            );
        }
        for (name, (count, error)) in self.errors() {
            let _ = writeln!(text, "{count:>6} × {name}, as in: {error}");
        }
        if let Some(Killed { process, moment }) = &self.killed {
            let _ = writeln!(text, "killed {process} {moment}");
        }
        self.processes.iter().for_each(|process| text.push_str(&process.line()));
        let totals = &self.totals;
        let _ = writeln!(
            text,
            "{} requests in {:.2} s: {} ok, {} failed; {} transfers for {} different images, {:.1} KiB; \
             {} tokens compared, {} mismatches, {} pages leaked, {} blocks leaked",
            totals.requests,
            totals.wall_ms / 1e3,
            totals.ok,
            totals.failed,
            totals.transfers,
            totals.distinct_images,
            totals.embedding_bytes as f64 / 1024.0,
            totals.tokens_compared,
            totals.mismatches,
            totals.pages_leaked,
            totals.blocks_leaked
        );
        for problem in &self.problems {
            let _ = writeln!(text, "PROBLEM: {problem}");
        }
        text
    }

    /// The errors of fetches and of requests by name: how often each occurred, and one of its messages.
    fn errors(&self) -> BTreeMap<&str, (usize, &str)> {
        let fetches = self.requests.iter().flat_map(|request| &request.images);
        let fetches = fetches.filter_map(|image| image.arrived.as_ref()?.error.as_ref());
        let requests = self.requests.iter().filter_map(|request| match &request.outcome {
            Outcome::Failed(error) => Some(error),
            _ => None,
        });
        let mut errors = BTreeMap::new();
        for error in fetches.chain(requests) {
            errors.entry(error.name.as_str()).or_insert((0, error.text.as_str())).0 += 1;
        }
        errors
    }

    /// One row for each image of each request.
    fn image_table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([
            "round",
            "#",
            "image",
            "encoder",
            "KiB",
            "at encoder",
            "at prefill",
            "ready ms",
            "outcome",
        ]);
        for request in &self.requests {
            for (place, image) in request.images.iter().enumerate() {
                let first = |text: String| if place == 0 { text } else { String::new() };
                let arrived = image.arrived.as_ref();
                let dash = || "-".to_owned();
                table.add_row([
                    first(request.round.to_string()),
                    first(request.request.to_string()),
                    image.image.clone(),
                    image.encoder.clone().unwrap_or_else(dash),
                    arrived.map_or_else(dash, |arrived| format!("{:.0}", arrived.bytes as f64 / 1024.0)),
                    image
                        .computed
                        .map_or_else(dash, |computed| (if computed { "miss" } else { "hit" }).to_owned()),
                    arrived.map_or_else(dash, Arrived::label),
                    arrived.map_or_else(dash, |arrived| format!("{:.2}", arrived.ready_ms)),
                    first(request.outcome.label()),
                ]);
            }
        }
        for column in [4, 7] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }
}

impl ProcessReport {
    /// The pages and blocks of the process, for people.
    fn line(&self) -> String {
        let mut text = format!("{}:", self.name);
        if self.killed {
            let _ = write!(text, " killed");
        }
        if let Some(pages) = &self.pages {
            let _ = write!(text, " {} of {} pages free at the end;", pages.free_pages, pages.pages);
        }
        if let Some(Blocks { blocks, free, cached, entries, evictions, .. }) = &self.blocks {
            let _ = write!(
                text,
                " {free} of {blocks} blocks free and {cached} in {entries} entries at the end, {evictions} \
                 entries evicted"
            );
        }
        if let Some(fetched) = self.fetched {
            let _ = write!(text, ", {fetched} entries fetched");
        }
        if let Some(served) = self.served {
            let _ = write!(text, ", {served} entries served");
        }
        text.push('\n');
        text
    }
}

impl Arrived {
    fn label(&self) -> String {
        let way = match self.way {
            Way::LocalHit => "hit",
            Way::Fetched => "miss: fetched",
            Way::Joined => "miss: joined",
            Way::EncodedHere => "miss: encoded here",
        };
        match &self.error {
            Some(error) => format!("{way} ({})", error.name),
            None => way.to_owned(),
        }
    }
}

impl Outcome {
    fn label(&self) -> String {
        match self {
            Outcome::Ok => "ok".to_owned(),
            Outcome::Mismatch { at } => format!("MISMATCH at token {at}"),
            Outcome::Failed(error) => error.name.clone(),
            Outcome::Overdue => "OVERDUE".to_owned(),
        }
    }
}
