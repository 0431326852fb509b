//! The receiving half of a request.

use kv_conformance::Random;
use kv_transfer::prelude::*;
use kv_transfer::{AuxIndex, Backpressure, OpenError, Receiver, Reclaimed};

use super::{DEADLINE, End, Job, Patience, Tally};
use crate::support::host::Host;
use crate::support::memory::row_content;

#[derive(Debug)]
pub struct Receiving {
    room: Room,
    session: Option<Receiver>,
    /// True if the session has been given the pages.
    given: bool,
    /// Pages that the ring had no room for.
    unsent: Pages,
    /// All pages, in the order of the request.
    list: PageList,
    row: Option<AuxIndex>,
    patience: Patience,
    pub end: Option<End>,
}

impl Receiving {
    pub fn new(room: Room, patience: Patience) -> Receiving {
        Receiving {
            room,
            session: None,
            given: false,
            unsent: Pages::none(),
            list: PageList::default(),
            row: None,
            patience,
            end: None,
        }
    }

    pub fn is_open(&self) -> bool {
        self.session.is_some() || self.end.is_some()
    }

    pub fn gave_up(&self) -> bool {
        self.patience.gave_up
    }

    pub fn has_failed(&self) -> bool {
        let failed = self.session.as_ref().is_some_and(|session| session.poll() == KvPoll::Failed);
        failed || matches!(self.end, Some(End::Failed(_) | End::Dropped))
    }

    /// Does the next thing there is to do. True if something happened.
    pub fn step(
        &mut self,
        job: &Job,
        host: &mut Host,
        addr: &str,
        random: &mut Random,
        tally: &mut Tally,
    ) -> bool {
        let Some(session) = &mut self.session else { return self.open(job, host, addr, tally) };
        if self.patience.lost() {
            if self.patience.drops {
                self.drop_handle(job, host, tally);
                return true;
            }
            session.abort();
        }
        if session.poll().is_terminal() {
            return self.take_end(job, host, tally);
        }
        // Some schedulers give pages at once, others when the handshake is done.
        if self.given || session.poll() == KvPoll::Bootstrapping && random.chance(80) {
            return false;
        }
        if self.list.is_empty() {
            self.unsent = host.room_for(job.pages);
            self.list = self.unsent.list().clone();
        }
        if self.row.is_none() && job.with_row {
            self.row = host.rows.take();
            assert!(self.row.is_some(), "{job}: more requests than rows");
        }
        match session.init(std::mem::take(&mut self.unsent), self.row) {
            Ok(()) => self.given = true,
            Err(Backpressure(pages)) => {
                assert_eq!(*pages.list(), self.list, "{job}: backpressure returns the pages");
                self.unsent = pages;
                tally.backpressure += 1;
            }
        }
        self.given
    }

    fn open(&mut self, job: &Job, host: &Host, addr: &str, tally: &mut Tally) -> bool {
        let options = SessionOptions::default().with(|options| {
            options.deadline = Some(DEADLINE);
            options.prefill_dp_rank = job.replica;
        });
        match host.manager.receiver(addr, self.room.clone(), options) {
            Ok(session) => self.session = Some(session),
            Err(OpenError::Backpressure) => tally.backpressure += 1,
            Err(error) => panic!("{job}: {error}"),
        }
        self.session.is_some()
    }

    /// The pages that the session has come back as orphans.
    fn drop_handle(&mut self, job: &Job, host: &mut Host, tally: &mut Tally) {
        self.session = None;
        if self.given {
            for (position, page) in self.list.iter().enumerate() {
                host.limbo.insert(page, Some((job.content, position)));
            }
        }
        host.limbo_rows.extend(self.row.take().map(|row| (row, Some(job.content))));
        host.free(std::mem::take(&mut self.unsent));
        tally.dropped += 1;
        self.end = Some(End::Dropped);
    }

    fn take_end(&mut self, job: &Job, host: &mut Host, tally: &mut Tally) -> bool {
        let Some(session) = &mut self.session else { return false };
        let Some(Reclaimed { mut pages, .. }) = session.reclaim() else { return false };
        let end = match session.failure() {
            Some(failure) => End::Failed(failure.cause),
            None => End::Success,
        };
        self.session = None;
        if self.given {
            assert_eq!(*pages.list(), self.list, "{job}: the receiver's pages, in the order given");
        }
        let row = self.row.map(|row| (row, row_content(job.content, host.memory.shape.row_len())));
        match &end {
            End::Success => {
                host.arrived(pages.list(), job.content, job);
                if let Some((AuxIndex(row), content)) = &row {
                    host.memory.row_arrived(*row, content, job);
                }
                tally.received += 1;
                tally.pages += pages.len();
            }
            End::Failed(cause) => {
                host.missed(pages.list(), job.content, job);
                if let Some((AuxIndex(row), content)) = &row {
                    host.memory.row_failed(*row, content, job);
                }
                match cause {
                    kv_transfer::Cause::Aborted => tally.aborted += 1,
                    _ => tally.receivers_told += 1,
                }
            }
            End::Dropped => {}
        }
        pages.append(std::mem::take(&mut self.unsent)).unwrap();
        host.free(pages);
        if let Some((row, _)) = row {
            assert!(host.rows.give(row));
        }
        self.end = Some(end);
        true
    }
}
