//! SGLang's workers as a script plays them: decode ranks that ask for pages, prefill ranks that end requests, and
//! anything else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kv_bootstrap::SglangRank;
use kv_core::layout::{Holds, Layout, RegionRole};
use kv_core::{
    AuxIndex, EngineId, Incarnation, KvArgs, PageList, Parallel, PeerId, Post, RankRecord, Region, Room,
    SessionId, SessionOptions, WayEnd, WorkerId, WorkerRole,
};
use kv_interop::fuzz::{Said, heard_by_sglang, said_by_sglang};
use kv_interop::message::{Incoming, Message, Way};
use kv_interop::sglang::model::{self, SglangAgent};
use kv_interop::sglang::{AUX_ITEM_LENS, SglangConfig};
use kv_poll::KvMachine;

use super::{Dialect, PAGES, ROWS, Script};

/// Bytes of a page in one region: four tokens of two heads.
const ITEM: u64 = 128;

/// SGLang's workers around one worker.
pub(super) struct Sglang {
    /// The room that every aux row holds.
    row: Arc<AtomicU64>,
    /// The room and the number of the last abort.
    abort: (u64, u64),
    /// The last receiver of each room.
    receivers: BTreeMap<u64, SessionId>,
    /// Who may write into the pages of a receiver.
    writers: BTreeMap<SessionId, Writers>,
}

/// The prefill ranks that were told the pages of a receiver.
#[derive(Debug, Default)]
struct Writers {
    pages: Vec<u32>,
    /// The addresses of the ranks.
    ranks: BTreeSet<String>,
    /// The addresses of ranks that are dead.
    dead: BTreeSet<String>,
    /// The numbers of ranks that have said that they write no more.
    quiet: BTreeSet<u32>,
}

fn args(place: Parallel) -> Option<KvArgs> {
    let layout = Layout::default().with(|layout| layout.total_kv_heads = 2);
    let builder = KvArgs::builder("us", 0).pages(PAGES, 4).heads(2, 8).dtype("bf16");
    let mut builder = builder.layout(layout).parallel(place).max_sge(16).max_inflight(6);
    for (at, holds) in (0..).zip([Holds::Key, Holds::Key, Holds::Value, Holds::Value]) {
        let region = Region::dram(RegionRole::Kv, 0x100_0000 * (at + 1), u64::from(PAGES) * ITEM, ITEM);
        builder = builder.region(region.holds(holds).layer((at % 2) as u32));
    }
    for (buffer, len) in (0..).zip(AUX_ITEM_LENS) {
        let addr = 0x1000_0000 + buffer * 0x10_0000;
        builder = builder.region(Region::dram(RegionRole::Aux, addr, u64::from(ROWS) * len, len));
    }
    builder.build().ok()
}

fn text(text: impl ToString) -> Bytes {
    Bytes::from(text.to_string())
}

fn packed(numbers: impl IntoIterator<Item = u64>) -> Bytes {
    numbers.into_iter().flat_map(u64::to_le_bytes).collect()
}

fn room(script: &mut Script<'_>) -> u64 {
    if script.byte() < 8 { script.number() } else { u64::from(1 + script.below(6)) }
}

/// The address and port of a decode rank's socket, and the name of its agent.
fn rank(script: &mut Script<'_>) -> [Bytes; 3] {
    let rank = script.below(6);
    let port = if script.byte() < 8 { u64::from(script.small()) } else { 5600 + u64::from(rank) };
    let name = if script.byte() < 8 { script.text(200) } else { format!("decode-{rank}") };
    [text("10.0.1.1"), text(port), text(name)]
}

fn registration(script: &mut Script<'_>) -> Vec<Bytes> {
    let [ip, port, agent] = rank(script);
    let life = script.below(20);
    let mut parts = vec![Bytes::new(); 25];
    (parts[0], parts[1]) = (Bytes::from_static(b"NixlMsgGuard"), text("None"));
    (parts[2], parts[3], parts[4]) = (ip, port, agent);
    parts[5] = text(format!("metadata {}", if life > 16 { life } else { 0 }));
    parts[6] = packed((0..4).map(|region| 0x5000_0000 + 0x10_0000 * region));
    parts[7] = packed((0..10).map(|buffer| 0x6000_0000 + 0x10_0000 * buffer));
    (parts[9], parts[10], parts[11]) = (text(0), text(1), text(0));
    (parts[12], parts[17]) = (text(ITEM), text(PAGES));
    parts[18] = text(["DRAM"; 4].join(","));
    parts[19] = packed([ITEM; 4]);
    (parts[22], parts[23]) = (text(1), text(0));
    parts
}

fn request(script: &mut Script<'_>) -> Vec<Bytes> {
    let room = room(script);
    let [ip, port, agent] = rank(script);
    let pages = script.runs(3000, PAGES).into_iter().map(|(page, _)| page % (PAGES + 1));
    let pages: Bytes = pages.flat_map(u32::to_le_bytes).collect();
    let required = if script.rarely() { script.below(4) } else { 1 };
    let dummy = script.byte() < 16;
    let prefix = if script.rarely() { script.number() } else { 0 };
    let guard = Bytes::from_static(b"NixlMsgGuard");
    let (aux, required, dummy) = (text(script.below(ROWS as u8 + 1)), text(required), text(u8::from(dummy)));
    vec![guard, text(room), ip, port, agent, pages, aux, required, Bytes::new(), text(prefix), dummy]
}

/// A message, in some cases with another number of parts or with a part that is not what it should be.
fn damaged(mut parts: Vec<Bytes>, script: &mut Script<'_>) -> Vec<Bytes> {
    if script.byte() >= 40 {
        return parts;
    }
    let at = usize::from(script.byte()) % parts.len().max(1);
    let other = match script.below(7) {
        0 => {
            parts.truncate(at);
            return parts;
        }
        1 => {
            parts.resize(parts.len() + script.size(60), Bytes::from_static(b"more"));
            return parts;
        }
        2 => Bytes::new(),
        3 => text(script.number()),
        4 => Bytes::from(vec![0xff; script.size(40_000)]),
        5 => text(script.text(2000)),
        _ => packed(vec![script.number(); script.size(5000)]),
    };
    if let Some(part) = parts.get_mut(at) {
        *part = other;
    }
    parts
}

fn address(way: &Way) -> Option<String> {
    if let Way::Push { addr } = way { Some(addr.clone()) } else { None }
}

impl Sglang {
    fn status(&self, script: &mut Script<'_>) -> Vec<Bytes> {
        let room = room(script);
        let status = if script.byte() < 8 { script.number() } else { 4 * u64::from(script.flag()) };
        if script.byte() < 192 {
            self.row.store(room, Ordering::Relaxed);
        }
        vec![text("KV_STATUS"), text(room), text(status), text(script.below(3)), text(script.text(700))]
    }

    fn abort(script: &mut Script<'_>) -> Vec<Bytes> {
        let room = room(script);
        let [ip, port, _] = rank(script);
        let mut parts = vec![text("ABORT"), text(room), ip, port, text(script.number())];
        parts.truncate(5 - usize::from(script.below(16) / 13));
        parts
    }

    fn ack(&self, script: &mut Script<'_>) -> Vec<Bytes> {
        let (room, generation) =
            if script.rarely() { (room(script), script.number()) } else { (self.abort.0, self.abort.1) };
        vec![text("ABORT_ACK"), text(room), text(script.below(3)), text(generation)]
    }
}

impl Dialect for Sglang {
    const NAME: &'static str = "sglang_machine";
    const AUX: bool = true;

    fn new(script: &mut Script<'_>) -> (Sglang, KvArgs, KvMachine) {
        let row: Arc<AtomicU64> = Arc::default();
        let rows = Arc::clone(&row);
        let role = if script.flag() { WorkerRole::Prefill } else { WorkerRole::Decode };
        let ours = SglangAgent {
            name: "agent-us".to_owned(),
            metadata: Bytes::from_static(b"nixlSerDes|us"),
            pull: ("10.0.0.9".to_owned(), 4321),
        };
        let config = SglangConfig::new(role).with(|config| {
            config.seed = Some(32);
            config.limits.agents = 4;
            config.limits.unclaimed_rooms = 4;
            config.limits.unclaimed_pages = 5000;
            config.limits.prefill_ranks = 4;
            config.limits.post_bytes = 2000;
            config.aux_rooms = Some(Box::new(move |_: AuxIndex| rows.load(Ordering::Relaxed)));
        });
        #[allow(clippy::expect_used)]
        let args = args(Parallel::default()).expect("the worker's arguments are valid");
        #[allow(clippy::expect_used)]
        let machine = model::machine(&args, config, ours).expect("the machine is possible");
        let (receivers, writers) = (BTreeMap::new(), BTreeMap::new());
        (Sglang { row, abort: (0, 0), receivers, writers }, args, Box::new(machine))
    }

    fn open(&mut self, script: &mut Script<'_>, _: bool) -> (Room, String, SessionOptions, u64) {
        let options = SessionOptions::default().with(|options| {
            options.deadline = script.option(|script| Duration::from_millis(script.number() % 1_000_000));
            options.prefill_dp_rank = script.option(|script| u32::from(script.below(2)));
            options.prefix_pages = if script.rarely() { script.below(4).into() } else { 0 };
        });
        let room = Room::Number(room(script));
        (room, format!("10.0.0.{}:8998", script.below(3)), options, 64)
    }

    fn say(&mut self, script: &mut Script<'_>) -> (&'static str, Incoming) {
        let (what, parts) = match script.byte() {
            0..=59 => ("Registration", registration(script)),
            60..=119 => ("Request", request(script)),
            120..=169 => ("Status", self.status(script)),
            170..=199 => ("AbortOfRank", Sglang::abort(script)),
            200..=229 => ("AbortAck", self.ack(script)),
            230..=239 => {
                let agent = format!("decode-{}", script.below(3));
                let bytes = Bytes::from(format!("{}_kv_0_1_0", room(script)));
                return ("Notification", Incoming::Notification { agent, bytes });
            }
            _ => ("Message", (0..script.size(70)).map(|_| text(script.text(300))).collect()),
        };
        let message = Message(damaged(parts, script));
        let peer = script.rarely().then(|| u64::from(script.below(8)));
        (what, Incoming::Message { peer, message })
    }

    fn arrives(&mut self, incoming: &Incoming) {
        let Incoming::Message { message, .. } = incoming else { return };
        let Some(Said::End { room, rank }) = heard_by_sglang(&message.0) else { return };
        let receiver = self.receivers.get(&room).and_then(|session| self.writers.get_mut(session));
        if let Some(writers) = receiver {
            writers.quiet.insert(rank);
        }
    }

    fn hears(&mut self, _: PeerId, way: &Way, frame: &[u8]) {
        match said_by_sglang(way, frame) {
            Some(Said::Pages { room, pages, dummy: false }) => {
                let session = self.receivers.get(&room).copied();
                let Some(session) = session else { panic!("pages of room {room}, which no receiver has") };
                let writers = self.writers.entry(session).or_default();
                writers.pages = pages;
                writers.ranks.extend(address(way));
            }
            Some(Said::Abort { room, generation: Some(generation) }) => self.abort = (room, generation),
            Some(_) => {}
            None => panic!("no SGLang worker says {:?}", Message::decode(frame)),
        }
    }

    fn posted(&mut self, _: &Way, post: &Post) {
        assert_eq!(post.notify, None, "SGLang's agents are told by messages");
    }

    fn ranks(&self, script: &mut Script<'_>) -> Vec<RankRecord> {
        let (tp_size, strange) = (1 + u32::from(script.below(2)), script.byte());
        let rank = |tp_rank: u32| {
            let life = if strange < 16 { 2 } else { 1 };
            let place = Parallel::default().with(|place| (place.tp_size, place.tp_rank) = (tp_size, tp_rank));
            let port = 7000 + tp_rank as u16 + u16::from(strange % 3);
            let rank = SglangRank::new("10.0.0.2".to_owned(), port, 4).with(|rank| {
                rank.parallel = place;
                rank.kv_cache_dtype = Some("torch.bfloat16".to_owned());
            });
            let worker = WorkerId { engine: EngineId::new("theirs").ok()?, rank: tp_rank };
            let who = (worker, Incarnation::from_random(life));
            RankRecord::new(who, WorkerRole::Prefill, place, Vec::new(), vec![rank.offer()]).ok()
        };
        (0..tp_size).filter_map(rank).collect()
    }

    fn opened(&mut self, session: SessionId, room: &Room, sender: bool) {
        let Room::Number(room) = room else { return };
        // A room whose former receiver may still be written is not opened.
        let taken = self.receivers.get(room).is_some_and(|former| self.writers.contains_key(former));
        if !sender && !taken {
            self.receivers.insert(*room, session);
        }
    }

    fn gone(&mut self, way: &Way, end: WayEnd) {
        let Some(rank) = address(way).filter(|_| end != WayEnd::Lost) else { return };
        for writers in self.writers.values_mut().filter(|writers| writers.ranks.contains(&rank)) {
            writers.dead.insert(rank.clone());
        }
    }

    fn comes_back(&mut self, session: SessionId, pages: &PageList) {
        // Pages that were lent too late were never told.
        let told = |writers: &Writers| pages.iter().any(|page| writers.pages.contains(&page));
        if !self.writers.get(&session).is_some_and(told) {
            return;
        }
        let Some(writers) = self.writers.remove(&session) else { return };
        let quiet = writers.dead.len() + writers.quiet.len();
        assert!(
            quiet >= writers.ranks.len(),
            "pages of {session} come back, and may be written: {writers:?}"
        );
    }
}
