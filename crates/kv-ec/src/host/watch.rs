//! What a server waits for: ranks that connect, sockets that are ready, processes that end, and a wake-up.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_host::OsError;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

/// Most events of one turn.
const EVENTS: usize = 64;
/// Longest sleep, far below what the kernel's clock can hold.
const LONGEST: Duration = Duration::from_secs(3600);

/// The set of descriptors that a server waits for. A descriptor that is ready is reported in every turn until
/// it is no longer ready, so that a turn may leave work to the next one.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
}

/// A descriptor that is ready, by its use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    Listener,
    Wake,
    /// The socket of the rank with this number.
    Socket(u64),
    /// The process of the rank with this number has ended.
    Process(u64),
}

impl Ready {
    fn to_data(self) -> EventData {
        EventData::new_u64(match self {
            Ready::Listener => 0,
            Ready::Wake => 1,
            Ready::Socket(rank) => 2 * rank + 2,
            Ready::Process(rank) => 2 * rank + 3,
        })
    }

    fn from_data(data: EventData) -> Ready {
        match data.u64() {
            0 => Ready::Listener,
            1 => Ready::Wake,
            even if even % 2 == 0 => Ready::Socket(even / 2 - 1),
            odd => Ready::Process(odd / 2 - 1),
        }
    }
}

impl Watch {
    pub(super) fn new() -> Result<Watch, OsError> {
        let epoll =
            epoll::create(CreateFlags::CLOEXEC).map_err(|error| OsError::new("epoll_create", error))?;
        Ok(Watch { epoll })
    }

    /// Waits until the descriptor can be read or has ended.
    pub(super) fn add(&self, fd: impl AsFd, ready: Ready) -> Result<(), OsError> {
        epoll::add(&self.epoll, fd, ready.to_data(), EventFlags::IN)
            .map_err(|error| OsError::new("epoll_ctl", error))
    }

    /// Waits from now on until the descriptor has room for a message, or again until it can be read.
    pub(super) fn wait_for_room(&self, fd: impl AsFd, ready: Ready, room: bool) -> Result<(), OsError> {
        let flags = if room { EventFlags::OUT } else { EventFlags::IN };
        epoll::modify(&self.epoll, fd, ready.to_data(), flags)
            .map_err(|error| OsError::new("epoll_ctl", error))
    }

    pub(super) fn remove(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Sleeps until something is ready or the time has passed.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> Result<Vec<Ready>, OsError> {
        let mut room = [const { MaybeUninit::uninit() }; EVENTS];
        let timeout = Timespec::try_from(timeout.unwrap_or(LONGEST).min(LONGEST)).ok();
        match epoll::wait(&self.epoll, &mut room, timeout.as_ref()) {
            Ok((events, _)) => Ok(events.iter().map(|event| Ready::from_data(event.data)).collect()),
            Err(Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(OsError::new("epoll_wait", error)),
        }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// Ends the sleep of a server's thread, for good.
#[derive(Debug)]
pub(super) struct Stop {
    event: OwnedFd,
    asked: AtomicBool,
}

impl Stop {
    pub(super) fn new() -> Result<Stop, OsError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(|error| OsError::new("eventfd", error))?;
        Ok(Stop { event, asked: AtomicBool::new(false) })
    }

    pub(super) fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    pub(super) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
