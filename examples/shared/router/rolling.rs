//! A rolling restart: the ranks of one side are drained and started anew, one after the other, while requests
//! keep coming.
//!
//! ```text
//! the first requests ─▶ drain rank 0 ─▶ more requests ─▶ rank 0 is empty, and exits ─▶ its successor is ready
//!                    ─▶ more requests ─▶ drain rank 1 ─▶ …
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::process::{Child, ChildStdin, ChildStdout};

use super::rank::{Rank, Side};
use super::run::Plan;
use super::{Router, process};
use crate::control::Accounting;
use crate::error::ExampleError;
use crate::process::Process;
use crate::workload::Chat;

/// Starts the process of a rank once more, by its side and number.
pub type Respawn = Box<dyn FnMut(Side, u32) -> Result<(Child, ChildStdin, ChildStdout), ExampleError>>;

/// A rolling restart of the ranks of one side.
pub(super) struct Rolling {
    respawn: Respawn,
    /// The positions of the ranks that are still to be drained.
    to_drain: VecDeque<usize>,
    /// The chats that are sent at each step, one portion after the other.
    portions: VecDeque<Range<usize>>,
    stage: Stage,
}

/// How far the rolling restart is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The rank at this position drains.
    Draining(usize),
    /// The process of the rank at this position, which takes the place of one that was drained, comes up.
    Starting(usize),
    /// Every rank of the side was started anew.
    Done,
}

impl Router {
    /// Drains the ranks of a side one after the other, and starts each anew.
    pub fn roll(&mut self, side: Side, respawn: Respawn) {
        let of_side = |rank: &usize| self.ranks[*rank].side == side;
        let to_drain = (0..self.ranks.len()).filter(of_side).collect();
        self.rolling = Some(Rolling { respawn, to_drain, portions: VecDeque::new(), stage: Stage::Done });
    }

    /// Sends the first chats: all of them, unless ranks are drained meanwhile.
    pub(super) fn begin(&mut self, chats: &[Chat], plan: &Plan) -> Result<(), ExampleError> {
        let Some(rolling) = &mut self.rolling else { return self.send(0..chats.len(), chats, plan) };
        // Some at the beginning, some while each rank drains, and some when each successor is ready.
        let steps = 2 * rolling.to_drain.len() + 1;
        let bound = |step: usize| chats.len() * step / steps;
        rolling.portions = (0..steps).map(|step| bound(step)..bound(step + 1)).collect();
        self.send_portion(chats, plan)?;
        self.drain_next(chats, plan)
    }

    fn send(&mut self, numbers: Range<usize>, chats: &[Chat], plan: &Plan) -> Result<(), ExampleError> {
        numbers.into_iter().try_for_each(|number| self.next_turn(chats, number, plan))
    }

    fn send_portion(&mut self, chats: &[Chat], plan: &Plan) -> Result<(), ExampleError> {
        let portion = self.rolling.as_mut().and_then(|rolling| rolling.portions.pop_front());
        self.send(portion.unwrap_or(0..0), chats, plan)
    }

    /// Drains the next rank, and sends more requests, which go to the other ranks.
    fn drain_next(&mut self, chats: &[Chat], plan: &Plan) -> Result<(), ExampleError> {
        let Some(rolling) = &mut self.rolling else { return Ok(()) };
        let Some(rank) = rolling.to_drain.pop_front() else {
            rolling.stage = Stage::Done;
            return Ok(());
        };
        rolling.stage = Stage::Draining(rank);
        self.ranks[rank].drain()?;
        self.send_portion(chats, plan)
    }

    /// True while ranks are to be drained, or to be started anew.
    pub(super) fn rolls(&self) -> bool {
        self.rolling.as_ref().is_some_and(|rolling| rolling.stage != Stage::Done)
    }

    /// A rank has reported its pages: if the rank drains, its process exits, and another takes its place.
    pub(super) fn has_drained(&mut self, rank: usize, pages: Accounting) -> Result<(), ExampleError> {
        let next = self.ranks.len();
        let Some(rolling) = self.rolling.as_mut().filter(|rolling| rolling.stage == Stage::Draining(rank))
        else {
            return Ok(());
        };
        let Rank { side, number, .. } = self.ranks[rank];
        self.ranks[rank].accounting = Some(pages);
        let (child, output, input) = (rolling.respawn)(side, number)?;
        rolling.stage = Stage::Starting(next);
        self.ranks.push(Rank::new(side, number, Process::new(output, Some(child))));
        self.ranks[next].starts();
        process::listen(next, input, self.sender.clone());
        Ok(())
    }

    /// A rank is ready: if it takes the place of one that was drained, it gets requests, and the next rank is
    /// drained.
    pub(super) fn is_ready(&mut self, rank: usize, chats: &[Chat], plan: &Plan) -> Result<(), ExampleError> {
        let starting = |rolling: &Rolling| rolling.stage == Stage::Starting(rank);
        if !self.rolling.as_ref().is_some_and(starting) {
            return Ok(());
        }
        self.ranks[rank].is_up();
        self.send_portion(chats, plan)?;
        self.drain_next(chats, plan)
    }
}
