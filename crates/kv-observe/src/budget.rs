//! How many loud lines the events of peers may cause: a peer that comes and goes all the time must not fill the log,
//! nor keep the worker's thread busy with writing it.

use std::time::Duration;

use kv_core::Time;

/// Lines in a second, for each worker.
const LINES: u32 = 16;
const SECOND: Duration = Duration::from_secs(1);

/// Lines that may still be written, and lines that were not.
#[derive(Debug, Clone, Default)]
pub(crate) struct Budget {
    since: Option<Time>,
    used: u32,
    held: u64,
}

impl Budget {
    /// Takes a line. `None` if the second has had its lines; otherwise how many were left out before this line.
    pub(crate) fn take(&mut self, now: Time) -> Option<u64> {
        if self.since.is_none_or(|since| now - since >= SECOND) {
            (self.since, self.used) = (Some(now), 0);
        }
        if self.used == LINES {
            self.held = self.held.saturating_add(1);
            return None;
        }
        self.used += 1;
        Some(std::mem::take(&mut self.held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_its_lines_and_the_next_one_tells_how_many_were_left_out() {
        let mut budget = Budget::default();
        let at = |millis| Time::ZERO + Duration::from_millis(millis);
        let taken: Vec<Option<u64>> = (0..100).map(|line| budget.take(at(line))).collect();
        assert_eq!(taken.iter().filter(|line| **line == Some(0)).count(), LINES as usize);
        assert_eq!(
            (budget.take(at(999)), budget.take(at(1000)), budget.take(at(1000))),
            (None, Some(85), Some(0))
        );
    }
}
