//! How connections end: when nothing on a connection touches memory any more.

use std::time::{Duration, Instant};

use kv_core::{PeerId, PostId, TransportError, TransportEvent, WayEnd};
use kv_host::Life;
use rustix::event::epoll;

use crate::connections::id::RemoteId;
use crate::connections::remote::Stage;
use crate::connections::route::Route;
use crate::notifications::envelope::{Kind, Notification};
use crate::notifications::outgoing::PROBE;
use crate::notifications::speech::Dialogue;
use crate::transport::NixlTransport;

/// How long the death of a peer on this host is awaited after its connection has failed: the kernel closes a
/// dying process's sockets before the process counts as dead.
const DYING: Duration = Duration::from_secs(1);
/// How long the farewell of another peer is awaited after its connection has failed: the peer says it before it closes the
/// connection, but on a connection of its own, which may be read later.
const LAST_WORDS: Duration = Duration::from_millis(250);

impl NixlTransport {
    /// Ends the connections on which nothing is on its way any more.
    pub(crate) fn end_connections(&mut self, now: Instant) {
        let mut index = 0;
        while let Some(id) = self.ending.get(index).copied() {
            if self.end_connection(id, now) {
                self.ending.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }

    /// True if the connection has ended, or is in use again.
    fn end_connection(&mut self, id: RemoteId, now: Instant) -> bool {
        let Some(remote) = self.remotes.get(&id) else { return true };
        if remote.stage == Stage::Open {
            return true;
        }
        if remote.requests > remote.failed {
            return false;
        }
        let Stage::Broken(since) = remote.stage else {
            if remote.failed > 0 {
                // Of files.
                return false;
            }
            self.remove(id);
            return true;
        };
        if remote.failed > 0 {
            if !self.is_quiet(id, now) {
                return false;
            }
            self.end_failed(id);
        }
        let Some(remote) = self.remotes.get(&id) else { return true };
        let posts: Vec<PostId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.remote == id)
            .map(|(post, _)| *post)
            .collect();
        if matches!(remote.life, Life::Watched(_)) && remote.life.is_over() {
            // What has come in its last moment is taken in by the next call, before its death is told.
            self.watch_no_more(id);
            if let Some(remote) = self.remotes.get_mut(&id) {
                remote.life = Life::Dead;
            }
            return false;
        }
        let dead = remote.said_farewell() || remote.life.is_over();
        let patience = match remote.life {
            Life::Watched(_) => DYING,
            _ if remote.users.is_empty() => Duration::ZERO,
            _ if remote.is_foreign() || remote.route == Route::Storage => Duration::ZERO,
            _ => LAST_WORDS,
        };
        if !dead && now.saturating_duration_since(since) < patience {
            return false;
        }
        let end = if dead { WayEnd::Dead { quiet_after: Duration::ZERO } } else { WayEnd::Lost };
        let users = self.remove(id);
        for post in posts {
            let stopped = self.transfers.get(&post).and_then(|transfer| transfer.stopped.clone());
            self.end(post, Err(stopped.unwrap_or(TransportError::PeerGone)));
        }
        for peer in users {
            self.peers.remove(&peer);
            self.permissions.remove(&peer);
            self.events.push(TransportEvent::PeerGone { peer, end });
        }
        true
    }

    /// Whether the failed requests of a broken connection touch no memory any more. Two things must have
    /// happened:
    ///
    /// 1. The connection was closed, at this end at least, in an earlier call than this one: UCX has then
    ///    dealt with all that it had taken in before.
    /// 2. The peer's process is dead, or [`settle`](crate::NixlConfig::settle) has passed: until then bytes
    ///    may be between the hosts, or with a peer that has not looked.
    ///
    /// A connection is closed only if UCX has failed the connection, or the peer is dead: otherwise requests
    /// would go on.
    fn is_quiet(&mut self, id: RemoteId, now: Instant) -> bool {
        let Some(remote) = self.remotes.get(&id) else { return true };
        let (dead, closed) = (remote.life.is_over(), remote.closed);
        if let Some(closed) = closed {
            return dead || now.saturating_duration_since(closed) >= self.config.settle;
        }
        if dead || self.is_severed(id, now) {
            self.give_up_handles(id);
            if let Some(remote) = self.remotes.get_mut(&id) {
                remote.closed = Some(now);
                self.engine.forget(&remote.name);
            }
        }
        false
    }

    /// Whether UCX has failed a connection: NIXL then drops the peer, or sends the peer nothing more. The
    /// connection is tried out now and then.
    fn is_severed(&mut self, id: RemoteId, now: Instant) -> bool {
        let Some(remote) = self.remotes.get_mut(&id) else { return true };
        if !self.engine.knows(&remote.name) {
            return true;
        }
        if now.saturating_duration_since(remote.spoke) < PROBE / 4 {
            return false;
        }
        remote.spoke = now;
        let Some(Dialogue { token, .. }) = remote.dialogue() else { return self.has_lost(id) };
        let probe = Notification { to: *token, connection: id.0, kind: Kind::Probe };
        self.engine.notify(&remote.name, &probe.encode()).is_err()
    }

    /// Takes a peer's process from those that are watched. To close its descriptor would not be enough: a child of this
    /// process may have inherited the descriptor.
    pub(crate) fn watch_no_more(&self, id: RemoteId) {
        if let Some(Life::Watched(process)) = self.remotes.get(&id).map(|remote| &remote.life) {
            let _ = epoll::delete(&self.wakes, process);
        }
    }

    fn remove(&mut self, id: RemoteId) -> Vec<PeerId> {
        self.watch_no_more(id);
        let Some(remote) = self.remotes.remove(&id) else { return Vec::new() };
        if remote.route != Route::Storage {
            self.engine.forget(&remote.name);
        }
        self.names.remove(&remote.name);
        remote.users
    }
}
