//! Commands that wait for a device. A command is passed on when its ready event has passed, and later
//! commands of the same session wait behind that command.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use kv_core::machine::{Machine, SessionCommand};
use kv_core::{ReadyEvent, ReadyEventError, SessionId, Time};

use super::discard::discard;
use super::shared::{Message, Shared};

/// First pause before an event is asked again; doubles while no event has passed.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
/// Longest pause: the time that the last layer of a long forward pass may lose.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Most sessions whose events are asked in one turn, so that frames and deadlines are served in between.
const PER_TURN: usize = 256;

/// The commands of sessions that wait for a ready event, in the order given.
///
/// The machine has not seen these commands, so no data operation uses what they lend. What they lend goes
/// back when their session ends for another reason, and when this value is dropped, with the worker.
pub(super) struct ReadyEvents<M: Machine> {
    shared: Arc<Shared<M>>,
    lines: BTreeMap<SessionId, VecDeque<Waiting<M>>>,
    due: Time,
    pause: Duration,
    /// The session that is asked first in the next turn, if there are more sessions than one turn asks.
    next: SessionId,
}

/// A command that waits, and the command's own ready event, if there is one.
struct Waiting<M: Machine> {
    message: Message<M>,
    ready_event: Option<Box<dyn ReadyEvent>>,
}

impl<M: Machine> ReadyEvents<M> {
    pub(super) fn new(shared: Arc<Shared<M>>) -> ReadyEvents<M> {
        ReadyEvents {
            shared,
            lines: BTreeMap::new(),
            due: Time::ZERO,
            pause: FIRST_PAUSE,
            next: SessionId(0),
        }
    }

    /// Keeps a message that has to wait; returns any other message.
    pub(super) fn admit(&mut self, now: Time, mut message: Message<M>) -> Option<Message<M>> {
        let (session, ready_event) = (message.cell.id(), message.command.take_ready());
        if ready_event.is_none() && !self.lines.contains_key(&session) {
            return Some(message);
        }
        let line = self.lines.entry(session).or_default();
        if line.is_empty() {
            // The event is asked in this turn.
            (self.due, self.pause) = (now, FIRST_PAUSE);
        }
        line.push_back(Waiting { message, ready_event });
        None
    }

    /// Asks the ready events, if it is time, and takes out the commands that need not wait any more: commands
    /// whose ready event has passed, with the commands behind them up to the next ready event; what stands
    /// for a command whose ready event has failed; and all commands of sessions that have ended.
    pub(super) fn ask(&mut self, now: Time) -> Vec<Message<M>> {
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

    /// When the events are to be asked again; `None` if no command waits.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        (!self.lines.is_empty()).then_some(self.due)
    }

    /// True if no command waits.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }
}

/// Takes messages out of a line up to the first whose ready event has not passed.
fn advance<M: Machine>(line: &mut VecDeque<Waiting<M>>, ready: &mut Vec<Message<M>>) {
    while let Some(Waiting { mut message, ready_event }) = line.pop_front() {
        let Some(mut ready_event) = ready_event else {
            ready.push(message);
            continue;
        };
        let answer = match message.cell.is_over() {
            true => Ok(true),
            false => catch_unwind(AssertUnwindSafe(|| ready_event.passed()))
                .unwrap_or(Err(ReadyEventError::Panicked)),
        };
        if answer == Ok(false) {
            return line.push_front(Waiting { message, ready_event: Some(ready_event) });
        }
        discard(Some(ready_event));
        if let Err(error) = answer {
            message.command = message.command.not_ready(error);
        }
        ready.push(message);
    }
}

impl<M: Machine> Drop for ReadyEvents<M> {
    fn drop(&mut self) {
        for Waiting { message, ready_event } in std::mem::take(&mut self.lines).into_values().flatten() {
            discard(ready_event);
            self.shared.return_unseen(&message.cell, message.command);
        }
    }
}
