//! The report as text for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};

use super::{Outcome, Report, RequestReport};
use crate::control::History;
use crate::router::Harm;

/// Up to this many requests get a row each.
const ALL_ROWS: usize = 40;
/// With more requests, only this many get a row.
const FIRST_ROWS: usize = 10;

impl Report {
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let rows = if self.requests.len() > ALL_ROWS { FIRST_ROWS } else { ALL_ROWS };
        let _ = writeln!(text, "{}", self.request_table(rows));
        if self.requests.len() > rows {
            let _ = writeln!(
                text,
                "… and {} more. All of them:\n{}",
                self.requests.len() - rows,
                self.percentiles()
            );
        }
        let _ = writeln!(
            text,
            "times in ms; transfer includes the computation of the prompt, wire is only the copying, and GB/s is bytes over wire"
        );
        if let Some(harmed) = &self.harm {
            let _ = writeln!(text, "{harmed}");
        }
        if let Some(lease) = &self.lease {
            let _ = writeln!(
                text,
                "lease of {:.1} s: the pages of {} requests were freed without having been read; of {} requests \
                 that a decode rank had acquired, the last were freed {:.2} s after their last heartbeat",
                lease.lease_ms / 1e3,
                lease.requests,
                lease.freed_after_ms.len(),
                lease.latest_ms() / 1e3
            );
        }
        for (turn, line) in self.histories() {
            let _ = writeln!(text, "turn {turn}: {line}");
        }
        for (outcome, (count, example)) in self.outcomes() {
            let _ = writeln!(text, "{count:>6} × {outcome}{example}");
        }
        for rank in &self.ranks {
            let _ = match (&rank.accounting, rank.harmed) {
                (Some(all), _) => {
                    let drained = if rank.drained { ", drained" } else { "" };
                    let (name, free, pages) = (&rank.name, all.free_pages, all.pages);
                    writeln!(text, "{name}: {free} of {pages} pages free at the end{drained}")
                }
                (None, Some(Harm::Kill)) => writeln!(text, "{}: killed", rank.name),
                (None, Some(Harm::Stop)) => writeln!(text, "{}: stopped", rank.name),
                (None, None) => writeln!(text, "{}: did not report its pages", rank.name),
            };
        }
        let totals = &self.totals;
        let _ = writeln!(
            text,
            "{} requests in {:.2} s, {:.1} MiB moved, {} tokens compared, {} mismatches, {} pages leaked",
            totals.requests,
            totals.wall_ms / 1e3,
            totals.bytes as f64 / f64::from(1 << 20),
            totals.tokens_compared,
            totals.mismatches,
            totals.pages_leaked
        );
        for problem in &self.problems {
            let _ = writeln!(text, "PROBLEM: {problem}");
        }
        text
    }

    fn request_table(&self, rows: usize) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([
            "#",
            "prefill",
            "decode",
            "prompt",
            "bootstrap",
            "prealloc",
            "transfer",
            "wire",
            "KiB",
            "GB/s",
            "tokens",
            "outcome",
        ]);
        for (i, request) in self.requests.iter().take(rows).enumerate() {
            table.add_row([
                i.to_string(),
                request.prefill.clone(),
                request.decode.clone(),
                request.prompt_tokens.to_string(),
                number(request.bootstrap_ms, 1),
                number(request.prealloc_ms, 1),
                number(request.transfer_ms, 1),
                number(request.wire_ms, 2),
                (request.bytes >> 10).to_string(),
                number(request.gb_per_s, 2),
                request.tokens_compared.to_string(),
                request.label(),
            ]);
        }
        for column in table.column_iter_mut().skip(3).take(8) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    fn percentiles(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["ms", "p50", "p90", "p99", "max"]);
        let phases = |request: &RequestReport| {
            [
                request.bootstrap_ms,
                request.prealloc_ms,
                request.transfer_ms,
                request.wire_ms,
                request.compute_ms,
            ]
        };
        for (i, name) in ["bootstrap", "prealloc", "transfer", "wire", "compute"].into_iter().enumerate() {
            let mut values: Vec<f64> =
                self.requests.iter().filter_map(|request| phases(request)[i]).collect();
            values.sort_by(f64::total_cmp);
            let at = |share: f64| {
                values.get((values.len().saturating_sub(1) as f64 * share).round() as usize).copied()
            };
            let mut row = vec![name.to_owned()];
            row.extend([0.5, 0.9, 0.99, 1.0].map(|share| number(at(share), 1)));
            table.add_row(row);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    /// For each turn after the first, where its requests got the KV of earlier turns from.
    fn histories(&self) -> BTreeMap<usize, String> {
        let mut histories: BTreeMap<usize, BTreeMap<String, (usize, usize)>> = BTreeMap::new();
        for request in &self.requests {
            let (what, tokens) = match &request.history {
                Some(History::PulledBack { tokens }) => ("pulled back".to_owned(), *tokens),
                Some(History::Recomputed { why }) => (format!("recomputed ({why})"), 0),
                None => continue,
            };
            let sum = histories.entry(request.turn).or_default().entry(what).or_default();
            *sum = (sum.0 + 1, sum.1 + tokens);
        }
        let line = |sums: BTreeMap<String, (usize, usize)>| {
            let sums = sums.iter().map(|(what, (count, tokens))| match tokens {
                0 => format!("{count} × {what}"),
                _ => format!("{count} × {what} ({tokens} tokens)"),
            });
            sums.collect::<Vec<String>>().join(", ")
        };
        histories.into_iter().map(|(turn, sums)| (turn, line(sums))).collect()
    }

    /// Each outcome by name: how often it occurred, and for errors one of the messages.
    fn outcomes(&self) -> BTreeMap<String, (usize, String)> {
        let mut outcomes: BTreeMap<String, (usize, String)> = BTreeMap::new();
        for request in &self.requests {
            let example = match &request.outcome {
                Outcome::Failed(error) => format!(", as in: {}", error.text),
                _ => String::new(),
            };
            outcomes.entry(request.outcome.label()).or_insert((0, example)).0 += 1;
        }
        outcomes
    }
}

impl RequestReport {
    fn label(&self) -> String {
        let outcome = self.outcome.label();
        match self.again {
            Some(again) => format!("{outcome}, repeated as {again}"),
            None if self.proof => format!("{outcome}, sent afterwards"),
            None => outcome,
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

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}
