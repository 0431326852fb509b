//! Announcements that wait for a device: each is passed on when its fence has passed, and what its
//! session says after it waits behind it.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use kv_core::proto::Command;
use kv_core::{Fence, FenceError, SessionId, Time};

use crate::cell::Cell;
use crate::link::{Link, Message};
use crate::token::Token;

/// First pause between two questions; doubles while the answer stays no.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
/// The longest: what the last layer of a long forward pass may lose.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Most sessions asked in one turn: frames and deadlines are served beside them.
const PER_TURN: usize = 256;

/// The commands of sessions that wait for a fence, in the order given.
///
/// The node has not seen them, so the pages in them are quiet. They go back when their session ends
/// for another reason, and when this is dropped: with the worker.
pub(super) struct Fences {
    link: Arc<Link>,
    lines: BTreeMap<SessionId, VecDeque<Message>>,
    due: Time,
    pause: Duration,
    /// Whose turn it is, where not all can be asked at once.
    next: SessionId,
}

impl Fences {
    pub(super) fn new(link: Arc<Link>) -> Fences {
        Fences { link, lines: BTreeMap::new(), due: Time::ZERO, pause: FIRST_PAUSE, next: SessionId(0) }
    }

    /// Keeps a message that has to wait; gives any other back.
    pub(super) fn admit(&mut self, now: Time, message: Message) -> Option<Message> {
        let session = message.cell.id();
        if message.fence.is_none() && !self.lines.contains_key(&session) {
            return Some(message);
        }
        let line = self.lines.entry(session).or_default();
        if line.is_empty() {
            // It is asked this very turn.
            (self.due, self.pause) = (now, FIRST_PAUSE);
        }
        line.push_back(message);
        None
    }

    /// Asks the fences, if it is time, and takes out what need not wait any more: announcements whose
    /// fence has passed and what follows them up to the next fence, a `FenceFailed` for a fence that
    /// never will, and everything of sessions that have ended.
    pub(super) fn ask(&mut self, now: Time) -> Vec<(Arc<Cell>, Command)> {
        let mut ready = Vec::new();
        if self.lines.is_empty() || now < self.due {
            return ready;
        }
        let (before, after) = (self.lines.range(..self.next), self.lines.range(self.next..));
        let asked: Vec<SessionId> = after.chain(before).map(|(id, _)| *id).take(PER_TURN).collect();
        for &session in &asked {
            let Some(line) = self.lines.get_mut(&session) else { continue };
            advance(line, &mut ready);
            if line.is_empty() {
                self.lines.remove(&session);
            }
        }
        self.next = asked.last().map_or(SessionId(0), |last| SessionId(last.0.saturating_add(1)));
        self.pause = if ready.is_empty() { (self.pause * 2).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
        self.due = now + self.pause;
        ready
    }

    /// When to ask again.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        (!self.lines.is_empty()).then_some(self.due)
    }

    /// True if nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }
}

/// Takes messages out of a line up to the first whose fence has not passed.
fn advance(line: &mut VecDeque<Message>, ready: &mut Vec<(Arc<Cell>, Command)>) {
    while let Some(Message { cell, command, fence }) = line.pop_front() {
        let Some(mut fence) = fence else {
            ready.push((cell, command));
            continue;
        };
        let answer = match cell.poll().is_terminal() {
            true => Ok(true),
            false => catch_unwind(AssertUnwindSafe(|| fence.passed())).unwrap_or(Err(FenceError::Panicked)),
        };
        if answer == Ok(false) {
            return line.push_front(Message { cell, command, fence: Some(fence) });
        }
        discard(Some(fence));
        let command = match (answer, command) {
            (Err(error), Command::LayersFinal { session, chunk, .. }) => {
                Command::FenceFailed { session, chunk, error }
            }
            (_, command) => command,
        };
        ready.push((cell, command));
    }
}

impl Drop for Fences {
    fn drop(&mut self) {
        for Message { cell, command, fence } in std::mem::take(&mut self.lines).into_values().flatten() {
            discard(fence);
            if let Some(token) = Token::from_command(command) {
                self.link.give_back(&cell, token);
            }
        }
    }
}

/// Drops a fence that nobody will ask any more. It may panic; the pages behind it are not to be lost
/// for that.
fn discard(fence: Option<Box<dyn Fence>>) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(fence)));
}
