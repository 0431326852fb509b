//! The least that a request can take: a relay of as many wake-ups between threads of two processes as a request
//! needs, by eventfds, with a memcpy of the request's bytes at the place where the sender copies.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::Error;
use crate::far::{Told, answer};
use crate::limits::Memcpy;
use crate::side::{Shape, now, wait};

/// The variable that makes a process the far end of a relay: four descriptors and the shape of the cache.
pub(crate) const RELAY: &str = "KV_BENCH_SESSIONS_RELAY";

/// The runners: the scheduler and the worker here, and the worker and the scheduler there.
pub(crate) struct Relay {
    told: Told,
    /// To the worker here, from the scheduler here.
    ask: OwnedFd,
    /// To the scheduler here, from the worker here.
    done: OwnedFd,
    next: usize,
}

impl Relay {
    pub(crate) fn start(shape: &Shape) -> Result<Relay, Error> {
        // Children inherit these: they are not closed when another program is run.
        let event = || eventfd(0, EventfdFlags::NONBLOCK);
        let (ask, over, back, done) = (event()?, event()?, event()?, event()?);
        let Shape { pages, regions, item } = shape;
        let fds = format!("{} {}", over.as_raw_fd(), back.as_raw_fd());
        let told = Told::start(RELAY, &format!("{fds} {pages} {regions} {item}"))?;
        let (asked, finished) = (ask.try_clone()?, done.try_clone()?);
        // Ends with the process.
        std::thread::spawn(move || {
            worker_here(&asked, &over, &back, &finished).map_err(|error| error.to_string())
        });
        Ok(Relay { told, ask, done, next: 0 })
    }

    /// Four wake-ups: scheduler, worker, worker there with its copy, worker, scheduler. Returns the seconds.
    pub(crate) fn four_hops(&mut self) -> Result<f64, Error> {
        let begun = now();
        raise(&self.ask)?;
        await_event(&self.done)?;
        Ok(now() - begun)
    }

    /// Three wake-ups: scheduler there, worker there with its copy, worker, scheduler. Returns the seconds.
    pub(crate) fn three_hops(&mut self) -> Result<f64, Error> {
        self.next += 1;
        self.told.tell("send")?;
        await_event(&self.done)?;
        let ended = now();
        Ok(ended - self.told.answer()?.parse::<f64>()?)
    }
}

/// Passes what the scheduler asks for to the other process, and what comes from there to the scheduler.
fn worker_here(ask: &OwnedFd, over: &OwnedFd, back: &OwnedFd, done: &OwnedFd) -> Result<(), Error> {
    loop {
        wait(&[ask.as_fd(), back.as_fd()])?;
        if lower(ask) {
            raise(over)?;
        }
        if lower(back) {
            raise(done)?;
        }
    }
}

/// Runs the far end until its standard input ends.
pub(crate) fn serve(told: &str) -> Result<(), Error> {
    let numbers: Vec<usize> = told.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let [over, back, pages, regions, item] = numbers[..] else {
        return Err("the parent has told too little".into());
    };
    let (over, back) = (inherited(over as RawFd)?, inherited(back as RawFd)?);
    let copy = Memcpy::new(Shape { pages: pages as u32, regions, item })?;
    let own = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
    let asked = own.try_clone()?;
    std::thread::spawn(move || -> Result<(), String> {
        let failed = |error: Error| error.to_string();
        for request in 0.. {
            while !lower(&over) && !lower(&asked) {
                wait(&[over.as_fd(), asked.as_fd()]).map_err(failed)?;
            }
            copy.run(request, 1, 1).map_err(failed)?;
            raise(&back).map_err(failed)?;
        }
        Ok(())
    });
    answer("ready")?;
    for line in std::io::stdin().lines() {
        if line? == "send" {
            let begun = now();
            raise(&own)?;
            answer(&format!("{begun:.9}"))?;
        }
    }
    Ok(())
}

/// A descriptor that the parent has left open for this process.
#[allow(unsafe_code)]
fn inherited(fd: RawFd) -> Result<OwnedFd, Error> {
    // SAFETY: the parent has opened the descriptor for this process, and has named it in an environment variable.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(fd.try_clone_to_owned()?)
}

fn raise(event: &OwnedFd) -> Result<(), Error> {
    rustix::io::write(event, &1_u64.to_ne_bytes())?;
    Ok(())
}

/// True if the event was raised; it is not any more.
fn lower(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0_u8; 8]).is_ok()
}

fn await_event(event: &OwnedFd) -> Result<(), Error> {
    while !lower(event) {
        wait(&[event.as_fd()])?;
    }
    Ok(())
}
