//! [`Watcher`]: whether the processes behind the ports of SGLang's ranks live.
//!
//! | link | left when |
//! |---|---|
//! | `Down` | the next try is due: `Dialing` |
//! | `Dialing` | the peer greets: `Held`; it refuses, resets, closes or is silent: `Down` |
//! | `Held` | the peer closes: `Down`, and the next try is due at once; the time to hold is over: `Dialing` |

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use kv_core::Time;
use mio::event::Event;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use slab::Slab;

use crate::client_addr::ClientAddr;
use crate::config::WatchConfig;
use crate::expiry::Expiry;
use crate::sglang::{Verdict, WatchOrder};

/// Refused connections in a row that prove a process dead.
const PROOF: u8 = 2;
/// Failed tries in a row, for any other reason, after which a port counts as silent.
const MISSES: u8 = 2;
/// From how many clients on the clients without ports are removed.
const SWEEP: usize = 64;

/// The number by which a table knows a port: the table's place among the listening addresses, and the number of
/// the entry.
pub(crate) type Key = (usize, u64);

/// One idle connection to each port that is watched. No method blocks.
#[derive(Debug)]
pub(crate) struct Watcher {
    config: WatchConfig,
    /// The first token of the watcher; the next ones are for the positions in `ports`.
    base: usize,
    ports: Slab<Port>,
    by_key: BTreeMap<Key, usize>,
    due: Expiry<usize>,
    clients: BTreeMap<ClientAddr, Share>,
    dials: Dials,
    verdicts: Vec<(Key, Verdict)>,
}

#[derive(Debug)]
struct Port {
    key: Key,
    addr: SocketAddr,
    client: ClientAddr,
    link: Link,
    /// When the link was last changed by a new connection.
    dialed: Option<Time>,
    due: Time,
    refused: u8,
    missed: u8,
}

#[derive(Debug)]
enum Link {
    Down,
    Dialing(TcpStream),
    Held(TcpStream),
}

/// Ports and connections of one client address.
#[derive(Debug, Default)]
struct Share {
    ports: usize,
    dials: Dials,
}

/// Connections begun in the second that began at `since`.
#[derive(Debug, Default)]
struct Dials {
    since: Time,
    begun: usize,
}

/// What an event or a failed connection says about a port.
enum Sign {
    Greeted,
    /// Nothing listens at the port.
    Refused,
    /// The connection has failed, or ended without a greeting.
    Missed,
    /// This process cannot open a connection now, which says nothing about the port.
    Nothing,
}

impl Watcher {
    /// A watcher whose sockets have the tokens from `base` on.
    pub(crate) fn new(config: WatchConfig, base: usize) -> Watcher {
        Watcher {
            config,
            base,
            ports: Slab::new(),
            by_key: BTreeMap::new(),
            due: Expiry::default(),
            clients: BTreeMap::new(),
            dials: Dials::default(),
            verdicts: Vec::new(),
        }
    }

    /// Ports that are watched.
    pub(crate) fn len(&self) -> usize {
        self.ports.len()
    }

    /// Begins or ends watching a port for the table of the listening address `desk`. A port beyond a bound is
    /// not watched.
    pub(crate) fn take_order(&mut self, now: Time, registry: &Registry, desk: usize, order: WatchOrder) {
        match order {
            WatchOrder::Begin { seq, addr, client } => {
                if self.clients.len() >= SWEEP.max(2 * self.ports.len()) {
                    self.clients.retain(|_, share| share.ports > 0 || share.dials.is_recent(now));
                }
                let share = self.clients.entry(client).or_default();
                if self.ports.len() >= self.config.max_ports
                    || share.ports >= self.config.max_ports_per_client
                {
                    return;
                }
                share.ports += 1;
                let key = (desk, seq);
                let (link, dialed, refused, missed) = (Link::Down, None, 0, 0);
                let at =
                    self.ports.insert(Port { key, addr, client, link, dialed, due: now, refused, missed });
                self.by_key.insert(key, at);
                self.due.insert(now, at);
            }
            WatchOrder::End { seq } => {
                let Some(at) = self.by_key.remove(&(desk, seq)) else { return };
                let Some(mut port) = self.ports.try_remove(at) else { return };
                self.due.remove(port.due, at);
                port.hang_up(registry);
                if let Some(share) = self.clients.get_mut(&port.client) {
                    share.ports -= 1;
                }
            }
        }
    }

    /// Takes an event of one of the watcher's sockets.
    pub(crate) fn ready(&mut self, now: Time, registry: &Registry, event: &Event) {
        let Some(at) = event.token().0.checked_sub(self.base) else { return };
        let Some(port) = self.ports.get_mut(at) else { return };
        let ended = event.is_read_closed() || event.is_error();
        match &port.link {
            Link::Down => {}
            Link::Held(_) if ended => {
                port.hang_up(registry);
                self.verdicts.push((port.key, Verdict::Unknown));
                let due = port.dialed.map_or(now, |dialed| now.max(dialed + self.config.interval));
                self.set_due(at, due);
            }
            Link::Held(_) => {}
            Link::Dialing(stream) => match sign(stream) {
                Some(Sign::Greeted) if ended => {
                    // The peer lives, and does not want the connection.
                    self.take_sign(now, registry, at, Sign::Greeted);
                    self.take_sign(now, registry, at, Sign::Nothing);
                }
                Some(sign) => self.take_sign(now, registry, at, sign),
                None if ended => self.take_sign(now, registry, at, Sign::Missed),
                None => {}
            },
        }
    }

    /// Does what is due: new connections, and the end of those that are silent.
    pub(crate) fn expire(&mut self, now: Time, registry: &Registry) {
        while let Some(at) = self.due.pop_due(now) {
            let Some(port) = self.ports.get_mut(at) else { continue };
            // The end of the loop, and everything on the way, enters another time.
            port.due = Time::MAX;
            self.due.insert(Time::MAX, at);
            if matches!(port.link, Link::Dialing(_)) {
                self.take_sign(now, registry, at, Sign::Missed);
            } else {
                self.dial(now, registry, at);
            }
        }
    }

    /// When [`Watcher::expire`] has something to do.
    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.due.next().filter(|at| *at != Time::MAX)
    }

    /// What was found since the last call.
    pub(crate) fn take_verdicts(&mut self) -> Vec<(Key, Verdict)> {
        std::mem::take(&mut self.verdicts)
    }

    fn dial(&mut self, now: Time, registry: &Registry, at: usize) {
        let Some(port) = self.ports.get_mut(at) else { return };
        let share = self.clients.entry(port.client).or_default();
        let max = (self.config.max_dials, self.config.max_dials_per_client);
        if let Err(later) = self.dials.may(now, max.0).and_then(|()| share.dials.may(now, max.1)) {
            return self.set_due(at, later);
        }
        self.dials.begun += 1;
        share.dials.begun += 1;
        port.hang_up(registry);
        port.dialed = Some(now);
        let opened = TcpStream::connect(port.addr).and_then(|mut stream| {
            let interest = Interest::READABLE | Interest::WRITABLE;
            registry.register(&mut stream, Token(self.base + at), interest)?;
            Ok(stream)
        });
        match opened {
            Ok(stream) => {
                port.link = Link::Dialing(stream);
                self.set_due(at, now + self.config.silence);
            }
            Err(error) => self.take_sign(now, registry, at, Sign::of(&error)),
        }
    }

    fn take_sign(&mut self, now: Time, registry: &Registry, at: usize, sign: Sign) {
        let Some(port) = self.ports.get_mut(at) else { return };
        let verdict = match sign {
            Sign::Greeted => {
                (port.refused, port.missed) = (0, 0);
                if let Link::Dialing(stream) = std::mem::replace(&mut port.link, Link::Down) {
                    port.link = Link::Held(stream);
                }
                self.verdicts.push((port.key, Verdict::Lives));
                return self.set_due(at, now + self.config.hold);
            }
            Sign::Refused => {
                (port.refused, port.missed) = (port.refused.saturating_add(1), 0);
                Some(if port.refused >= PROOF { Verdict::Dead } else { Verdict::Refused })
            }
            Sign::Missed => {
                (port.refused, port.missed) = (0, port.missed.saturating_add(1));
                (port.missed >= MISSES).then_some(Verdict::Silent)
            }
            Sign::Nothing => None,
        };
        port.hang_up(registry);
        self.verdicts.extend(verdict.map(|verdict| (port.key, verdict)));
        self.set_due(at, now + self.config.interval);
    }

    fn set_due(&mut self, at: usize, due: Time) {
        let Some(port) = self.ports.get_mut(at) else { return };
        self.due.remove(port.due, at);
        self.due.insert(due, at);
        port.due = due;
    }
}

impl Port {
    fn hang_up(&mut self, registry: &Registry) {
        if let Link::Dialing(mut stream) | Link::Held(mut stream) =
            std::mem::replace(&mut self.link, Link::Down)
        {
            // A socket that is closed is registered no longer, whatever this call says.
            let _ = registry.deregister(&mut stream);
        }
    }
}

impl Dials {
    /// Whether one more connection may be begun; `Err` says when.
    fn may(&mut self, now: Time, max: usize) -> Result<(), Time> {
        if !self.is_recent(now) {
            (self.since, self.begun) = (now, 0);
        }
        if self.begun < max.max(1) { Ok(()) } else { Err(self.since + SECOND) }
    }

    fn is_recent(&self, now: Time) -> bool {
        now.since(self.since) < SECOND
    }
}

const SECOND: std::time::Duration = std::time::Duration::from_secs(1);

/// What a connection that is being opened says; `None` while there is nothing to see. A greeting is left
/// unread.
fn sign(stream: &TcpStream) -> Option<Sign> {
    if let Ok(Some(error)) | Err(error) = stream.take_error() {
        return Some(Sign::of(&error));
    }
    match stream.peek(&mut [0]) {
        Ok(0) => Some(Sign::Missed),
        Ok(_) => Some(Sign::Greeted),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::NotConnected => None,
            _ => Some(Sign::of(&error)),
        },
    }
}

impl Sign {
    fn of(error: &io::Error) -> Sign {
        match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => Sign::Refused,
            io::ErrorKind::TimedOut
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable => Sign::Missed,
            _ => Sign::Nothing,
        }
    }
}

#[cfg(test)]
mod tests;
