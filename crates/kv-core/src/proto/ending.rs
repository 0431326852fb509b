//! How sessions end: senders and receivers, in push and pull.
//!
//! ```text
//! every peer is done, and none is missing ─▶ Success ───────────────────────────────────────────┐
//! any failure ─▶ Failed ─▶ timers, room and turns given up ─▶ peers told, own posts cancelled   │
//!                  └─ no peer and no post of the session touches the pages any more ────────────┴▶ pages and groups back
//! ```
//!
//! | standing | from | when | status said |
//! |---|---|---|---|
//! | `Going` | – | the session is opened | `Bootstrapping` |
//! | `Going` | `Going` | the session gets further than it was | the status that it has reached |
//! | `Failed` | `Going` | the session fails; the cause that peers are told is kept | `Failed` |
//! | `Ended` | `Going` | the session is quiet | `Success` |
//! | `Ended` | `Failed` | the session is quiet | – |
//!
//! A session is *quiet* when every peer is done with the session and no post of the session is in
//! flight. A [`Role`] says when a peer is done, and which peers are told of a failure. Only this
//! file takes a session out of its [`Sessions`]. The final status is a value that a session has
//! once: therefore the status is reported once, and pages come back once.

use std::time::Duration;

use super::context::{Admits, Context};
use super::effects::Effects;
use super::timer::Timer;
use crate::command::Resource;
use crate::error::{Cause, PeerCause, Phase, TransferError};
use crate::id::{PeerId, Room, SessionId};
use crate::in_order::InOrder;
use crate::meter::each;
use crate::poll::KvPoll;
use crate::quarantine::Quarantine;
use crate::trace::{Half, KvWhat};

/// The state of a session, and how long it may take.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(super) struct Standing {
    state: State,
    deadline: Duration,
}

#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
enum State {
    Going(KvPoll, Last),
    Failed(PeerCause),
    Ended(KvPoll),
}

/// What happens to a session.
#[derive(Debug)]
enum Event {
    Reaches(KvPoll),
    Fails(PeerCause),
    IsQuiet,
}

/// The right to report the final status of a session, which exists once.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
struct Last;

impl Last {
    fn say(self, fx: &mut Effects, session: SessionId, failure: Option<TransferError>) {
        let poll = if failure.is_some() { KvPoll::Failed } else { KvPoll::Success };
        fx.status(session, poll, failure);
    }
}

impl State {
    /// Applies the table at the top. `Some` if the final status must be reported now.
    fn turn(&mut self, event: Event) -> Option<Last> {
        let before = std::mem::replace(self, State::Ended(KvPoll::Failed));
        let (after, last) = match (before, event) {
            (State::Going(poll, last), Event::Reaches(next)) => (State::Going(poll.max(next), last), None),
            (State::Going(_, last), Event::Fails(cause)) => (State::Failed(cause), Some(last)),
            (State::Going(_, last), Event::IsQuiet) => (State::Ended(KvPoll::Success), Some(last)),
            (State::Failed(_), Event::IsQuiet) => (State::Ended(KvPoll::Failed), None),
            (same @ (State::Failed(_) | State::Ended(_)), _) => (same, None),
        };
        *self = after;
        last
    }
}

impl Standing {
    /// The standing of a session that must end within `deadline`.
    pub(super) fn new(deadline: Duration) -> Standing {
        Standing { state: State::Going(KvPoll::Bootstrapping, Last), deadline }
    }

    /// The status that was reported last.
    pub(super) fn poll(&self) -> KvPoll {
        match self.state {
            State::Going(poll, _) | State::Ended(poll) => poll,
            State::Failed(_) => KvPoll::Failed,
        }
    }

    /// True if the session has neither failed nor succeeded.
    pub(super) fn is_going(&self) -> bool {
        matches!(self.state, State::Going(..))
    }

    /// Why the session has failed, in the words for its peers; `None` if it has not failed.
    pub(super) fn failure(&self) -> Option<&PeerCause> {
        match &self.state {
            State::Failed(told) => Some(told),
            State::Going(..) | State::Ended(_) => None,
        }
    }

    /// How long after its opening the session ends at the latest.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Reports that the session has got so far, unless it had got so far before.
    pub(super) fn reach(&mut self, fx: &mut Effects, session: SessionId, poll: KvPoll) {
        let before = self.poll();
        self.state.turn(Event::Reaches(poll));
        if self.poll() != before {
            fx.status(session, self.poll(), None);
        }
    }
}

/// All sessions of one role. Sessions are removed only when they have ended. Each has a place of its own, so that the
/// end of one moves no other.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(super) struct Sessions<S>(InOrder<SessionId, Box<S>>);

impl<S> Default for Sessions<S> {
    fn default() -> Sessions<S> {
        Sessions(InOrder::default())
    }
}

impl<S> Sessions<S> {
    pub(super) fn get(&self, session: &SessionId) -> Option<&S> {
        self.0.get(*session).map(|own| &**own)
    }

    pub(super) fn get_mut(&mut self, session: &SessionId) -> Option<&mut S> {
        self.0.get_mut(*session).map(|own| &mut **own)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SessionId, &S)> {
        self.0.iter().map(|(session, own)| (session, &**own))
    }
}

/// What this file needs to know of a session.
pub(super) trait Session {
    fn standing(&self) -> &Standing;
    fn standing_mut(&mut self) -> &mut Standing;
    fn room(&self) -> &Room;
    /// How far the session has come.
    fn phase(&self) -> Phase;
    /// The peer that an error of the session names.
    fn peer(&self) -> Option<PeerId>;
    /// True if no peer is missing: once the session is quiet, it has succeeded.
    fn is_served(&self) -> bool;
    /// True if every peer is done with the session.
    fn is_quiet(&self) -> bool;
    /// The resources that the session was lent.
    fn into_resources(self) -> impl Iterator<Item = Resource>;
}

/// All sending, or all receiving sessions: what differs between the two when a session ends.
pub(super) trait Role {
    type Session: Session;
    /// Whether the sessions send or receive.
    const HALF: Half;
    /// The timers that a session may have set.
    const TIMERS: [fn(SessionId) -> Timer; 2];

    fn sessions(&self) -> &Sessions<Self::Session>;
    fn sessions_mut(&mut self) -> &mut Sessions<Self::Session>;
    /// What the pages of a failed session wait for; `None` if they have come back.
    fn waits(&self, cx: &Context, session: SessionId) -> Option<Quarantine>;
    /// A session has failed. No peer can find it from now on, and it waits for no peer.
    fn withdraw(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause);
    /// Tells the peers of a failed session what they must know, and stops what is under way with
    /// them.
    fn stop(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause);
    /// A session has ended, and is removed.
    fn forget(&mut self, cx: &mut Context, session: SessionId, ended: &Self::Session);
}

/// The only way in which sessions end.
pub(super) trait Ending: Role {
    /// Opens a session. False if the session has failed at once, because the worker drains or is stopping.
    fn open(&mut self, cx: &mut Context, session: SessionId, own: Self::Session) -> bool {
        let deadline = own.standing().deadline();
        cx.fx.tell(session, || KvWhat::Opened { room: own.room().clone(), half: Self::HALF });
        self.sessions_mut().0.insert(session, Box::new(own));
        cx.fx.status(session, KvPoll::Bootstrapping, None);
        let refusal = match cx.admits {
            Admits::All => None,
            Admits::OpenRooms => Some(Cause::Draining),
            Admits::Nothing => Some(Cause::WorkerStopped),
        };
        if let Some(cause) = refusal {
            self.fail(cx, session, cause);
            return false;
        }
        cx.fx.arm(Timer::Deadline(session), cx.fx.now() + deadline);
        true
    }

    /// Fails a session. No effect on a session that has failed or ended before.
    fn fail(&mut self, cx: &mut Context, session: SessionId, cause: Cause) {
        let peer = self.sessions().get(&session).and_then(|own| own.peer());
        self.fail_by(cx, session, peer, cause);
    }

    /// Fails a session for a cause that lies with one of its peers, which the failure names. No effect on a
    /// session that has failed or ended before.
    fn fail_by(&mut self, cx: &mut Context, session: SessionId, peer: Option<PeerId>, cause: Cause) {
        let Some(own) = self.sessions_mut().get_mut(&session) else { return };
        let told = cause.for_peer();
        let Some(last) = own.standing_mut().state.turn(Event::Fails(told.clone())) else { return };
        let peer = peer.and_then(|peer| cx.peers.get(peer)).map(|peer| peer.worker().clone());
        let failure = TransferError { room: own.room().clone(), peer, phase: own.phase(), cause };
        self.cancel_timers(&mut cx.fx, session);
        self.withdraw(cx, session, &told);
        cx.posts.leave(session);
        last.say(&mut cx.fx, session, Some(failure));
        self.stop(cx, session, &told);
        self.settle(cx, session);
        if cx.fx.is_heard()
            && let Some(waits) = self.waits(cx, session)
        {
            cx.fx.quarantine_began(session, &waits);
        }
    }

    /// A peer, or a post, is done with a session. If that was the last, the session ends and its
    /// resources come back.
    fn settle(&mut self, cx: &mut Context, session: SessionId) {
        let Some(own) = self.sessions().get(&session) else { return };
        let waits = own.standing().is_going() && !own.is_served();
        if waits || !own.is_quiet() || cx.posts.has_any_of(session) {
            return;
        }
        let Some(mut own) = self.sessions_mut().0.remove(session) else { return };
        self.forget(cx, session, &own);
        self.cancel_timers(&mut cx.fx, session);
        if let Some(last) = own.standing_mut().state.turn(Event::IsQuiet) {
            last.say(&mut cx.fx, session, None);
        }
        for resource in each(own.into_resources()) {
            cx.fx.release(session, resource);
        }
        cx.fx.closed(session);
    }

    fn cancel_timers(&self, fx: &mut Effects, session: SessionId) {
        for timer in Self::TIMERS {
            fx.cancel(timer(session));
        }
    }

    fn has(&self, session: SessionId) -> bool {
        self.sessions().0.contains(session)
    }

    /// The sessions that have not ended, or whose pages have not come back.
    fn ids(&self) -> impl Iterator<Item = SessionId> {
        self.sessions().0.iter().map(|(session, _)| session)
    }

    /// How many such sessions there are.
    fn len(&self) -> usize {
        self.sessions().0.len()
    }

    /// How long after its opening a session ends at the latest; `None` if the session is not known.
    fn deadline(&self, session: SessionId) -> Option<Duration> {
        self.sessions().get(&session).map(|own| own.standing().deadline())
    }
}

impl<R: Role> Ending for R {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_list::PageList;
    use crate::pages::Pages;
    use crate::proto::io::{NodeConfig, Output};
    use crate::proto::posts::InFlight;
    use crate::{Incarnation, KvArgs, Op, Region, RegionRole};

    const ONE: SessionId = SessionId(1);

    /// The table at the top, by standing and event.
    #[test]
    fn a_session_standing_follows_its_table_to_one_final_status() {
        let going = |poll| State::Going(poll, Last);
        let failed = || State::Failed(PeerCause::Aborted);
        let ended = State::Ended;
        let [met, moves] = [KvPoll::WaitingForInput, KvPoll::Transferring];
        let rows = [
            (going(met), Event::Reaches(moves), going(moves), None),
            (going(moves), Event::Reaches(met), going(moves), None),
            (going(met), Event::Fails(PeerCause::Aborted), failed(), Some(Last)),
            (going(moves), Event::IsQuiet, ended(KvPoll::Success), Some(Last)),
            (failed(), Event::Reaches(moves), failed(), None),
            (failed(), Event::Fails(PeerCause::WorkerStopped), failed(), None),
            (failed(), Event::IsQuiet, ended(KvPoll::Failed), None),
            (ended(KvPoll::Success), Event::Reaches(moves), ended(KvPoll::Success), None),
            (ended(KvPoll::Success), Event::Fails(PeerCause::Aborted), ended(KvPoll::Success), None),
            (ended(KvPoll::Success), Event::IsQuiet, ended(KvPoll::Success), None),
        ];
        for (mut state, event, after, last) in rows {
            let row = format!("{state:?} {event:?}");
            assert_eq!((state.turn(event), state), (last, after), "{row}");
        }
    }

    /// A role with no peers: it notes what it is asked for.
    #[derive(Default)]
    struct Lone {
        sessions: Sessions<Own>,
        asked: Vec<&'static str>,
    }

    struct Own {
        standing: Standing,
        room: Room,
        served: bool,
        quiet: bool,
        pages: Pages,
    }

    impl Session for Own {
        fn standing(&self) -> &Standing {
            &self.standing
        }
        fn standing_mut(&mut self) -> &mut Standing {
            &mut self.standing
        }
        fn room(&self) -> &Room {
            &self.room
        }
        fn phase(&self) -> Phase {
            Phase::Transfer
        }
        fn peer(&self) -> Option<PeerId> {
            None
        }
        fn is_served(&self) -> bool {
            self.served
        }
        fn is_quiet(&self) -> bool {
            self.quiet
        }
        fn into_resources(self) -> impl Iterator<Item = Resource> {
            std::iter::once(self.pages.into())
        }
    }

    impl Role for Lone {
        type Session = Own;
        const HALF: Half = Half::Sender;
        const TIMERS: [fn(SessionId) -> Timer; 2] = [Timer::Deadline, Timer::Lease];

        fn sessions(&self) -> &Sessions<Own> {
            &self.sessions
        }
        fn sessions_mut(&mut self) -> &mut Sessions<Own> {
            &mut self.sessions
        }
        fn waits(&self, _: &Context, _: SessionId) -> Option<Quarantine> {
            None
        }
        fn withdraw(&mut self, _: &mut Context, _: SessionId, _: &PeerCause) {
            self.asked.push("withdraw");
        }
        fn stop(&mut self, _: &mut Context, _: SessionId, _: &PeerCause) {
            self.asked.push("stop");
        }
        fn forget(&mut self, _: &mut Context, _: SessionId, _: &Own) {
            self.asked.push("forget");
        }
    }

    fn begun(served: bool, quiet: bool) -> (Context, Lone) {
        let region = Region::dram(RegionRole::Kv, 0x1000, 4 * 64, 64);
        let args = KvArgs::builder("prefill", 0).pages(4, 16).region(region).build().unwrap();
        let life = Incarnation::from_random(7);
        let mut cx = Context::new(NodeConfig::new(args, life, "local", Default::default()));
        let mut lone = Lone::default();
        let pages = Pages::unpooled(PageList::from_pages([2, 3]).unwrap()).unwrap();
        let standing = Standing::new(Duration::from_secs(9));
        let own = Own { standing, room: Room::Number(4), served, quiet, pages };
        assert!(lone.open(&mut cx, ONE, own));
        assert_eq!(said(&mut cx), ["Bootstrapping"]);
        assert!(cx.fx.is_armed(Timer::Deadline(ONE)));
        (cx, lone)
    }

    /// Statuses and pages that came out.
    fn said(cx: &mut Context) -> Vec<String> {
        let said = std::iter::from_fn(|| cx.fx.next_output()).map(|output| match output {
            Output::Status { poll, failure: None, .. } => format!("{poll:?}"),
            Output::Status { poll, failure: Some(failure), .. } => format!("{poll:?}: {:?}", failure.cause),
            Output::Release { resource: Resource::Pages(pages), .. } => format!("{:?}", pages.list()),
            Output::Cancel { .. } => "cancel".to_owned(),
            other => panic!("{other:?}"),
        });
        said.collect()
    }

    fn pages() -> String {
        format!("{:?}", PageList::from_pages([2, 3]).unwrap())
    }

    #[test]
    fn a_session_succeeds_only_when_it_is_served_and_quiet() {
        for (served, quiet) in [(false, false), (false, true), (true, false)] {
            let (mut cx, mut lone) = begun(served, quiet);
            lone.settle(&mut cx, ONE);
            assert!(said(&mut cx).is_empty() && lone.has(ONE), "served {served}, quiet {quiet}");
        }
        let (mut cx, mut lone) = begun(true, true);
        lone.settle(&mut cx, ONE);
        assert_eq!(said(&mut cx), ["Success".to_owned(), pages()]);
        lone.settle(&mut cx, ONE);
        lone.fail(&mut cx, ONE, Cause::Aborted);
        assert!(said(&mut cx).is_empty() && lone.len() == 0 && cx.fx.timers() == 0);
        assert_eq!(lone.asked, ["forget"]);
    }

    #[test]
    fn a_failed_session_reports_once_and_keeps_its_pages_until_quiet() {
        let (mut cx, mut lone) = begun(false, false);
        lone.fail(&mut cx, ONE, Cause::Aborted);
        lone.fail(&mut cx, ONE, Cause::WorkerStopped);
        assert_eq!(said(&mut cx), ["Failed: Aborted"]);
        assert_eq!((lone.asked.clone(), cx.fx.timers()), (vec!["withdraw", "stop"], 0));
        let post = InFlight { op: Op::Read, session: ONE, target: 0, part: 0, peer: PeerId(1), origin: None };
        let post = cx.posts.start(post, cx.fx.now());
        lone.sessions.get_mut(&ONE).unwrap().quiet = true;
        lone.settle(&mut cx, ONE);
        assert!(said(&mut cx).is_empty(), "its own post is in flight");
        cx.posts.end(post, cx.fx.now());
        lone.settle(&mut cx, ONE);
        lone.settle(&mut cx, ONE);
        assert_eq!((said(&mut cx), lone.len()), (vec![pages()], 0));
        assert_eq!(lone.asked, ["withdraw", "stop", "forget"]);
    }
}
