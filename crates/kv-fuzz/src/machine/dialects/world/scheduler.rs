//! The worker's own scheduler: opens sessions, and gives commands that the handles of sessions could give.

use std::time::Duration;

use kv_core::proto::Command;
use kv_core::{
    AuxIndex, CacheGroupItems, ChunkId, FinalLayers, PageList, Pages, ReadyEventError, RequestCacheGroups,
    SessionId,
};

use super::super::super::books;
use super::super::{Dialect, Input, PAGES, ROWS};
use super::World;

/// How long a session may take whose options name no deadline, in both dialects.
const SESSION_DEADLINE: Duration = Duration::from_secs(300);

impl<D: Dialect> World<'_, D> {
    pub(super) fn open(&mut self, sender: bool) {
        self.opened += 1;
        let session = SessionId(self.opened);
        let (room, bootstrap_addr, options, own) = self.dialect.open(&mut self.script, sender);
        self.deadlines.insert(session, self.now + options.deadline.unwrap_or(SESSION_DEADLINE));
        self.dialect.opened(session, &room, sender);
        let options = Box::new(options);
        self.ask(
            session,
            own,
            0,
            if sender {
                Command::OpenSender { session, room, receivers: 0, options }
            } else {
                Command::OpenReceiver { session, room, bootstrap_addr, options }
            },
        );
        // Most sessions are given pages at once.
        if self.script.byte() < 160 {
            let (pages, row) = (self.pages(), AuxIndex(u32::from(self.script.below(ROWS as u8))));
            let aux = (D::AUX || self.script.rarely()).then_some(row);
            let Some(pages) = pages else { return };
            if sender {
                let num_pages = pages.len() + usize::from(self.script.rarely());
                self.ask(session, 1, 0, Command::InitSender { session, num_pages, aux });
                self.lend(session, pages, |chunk| Command::Send { session, chunk });
            } else {
                self.lend(session, pages, |pages| Command::InitReceiver { session, pages, aux });
            }
        }
    }

    /// Pages that no session has.
    fn pages(&mut self) -> Option<Pages> {
        let (first, count) = (self.script.below(PAGES as u8), self.script.below(9));
        let free = (0..PAGES).map(|page| (page + u32::from(first)) % PAGES);
        let free: Vec<u32> = free.filter(|page| !self.pool.is_out(*page)).take(count.into()).collect();
        self.pool.adopt(PageList::from_pages(free).ok()?).ok()
    }

    fn lend(&mut self, session: SessionId, pages: Pages, command: impl FnOnce(Pages) -> Command) {
        let own = 1 + pages.len() as u64;
        self.ask(session, own, 1, command(pages));
    }

    pub(super) fn command(&mut self) {
        let session = SessionId(1 + u64::from(self.script.byte()) % self.opened.max(1));
        let aux = self.script.option(|script| AuxIndex(script.below(ROWS as u8 + 2).into()));
        match self.script.below(10) {
            0 => {
                let num_pages = self.script.size(200);
                self.ask(session, 1, 0, Command::InitSender { session, num_pages, aux });
            }
            1 | 2 => {
                let begins = self.script.flag();
                let Some(pages) = self.pages() else { return };
                self.lend(session, pages, |chunk| match begins {
                    true => Command::BeginChunk { session, chunk },
                    false => Command::Send { session, chunk },
                });
            }
            3 | 4 => {
                let (chunk, start) = (ChunkId(self.script.below(3).into()), u32::from(self.script.below(3)));
                let mut layers = FinalLayers::all(chunk);
                layers.layers = self.script.option(|script| start..start + u32::from(script.below(3)));
                self.ask(session, 1, 0, Command::LayersFinal { session, layers });
            }
            5 => {
                let (chunk, error) = (ChunkId(0), ReadyEventError::Device { code: 1 });
                self.ask(session, 0, 0, Command::ReadyEventFailed { session, chunk, error });
            }
            6 | 7 => {
                let Some(pages) = self.pages() else { return };
                self.lend(session, pages, |pages| Command::InitReceiver { session, pages, aux });
            }
            8 => {
                let items = Pages::unpooled(PageList::from_pages([1, 2]).unwrap_or_default());
                let mut groups = RequestCacheGroups::none();
                let _ = groups.push(CacheGroupItems::from_number(1, 0, items.unwrap_or_default()));
                self.ask(session, 3, 1, Command::RequestCacheGroups { session, groups });
            }
            _ => self.ask(session, 0, 0, Command::Abort { session }),
        }
    }

    /// Gives a command, unless the session's handle has no such method. What the command lends is back then.
    fn ask(&mut self, session: SessionId, own: u64, lent: u32, command: Command) {
        if self.opened > 0 && self.books.enter(session, own, lent, &command) {
            return self.input(books::name(&command), 0, Input::Command(command));
        }
        let (Command::Send { chunk: pages, .. }
        | Command::BeginChunk { chunk: pages, .. }
        | Command::InitReceiver { pages, .. }) = command
        else {
            return;
        };
        assert!(self.pool.release(pages).is_ok(), "the pages are of this pool");
    }
}
