//! Sockets that are ready: reading and writing them in bounded shares, so that a call of `poll` takes about
//! half a millisecond and no connection waits for another one.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use kv_host::{OsError, clock};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::connection::{Connection, ConnectionId, Owner};
use crate::inbound::{ReceiveError, Received};
use crate::message::Broken;
use crate::serving;
use crate::slicing::QUEUED;
use crate::transport::TcpTransport;
use crate::watch::Woken;

/// How long one call of `poll` reads and writes.
const TURN: Duration = Duration::from_micros(500);
/// Most bytes of messages that are read at once. Pages do not pass through this buffer, but for those that come
/// with their message.
pub(crate) const MESSAGES: usize = 16 << 10;
/// The number of events for the owner after which a call of `poll` reads no more.
pub(crate) const EVENTS: usize = 1024;

/// How a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// The other side's kernel has closed it: the process has ended, or has closed the socket.
    Closed,
    /// Nothing listens at the address, or another transport does.
    Gone,
    /// The network, or a limit: nothing is known about the other side.
    Failed,
    /// The other side has broken the rules of the stream.
    Broken,
    /// Certificates do not show that the other side is a worker of the service, for this reason.
    Untrusted(&'static str),
}

impl From<OsError> for Over {
    fn from(error: OsError) -> Over {
        match error.kind {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => Over::Closed,
            ErrorKind::ConnectionRefused => Over::Gone,
            _ => Over::Failed,
        }
    }
}

impl From<Errno> for Over {
    fn from(error: Errno) -> Over {
        OsError::new("connect", error).into()
    }
}

impl From<Broken> for Over {
    fn from(_: Broken) -> Over {
        Over::Broken
    }
}

impl From<ReceiveError> for Over {
    fn from(error: ReceiveError) -> Over {
        match error {
            ReceiveError::Os(error) => error.into(),
            ReceiveError::Broken(error) => error.into(),
            ReceiveError::Untrusted(reason) => Over::Untrusted(reason),
        }
    }
}

impl TcpTransport {
    /// Serves sockets until none is ready, or the time is over.
    pub(crate) fn serve_sockets(&mut self) {
        let begun = Instant::now();
        loop {
            self.fill_stirred(|| begun.elapsed() >= TURN);
            let woken = self.watch.woken();
            if woken.is_empty() && self.unread.is_empty() {
                return;
            }
            // Sockets that the kernel reports, and connections with bytes that it does not report, take turns.
            let turns = woken.len().max(self.unread.len());
            let mut woken = woken.into_iter();
            for _ in 0..turns {
                match woken.next() {
                    Some(Woken::Listener) => self.accept_some(),
                    Some(Woken::Socket(id, flags)) => self.ready(id, flags),
                    None => {}
                }
                if let Some(id) = self.unread.pop_front() {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        connection.listed = false;
                    }
                    self.ready(id, EventFlags::IN);
                }
                // What is left over is reported again, after the others.
                if begun.elapsed() >= TURN || self.posts.events() >= EVENTS {
                    self.now = clock::now();
                    return;
                }
            }
            self.now = clock::now();
        }
    }

    /// Serves a connection that is ready for the operations in the flags.
    pub(crate) fn ready(&mut self, id: ConnectionId, flags: EventFlags) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        match self.serve(id, &mut connection, flags) {
            Ok(()) => {
                self.keep(id, connection);
            }
            Err(over) => {
                self.forget(&connection);
                drop(connection.outbound);
                self.ended(id, connection.owner, over);
            }
        }
    }

    fn serve(
        &mut self,
        id: ConnectionId,
        connection: &mut Connection,
        flags: EventFlags,
    ) -> Result<(), Over> {
        if matches!(connection.owner, Owner::Dialed(..)) {
            self.connected(connection)?;
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            match connection.owner {
                Owner::Dialed(..) => {}
                Owner::Stranger => self.read_stranger(id, connection)?,
                Owner::Greeted(..) => self.read_welcome(id, connection)?,
                Owner::Guest(guest) => self.read_guest(connection, guest)?,
                Owner::Lane(way, lane) => self.read_lane(connection, way, lane)?,
            }
        }
        let blocked = connection.watched.is_some_and(|watched| watched.contains(EventFlags::OUT));
        if blocked && !flags.contains(EventFlags::OUT) {
            return Ok(());
        }
        let was_full = serving::is_full(connection);
        self.write(connection)?;
        match connection.owner {
            // What has come meanwhile is in the connection's buffer: the socket will not report it.
            Owner::Guest(guest) if was_full => self.take_requests(connection, guest),
            _ => Ok(()),
        }
    }

    /// Writes a share of what waits on a connection.
    pub(crate) fn write(&mut self, connection: &mut Connection) -> Result<(), Over> {
        let mut left = connection.share();
        while !connection.is_flushed() && left > 0 {
            let (regions, now) = (self.given.regions(), clock::now());
            let (sent, more) = connection.flush(regions, now, left, &mut self.scratch)?;
            left = left.saturating_sub(sent);
            if !more {
                break;
            }
        }
        if let Owner::Lane(way, _) = connection.owner
            && connection.outbound.len() < QUEUED
        {
            self.resume(way);
        }
        Ok(())
    }

    /// Reads once from a connection: pages into their places, and messages.
    pub(crate) fn receive(&mut self, connection: &mut Connection, most: usize) -> Result<Received, Over> {
        let room = self.scratch.len().min(MESSAGES);
        let scratch = self.scratch.get_mut(..room).unwrap_or_default();
        Ok(connection.receive(self.given.regions(), scratch, most)?)
    }

    /// Puts a connection back, watched for what it waits for.
    pub(crate) fn keep(&mut self, id: ConnectionId, mut connection: Connection) {
        connection.tidy();
        let mut wanted = EventFlags::empty();
        if !matches!(connection.owner, Owner::Dialed(..)) && !serving::is_full(&connection) {
            wanted |= EventFlags::IN;
        }
        if matches!(connection.owner, Owner::Dialed(..)) || !connection.is_flushed() {
            wanted |= EventFlags::OUT;
        }
        if connection.watched != Some(wanted) {
            let before = connection.watched;
            if self.watch.watch_socket(id, connection.socket(), before, wanted).is_err() {
                let owner = connection.owner;
                self.forget(&connection);
                drop(connection);
                return self.ended(id, owner, Over::Failed);
            }
            connection.watched = Some(wanted);
        }
        if connection.has_unread() && !connection.listed && !serving::is_full(&connection) {
            connection.listed = true;
            self.unread.push_back(id);
        }
        self.connections.insert(id, connection);
    }

    /// Stops watching a connection that is about to be dropped.
    pub(crate) fn forget(&self, connection: &Connection) {
        self.watch.forget_socket(connection.socket());
    }

    /// Closes a connection, if it is open.
    pub(crate) fn close(&mut self, id: ConnectionId) {
        self.strangers.remove(&id);
        if let Some(mut connection) = self.connections.remove(&id) {
            connection.say_goodbye();
            self.forget(&connection);
        }
    }

    /// Writes what the sockets take at once, as the last thing.
    pub(crate) fn send_last(&mut self) {
        self.fill_stirred(|| false);
        let ids: Vec<ConnectionId> = self.connections.keys().copied().collect();
        for id in ids {
            if let Some(mut connection) = self.connections.remove(&id) {
                let _ = self.write(&mut connection);
                connection.say_goodbye();
            }
        }
    }
}
