//! [`HostClient`]: how a rank uses the region of its host.

use std::io::{ErrorKind, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kv_core::{ContentHash, PageList};
use kv_host::{OsError, check_user, descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use super::address::HostAddress;
use super::error::HostError;
use super::message::{
    Answer, Ask, Greeting, MAX_REPLY, Reply, Request, append, decode, decode_greeting, encode,
};
use crate::region::EcRegion;

/// A rank's connection to the process that owns the region of the host. Clones are the same connection.
///
/// A call blocks until the server has answered, for the `timeout` of [`connect`](HostClient::connect) at most.
/// Calls of several threads are answered one after the other. After an error other than
/// [`HostError::Refused`] and [`HostError::Region`], the connection is over, and later calls fail with
/// [`HostError::Closed`].
///
/// The connection ends when the client and all of its reservations and pins are dropped. The region stays
/// mapped for as long as a clone of [`region`](HostClient::region) lives.
#[derive(Debug, Clone)]
pub struct HostClient {
    line: Arc<Line>,
}

#[derive(Debug)]
struct Line {
    region: EcRegion,
    timeout: Duration,
    socket: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// True once a call has failed in a way that ends the connection.
    is_over: bool,
    /// The number of the last request.
    number: u64,
    buffer: Box<[u8]>,
}

impl HostClient {
    /// Connects to the server of the host and maps its region. `compatibility` is the rank's own hash, which
    /// must equal the server's. `timeout` bounds this call and each later one.
    ///
    /// # Errors
    ///
    /// [`HostError::Os`] if no server listens at the address, [`HostError::Peer`] if the server belongs to
    /// another user, [`HostError::Incompatible`] and [`HostError::Version`] with both values,
    /// [`HostError::Refused`] if the server has too many connections.
    pub fn connect(
        address: &HostAddress,
        compatibility: &str,
        timeout: Duration,
    ) -> Result<HostClient, HostError> {
        let deadline = Deadline { at: Instant::now() + timeout, after: timeout };
        let socket = address.dial(timeout)?;
        check_user(socket.as_fd())?;
        let (mut buffer, mut passed) = (vec![0; MAX_REPLY].into_boxed_slice(), Vec::new());
        let len = receive(&socket, &mut buffer, &mut passed, &deadline)?;
        let welcome = match decode_greeting(buffer.get(..len).unwrap_or_default())? {
            Greeting::Welcome(welcome) => welcome,
            Greeting::Refused(refusal) => return Err(refusal.into()),
        };
        if welcome.compatibility != compatibility {
            let (ours, theirs) = (compatibility.to_owned(), welcome.compatibility);
            return Err(HostError::Incompatible { ours, theirs });
        }
        let file = passed.pop().ok_or(HostError::Protocol("the welcome came without a descriptor"))?;
        let region = EcRegion::received(file, welcome.blocks, welcome.block_bytes)?;
        let state = Mutex::new(State { is_over: false, number: 0, buffer });
        Ok(HostClient { line: Arc::new(Line { region, timeout, socket, state }) })
    }

    /// The region, mapped in this process.
    pub fn region(&self) -> &EcRegion {
        &self.line.region
    }

    /// Reserves blocks for an entry of `bytes` bytes, as
    /// [`EncoderCache::reserve`](crate::EncoderCache::reserve) does. [`Refusal::Reserve`](super::Refusal::Reserve)
    /// has the cache's reason for a refusal.
    pub fn reserve(&self, hash: &ContentHash, bytes: u64) -> Result<HostReservation, HostError> {
        let held = self.line.hold(Ask::Reserve { hash: hash.clone(), bytes })?;
        Ok(HostReservation { line: Arc::clone(&self.line), held })
    }

    /// Pins a committed entry, as [`EncoderCache::pin`](crate::EncoderCache::pin) does.
    /// [`Refusal::Absent`](super::Refusal::Absent) has the cache's reason for a refusal.
    pub fn pin(&self, hash: &ContentHash) -> Result<HostPin, HostError> {
        let held = self.line.hold(Ask::Pin(hash.clone()))?;
        Ok(HostPin { line: Arc::clone(&self.line), held })
    }
}

/// What the server knows under a number of this connection.
#[derive(Debug)]
struct Held {
    handle: u64,
    bytes: u64,
    pages: PageList,
}

/// Blocks that this rank fills with the bytes of an entry.
///
/// A reservation that is dropped without a commit or a discard keeps its blocks until this process ends,
/// because the server cannot know whether the process still writes into the blocks.
#[derive(Debug)]
#[must_use = "a reservation keeps its blocks until the process ends: commit or discard it"]
pub struct HostReservation {
    line: Arc<Line>,
    held: Held,
}

impl HostReservation {
    /// Bytes of the entry. The last block may be longer.
    pub fn bytes(&self) -> u64 {
        self.held.bytes
    }

    /// The blocks, in the order of the entry's bytes.
    pub fn pages(&self) -> &PageList {
        &self.held.pages
    }

    /// Copies `bytes` into the entry, from byte `offset` of the entry on.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), HostError> {
        Ok(self.line.region.write(&self.held.pages, offset, bytes)?)
    }

    /// Makes the entry ready. All copies into its blocks, those of devices included, must have ended before.
    pub fn commit(self) -> Result<(), HostError> {
        self.line.request(Ask::Commit(self.held.handle)).map(|_| ())
    }

    /// Gives up the entry: its blocks are free at once. No copy into the blocks may still run.
    pub fn discard(self) -> Result<(), HostError> {
        self.line.request(Ask::Discard(self.held.handle)).map(|_| ())
    }
}

/// The pin of an entry that this rank reads. Dropping the pin unpins the entry.
#[derive(Debug)]
#[must_use = "the entry is pinned only while the pin lives"]
pub struct HostPin {
    line: Arc<Line>,
    held: Held,
}

impl HostPin {
    /// Bytes of the entry. The last block may be longer.
    pub fn bytes(&self) -> u64 {
        self.held.bytes
    }

    /// The blocks, in the order of the entry's bytes.
    pub fn pages(&self) -> &PageList {
        &self.held.pages
    }

    /// Copies `out.len()` bytes of the entry to `out`, from byte `offset` of the entry on.
    ///
    /// # Errors
    ///
    /// [`HostError::Closed`] if the connection is over, and with it the pin: the bytes in `out` may be those of
    /// another entry.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), HostError> {
        self.line.region.read(&self.held.pages, offset, out)?;
        self.line.check_open()
    }
}

impl Drop for HostPin {
    fn drop(&mut self) {
        self.line.tell(Ask::Unpin(self.held.handle));
    }
}

impl Line {
    /// Asks for a reservation or pin, and for its blocks until all are known.
    fn hold(&self, ask: Ask) -> Result<Held, HostError> {
        let Answer::Held { handle, bytes, total, mut runs } = self.request(ask)? else {
            return Err(HostError::Protocol("a reservation or pin without blocks"));
        };
        while runs.runs().len() < total as usize {
            let from = u32::try_from(runs.runs().len()).unwrap_or(u32::MAX);
            match self.request(Ask::Runs { handle, from })? {
                Answer::Runs(more) if !more.is_empty() => append(&mut runs, &more)?,
                _ => return Err(HostError::Protocol("a list of blocks that ends too early")),
            }
        }
        Ok(Held { handle, bytes, pages: runs })
    }

    /// Sends a request and waits for its answer.
    fn request(&self, ask: Ask) -> Result<Answer, HostError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = state.request(&self.socket, ask, &self.deadline());
        if !matches!(answer, Ok(_) | Err(HostError::Refused(_))) {
            self.end(&mut state);
        }
        answer
    }

    /// Sends a request whose answer nobody needs.
    fn tell(&self, ask: Ask) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Without room for the request the server is behind, and is waited for.
        let told = match state.send(&self.socket, &ask) {
            Ok(false) => state.request(&self.socket, ask, &self.deadline()).map(|_| ()),
            sent => sent.map(|_| ()),
        };
        if !matches!(told, Ok(()) | Err(HostError::Refused(_))) {
            self.end(&mut state);
        }
    }

    /// Ends the connection. The server then gives up the pins.
    fn end(&self, state: &mut State) {
        state.is_over = true;
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Refuses a connection that is over, by either side. Both sides end the connection before any pin is over.
    fn check_open(&self) -> Result<(), HostError> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) => Ok(()),
            Ok(_) => Err(HostError::Closed),
            Err(error) => Err(OsError::new("poll", error).into()),
        }
    }

    fn deadline(&self) -> Deadline {
        Deadline { at: Instant::now() + self.timeout, after: self.timeout }
    }
}

impl State {
    /// Sends a request with the next number; false if there is no room for it now.
    fn send(&mut self, socket: &OwnedFd, ask: &Ask) -> Result<bool, HostError> {
        if self.is_over {
            return Err(HostError::Closed);
        }
        let message = encode(&Request { number: self.number + 1, ask: ask.clone() })?;
        match descriptors::send(socket.as_fd(), &[IoSlice::new(&message)], &[]) {
            Ok(_) => self.number += 1,
            Err(error) if error.kind == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind == ErrorKind::BrokenPipe => return Err(HostError::Closed),
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }

    fn request(&mut self, socket: &OwnedFd, ask: Ask, deadline: &Deadline) -> Result<Answer, HostError> {
        while !self.send(socket, &ask)? {
            // The server may be waiting for room for answers that nobody needs.
            if deadline.wait(socket, PollFlags::IN | PollFlags::OUT)?.contains(PollFlags::IN) {
                self.reply(socket, deadline)?;
            }
        }
        loop {
            let reply = self.reply(socket, deadline)?;
            if reply.number == self.number {
                return Ok(reply.answer?);
            }
        }
    }

    /// The next reply, to this request or to an earlier one that nobody waits for.
    fn reply(&mut self, socket: &OwnedFd, deadline: &Deadline) -> Result<Reply, HostError> {
        let len = receive(socket, &mut self.buffer, &mut Vec::new(), deadline)?;
        let reply: Reply = decode(self.buffer.get(..len).unwrap_or_default())?;
        if reply.number > self.number {
            return Err(HostError::Protocol("an answer to a request that was not made"));
        }
        Ok(reply)
    }
}

/// Until when a call waits.
struct Deadline {
    at: Instant,
    /// The time that the caller allowed.
    after: Duration,
}

impl Deadline {
    /// Waits until the socket is ready for one of these, or has ended.
    fn wait(&self, socket: &OwnedFd, flags: PollFlags) -> Result<PollFlags, HostError> {
        loop {
            let left = self.at.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(socket, flags)];
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                Ok(0) => return Err(HostError::TimedOut { after: self.after }),
                Ok(_) => return Ok(fds.first().map_or(flags, PollFd::revents)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(OsError::new("poll", error).into()),
            }
        }
    }
}

/// Waits for a message of at most `buffer.len()` bytes, and at most one descriptor with it.
fn receive(
    socket: &OwnedFd,
    buffer: &mut [u8],
    passed: &mut Vec<OwnedFd>,
    deadline: &Deadline,
) -> Result<usize, HostError> {
    loop {
        deadline.wait(socket, PollFlags::IN)?;
        match descriptors::receive(socket.as_fd(), buffer, passed, 1) {
            Ok(0) => return Err(HostError::Closed),
            Ok(len) => return Ok(len),
            Err(error) if error.is_for_now() => {}
            Err(descriptors::ReceiveError::Os(error)) if error.kind == ErrorKind::ConnectionReset => {
                return Err(HostError::Closed);
            }
            Err(descriptors::ReceiveError::Os(error)) => return Err(error.into()),
            Err(_) => return Err(HostError::Protocol("more descriptors than one")),
        }
    }
}
