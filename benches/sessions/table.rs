//! The table: one line for each kind of request and transport.

use crate::rows::Measured;

/// What a ratio must be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    /// The requests are at least this fast, as a part of the speed of the limit: the part is printed, in percent.
    AtLeast(f64),
    /// The requests take at most this many times as long as the limit: the number of times is printed.
    AtMost(f64),
    /// The measured time is at most this many seconds more than the time of the limit. The difference is printed, in
    /// milliseconds.
    Beyond(f64),
    /// No goal is set for this transport. The number of times is printed.
    Open,
}

pub(crate) fn heading() {
    println!(
        "{:<44} {:>6} {:>10} {:>35} {:>10} {:>9} {:>9}",
        "work", "way", "ms", "limit", "ms", "ratio", "goal"
    );
}

/// Prints one line: medians of the times, and of the ratio of the two times of each round.
pub(crate) fn line(work: &str, way: &str, limit: &str, goal: Goal, rounds: &[Measured]) {
    let over = |measured: &Measured| match goal {
        Goal::AtMost(_) | Goal::Open => measured.took / measured.limit,
        Goal::Beyond(_) => measured.took - measured.limit,
        Goal::AtLeast(_) => measured.limit / measured.took,
    };
    let got = median(rounds.iter().map(over));
    let (shown, goal, is_met) = match goal {
        Goal::AtLeast(least) => {
            (format!("{:.0} %", got * 100.0), format!(">= {:.0} %", least * 100.0), got >= least)
        }
        Goal::AtMost(most) => (format!("{got:.2} x"), format!("<= {most} x"), got <= most),
        Goal::Beyond(most) => {
            (format!("{:+.2} ms", got * 1e3), format!("<= +{} ms", most * 1e3), got <= most)
        }
        Goal::Open => (format!("{got:.2} x"), String::new(), true),
    };
    println!(
        "{work:<44} {way:>6} {:>10.3} {limit:>35} {:>10.3} {shown:>9} {goal:>9} {}",
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
