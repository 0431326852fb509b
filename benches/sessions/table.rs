//! The table: one line for each kind of request and transport.

use crate::rows::Measured;

/// What a ratio must be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    /// The time of the limit over the measured time is at least this.
    AtLeast(f64),
    /// The measured time over the time of the limit is at most this.
    AtMost(f64),
    /// The measured time is at most this many seconds more than the time of the limit. The difference is printed, in
    /// milliseconds.
    Beyond(f64),
    /// No goal is set for this transport. The time of the limit over the measured time is printed.
    Open,
}

pub(crate) fn heading() {
    println!(
        "{:<44} {:>6} {:>10} {:>35} {:>10} {:>7} {:>9}",
        "work", "way", "ms", "limit", "ms", "ratio", "goal"
    );
}

/// Prints one line: medians of the times, and of the ratio of the two times of each round.
pub(crate) fn line(work: &str, way: &str, limit: &str, goal: Goal, rounds: &[Measured]) {
    let over = |measured: &Measured| match goal {
        Goal::AtMost(_) => measured.took / measured.limit,
        Goal::Beyond(_) => (measured.took - measured.limit) * 1e3,
        Goal::AtLeast(_) | Goal::Open => measured.limit / measured.took,
    };
    let ratio = median(rounds.iter().map(over));
    let (goal, is_met) = match goal {
        Goal::AtLeast(least) => (format!(">= {least}"), ratio >= least),
        Goal::AtMost(most) => (format!("<= {most}"), ratio <= most),
        Goal::Beyond(most) => (format!("<= +{} ms", most * 1e3), ratio <= most * 1e3),
        Goal::Open => (String::new(), true),
    };
    println!(
        "{work:<44} {way:>6} {:>10.3} {limit:>35} {:>10.3} {ratio:>7.2} {goal:>9} {}",
        median(rounds.iter().map(|measured| measured.took)) * 1e3,
        median(rounds.iter().map(|measured| measured.limit)) * 1e3,
        if is_met { "" } else { "missed" },
    );
}

pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
