//! The progress of a run, as bars on a terminal.

use indicatif::ProgressBar;
use kv_examples::progress::bars;

use crate::requests::Request;

/// One bar for each step of the requests, and one for the comparison.
pub struct Progress {
    /// Counts images that an encoder has answered for.
    pub encoded: ProgressBar,
    /// Counts images whose embedding the prefill process has.
    pub arrived: ProgressBar,
    /// Counts requests that have ended.
    pub decoded: ProgressBar,
    /// Counts requests that the run in one process has answered.
    pub monolithic: ProgressBar,
}

impl Progress {
    /// Bars for `rounds` times `requests`, if stderr is a terminal and `visible`.
    pub fn new(requests: &[Request], rounds: usize, visible: bool) -> Progress {
        let images = rounds * requests.iter().map(|request| request.items.len()).sum::<usize>();
        let answers = rounds * requests.len();
        let names = [
            ("encoded", images),
            ("fetched", images),
            ("decoded", answers),
            ("in one process", requests.len()),
        ];
        let [encoded, arrived, decoded, monolithic] = bars(names, visible);
        Progress { encoded, arrived, decoded, monolithic }
    }

    /// Leaves the bars as they stand.
    pub fn end(&self) {
        for bar in [&self.encoded, &self.arrived, &self.decoded, &self.monolithic] {
            bar.abandon();
        }
    }
}
