//! A simulated world of the service: one holder and its clients, what they do and when, and what must be true
//! after every step, whatever happens to frames, connections and hosts.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_sim::net::{
    ChaosParams, Fact, FailureOf, Held, HoldId, LifeId, LifeRecord, LookupParams, Memory, NetParams, Outcome,
    Physics, Slot as Host, TRANSPORT, World, metadata,
};
use kv_sim::{Clock, Trace, Violation};
use kv_transfer::unstable::machine::{Input, SessionStatus};
use kv_transfer::{EngineId, Incarnation, SessionId, Time, WorkerId};

use crate::counter::machine::{Counter, Mistake};
use crate::counter::{Command, Resource, Slot, Status, Whom, record};

const HOLDER: Host = 0;
const CLIENTS: usize = 3;
const ADDR: &str = "counter:1";
const LEASE: Duration = Duration::from_millis(300);
const WITHIN: Duration = Duration::from_secs(1);
/// How many numbers a holder has.
const NUMBERS: u64 = 3;
/// The number of questions while there are faults, and again after them.
const QUESTIONS: u64 = 24;
const LAST_QUESTIONS: u64 = 6;
/// How much later than due a session may end: a timer rings late.
const SLACK: u64 = 5 * MS;
const MS: u64 = 1_000_000;

/// What the schedulers do.
#[derive(Debug)]
pub enum Act {
    /// Numbers are lent to the holder's worker, if it has none.
    Hold,
    /// The holder's session is aborted.
    Close,
    /// A client asks for a number, of a certain incarnation of the holder or of any.
    Ask { client: Host, registered: bool },
    /// A client's session is aborted.
    Abort { life: LifeId, session: SessionId },
}

/// Facts of this service, beside the facts of every world.
#[derive(Debug)]
pub enum Seen<'a> {
    Told(LifeId, SessionId, Status),
    Back(LifeId, SessionId, &'a Resource),
}

/// The numbers that the clients of one machine may use, and until when by its clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct Uses([Option<(SessionId, u64, Time)>; 16]);

struct Session {
    /// The numbers that a holder has lent; `None` for a client, which has lent a slot.
    numbers: Option<Vec<u64>>,
    state: Status,
    back: bool,
    asked: u64,
    /// True if the question was asked after all faults had ended.
    served: bool,
}

/// The state of the service in one world.
#[derive(Default)]
pub struct Leasing {
    mistake: Option<Mistake>,
    sessions: BTreeMap<(LifeId, SessionId), Session>,
    uses: BTreeMap<LifeId, Uses>,
    is_healed: bool,
    is_closed: bool,
}

/// Memory that nothing is posted from or to.
pub struct Nothing;

impl Memory for Nothing {
    fn piece(&self, _: u32, _: u64, _: u64) -> Option<&[u8]> {
        None
    }

    fn overwrite(&mut self, _: u32, _: u64, _: &[u8]) -> bool {
        false
    }

    fn holder(&self, _: u32, _: u64) -> HoldId {
        0
    }

    fn item_len(&self, _: u32) -> u64 {
        1
    }
}

/// What must be true after every step.
impl Leasing {
    fn judge(
        &mut self,
        now: u64,
        lives: &[LifeRecord],
        fact: &Fact<'_, Uses, Seen<'_>>,
    ) -> Result<(), Violation> {
        match fact {
            Fact::Stepped { life, gauges, .. } => {
                self.uses.insert(*life, *gauges);
                self.numbers_have_one_user(now, lives)?;
                let mut open = self.sessions.iter().filter(|((at, _), known)| {
                    at == life && !known.state.is_terminal() && is_late(known, now, &lives[*life])
                });
                open.next().map_or(Ok(()), |((_, session), known)| {
                    let (asked, state) = (known.asked, known.state);
                    ends(format!("session {session} of life {life}, asked at {asked}, is {state} at {now}"))
                })
            }
            Fact::Own(Seen::Told(life, session, to)) => self.told(now, &lives[*life], (*life, *session), *to),
            Fact::Own(Seen::Back(life, session, resource)) => {
                self.comes_back(now, lives, (*life, *session), resource)
            }
            Fact::Panicked { life, message } => ends(format!("life {life} panics: {message}")),
            Fact::Restless => ends("the world never comes to rest".to_owned()),
            Fact::Settled { .. } => self.at_rest(lives),
            _ => Ok(()),
        }
    }

    /// Which client uses which number now. A client checks its own clock before it uses a number.
    fn users(&self, now: u64, lives: &[LifeRecord]) -> Vec<(u64, LifeId, SessionId)> {
        let living = self.uses.iter().filter(|(life, _)| lives[**life].alive);
        let of_all = living.flat_map(|(life, uses)| {
            let clock = lives[*life].clock;
            let uses = uses.0.iter().flatten().filter(move |(.., until)| clock.local(now) < *until);
            uses.map(|(session, number, _)| (*number, *life, *session))
        });
        of_all.collect()
    }

    fn numbers_have_one_user(&self, now: u64, lives: &[LifeRecord]) -> Result<(), Violation> {
        let mut users = BTreeMap::new();
        for (number, life, session) in self.users(now, lives) {
            if let Some(other) = users.insert(number, (life, session)) {
                let what = format!("{number} is used by {other:?} and {:?}", (life, session));
                return Err(Violation { invariant: "no_number_is_used_twice", what });
            }
        }
        Ok(())
    }

    fn told(
        &self,
        now: u64,
        life: &LifeRecord,
        key: (LifeId, SessionId),
        to: Status,
    ) -> Result<(), Violation> {
        match self.sessions.get(&key) {
            Some(known) if known.state.is_terminal() => ends(format!("{key:?} ends twice: {to}")),
            Some(known) if is_late(known, now, life) => ends(format!("{key:?} becomes {to} only at {now}")),
            Some(_) => Ok(()),
            None => ends(format!("{key:?} is unknown and becomes {to}")),
        }
    }

    fn comes_back(
        &self,
        now: u64,
        lives: &[LifeRecord],
        key: (LifeId, SessionId),
        resource: &Resource,
    ) -> Result<(), Violation> {
        let is_right = |known: &Session| match (&known.numbers, resource) {
            (Some(lent), Resource::Numbers(numbers)) => {
                let mut numbers = numbers.clone();
                numbers.sort_unstable();
                let is_used = |user: &(u64, LifeId, SessionId)| lent.contains(&user.0);
                numbers == *lent && !self.users(now, lives).iter().any(is_used)
            }
            (None, Resource::Slot(slot)) => slot.0.is_some() == (known.state == Status::Over),
            _ => false,
        };
        match self.sessions.get(&key) {
            Some(known) if known.state.is_terminal() && !known.back && is_right(known) => Ok(()),
            _ => once(format!("{resource:?} of {key:?} comes back at {now}")),
        }
    }

    /// Checks that all sessions of clients have ended and handed back their slots, and in the end the
    /// holder's session, too.
    fn at_rest(&self, lives: &[LifeRecord]) -> Result<(), Violation> {
        for ((life, session), known) in self.sessions.iter().filter(|((life, _), _)| lives[*life].alive) {
            let may_hold = known.numbers.is_some() && !self.is_closed;
            if !may_hold && (!known.state.is_terminal() || !known.back) {
                let (state, back) = (known.state, known.back);
                return once(format!("session {session} of life {life} is {state} at rest, back: {back}"));
            }
            if known.served && known.state != Status::Over {
                let what = format!("session {session} of life {life} is {} without any fault", known.state);
                return Err(Violation { invariant: "a_healed_world_serves", what });
            }
        }
        Ok(())
    }
}

/// True if the session's deadline is over. A host that was stopped has had no time to end it.
fn is_late(known: &Session, now: u64, life: &LifeRecord) -> bool {
    let span = match known.state {
        _ if known.numbers.is_some() => return false,
        Status::Waiting => WITHIN,
        _ => WITHIN + LEASE,
    };
    let due = life.clock.global(life.clock.local(known.asked) + span);
    now > due.max(life.paused_until) + SLACK
}

fn ends(what: String) -> Result<(), Violation> {
    Err(Violation { invariant: "sessions_end_by_their_deadline", what })
}

fn once(what: String) -> Result<(), Violation> {
    Err(Violation { invariant: "all_that_is_lent_comes_back_once", what })
}

/// The service as a simulated world runs it.
impl kv_sim::net::Service for Leasing {
    type Machine = Counter;
    type Memory = Nothing;
    type Act = Act;
    type Gauges = Uses;
    type Own<'a> = Seen<'a>;
    type Stranger = ();

    fn boot(world: &mut World<Leasing>, slot: Host) {
        let (life, bits) = (world.next_life(), world.rng().bits());
        let worker = WorkerId { engine: EngineId::new(&format!("counter-{slot}")).unwrap(), rank: 0 };
        let record = record((worker, Incarnation::from_random(bits)), TRANSPORT, metadata(life)).unwrap();
        let machine = Counter::new(metadata(life)).mistaken(world.service.mistake);
        let (epoch, drift) = (world.rng().below(1_000_000_000), world.rng().below(400));
        let clock = Clock::new(world.now(), epoch, 999_800 + drift);
        let published = (slot == HOLDER).then(|| ADDR.to_owned());
        world.start(slot, (machine, Nothing), (record, published), clock);
        if slot == HOLDER {
            world.act_in(0, Act::Hold);
        }
    }

    fn begin(world: &mut World<Leasing>) {
        for _ in 0..QUESTIONS {
            let (at, client) = (world.rng().below(800 * MS), 1 + world.rng().index(CLIENTS));
            let registered = world.rng().chance(700);
            world.act_in(at, Act::Ask { client, registered });
        }
        if world.rng().chance(500) {
            let at = world.rng().below(800 * MS);
            world.act_in(at, Act::Close);
            world.act_in(at + 400 * MS, Act::Hold);
        }
    }

    fn act(world: &mut World<Leasing>, act: Act) {
        let place = Leasing::place(world, &act);
        let Some(life) = place.filter(|life| world.record(*life).alive) else { return };
        let number = world.service.sessions.len() as u64;
        match act {
            Act::Hold if world.service.holder(life).is_some() => {}
            Act::Hold => {
                let first = number * NUMBERS;
                let (session, numbers) = (SessionId(number), (first..first + NUMBERS).collect::<Vec<_>>());
                world.open(life, session, Some(numbers.clone()));
                let hold = Command::Hold { session, numbers, lease: LEASE };
                world.feed(life, "hold", Input::Command(hold));
            }
            Act::Close => {
                if let Some(session) = world.service.holder(life) {
                    world.feed(life, "close", Input::Command(Command::Abort { session }));
                }
            }
            Act::Ask { registered, .. } => {
                let known = world.life(HOLDER).filter(|_| !registered).map(metadata);
                let whom = known.map_or(Whom::Registered(ADDR.to_owned()), Whom::Worker);
                let (session, slot) = (SessionId(number), Slot::default());
                world.open(life, session, None);
                world.feed(life, "open", Input::Command(Command::Open { session }));
                let ask = Command::Ask { session, whom, slot, within: WITHIN, ready: None };
                world.feed(life, "ask", Input::Command(ask));
                if !world.service.is_healed && world.rng().chance(100) {
                    let at = world.rng().below(500 * MS);
                    world.act_in(at, Act::Abort { life, session });
                }
            }
            Act::Abort { session, .. } => {
                world.feed(life, "abort", Input::Command(Command::Abort { session }));
            }
        }
    }

    fn place(world: &World<Leasing>, act: &Act) -> Option<LifeId> {
        match act {
            Act::Hold | Act::Close => world.life(HOLDER),
            Act::Ask { client, .. } => world.life(*client),
            Act::Abort { life, .. } => Some(*life),
        }
    }

    fn status(
        world: &mut World<Leasing>,
        life: LifeId,
        session: SessionId,
        to: Status,
        _: Option<&FailureOf<Leasing>>,
    ) {
        world.tell(&Fact::Own(Seen::Told(life, session, to)));
        if let Some(known) = world.service.sessions.get_mut(&(life, session)) {
            known.state = to;
        }
    }

    fn release(world: &mut World<Leasing>, life: LifeId, session: SessionId, resource: Resource) {
        world.tell(&Fact::Own(Seen::Back(life, session, &resource)));
        if let Some(known) = world.service.sessions.get_mut(&(life, session)) {
            known.back = true;
        }
    }

    fn gauges(machine: &Counter) -> Uses {
        let mut uses = Uses::default();
        let mut places = uses.0.iter_mut();
        for used in machine.numbers() {
            *places.next().expect("a worker has few clients") = Some(used);
        }
        uses
    }

    fn held(_: &Uses) -> Held {
        Held::default()
    }

    fn observe(world: &mut World<Leasing>, fact: &Fact<'_, Uses, Seen<'_>>) -> Result<(), Violation> {
        let lives: Vec<LifeRecord> = (0..world.next_life()).map(|life| world.record(life).clone()).collect();
        let now = world.now();
        world.service.judge(now, &lives, fact)
    }

    fn shut_down(world: &mut World<Leasing>, life: LifeId) {
        world.feed(life, "shut down", Input::Command(Command::Shutdown));
    }

    fn healed(world: &mut World<Leasing>) {
        world.service.is_healed = true;
        // Nobody is paused any more by then, and no number is leased.
        world.act_in(1_500 * MS, Act::Hold);
        for question in 0..LAST_QUESTIONS {
            let client = 1 + question as usize % CLIENTS;
            world.act_in(1_600 * MS, Act::Ask { client, registered: question % 2 == 0 });
        }
    }

    fn go_on(world: &mut World<Leasing>) -> bool {
        let closes = !std::mem::replace(&mut world.service.is_closed, true);
        if closes {
            world.act_in(0, Act::Close);
        }
        closes
    }
}

impl Leasing {
    /// The session by which a life holds numbers, if there is one.
    fn holder(&self, life: LifeId) -> Option<SessionId> {
        let mut of_incarnation = self.sessions.range((life, SessionId(0))..=(life, SessionId(u64::MAX)));
        let holds = |known: &Session| known.numbers.is_some() && !known.state.is_terminal();
        of_incarnation.find(|(_, known)| holds(known)).map(|((_, session), _)| *session)
    }

    /// The number of clients' sessions that had a number to the end of its lease.
    pub fn over(&self) -> usize {
        self.sessions.values().filter(|known| known.state == Status::Over).count()
    }
}

trait Open {
    fn open(&mut self, life: LifeId, session: SessionId, numbers: Option<Vec<u64>>);
}

impl Open for World<Leasing> {
    fn open(&mut self, life: LifeId, session: SessionId, numbers: Option<Vec<u64>>) {
        let (asked, served) = (self.now(), self.service.is_healed && numbers.is_none());
        let known = Session { numbers, state: Status::OPENED, back: false, asked, served };
        self.service.sessions.insert((life, session), known);
    }
}

/// Runs the world of a seed. With `driven`, its hosts run the worker's own loop.
pub fn run(seed: u64, driven: bool, mistake: Option<Mistake>) -> Outcome<Leasing> {
    let us = MS / 1_000;
    let net = NetParams {
        drop: 200,
        duplicate: 300,
        tail: 200,
        delay: 100 * us,
        delay_max: 50 * MS,
        misdeliver: 300,
        garbage: 20,
        spurious: 20,
        ..NetParams::default()
    };
    let chaos = ChaosParams {
        crashes: 2,
        pauses: 3,
        partitions: 2,
        breaks: 1,
        shutdowns: 1,
        detect_max: 20 * MS,
        ..ChaosParams::default()
    };
    let lookup = LookupParams { fail: 200, delay: MS, delay_max: 20 * MS, lease: 50 * MS, stale: 100 };
    let calm = Physics::calm(seed, (1, CLIENTS));
    let physics = Physics {
        driven,
        fault_span: 1_000 * MS,
        lateness: 50 * us,
        drift_ppm: 200,
        net,
        chaos,
        lookup,
        ..calm
    };
    World::new(Leasing { mistake, ..Leasing::default() }, physics, None, Trace::keeping(0)).run(None)
}
