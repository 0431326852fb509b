//! The record of a world, for people and for the comparison of two runs.

use std::collections::VecDeque;

use kv_core::random::mix;

use crate::net::lives::LifeId;

/// A running hash of everything that happened, and the last lines of text if they were asked for.
#[derive(Debug, Default, Clone)]
pub struct Trace {
    hash: u64,
    keep: usize,
    lines: VecDeque<String>,
}

impl Trace {
    /// A trace that keeps the last `keep` lines.
    pub fn keeping(keep: usize) -> Trace {
        Trace { keep, ..Trace::default() }
    }

    /// The hash so far: equal for equal histories.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The lines that were kept: the last ones of the world.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(String::as_str)
    }

    pub(crate) fn step(&mut self, now: u64, life: LifeId, input: &'static str) {
        self.fold(now);
        self.fold(life as u64);
        self.note(now, || format!("life {life} {input}"));
    }

    pub(crate) fn frame(&mut self, now: u64, bytes: &[u8], text: impl FnOnce() -> String) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.hash =
                (self.hash ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        }
        self.note(now, text);
    }

    pub(crate) fn fold(&mut self, word: u64) {
        self.hash = mix(self.hash ^ word);
    }

    /// Adds a line, if lines are kept.
    pub(crate) fn note(&mut self, now: u64, text: impl FnOnce() -> String) {
        if self.keep == 0 {
            return;
        }
        if self.lines.len() == self.keep {
            self.lines.pop_front();
        }
        self.lines.push_back(format!("{:>12.3} us  {}", now as f64 / 1000.0, text()));
    }
}
