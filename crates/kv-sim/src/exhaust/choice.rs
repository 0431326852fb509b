//! The steps that are possible in a state of a small world, and how each is carried out.

use kv_core::TransportError;
use kv_core::wire::Frame;

use super::search::Histories;
use super::small::{P, Small};
use crate::net::lives::Slot;
use crate::violation::Violation;

/// One possible step of a small world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// The prefill scheduler gives the pages, complete.
    Send,
    /// The scheduler of a decode host gives the pages to read into.
    Init(Slot),
    /// A frame arrives. With `again`, a copy stays in flight and may arrive later.
    Deliver { letter: usize, again: bool },
    /// The next timer of a host rings.
    Ring(Slot),
    /// A read copies its bytes.
    Copy(usize),
    /// The host is told that a read that has copied its bytes has ended.
    End(usize),
    /// A read ends with an error.
    Fail(usize),
    /// The scheduler of a host aborts the host's session.
    Abort(Slot),
    /// The prefill host crashes and starts again, as a new incarnation.
    Restart,
    /// A decode host dies and does not come back.
    Die(Slot),
    /// A transport reports as proven that a dead life of a host is gone.
    Gone(usize),
}

impl Histories for Small {
    type Choice = Choice;

    fn fork(&self) -> Result<Small, Violation> {
        Ok(self.clone())
    }

    fn fingerprint(&self) -> u64 {
        self.state()
    }

    fn rest(self, lossy: bool) -> Result<(), Violation> {
        self.run_to_rest(lossy)
    }

    fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        if !self.sent {
            choices.push(Choice::Send);
        }
        let decodes = 1..self.stage.lives.len();
        choices.extend(
            decodes
                .clone()
                .filter(|&slot| self.stage.is_alive(slot) && !self.is_init(slot))
                .map(Choice::Init),
        );
        for letter in self.stage.letters() {
            choices.push(Choice::Deliver { letter, again: false });
            if self.left.duplicates > 0 {
                choices.push(Choice::Deliver { letter, again: true });
            }
        }
        self.add_reads(&mut choices);
        choices.extend(self.stage.timers().map(Choice::Ring));
        for slot in 0..self.stage.lives.len() {
            if self.left.aborts > 0 && self.is_open(slot) {
                choices.push(Choice::Abort(slot));
            }
        }
        if self.left.restarts > 0 {
            choices.push(Choice::Restart);
        }
        if self.left.deaths > 0 {
            choices.extend(decodes.filter(|&slot| self.stage.is_alive(slot)).map(Choice::Die));
        }
        choices.extend((0..self.stage.proofs.len()).map(Choice::Gone));
        choices
    }

    fn apply(&mut self, choice: Choice) -> Result<(), Violation> {
        match choice {
            Choice::Send => self.send_pages(),
            Choice::Init(slot) => self.init_receiver(slot),
            Choice::Deliver { letter, again } => {
                let it = if again { self.stage.wire[letter].clone() } else { self.stage.wire.remove(letter) };
                self.left.duplicates -= u8::from(again);
                self.stage.deliver(it)
            }
            Choice::Ring(slot) => self.stage.ring(slot),
            Choice::Copy(read) => self.copy(read),
            Choice::End(read) => self.end(read, Ok(())),
            Choice::Fail(read) => {
                let it = &self.stage.world.flights[read];
                let wanton = self.stage.can_copy(it) || it.moved == it.pieces.len();
                self.left.failures = self.left.failures.saturating_sub(u8::from(wanton));
                self.end(read, Err(TransportError::PeerGone))
            }
            Choice::Abort(slot) => {
                self.left.aborts -= 1;
                self.abort(slot)
            }
            Choice::Restart => {
                self.left.restarts -= 1;
                self.restart()
            }
            Choice::Die(slot) => {
                self.left.deaths -= 1;
                self.stage.die(slot)
            }
            Choice::Gone(proof) => self.stage.prove(proof),
        }
    }

    fn describe(&self, choice: Choice) -> String {
        let name = |slot: Slot| if slot == P { "P".to_owned() } else { format!("D{slot}") };
        let of_life = |life: usize| name(self.stage.world.hosts[life].slot);
        let read = |read: usize| {
            let it = &self.stage.world.flights[read];
            format!("{}: {:?}", of_life(it.life), it.post)
        };
        let what = match choice {
            Choice::Send => "P: the pages are complete".to_owned(),
            Choice::Init(slot) => format!("{}: pages to read into", name(slot)),
            Choice::Deliver { letter, again } => {
                let it = &self.stage.wire[letter];
                let body = Frame::decode(&it.bytes).map(|frame| format!("{:?}", frame.body));
                let (to, again) = (of_life(it.to), if again { " (and will again)" } else { "" });
                format!("{to} receives {}{again}", body.unwrap_or_default())
            }
            Choice::Ring(slot) => format!("{}: the next timer rings", name(slot)),
            Choice::Copy(it) => format!("{} copies", read(it)),
            Choice::End(it) => format!("{} ends", read(it)),
            Choice::Fail(it) => format!("{} fails", read(it)),
            Choice::Abort(slot) => format!("{}: abort", name(slot)),
            Choice::Restart => "P restarts".to_owned(),
            Choice::Die(slot) => format!("{} dies", name(slot)),
            Choice::Gone(proof) => {
                let proof = &self.stage.proofs[proof];
                let gone = self.stage.world.hosts[proof.life].conns.get(&proof.peer);
                let gone = gone.map_or_else(|| "a forgotten peer".to_owned(), |conn| of_life(conn.target));
                format!("{}: {gone} is proven gone", of_life(proof.life))
            }
        };
        format!("{:>9.3} s  {what}", self.stage.world.now as f64 / 1e9)
    }
}

impl Small {
    fn add_reads(&self, choices: &mut Vec<Choice>) {
        for (read, it) in self.stage.reads() {
            let (copied, reachable) = (it.moved == it.pieces.len(), self.stage.can_copy(it));
            if copied {
                choices.push(Choice::End(read));
            } else if reachable {
                choices.push(Choice::Copy(read));
            }
            if self.left.failures > 0 || !copied && !reachable {
                choices.push(Choice::Fail(read));
            }
        }
    }
}
