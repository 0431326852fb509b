//! [`AuxRows`]: which aux rows are taken, and which are free.

use std::collections::VecDeque;

use kv_core::AuxIndex;

/// A fixed number of aux rows, each free or taken. The row that has been free for longest is taken first.
///
/// Decode queues have a set of their own; a prefill server keeps another one for the rows that it fills.
#[derive(Debug, Clone)]
pub struct AuxRows {
    free: VecDeque<u32>,
    taken: Vec<bool>,
}

impl AuxRows {
    /// Rows `0..rows`, all free.
    pub fn new(rows: u32) -> AuxRows {
        AuxRows { free: (0..rows).collect(), taken: vec![false; rows as usize] }
    }

    /// How many rows there are, free or taken.
    pub fn capacity(&self) -> usize {
        self.taken.len()
    }

    /// How many rows are free.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Takes a free row; `None` if all rows are taken.
    pub fn take(&mut self) -> Option<AuxIndex> {
        let row = self.free.pop_front()?;
        if let Some(taken) = self.taken.get_mut(row as usize) {
            *taken = true;
        }
        Some(AuxIndex(row))
    }

    /// Gives a row back. False, and nothing changes, if the row was not taken.
    pub fn give(&mut self, row: AuxIndex) -> bool {
        match self.taken.get_mut(row.0 as usize) {
            Some(taken) if *taken => {
                *taken = false;
                self.free.push_back(row.0);
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_taken_once_and_given_once() {
        let mut rows = AuxRows::new(2);
        assert_eq!((rows.take(), rows.take(), rows.take()), (Some(AuxIndex(0)), Some(AuxIndex(1)), None));
        assert!(rows.give(AuxIndex(1)));
        assert!(!rows.give(AuxIndex(1)));
        assert!(!rows.give(AuxIndex(2)));
        assert_eq!((rows.available(), rows.take()), (1, Some(AuxIndex(1))));
    }
}
