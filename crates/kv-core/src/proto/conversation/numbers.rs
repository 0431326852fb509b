//! Time that a peer has granted: the one rule by which leases of pages and permissions to write are
//! counted.
//!
//! The side that asks counts from the moment at which it *asked*; the side that grants counts from
//! the moment at which it *answered*. So the asking side's end is never after the granting side's
//! end, if the rates of the two clocks differ by less than a thirty-second part, which the asking
//! side subtracts. Every question has a number, which its answer repeats. An answer to a question
//! that was never asked, or was asked more than a minute ago, grants nothing.

use std::collections::VecDeque;
use std::time::Duration;

use crate::meter::step;
use crate::time::Time;

/// Until when an answer of `millis` milliseconds grants something, by this side's clock, if the
/// question was asked at `asked_at`.
pub(in crate::proto) fn granted_until(asked_at: Time, millis: u64) -> Time {
    let granted = Duration::from_millis(millis);
    asked_at + (granted - granted / 32)
}

/// The granted duration as a peer is told it: in whole milliseconds, rounded down.
pub(in crate::proto) fn millis(granted: Duration) -> u64 {
    u64::try_from(granted.as_millis()).unwrap_or(u64::MAX)
}

/// The numbers of the questions that were sent to a peer, each with the time of sending.
#[derive(Debug, Clone, Default)]
pub(super) struct Numbers {
    /// The last number that was drawn. Numbers count from 1.
    last: u64,
    /// The last numbers with their times, oldest first.
    sent: VecDeque<(u64, Time)>,
}

impl Numbers {
    /// Numbers that begin after `last`.
    pub(super) fn above(last: u64) -> Numbers {
        Numbers { last, ..Numbers::default() }
    }

    /// The last number that was drawn; 0 if none was.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// An answer that takes longer than this grants nothing.
    const REMEMBERED: Duration = Duration::from_secs(60);
    /// Most numbers that are remembered: a thousand in a second, for `REMEMBERED`.
    const MOST: usize = 60_000;

    /// The number for a question that is sent now. Questions of one moment share a number.
    pub(in crate::proto) fn number(&mut self, now: Time) -> u64 {
        if let Some(&(number, _)) = self.sent.back().filter(|&&(_, at)| at == now) {
            return number;
        }
        self.last += 1;
        let old = |&(_, at): &(u64, Time)| now - at > Numbers::REMEMBERED;
        while self.sent.len() >= Numbers::MOST || self.sent.front().is_some_and(old) {
            step(1);
            self.sent.pop_front();
        }
        self.sent.push_back((self.last, now));
        self.last
    }

    /// How many numbers are remembered.
    pub(in crate::proto) fn len(&self) -> usize {
        self.sent.len()
    }

    /// Until when an answer to this number grants `millis` milliseconds; `None` if no question with
    /// this number was sent, or too long ago.
    pub(in crate::proto) fn granted_until(&self, number: u64, millis: u64) -> Option<Time> {
        let at = self.sent.binary_search_by_key(&number, |&(number, _)| number).ok()?;
        self.sent.get(at).map(|&(_, asked_at)| granted_until(asked_at, millis))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn an_answer_leases_a_thirty_second_part_less_from_the_moment_of_the_question() {
        let mut numbers = Numbers::default();
        let asked = Time::from_nanos(5 * SECOND);
        let number = numbers.number(asked);
        assert_eq!(numbers.number(asked), number, "what is sent at one moment shares a number");
        assert_eq!(numbers.granted_until(number, 32_000), Some(Time::from_nanos(36 * SECOND)));
        assert_eq!(numbers.granted_until(number + 1, 32_000), None);
    }

    #[test]
    fn numbers_are_forgotten_after_a_minute_and_never_given_twice() {
        let mut numbers = Numbers::default();
        let first = numbers.number(Time::from_nanos(1));
        let later = numbers.number(Time::from_nanos(61 * SECOND));
        assert!(later > first && numbers.len() == 1);
        assert_eq!(numbers.granted_until(first, 1000), None);
    }
}
