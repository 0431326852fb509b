//! Progress of a run, on a terminal.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The bars.
pub struct Progress {
    /// Prompts whose KV has been sent.
    pub prefilled: ProgressBar,
    /// Requests continued to their end.
    pub decoded: ProgressBar,
    /// Requests of the run that they are compared with.
    pub monolithic: ProgressBar,
}

impl Progress {
    /// Bars on stderr for `requests`, if that is a terminal and `visible`.
    pub fn new(requests: usize, visible: bool) -> Progress {
        let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bars = MultiProgress::with_draw_target(target);
        let style = ProgressStyle::with_template("{prefix:>11} {bar:40} {pos}/{len} {elapsed}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = |prefix: &'static str| {
            bars.add(ProgressBar::new(requests as u64)).with_style(style.clone()).with_prefix(prefix)
        };
        Progress { prefilled: bar("prefilled"), decoded: bar("decoded"), monolithic: bar("monolithic") }
    }

    /// Leaves the bars as they stand.
    pub fn end(&self) {
        for bar in [&self.prefilled, &self.decoded, &self.monolithic] {
            bar.abandon();
        }
    }
}
