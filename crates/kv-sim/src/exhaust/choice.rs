//! What may happen next, and what happens then.

use kv_core::proto::{Command, Input};
use kv_core::wire::Frame;
use kv_core::{PageList, Pages, PlaneError};

use super::world::{P, Read, SENDER, World};
use crate::Violation;

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// The prefill scheduler gives the pages, complete.
    Send,
    /// The scheduler of a decode host gives its pages.
    Init(usize),
    /// A frame arrives; the same may arrive again.
    Deliver { letter: usize, again: bool },
    /// The next timer of a host rings.
    Ring(usize),
    /// A read copies its bytes.
    Copy(usize),
    /// A read that has copied ends.
    End(usize),
    /// A read fails.
    Fail(usize),
    /// A host's scheduler aborts its session.
    Abort(usize),
    /// The prefill host restarts.
    Restart,
    /// A decode host dies.
    Die(usize),
    /// The plane of the first host proves the last life of the second one gone.
    Gone(usize, usize),
}

impl World {
    /// Everything that may happen now.
    pub(super) fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        if !self.sent {
            choices.push(Choice::Send);
        }
        let alive = |host: usize| self.hosts[host].alive;
        let decodes = 1..self.hosts.len();
        choices.extend(decodes.clone().filter(|&d| alive(d) && !self.hosts[d].init).map(Choice::Init));
        for (letter, it) in self.wire.iter().enumerate() {
            // Twins lead to the same state.
            if !alive(it.to.0) || self.wire[..letter].contains(it) {
                continue;
            }
            choices.push(Choice::Deliver { letter, again: false });
            if self.left.duplicates > 0 {
                choices.push(Choice::Deliver { letter, again: true });
            }
        }
        for (read, it) in self.reads.iter().enumerate() {
            let reachable = self.can_copy(it);
            if it.copied {
                choices.push(Choice::End(read));
            } else if reachable {
                choices.push(Choice::Copy(read));
            }
            if self.left.failures > 0 || !it.copied && !reachable {
                choices.push(Choice::Fail(read));
            }
        }
        for host in 0..self.hosts.len() {
            if alive(host) && self.hosts[host].node.next_timeout().is_some() {
                choices.push(Choice::Ring(host));
            }
            if self.left.aborts > 0 && self.is_open(host) {
                choices.push(Choice::Abort(host));
            }
        }
        if self.left.restarts > 0 {
            choices.push(Choice::Restart);
        }
        if self.left.deaths > 0 {
            choices.extend(decodes.filter(|&d| alive(d)).map(Choice::Die));
        }
        choices.extend(self.gone.iter().map(|&(host, other)| Choice::Gone(host, other)));
        choices
    }

    /// Makes it happen.
    pub(super) fn apply(&mut self, choice: Choice) -> Result<(), Violation> {
        match choice {
            Choice::Send => self.send_pages(),
            Choice::Init(host) => {
                self.hosts[host].init = true;
                let Some(session) = self.hosts[host].session else { return Ok(()) };
                let pages = self.request();
                self.ledger.gives(self.life(host), session, &pages);
                let Ok(pages) = Pages::claim(pages) else { return Ok(()) };
                self.command(host, Command::InitReceiver { session, pages, aux: None })
            }
            Choice::Deliver { letter, again } => {
                let it = if again { self.wire[letter].clone() } else { self.wire.remove(letter) };
                self.left.duplicates -= u8::from(again);
                self.deliver(it)
            }
            Choice::Ring(host) => {
                let Some(due) = self.hosts[host].node.next_timeout() else { return Ok(()) };
                self.now = self.now.max(self.hosts[host].when(due));
                self.ring(host)
            }
            Choice::Copy(read) => {
                self.copy(read);
                Ok(())
            }
            Choice::End(read) => {
                let Read { host, post, .. } = self.reads.remove(read);
                self.read_ended(host, post)
            }
            Choice::Fail(read) => {
                let it = self.reads.remove(read);
                self.left.failures =
                    self.left.failures.saturating_sub(u8::from(self.can_copy(&it) || it.copied));
                self.input(it.host, Input::Posted { post: it.post, result: Err(PlaneError::PeerGone) })
            }
            Choice::Abort(host) => {
                self.left.aborts -= 1;
                let session = if host == P { Some(SENDER) } else { self.hosts[host].session };
                match session {
                    Some(session) => self.command(host, Command::Abort { session }),
                    None => Ok(()),
                }
            }
            Choice::Restart => {
                self.left.restarts -= 1;
                self.restart()
            }
            Choice::Die(host) => {
                self.left.deaths -= 1;
                self.die(host);
                Ok(())
            }
            Choice::Gone(host, other) => self.tell_gone(host, other),
        }
    }

    /// The pages of the request, on either side.
    pub(super) fn request(&self) -> PageList {
        // Every other page, so that each is a descriptor of its own.
        PageList::from_pages((0..self.scope.pages).map(|page| page * 2)).unwrap_or_default()
    }

    /// A choice in words; before it is made.
    pub(super) fn describe(&self, choice: Choice) -> String {
        let name = |host: usize| if host == P { "P".to_owned() } else { format!("D{host}") };
        let what = match choice {
            Choice::Send => "P: the pages are complete".to_owned(),
            Choice::Init(host) => format!("{}: pages to read into", name(host)),
            Choice::Deliver { letter, again } => {
                let it = &self.wire[letter];
                let body = Frame::decode(&it.bytes).map(|frame| format!("{:?}", frame.body));
                let (to, again) = (name(it.to.0), if again { " (and will again)" } else { "" });
                format!("{to} receives {}{again}", body.unwrap_or_default())
            }
            Choice::Ring(host) => format!("{}: the next timer rings", name(host)),
            Choice::Copy(read) => {
                format!("{}: {:?} copies", name(self.reads[read].host), self.reads[read].post)
            }
            Choice::End(read) => format!("{}: {:?} ends", name(self.reads[read].host), self.reads[read].post),
            Choice::Fail(read) => {
                format!("{}: {:?} fails", name(self.reads[read].host), self.reads[read].post)
            }
            Choice::Abort(host) => format!("{}: abort", name(host)),
            Choice::Restart => "P restarts".to_owned(),
            Choice::Die(host) => format!("{} dies", name(host)),
            Choice::Gone(host, other) => format!("{}: {} is proven gone", name(host), name(other)),
        };
        format!("{:>9.3} s  {what}", self.now as f64 / 1e9)
    }
}
