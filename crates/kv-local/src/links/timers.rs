//! Timers: dialing again, accepting again, and dropping links that have been silent for too long.

use kv_core::{Time, TransportError};

use super::opening::LISTEN_AGAIN;
use crate::transport::LocalTransport;

impl LocalTransport {
    pub(crate) fn serve_timers(&mut self) {
        self.drop_unwatched();
        let now = self.now;
        if self.listen_at.is_some_and(|at| at <= now) {
            self.listen_at = match self.watch.watch_listener() {
                Ok(()) => None,
                Err(_) => Some(now + LISTEN_AGAIN),
            };
        }
        if self.links.has_to_dial() && self.dial_at <= now {
            for id in self.links.take_dialing() {
                match self.dial(id) {
                    Ok(()) => {}
                    // No socket listens there any more: the peer's transport has ended.
                    Err(TransportError::PeerGone) => self.gone(id),
                    Err(_) => self.lose(id),
                }
            }
        }
        if self.feed_at().is_some_and(|at| at <= now) {
            for id in self.feed() {
                self.reject(id);
            }
        }
        if self.sweep_at <= now {
            self.sweep();
        }
        self.tell_lost_of_the_living();
    }

    /// When `serve_timers` has something to do, if nothing else happens before.
    pub(crate) fn next_timer(&self) -> Option<Time> {
        let dial = self.links.has_to_dial().then_some(self.dial_at);
        let watched = !self.links.strangers().is_empty() || !self.links.unclaimed().is_empty();
        let sweep = (watched && self.sweep_at != Time::MAX).then_some(self.sweep_at);
        [dial, sweep, self.feed_at(), self.revoking.next(), self.listen_at].into_iter().flatten().min()
    }

    /// Drops strangers and unclaimed links that have been silent for too long.
    fn sweep(&mut self) {
        let peers = self.links.tokens();
        let mut next = Time::MAX;
        for id in self.links.strangers().clone() {
            let Some(link) = self.links.get(id) else {
                continue;
            };
            // Counted from the link's beginning: a byte now and then must not keep the link.
            let due = link.opened + self.config.handshake_timeout;
            if due <= self.now {
                self.stats.refused += 1;
                self.remove(id);
            } else {
                next = next.min(due);
            }
        }
        for id in self.links.unclaimed().clone() {
            let Some(link) = self.links.get_mut(id) else {
                continue;
            };
            link.notice_copies(self.now);
            let known = link.token().is_some_and(|token| peers.contains(&token));
            let due = if known { self.now } else { link.heard } + self.config.unclaimed_timeout;
            if due <= self.now {
                self.close(id);
            } else {
                next = next.min(due);
            }
        }
        self.sweep_at = next;
    }
}
