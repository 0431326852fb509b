//! The sending half of a request.

use kv_conformance::Random;
use kv_transfer::prelude::*;
use kv_transfer::{AuxIndex, Backpressure, OpenError, Reclaimed, Sender};

use super::{DEADLINE, End, Job, Patience, Tally};
use crate::support::host::Host;

#[derive(Debug)]
pub struct Sending {
    room: Room,
    session: Option<Sender>,
    announced: bool,
    /// Pages that the session has not taken yet.
    unsent: Pages,
    sent: usize,
    chunks: usize,
    /// All pages, in the order of the request.
    list: PageList,
    row: Option<AuxIndex>,
    patience: Patience,
    pub end: Option<End>,
}

impl Sending {
    pub fn new(room: Room, patience: Patience) -> Sending {
        Sending {
            room,
            session: None,
            announced: false,
            unsent: Pages::none(),
            sent: 0,
            chunks: 0,
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
    pub fn step(&mut self, job: &Job, host: &mut Host, random: &mut Random, tally: &mut Tally) -> bool {
        let Some(session) = &mut self.session else { return self.open(job, host, tally) };
        if self.patience.lost() {
            if self.patience.drops {
                self.drop_handle(host, tally);
                return true;
            }
            session.abort();
        }
        if session.poll().is_terminal() {
            return self.take_end(job, host, tally);
        }
        if !self.announced {
            self.announced = session.init(job.pages, self.row).is_ok();
            tally.backpressure += usize::from(!self.announced);
            return self.announced;
        }
        let complete = self.sent == job.pages && self.chunks > 0;
        if complete || self.patience.gave_up && random.chance(50) {
            return false;
        }
        self.send(job, random, tally)
    }

    fn open(&mut self, job: &Job, host: &mut Host, tally: &mut Tally) -> bool {
        let options = SessionOptions::default().with(|options| options.deadline = Some(DEADLINE));
        match host.manager.sender(&host.addr, self.room.clone(), &[], options) {
            Ok(session) => self.session = Some(session),
            Err(OpenError::Backpressure) => {
                tally.backpressure += 1;
                return false;
            }
            Err(error) => panic!("{job}: {error}"),
        }
        self.unsent = host.prompt(job.pages, job.content);
        self.list = self.unsent.list().clone();
        self.row = job.with_row.then(|| host.prompt_row(job.content));
        true
    }

    fn send(&mut self, job: &Job, random: &mut Random, tally: &mut Tally) -> bool {
        let Some(session) = &mut self.session else { return false };
        let left = self.unsent.len();
        let cut = match random.below(4) {
            0 => left,
            1 => left.min(1),
            _ => random.below(left + 1),
        };
        let rest = self.unsent.split_off(cut);
        let chunk = std::mem::replace(&mut self.unsent, rest);
        tally.pages_before_peer += if session.poll() == KvPoll::Bootstrapping { cut } else { 0 };
        match session.send(chunk) {
            Ok(()) => {
                self.sent += cut;
                self.chunks += 1;
                true
            }
            Err(Backpressure(mut chunk)) => {
                assert_eq!(chunk.len(), cut, "{job}: backpressure returns the chunk");
                chunk.append(std::mem::take(&mut self.unsent)).unwrap();
                self.unsent = chunk;
                tally.backpressure += 1;
                false
            }
        }
    }

    /// The pages that the session has come back as orphans.
    fn drop_handle(&mut self, host: &mut Host, tally: &mut Tally) {
        self.session = None;
        for page in self.list.iter().take(self.sent) {
            host.limbo.insert(page, None);
        }
        host.limbo_rows.extend(self.row.take().map(|row| (row, None)));
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
        let given = self.list.slice(0, self.sent);
        assert_eq!(Some(pages.list()), given.as_ref(), "{job}: the sender's pages, in the order given");
        match &end {
            End::Success => {
                assert_eq!(self.sent, job.pages, "{job}: success before all pages were sent");
                tally.sent += 1;
            }
            End::Failed(kv_transfer::Cause::Aborted) => tally.aborted += 1,
            End::Failed(_) | End::Dropped => tally.senders_told += 1,
        }
        for page in pages.list().iter() {
            host.memory.check_page(page, job);
        }
        pages.append(std::mem::take(&mut self.unsent)).unwrap();
        host.free(pages);
        if let Some(row) = self.row {
            assert!(host.rows.give(row));
        }
        self.end = Some(end);
        true
    }
}
