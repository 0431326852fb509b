//! What a load has shown.

use std::time::Duration;

use serde_json::Value;

use super::client::Ended;
use super::memory::Memory;

/// Most problems that are printed.
const SHOWN: usize = 10;

/// The result of a load.
#[derive(Default)]
pub struct Report {
    complete: usize,
    tokens: usize,
    hung_up: usize,
    first: Vec<Duration>,
    lines: Vec<String>,
    /// Everything that must not be.
    pub problems: Vec<String>,
}

impl Report {
    /// Counts how requests ended.
    pub fn count(&mut self, ended: Vec<Ended>) {
        for ended in ended {
            match ended {
                Ended::Complete { tokens, first } => {
                    self.complete += 1;
                    self.tokens += tokens;
                    self.first.push(first);
                }
                Ended::HungUp => self.hung_up += 1,
                Ended::Wrong(what) => self.problems.push(format!("wrong tokens: {what}")),
                Ended::Failed(what) => self.problems.push(format!("failed: {what}")),
            }
        }
    }

    /// Checks that every page is back, after the prefixes were given up.
    pub fn pages(&mut self, health: Value) {
        let ranks = health["ranks"].as_array().cloned().unwrap_or_default();
        if ranks.is_empty() {
            self.problems.push("no engine says where its pages are".to_owned());
        }
        for rank in ranks {
            let of = |field: &str| rank["pages"][field].as_u64().unwrap_or_default();
            let (capacity, free) = (of("capacity"), of("free"));
            let name = rank["rank"].as_str().unwrap_or("a process").to_owned();
            self.lines.push(format!("{name}: {free} of {capacity} pages are free"));
            if free != capacity || capacity == 0 {
                self.problems.push(format!("{name}: pages are missing: {rank}"));
            }
        }
    }

    /// Checks that no process has grown.
    pub fn memory(&mut self, memory: &Memory) {
        for growth in memory.growth() {
            let [before, after] =
                [growth.before, growth.after].map(|bytes| bytes as f64 / f64::from(1 << 20));
            let line =
                format!("{}: {before:.1} MiB after the warm-up, {after:.1} MiB at the end", growth.name);
            if !growth.is_flat() {
                self.problems.push(format!("memory grows: {line}"));
            }
            self.lines.push(line);
        }
    }

    /// Prints the result.
    #[allow(clippy::print_stdout)] // A program for a terminal.
    pub fn print(&mut self, took: Duration) {
        self.first.sort_unstable();
        let at = |percent: usize| {
            let index = self.first.len().saturating_sub(1) * percent / 100;
            self.first.get(index).copied().unwrap_or_default().as_millis()
        };
        let Report { complete, tokens, hung_up, lines, problems, .. } = &self;
        let per_second = (complete + hung_up) as f64 / took.as_secs_f64();
        println!("{complete} streams complete, {tokens} tokens equal to the run in one process");
        println!("{hung_up} clients hung up");
        println!("{:.1} s, {per_second:.0} requests a second", took.as_secs_f64());
        println!("first token after {} ms (median), {} ms (99 of 100)", at(50), at(99));
        lines.iter().for_each(|line| println!("{line}"));
        println!("{} problems", problems.len());
        problems.iter().take(SHOWN).for_each(|problem| println!("  {problem}"));
    }
}
