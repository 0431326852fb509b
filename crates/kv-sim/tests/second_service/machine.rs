//! The machine of the counter: client and server in one. A client repeats what it asks for until the server
//! has answered or its deadline has passed; a server counts each question of a client once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Amounts, Input, Machine, Output, SessionCommand, SessionResource, SessionStatus};
use kv_core::{LookupId, PeerId, RankQuery, Replica, SessionId, Time, WorkerRole};

pub const ADDR: &str = "counter:1";
pub const SERVICE: &str = "counter";
const RETRY: Duration = Duration::from_millis(5);
const DEADLINE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Open,
    Counted,
    Failed,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl SessionStatus for State {
    const OPENED: State = State::Open;
    const FAILED: State = State::Failed;

    fn is_terminal(self) -> bool {
        self > State::Open
    }

    fn to_u8(self) -> u8 {
        self as u8
    }

    fn from_u8(number: u8) -> Option<State> {
        [State::Open, State::Counted, State::Failed].get(usize::from(number)).copied()
    }
}

#[derive(Debug)]
pub struct Stake(pub u32);

impl SessionResource for Stake {
    const KINDS: &'static [&'static str] = &["stakes"];

    fn amounts(&self) -> Amounts {
        Amounts::of(0, 1)
    }
}

#[derive(Debug)]
pub enum Ask {
    Add { session: SessionId, digit: u32, stake: Stake },
    Abort(SessionId),
    Shutdown,
}

impl SessionCommand for Ask {
    type Resource = Stake;

    fn abort(session: SessionId) -> Ask {
        Ask::Abort(session)
    }

    fn shutdown() -> Ask {
        Ask::Shutdown
    }

    fn address(&mut self, to: SessionId) -> bool {
        match self {
            Ask::Abort(session) => *session = to,
            Ask::Add { .. } | Ask::Shutdown => return false,
        }
        true
    }

    fn lends(&self) -> Option<Amounts> {
        matches!(self, Ask::Add { .. }).then(|| Amounts::of(0, 1))
    }

    fn into_resource(self) -> Option<Stake> {
        match self {
            Ask::Add { stake, .. } => Some(stake),
            Ask::Abort(_) | Ask::Shutdown => None,
        }
    }
}

#[derive(Debug, Clone)]
pub struct TooLate;

impl fmt::Display for TooLate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody has counted it in time")
    }
}

impl std::error::Error for TooLate {}

/// Client and server in one. `total` has a digit of base four for each amount.
pub struct Counter {
    name: Bytes,
    /// With a planted bug: what was counted is not remembered.
    forgetful: bool,
    now: Time,
    pub total: u64,
    counted: BTreeSet<(Bytes, u64)>,
    peers: BTreeMap<Bytes, PeerId>,
    server: Option<PeerId>,
    asking: bool,
    open: BTreeMap<SessionId, (u32, Stake, Time)>,
    retry: Option<Time>,
    outputs: VecDeque<Output<State, Stake, TooLate>>,
}

impl Counter {
    pub fn new(name: Bytes, forgetful: bool) -> Counter {
        Counter {
            name,
            forgetful,
            now: Time::ZERO,
            total: 0,
            counted: BTreeSet::new(),
            peers: BTreeMap::new(),
            server: None,
            asking: false,
            open: BTreeMap::new(),
            retry: None,
            outputs: VecDeque::new(),
        }
    }

    fn connect(&mut self, name: &Bytes) -> PeerId {
        let next = PeerId(self.peers.len() as u64 + 1);
        if let Some(&peer) = self.peers.get(name) {
            return peer;
        }
        self.peers.insert(name.clone(), next);
        self.outputs.push_back(Output::Connect { peer: next, metadata: name.clone() });
        next
    }

    fn say(&mut self) {
        let Some(peer) = self.server else {
            if !std::mem::replace(&mut self.asking, true) {
                let query = RankQuery {
                    role: WorkerRole::Prefill,
                    service: SERVICE.to_owned(),
                    replica: Replica::Rank(0),
                };
                self.outputs.push_back(Output::Lookup { lookup: LookupId(1), addr: ADDR.to_owned(), query });
            }
            return;
        };
        for (session, (digit, ..)) in &self.open {
            let mut frame = vec![1];
            frame.extend(session.0.to_le_bytes());
            frame.extend(digit.to_le_bytes());
            frame.extend(&self.name);
            self.outputs.push_back(Output::Send { peer, frame: frame.into() });
        }
    }

    fn hear(&mut self, frame: &Bytes) {
        if frame.len() < 9 {
            return;
        }
        let number = u64::from_le_bytes(frame[1..9].try_into().unwrap());
        match frame[0] {
            1 if frame.len() == 21 => {
                let digit = u32::from_le_bytes(frame[9..13].try_into().unwrap());
                let name = frame.slice(13..);
                if self.counted.insert((name.clone(), number)) || self.forgetful {
                    self.total += 1 << (2 * digit);
                }
                let peer = self.connect(&name);
                let answer = [&[2], &frame[1..9]].concat();
                self.outputs.push_back(Output::Send { peer, frame: answer.into() });
            }
            2 => self.end(SessionId(number), State::Counted),
            _ => {}
        }
    }

    fn end(&mut self, session: SessionId, poll: State) {
        let Some((_, resource, _)) = self.open.remove(&session) else { return };
        let failure = (poll == State::Failed).then(|| Box::new(TooLate));
        self.outputs.push_back(Output::Status { session, poll, failure });
        self.outputs.push_back(Output::Release { session, resource });
    }

    fn tick(&mut self) {
        let late = self.open.iter().filter(|(_, (.., until))| *until <= self.now);
        let late: Vec<SessionId> = late.map(|(session, _)| *session).collect();
        late.into_iter().for_each(|session| self.end(session, State::Failed));
        if self.retry.is_none_or(|at| at <= self.now) {
            self.say();
            self.retry = Some(self.now + RETRY);
        }
        if self.open.is_empty() {
            self.retry = None;
        }
    }
}

impl Machine for Counter {
    type Command = Ask;
    type Status = State;
    type Resource = Stake;
    type Failure = TooLate;
    type Quarantine = ();

    fn handle(&mut self, now: Time, input: Input<Ask>) {
        self.now = now;
        match input {
            Input::Command(Ask::Add { session, digit, stake }) => {
                self.open.insert(session, (digit, stake, now + DEADLINE));
                self.retry = None;
            }
            Input::Command(Ask::Abort(session)) => self.end(session, State::Failed),
            Input::Command(Ask::Shutdown) => {
                let open: Vec<SessionId> = self.open.keys().copied().collect();
                open.into_iter().for_each(|session| self.end(session, State::Failed));
            }
            Input::Frame { frame, .. } => self.hear(&frame),
            Input::Found { ranks, .. } => {
                self.asking = false;
                self.server = ranks.first().map(|rank| self.connect(&rank.transports[0].metadata));
                self.retry = None;
            }
            Input::LookupFailed { .. } => self.asking = false,
            Input::PeerGone { peer, .. } | Input::ConnectFailed { peer, .. } => {
                self.peers.retain(|_, known| *known != peer);
                self.server = self.server.filter(|server| *server != peer);
                self.outputs.push_back(Output::Disconnect { peer });
            }
            Input::Connected { .. } | Input::Posted { .. } | Input::Revoked { .. } | Input::Timeout => {}
        }
        self.tick();
    }

    fn poll_output(&mut self) -> Option<Output<State, Stake, TooLate>> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.retry
    }
}
