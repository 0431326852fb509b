//! A machine whose time the test drives, and a line of requests before it.

use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::NodeConfig;
use kv_core::{ContentHash, Incarnation, SessionId, Time};

use super::{AT_ONCE, TURN_AGAIN};
use crate::cache::{EncoderCache, Eviction};
use crate::claims::Claim;
use crate::machine::{Command, EcError, EcMachine, MachineConfig, Want};
use crate::region::EcRegion;
use crate::room::{Entries, Key};
use crate::store::SharedStore;

const BLOCKS: u32 = 4000;
const REQUESTS: u64 = 1000;
const EACH: u64 = 4;
const BUDGET: Duration = Duration::from_secs(3600);

struct Line {
    machine: EcMachine,
    store: SharedStore,
    now: Time,
}

impl Line {
    fn new() -> Line {
        let args = EcRegion::create(BLOCKS, 1).unwrap().args("prefill", 0).build().unwrap();
        let node = NodeConfig::new(args, Incarnation::from_random(1), "test", Bytes::from_static(&[0]));
        let store = SharedStore::new(EncoderCache::new(BLOCKS, 1, Eviction::Lru));
        let machine = EcMachine::new(MachineConfig::new("one model"), node, store.clone());
        Line { machine, store, now: Time::ZERO }
    }

    fn claim(&self, entries: impl IntoIterator<Item = (Key, u64)>) -> Claim {
        self.store.claims().claim(Entries::from_iter(entries), self.store.lock().room())
    }

    /// Opens the sessions of as many requests as stand in the line, each for entries of its own.
    fn open(&mut self, budget: Duration) -> Vec<Claim> {
        let claims: Vec<Claim> =
            (0..REQUESTS).map(|request| self.claim(of(request).map(|key| (key, 1)))).collect();
        for (request, claim) in (0..).zip(&claims) {
            for (at, (hash, bytes)) in (0..).zip(of(request)) {
                let want = Want::new(hash, bytes, "127.0.0.1:1").with(|want| {
                    want.budget = Some(budget);
                    want.claim = Some(claim.clone());
                });
                let session = SessionId(request * EACH + at);
                self.handle(Input::Command(Command::Fetch { session, want: Box::new(want) }));
            }
        }
        claims
    }

    fn handle(&mut self, input: Input<Command>) -> Vec<EcError> {
        self.machine.handle(self.now, input);
        let failure = |output| match output {
            Output::Status { failure, .. } => failure.map(|failure| *failure),
            _ => None,
        };
        std::iter::from_fn(|| self.machine.poll_output()).filter_map(failure).collect()
    }

    /// Lets time go on until then, and the machine do what is due. Returns the failures, and how often the machine
    /// was woken.
    fn until(&mut self, then: Time) -> (Vec<EcError>, u64) {
        let (mut failures, mut woken) = (Vec::new(), 0);
        while let Some(at) = self.machine.next_timeout().filter(|at| *at <= then) {
            self.now = self.now.max(at);
            failures.extend(self.handle(Input::Timeout));
            woken += 1;
        }
        self.now = then;
        (failures, woken)
    }
}

fn of(request: u64) -> impl Iterator<Item = Key> {
    (0..EACH).map(move |at| (ContentHash::new(&format!("image-{request}-{at}")).unwrap(), 1))
}

#[test]
fn a_long_line_costs_a_machine_one_look_for_all_who_wait() {
    let mut line = Line::new();
    let first = line.claim([((ContentHash::new("large").unwrap(), u64::from(BLOCKS)), u64::from(BLOCKS))]);
    let claims = line.open(BUDGET);
    let looks = line.store.claims().looks();
    let (failures, woken) = line.until(line.now + TURN_AGAIN * 100);
    assert_eq!((failures, line.machine.gauges().transfers), (Vec::new(), 0));
    let looks = line.store.claims().looks() - looks;
    assert!(woken <= 101 && looks <= 101, "woken {woken} times, {looks} looks at claims");

    // Room comes for all of them, and no input begins more than its part.
    drop(first);
    let all = (REQUESTS * EACH) as usize;
    let soon = line.now + TURN_AGAIN;
    let mut begun = 0;
    while let Some(at) = line.machine.next_timeout().filter(|at| *at <= soon && begun < all) {
        line.now = line.now.max(at);
        line.handle(Input::Timeout);
        let transfers = line.machine.gauges().transfers;
        assert!(transfers - begun <= AT_ONCE, "{} began after one input", transfers - begun);
        begun = transfers;
    }
    assert_eq!((begun, line.store.gauges().filling), (all, BLOCKS));
    drop(claims);
}

#[test]
fn those_who_wait_in_a_long_line_end_within_their_budgets() {
    let mut line = Line::new();
    let first = line.claim([((ContentHash::new("large").unwrap(), u64::from(BLOCKS)), u64::from(BLOCKS))]);
    let budget = Duration::from_secs(1);
    let claims = line.open(budget);
    line.handle(Input::Command(Command::Abort { session: SessionId(0) }));
    let (failures, _) = line.until(line.now + budget);
    let over = |error: &EcError| matches!(error, EcError::Budget { last: Some(last), .. } if matches!(**last, EcError::NotInTurn { .. }));
    assert!(failures.iter().all(over), "{:?}", failures.first());
    assert_eq!((failures.len() as u64, line.machine.gauges().waiting), (REQUESTS * EACH - 1, 0));
    // Nobody waits any more.
    assert!(line.until(line.now + budget).1 <= 1);
    assert_eq!(line.machine.next_timeout(), None);
    drop((first, claims));
}

/// The claim ends while a transfer is under way, and the machine hears nothing of that before the session ends.
#[test]
fn a_session_whose_request_has_lost_its_room_tells_so_whatever_ends_the_session() {
    let ends: [fn(&mut Line) -> Vec<EcError>; 3] = [
        |line| line.until(line.now + Duration::from_secs(1)).0,
        |line| line.handle(Input::Command(Command::Abort { session: SessionId(0) })),
        |line| line.handle(Input::Command(Command::Shutdown)),
    ];
    for end in ends {
        let mut line = Line::new();
        let half = u64::from(BLOCKS / 2);
        let [one, two] = [0, 1].map(|request| line.claim(of(request).map(|key| (key, half / EACH))));
        assert!(one.hold(of(0).take(1)) && two.hold(of(1).skip(1)));
        let (hash, bytes) = of(1).next().unwrap();
        let want = Want::new(hash, bytes, "127.0.0.1:1").with(|want| {
            want.budget = Some(Duration::from_secs(1));
            want.claim = Some(two.clone());
        });
        line.handle(Input::Command(Command::Fetch { session: SessionId(0), want: Box::new(want) }));
        assert_eq!(line.machine.gauges().transfers, 1);
        drop(line.store.reserve(&ContentHash::new("lost").unwrap(), 1).unwrap());
        drop(line.claim([]));
        let lost = EcError::RoomLost { blocks: half, region: BLOCKS - 1 };
        assert_eq!(end(&mut line), [lost]);
    }
}
