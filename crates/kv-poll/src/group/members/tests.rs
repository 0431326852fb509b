//! Ranks that do what a test says.

use std::cell::RefCell;
use std::rc::Rc;

use kv_core::machine::{SessionCommand, Submit};
use kv_core::proto::Resource;
use kv_core::{PagePool, PeerCause, Phase, Room};

use super::*;

/// What a rank's session is made to do, and what it was told.
#[derive(Debug)]
struct Script {
    poll: KvPoll,
    cause: Option<Cause>,
    quiet: bool,
    room: usize,
    heard: Vec<Pages>,
    aborted: bool,
}

struct Fake {
    room: Room,
    script: Rc<RefCell<Script>>,
}

impl KvSession for Fake {
    fn id(&self) -> SessionId {
        SessionId(1)
    }

    fn room(&self) -> &Room {
        &self.room
    }

    fn poll(&self) -> KvPoll {
        self.script.borrow().poll
    }

    fn failure(&self) -> Option<TransferError> {
        let cause = self.script.borrow().cause.clone()?;
        Some(TransferError::new(self.room.clone(), Phase::Rendezvous, cause))
    }

    fn abort(&mut self) {
        self.script.borrow_mut().aborted = true;
    }

    fn reclaim(&mut self) -> Option<Reclaimed> {
        if !self.script.borrow().quiet {
            return None;
        }
        let mut pages = Pages::none();
        for token in std::mem::take(&mut self.script.borrow_mut().heard) {
            pages.append(token).unwrap();
        }
        Some(Reclaimed::new(pages))
    }
}

impl Submit<Command> for Fake {
    fn submit(&mut self, command: Command) -> Result<(), Command> {
        let mut script = self.script.borrow_mut();
        if script.room == 0 {
            return Err(command);
        }
        script.room -= 1;
        if let Some(Resource::Pages(pages)) = command.into_resource() {
            script.heard.push(pages);
        }
        Ok(())
    }
}

fn pages(list: &[u32]) -> Pages {
    Pages::unpooled(PageList::from_pages(list.iter().copied()).unwrap()).unwrap()
}

fn three() -> (Members<Fake>, Vec<Rc<RefCell<Script>>>) {
    let script = || Script {
        poll: KvPoll::Bootstrapping,
        cause: None,
        quiet: false,
        room: usize::MAX,
        heard: Vec::new(),
        aborted: false,
    };
    let scripts: Vec<_> = (0..3).map(|_| Rc::new(RefCell::new(script()))).collect();
    let fake = |script: &Rc<RefCell<Script>>| Fake { room: Room::from(1), script: Rc::clone(script) };
    let deal = Deal::new(std::iter::empty(), None, 0);
    (Members::new(scripts.iter().map(fake).collect(), deal), scripts)
}

fn say(members: &mut Members<Fake>, list: &[u32]) -> Result<(), Pages> {
    let command = Command::Send { session: SessionId(1), chunk: pages(list) };
    members.submit(command, &[None; 3]).map_err(|refused| match refused {
        Command::Send { chunk, .. } => chunk,
        other => panic!("another command was refused: {other:?}"),
    })
}

/// What the scheduler is told by the next `settle`, if that is news.
fn settled(members: &mut Members<Fake>) -> Option<Standing> {
    members.settle().then(|| members.told())
}

fn set(script: &Rc<RefCell<Script>>, members: &mut Members<Fake>, rank: usize, poll: KvPoll, quiet: bool) {
    script.borrow_mut().poll = poll;
    script.borrow_mut().quiet = quiet;
    members.note(rank, quiet);
}

#[test]
fn a_request_stands_where_its_slowest_rank_stands() {
    let (mut members, scripts) = three();
    for (rank, script) in scripts.iter().enumerate() {
        assert_eq!(settled(&mut members), None);
        set(script, &mut members, rank, KvPoll::WaitingForInput, false);
    }
    let standing = |poll, reclaimable| Some(Standing { poll, reclaimable });
    assert_eq!(settled(&mut members), standing(KvPoll::WaitingForInput, false));
    set(&scripts[0], &mut members, 0, KvPoll::Success, true);
    set(&scripts[1], &mut members, 1, KvPoll::Transferring, false);
    assert_eq!((settled(&mut members), members.poll()), (None, KvPoll::WaitingForInput));
    set(&scripts[2], &mut members, 2, KvPoll::Success, false);
    assert_eq!(settled(&mut members), standing(KvPoll::Transferring, false));
    set(&scripts[1], &mut members, 1, KvPoll::Success, true);
    assert_eq!(settled(&mut members), standing(KvPoll::Success, false));
    assert_eq!(members.reclaim(), None);
    set(&scripts[2], &mut members, 2, KvPoll::Success, true);
    assert_eq!(settled(&mut members), standing(KvPoll::Success, true));
    assert_eq!(members.reclaim(), Some(Reclaimed::default()));
}

#[test]
fn one_failed_rank_fails_the_others_and_no_page_is_free_before_all_are_quiet() {
    let (mut members, scripts) = three();
    say(&mut members, &[4, 5]).unwrap();
    set(&scripts[0], &mut members, 0, KvPoll::Success, true);
    scripts[1].borrow_mut().cause = Some(Cause::ByPeer(PeerCause::Aborted));
    set(&scripts[1], &mut members, 1, KvPoll::Failed, true);
    let failed = |reclaimable| Some(Standing { poll: KvPoll::Failed, reclaimable });
    assert_eq!(settled(&mut members), failed(false));
    assert!(scripts[2].borrow().aborted);
    assert_eq!(members.reclaim(), None);
    scripts[2].borrow_mut().cause = Some(Cause::Aborted);
    set(&scripts[2], &mut members, 2, KvPoll::Failed, false);
    assert_eq!((settled(&mut members), members.reclaim()), (None, None));
    // The one that failed for itself says why, not the one that was made to.
    let cause = members.failure().map(|error| error.cause);
    assert_eq!(cause, Some(Cause::ByPeer(PeerCause::Aborted)));
    set(&scripts[2], &mut members, 2, KvPoll::Failed, true);
    assert_eq!(settled(&mut members), failed(true));
    assert_eq!(members.reclaim().map(|reclaimed| reclaimed.pages), Some(pages(&[4, 5])));
    assert_eq!(members.poll(), KvPoll::Failed);
}

/// Ends the request on all ranks, of which the last returns what it is told to.
fn end(members: &mut Members<Fake>, scripts: &[Rc<RefCell<Script>>], last: Option<Pages>) -> Pages {
    for (rank, script) in scripts.iter().enumerate() {
        set(script, members, rank, KvPoll::Success, true);
    }
    if let Some(last) = last {
        scripts[2].borrow_mut().heard = vec![last];
    }
    members.reclaim().unwrap().pages
}

#[test]
fn a_group_holds_one_token_of_the_pool_for_all_ranks_and_returns_that() {
    let pool = PagePool::new(8);
    let minted = || pool.adopt(PageList::from_pages([4, 5, 6]).unwrap()).unwrap();
    let (mut members, scripts) = three();
    let command = Command::Send { session: SessionId(1), chunk: minted() };
    members.submit(command, &[None; 3]).unwrap();
    let back = end(&mut members, &scripts, None);
    pool.release(back).unwrap();
    assert_eq!((pool.num_out(), pool.lost().len()), (0, 0));

    // Page 5 is not known to be quiet on the last rank.
    let (mut members, scripts) = three();
    let command = Command::Send { session: SessionId(1), chunk: minted() };
    members.submit(command, &[None; 3]).unwrap();
    let back = end(&mut members, &scripts, Some(pages(&[4, 6])));
    assert_eq!(pool.release(back).unwrap(), PageList::from_pages([4, 6]).unwrap());
    assert_eq!((pool.num_out(), pool.lost()), (1, PageList::from_pages([5]).unwrap()));
}

#[test]
fn an_abort_that_is_submitted_concerns_all_ranks() {
    let (mut members, scripts) = three();
    assert!(members.submit(Command::Abort { session: SessionId(1) }, &[None; 3]).is_ok());
    assert!(scripts.iter().all(|script| script.borrow().aborted));
}

#[test]
fn a_full_queue_of_the_first_rank_refuses_and_one_of_another_keeps_the_order() {
    let (mut members, scripts) = three();
    scripts[0].borrow_mut().room = 3;
    scripts[2].borrow_mut().room = 1;
    for page in 0..3 {
        say(&mut members, &[page]).unwrap();
    }
    assert_eq!(say(&mut members, &[3]), Err(pages(&[3])));
    let heard = |rank: usize| scripts[rank].borrow().heard.len();
    assert_eq!([heard(0), heard(1), heard(2)], [3, 3, 1]);
    assert!(members.is_behind());
    scripts[2].borrow_mut().room = 1;
    assert_eq!(settled(&mut members), None);
    assert_eq!((heard(2), members.is_behind()), (2, true));
    scripts[2].borrow_mut().room = 9;
    members.settle();
    assert_eq!((heard(2), members.is_behind()), (3, false));
    let order: Vec<_> = scripts[2].borrow().heard.iter().map(|pages| pages.list().clone()).collect();
    assert_eq!(order, [0, 1, 2].map(|page| pages(&[page]).list().clone()));
}

#[test]
fn pages_that_a_failed_rank_was_never_told_of_are_free_on_it_and_lost_ones_are_not() {
    let (mut members, scripts) = three();
    scripts[1].borrow_mut().room = 1;
    say(&mut members, &[1]).unwrap();
    say(&mut members, &[2]).unwrap();
    for (rank, script) in scripts.iter().enumerate() {
        set(script, &mut members, rank, KvPoll::Failed, true);
    }
    members.settle();
    assert!(!members.is_behind());
    assert_eq!(members.reclaim().map(|reclaimed| reclaimed.pages), Some(pages(&[1, 2])));

    let (mut members, scripts) = three();
    say(&mut members, &[1, 2]).unwrap();
    for (rank, script) in scripts.iter().enumerate() {
        set(script, &mut members, rank, KvPoll::Success, true);
    }
    scripts[2].borrow_mut().heard = vec![pages(&[1])];
    assert_eq!(members.reclaim().map(|reclaimed| reclaimed.pages), Some(pages(&[1])));
}

#[test]
fn pages_that_are_asked_for_too_early_do_not_hide_the_end_of_the_request() {
    let (mut members, scripts) = three();
    say(&mut members, &[4, 9]).unwrap();
    for (rank, script) in scripts.iter().enumerate() {
        set(script, &mut members, rank, KvPoll::Transferring, false);
    }
    members.settle();
    for (rank, script) in scripts.iter().enumerate() {
        set(script, &mut members, rank, KvPoll::Failed, rank != 2);
    }
    assert_eq!(members.reclaim(), None, "the last rank has a wire at the pages");
    let failed = |reclaimable| Some(Standing { poll: KvPoll::Failed, reclaimable });
    assert_eq!(settled(&mut members), failed(false));
    set(&scripts[2], &mut members, 2, KvPoll::Failed, true);
    assert_eq!(settled(&mut members), failed(true));
    assert_eq!(members.reclaim().map(|back| back.pages), Some(pages(&[4, 9])));
    assert_eq!(settled(&mut members), None);
}

#[test]
fn a_rank_that_gave_back_before_it_was_reported_counts_as_reclaimable() {
    let (mut members, scripts) = three();
    say(&mut members, &[4]).unwrap();
    // The pages are back on the second rank, and its worker has not reported that yet.
    for (rank, script) in scripts.iter().enumerate() {
        set(script, &mut members, rank, KvPoll::Success, rank == 0);
    }
    scripts[1].borrow_mut().quiet = true;
    assert_eq!(members.reclaim(), None);
    set(&scripts[2], &mut members, 2, KvPoll::Success, true);
    assert_eq!(settled(&mut members), Some(Standing { poll: KvPoll::Success, reclaimable: true }));
}

#[test]
fn the_first_rank_keeps_the_pages_until_no_other_rank_has_a_wire_at_them() {
    let (mut members, scripts) = three();
    say(&mut members, &[4, 9]).unwrap();
    for (rank, script) in scripts.iter().enumerate() {
        set(script, &mut members, rank, KvPoll::Failed, rank != 2);
    }
    assert_eq!(members.reclaim(), None);
    assert_eq!(scripts[0].borrow().heard, [pages(&[4, 9])], "the owner of the pages has let go of them");
    set(&scripts[2], &mut members, 2, KvPoll::Failed, true);
    assert_eq!(members.reclaim().map(|back| back.pages), Some(pages(&[4, 9])));
}

#[test]
fn a_dropped_group_never_drops_the_owner_of_pages_that_another_rank_may_touch() {
    for (others_quiet, owners_left) in [(false, 2), (true, 1)] {
        let (mut members, scripts) = three();
        say(&mut members, &[4, 9]).unwrap();
        for (rank, script) in scripts.iter().enumerate() {
            set(script, &mut members, rank, KvPoll::Failed, rank != 2 || others_quiet);
        }
        drop(members);
        let left = scripts.iter().map(Rc::strong_count).collect::<Vec<_>>();
        assert_eq!(left, [owners_left, 1, 1], "the other ranks are quiet: {others_quiet}");
        assert_eq!(scripts[0].borrow().aborted, !others_quiet);
    }
}

#[test]
fn the_rank_that_failed_by_itself_says_why_whichever_rank_it_is() {
    for failed in 0..3 {
        let (mut members, scripts) = three();
        for (rank, script) in scripts.iter().enumerate() {
            let own = Cause::ByPeer(PeerCause::Unknown);
            script.borrow_mut().cause = Some(if rank == failed { own } else { Cause::Aborted });
            set(script, &mut members, rank, KvPoll::Failed, true);
        }
        let cause = |members: &Members<Fake>| members.failure().map(|error| error.cause);
        assert_eq!(cause(&members), Some(Cause::ByPeer(PeerCause::Unknown)), "rank {failed}");
        assert!(members.reclaim().is_some());
        assert_eq!(cause(&members), Some(Cause::ByPeer(PeerCause::Unknown)), "rank {failed}, reclaimed");
    }
}
