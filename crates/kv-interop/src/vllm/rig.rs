//! A machine of vLLM's dialect under test: the test plays the scheduler, the foreign engines and the clock.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::{Command, Resource};
use kv_core::{
    Cause, KvArgs, KvPoll, Origin, PageList, PagePool, Pages, PeerId, Quarantine, ReleaseError, Room,
    SessionId, SessionOptions, Time, TransferError, TransferMode,
};

use super::config::VllmConfig;
use super::machine::VllmMachine;
use crate::effects::Out;
use crate::gauges::{Ignored, IgnoredGauges};
use crate::message::Incoming;

pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

/// The machine, and everything that it has said to its scheduler. `out` holds what it has said to its transport.
pub(crate) struct Rig {
    pub(crate) machine: VllmMachine,
    pub(crate) now: Time,
    pub(crate) gauges: IgnoredGauges,
    pub(crate) out: Vec<Out>,
    pool: PagePool,
    /// Pages of other pools.
    refused: Vec<ReleaseError>,
    states: BTreeMap<SessionId, Vec<KvPoll>>,
    failures: BTreeMap<SessionId, TransferError>,
    back: BTreeMap<SessionId, Vec<u32>>,
}

impl Rig {
    pub(crate) fn new(args: KvArgs, change: impl FnOnce(&mut VllmConfig)) -> Rig {
        let gauges = IgnoredGauges::default();
        let config = VllmConfig::default().with(|config| {
            config.gauges = gauges.clone();
            change(config);
        });
        let pool = PagePool::new(args.geometry().num_pages);
        let machine = VllmMachine::new(&args, &config).unwrap();
        let (out, states) = (Vec::new(), BTreeMap::new());
        let (failures, back, refused) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Rig { machine, now: at(0), gauges, out, pool, refused, states, failures, back }
    }

    pub(crate) fn input(&mut self, input: Input<Command>) {
        self.machine.handle(self.now, input);
        while let Some(out) = self.machine.poll_output() {
            match out {
                Output::Status { session, poll, failure } => {
                    let states = self.states.entry(session).or_default();
                    assert!(
                        !states.last().is_some_and(|last| matches!(last, KvPoll::Success | KvPoll::Failed))
                    );
                    states.push(poll);
                    assert_eq!(poll == KvPoll::Failed, failure.is_some());
                    self.failures.extend(failure.map(|failure| (session, *failure)));
                }
                Output::Release { session, resource } => {
                    let ended = self.states.get(&session).and_then(|states| states.last());
                    assert!(matches!(ended, Some(KvPoll::Success | KvPoll::Failed)), "pages before the end");
                    if let Resource::Pages(pages) = resource {
                        self.back.entry(session).or_default().extend(pages.list().iter());
                        self.refused.extend(self.pool.release(pages).err());
                    }
                }
                other => self.out.push(other),
            }
        }
    }

    pub(crate) fn command(&mut self, command: Command) {
        self.input(Input::Command(command));
    }

    pub(crate) fn pages(&mut self, pages: &[u32]) -> Pages {
        self.pool.adopt(PageList::from_pages(pages.iter().copied()).unwrap()).unwrap()
    }

    /// Opens session `number`, which sends request `request`; in pull mode if the options do not say.
    pub(crate) fn open(&mut self, number: u64, request: &str, mut options: SessionOptions) -> SessionId {
        let (session, room) = (SessionId(number), Room::request(request).unwrap());
        options.mode.get_or_insert(TransferMode::Pull);
        let options = Box::new(options);
        self.command(Command::OpenSender { session, room, receivers: 0, options });
        session
    }

    pub(crate) fn announce(&mut self, session: SessionId, num_pages: usize) {
        self.command(Command::InitSender { session, num_pages, aux: None });
    }

    pub(crate) fn send(&mut self, session: SessionId, pages: &[u32]) {
        let chunk = self.pages(pages);
        self.command(Command::Send { session, chunk });
    }

    /// Opens session `number` for a request with these pages, all of which are final.
    pub(crate) fn sent(&mut self, number: u64, request: &str, pages: &[u32]) -> SessionId {
        let session = self.open(number, request, SessionOptions::default());
        self.announce(session, pages.len());
        self.send(session, pages);
        session
    }

    pub(crate) fn abort(&mut self, session: SessionId) {
        self.command(Command::Abort { session });
    }

    /// A notification of a foreign agent arrives.
    pub(crate) fn notify(&mut self, agent: &str, bytes: impl Into<Bytes>) {
        let incoming = Incoming::Notification { agent: agent.to_owned(), bytes: bytes.into() };
        self.input(Input::Frame { from: Origin(0), frame: incoming.encode() });
    }

    /// The answer of a side channel arrives.
    pub(crate) fn reply(&mut self, peer: PeerId, parts: Vec<Bytes>) {
        self.input(Input::Frame { from: Origin(0), frame: Incoming::reply(peer, parts).encode() });
    }

    /// Lets time pass up to this moment; every timer comes when it is due.
    pub(crate) fn wait_until(&mut self, moment: Time) {
        while let Some(due) = self.machine.next_timeout().filter(|due| *due <= moment) {
            self.now = self.now.max(due);
            self.input(Input::Timeout);
            assert!(self.machine.next_timeout() != Some(due), "a timer spins");
        }
        self.now = moment;
    }

    pub(crate) fn states(&self, session: SessionId) -> &[KvPoll] {
        self.states.get(&session).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn state(&self, session: SessionId) -> KvPoll {
        self.states(session).last().copied().unwrap_or(KvPoll::Bootstrapping)
    }

    pub(crate) fn cause(&self, session: SessionId) -> Option<Cause> {
        self.failures.get(&session).map(|failure| failure.cause.clone())
    }

    /// The pages of the session that have come back, in order.
    pub(crate) fn back(&self, session: SessionId) -> &[u32] {
        self.back.get(&session).map_or(&[], Vec::as_slice)
    }

    /// The state of the session and the pages that have come back.
    pub(crate) fn told(&self, session: SessionId) -> (KvPoll, &[u32]) {
        (self.state(session), self.back(session))
    }

    pub(crate) fn quarantine(&self) -> Vec<Quarantine> {
        self.machine.quarantine()
    }

    pub(crate) fn ignored(&self, why: Ignored) -> u64 {
        self.gauges.of(why)
    }
}
