//! vLLM's engines as a script plays them: side channels that answer, agents that notify, and anything else.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::layout::{HND_PACKED, Holds, Layout, RegionRole};
use kv_core::{
    EngineId, KvArgs, Lease, PageList, Parallel, PeerId, Post, RankRecord, Region, RemoteRequest, RequestId,
    Room, SessionId, SessionOptions, TransferMode, WayEnd,
};
use kv_interop::fuzz::{Said, heard_by_vllm, said_by_vllm, vllm_registration};
use kv_interop::message::{Incoming, Way};
use kv_interop::vllm::{
    NixlAgentMetadata, NixlHandshakePayload, SideChannelAddr, VllmConfig, VllmLimits, model,
};
use kv_poll::KvMachine;

use super::super::frames;
use super::{Dialect, PAGES, Script};

/// The name of the worker's engine.
const US: &str = "us";
/// Most requests of which foreign engines speak because the machine has named them.
const MAX_LEARNED: usize = 16;

/// vLLM's engines around one worker.
pub(super) struct Vllm {
    /// Side channels that were asked and have not answered, with the numbers of their engines.
    asked: Vec<(PeerId, u8)>,
    /// Requests that the machine has named.
    learned: Vec<String>,
    /// The last side channel to which a way was open.
    channel: (PeerId, u8),
    /// Who may write into the pages of a receiver, by the receiver's id of the request.
    writers: BTreeMap<String, Writers>,
}

/// The engine that writes a request, or reads one: nothing is registered for a request that is read.
#[derive(Debug, Default)]
struct Writers {
    /// The pages that were registered.
    blocks: Vec<u32>,
    /// The metadata of the agents that were told the pages, and whose ways have not ended since.
    told: BTreeSet<Bytes>,
    /// The agents that have said that they are done, and how many they say there are.
    done: BTreeSet<String>,
    count: usize,
}

impl Writers {
    /// True if nobody writes any more: all have said so, or all that were told have ended.
    fn are_quiet(&self) -> bool {
        self.told.is_empty() || !self.done.is_empty() && self.done.len() >= self.count
    }
}

/// A rank of an engine: two layers of 64 pages, of four tokens with two heads.
fn args(engine: &str, tp_size: u32, tp_rank: u32) -> Option<KvArgs> {
    let heads = (2 / tp_size).max(1);
    let len = u64::from(heads) * 128;
    let place = Parallel::default().with(|place| (place.tp_size, place.tp_rank) = (tp_size, tp_rank));
    let layout = Layout::default().with(|layout| (layout.axes, layout.total_kv_heads) = (HND_PACKED, 2));
    let builder = KvArgs::builder(engine, tp_rank).pages(PAGES, 4).heads(heads, 8).dtype("bf16");
    let builder = builder.parallel(place).layout(layout).max_sge(16).max_inflight(6);
    let kv = |layer: u32| {
        let addr = 0x100_0000 * (u64::from(layer) + 1);
        Region::dram(RegionRole::Kv, addr, u64::from(PAGES) * len, len).holds(Holds::KeyValue).layer(layer)
    };
    builder.region(kv(0)).region(kv(1)).build().ok()
}

/// The name of the agent of an engine's rank.
fn agent_of(engine: u8, tp_rank: u32, life: u8) -> String {
    format!("agent-{engine}-{tp_rank}-{life}")
}

/// The metadata of a NIXL agent of this name, as far as a worker reads them.
fn metadata(agent: &str) -> Bytes {
    [b"nixlSerDes|Agent", &(agent.len() as u64).to_le_bytes()[..], agent.as_bytes()].concat().into()
}

fn request(number: u8) -> String {
    format!("cmpl-{number}-0-0123abcd")
}

impl Vllm {
    fn a_request(&self, script: &mut Script<'_>) -> String {
        match script.byte() {
            0..=119 => request(script.below(6)),
            120..=229 if !self.learned.is_empty() => {
                self.learned[usize::from(script.byte()) % self.learned.len()].clone()
            }
            230..=239 => format!("cmpl-{}-0-{}", script.below(6), script.text(40)),
            _ => script.text(6000),
        }
    }

    /// The machine has named these requests.
    fn learn(&mut self, requests: Vec<String>) {
        for request in requests.into_iter().filter(|request| !request.is_empty()) {
            self.writers.entry(request.clone()).or_default();
            self.learned.push(request);
        }
        let excess = self.learned.len().saturating_sub(MAX_LEARNED);
        self.learned.drain(..excess);
    }

    /// What the side channel of an engine answers, mostly as an engine of a fitting model does.
    fn answer(engine: u8, script: &mut Script<'_>) -> Vec<Bytes> {
        let number = if script.byte() < 240 { engine } else { script.below(3) };
        let (engine, life) = (format!("engine-{number}"), script.below(20));
        let (tp_size, tp_rank) = if script.rarely() { (2, u32::from(script.below(2))) } else { (1, 0) };
        let agent = metadata(&agent_of(number, tp_rank, if life > 16 { life } else { 0 }));
        let shown = Duration::from_millis(script.number() % 1_000_000_000);
        let answered = args(&engine, tp_size, tp_rank)
            .and_then(|args| model::answer(&args, agent, "a hash", shown).ok())
            .unwrap_or_default();
        if script.byte() < 200 {
            return answered;
        }
        let [payload, clock] = &answered[..] else { return Vec::new() };
        match script.below(6) {
            0 => vec![payload.clone()],
            1 => vec![clock.clone(); script.size(60)],
            2 => vec![payload.clone(), Bytes::from_static(b"\xcb\x7f\xf0\0\0\0\0\0\0")],
            // Lists of four thousand million, and as many levels as bytes.
            3 => vec![Bytes::from_static(b"\x82\xb3kv_caches_base_addr\xdd\xff\xff\xff\xff"), clock.clone()],
            4 => vec![Bytes::from(vec![0x91; script.size(5000)]), clock.clone()],
            _ => vec![changed(payload, script).unwrap_or_default(), clock.clone()],
        }
    }
}

/// The number of the engine at an address: engine 2 is at 10.0.0.2.
fn engine_of(way: &Way) -> u8 {
    let Way::Request { addr } = way else { return 0 };
    let host = addr.rsplit_once(':').map_or(&addr[..], |(host, _)| host);
    host.rsplit_once('.').and_then(|(_, number)| number.parse().ok()).unwrap_or(0)
}

/// An answer with one field changed.
fn changed(payload: &Bytes, script: &mut Script<'_>) -> Option<Bytes> {
    let mut payload = NixlHandshakePayload::decode(payload).ok()?;
    let mut metadata = NixlAgentMetadata::decode(&payload.agent_metadata_bytes).ok()?;
    let number = script.number();
    match script.below(12) {
        0 => payload.compatibility_hash = script.text(2000),
        1 => metadata.engine_id = script.text(2000),
        2 => metadata.agent_metadata = Bytes::from(vec![7; script.size(1 << 21)]),
        3 => metadata.num_blocks = number,
        4 => metadata.block_lens.iter_mut().for_each(|len| *len = number),
        5 => metadata.block_strides.iter_mut().for_each(|stride| *stride = number),
        6 => metadata.block_size = number as u32,
        7 => metadata.physical_blocks_per_logical_kv_block = number as u32,
        8 => metadata.kv_caches_base_addr.iter_mut().for_each(|addr| *addr = number),
        9 => {
            let count = script.size(3000);
            metadata.kv_caches_base_addr = vec![0x1000; count];
            (metadata.block_lens, metadata.block_strides) = (vec![256; count], vec![256; count]);
        }
        10 => metadata.region_num_blocks = Some(vec![number; metadata.block_lens.len()]),
        _ => metadata.kv_cache_layout = script.text(100),
    }
    payload.agent_metadata_bytes = metadata.encode();
    Some(payload.encode())
}

impl Dialect for Vllm {
    const NAME: &'static str = "vllm_machine";
    const AUX: bool = false;

    fn new(_: &mut Script<'_>) -> (Vllm, KvArgs, KvMachine) {
        let config = VllmConfig::default().with(|config| {
            config.limits = VllmLimits::default().with(|limits| {
                limits.max_registrations = 8;
                limits.max_engines = 4;
                limits.max_post_bytes = 2000;
            });
            config.reader.max_engines = 4;
            config.side_channel = Some(SideChannelAddr { host: "10.0.0.9".to_owned(), port: 5601 });
            config.seed = Some(7);
        });
        #[allow(clippy::expect_used)]
        let args = args(US, 1, 0).expect("the worker's arguments are valid");
        #[allow(clippy::expect_used)]
        let machine = model::machine(&args, &config).expect("the machine is possible");
        let (asked, learned, writers) = (Vec::new(), Vec::new(), BTreeMap::new());
        (Vllm { asked, learned, channel: (PeerId(1), 0), writers }, args, Box::new(machine))
    }

    fn open(&mut self, script: &mut Script<'_>, sender: bool) -> (Room, String, SessionOptions, u64) {
        let mode = if script.flag() { TransferMode::Push } else { TransferMode::Pull };
        let number = script.below(6);
        let mut options = SessionOptions::default().with(|options| {
            options.mode = Some(mode);
            options.deadline = script.option(|script| Duration::from_millis(script.number() % 1_000_000));
            options.prefix_pages = if script.rarely() { script.below(4).into() } else { 0 };
        });
        let (blocks, engine) = (script.below(9), script.below(3));
        if sender {
            options.lease =
                script.option(|script| Lease::Fixed(Duration::from_millis(script.number() % 100_000)));
        } else {
            let engine = EngineId::new(&format!("engine-{engine}"));
            options.remote =
                engine.ok().zip(RequestId::new(&request(number)).ok()).map(|(engine, request)| {
                    Box::new(RemoteRequest::new(engine, request).with(|remote| {
                        let blocks = PageList::from_pages(u32::from(number)..u32::from(number + blocks));
                        remote.block_ids =
                            blocks.ok().filter(|_| mode == TransferMode::Pull).into_iter().collect();
                        remote.tp_size = if script.rarely() { 2 } else { 1 };
                    }))
                });
        }
        let room = Room::request(&request(number)).unwrap_or(Room::Number(1));
        let host = if script.byte() < 240 { engine } else { script.below(3) };
        (room, format!("10.0.0.{host}:5600"), options, 64)
    }

    fn say(&mut self, script: &mut Script<'_>) -> (&'static str, Incoming) {
        let agent = agent_of(script.below(5), 0, 0);
        let damage = *script;
        let said_by = |agent: &str, bytes: Bytes| {
            let bytes = frames::damaged(damage, &bytes);
            Incoming::Notification { agent: agent.to_owned(), bytes }
        };
        let notification = |bytes| said_by(&agent, bytes);
        match script.byte() {
            0..=49 => {
                let ids: Vec<String> = (0..=script.below(5)).map(|_| self.a_request(script)).collect();
                let text = if script.byte() < 8 { ids.join(",").repeat(200) } else { ids.join(",") };
                ("Heartbeat", notification(format!("HB:{text}").into()))
            }
            50..=99 => {
                let count = if script.rarely() { script.number() } else { 1 };
                ("Done", notification(format!("{}:{count}", self.a_request(script)).into()))
            }
            100..=149 => {
                let number = script.below(3);
                let there = if script.byte() < 8 { script.text(300) } else { US.to_owned() };
                let blocks = script.runs(3000, PAGES).into_iter().map(|(page, _)| page % 70).collect();
                let tp_size = if script.rarely() { script.small() } else { 1 };
                let (host, speaker) = match script.byte() {
                    0..240 => (number, agent_of(number, 0, 0)),
                    _ => (script.below(3), agent.clone()),
                };
                let from = (format!("engine-{number}"), format!("10.0.0.{host}"), 5600, tp_size);
                let bytes = vllm_registration(self.a_request(script), from, blocks, (there, 1));
                ("Registration", said_by(&speaker, bytes))
            }
            150..=159 => {
                let len = script.size(300).min(script.0.len());
                let (raw, rest) = script.0.split_at(len);
                *script = Script(rest);
                ("Notification", notification(Bytes::copy_from_slice(raw)))
            }
            160..=239 => {
                let (peer, engine) = self.asked.pop().unwrap_or(self.channel);
                ("Answer", Incoming::reply(peer, Vllm::answer(engine, script)))
            }
            _ => {
                let (peer, engine) = (PeerId(u64::from(script.below(12))), script.below(3));
                ("Answer", Incoming::reply(peer, Vllm::answer(engine, script)))
            }
        }
    }

    fn serve(&mut self) -> Option<Incoming> {
        let (peer, engine) = self.asked.pop()?;
        Some(Incoming::reply(peer, Vllm::answer(engine, &mut Script(&[]))))
    }

    fn arrives(&mut self, incoming: &Incoming) {
        let Incoming::Notification { agent, bytes } = incoming else { return };
        let Some(Said::Done { request, count }) = heard_by_vllm(bytes) else { return };
        if let Some(writers) = self.writers.get_mut(&request)
            && writers.done.insert(agent.clone())
        {
            // Every engine has one pipeline stage, and the worker is alone in its engine.
            writers.count = count.max(1) as usize;
        }
    }

    fn hears(&mut self, peer: PeerId, way: &Way, frame: &[u8]) {
        match said_by_vllm(way, frame) {
            Some(Said::Question) => {
                self.channel = (peer, engine_of(way));
                self.asked.push(self.channel);
            }
            Some(Said::Notification(requests)) => self.learn(requests),
            Some(Said::Blocks { request, blocks }) => {
                let writers = self.writers.entry(request.clone()).or_default();
                writers.blocks = blocks;
                if let Way::Agent { metadata, .. } = way {
                    writers.told.insert(metadata.clone());
                }
                self.learn(vec![request]);
            }
            other => panic!("no vLLM engine says {:?}: {other:?}", Bytes::copy_from_slice(frame)),
        }
    }

    fn posted(&mut self, way: &Way, post: &Post) {
        let fits = |frame: &Bytes| matches!(said_by_vllm(way, frame), Some(Said::Notification(_)));
        assert!(post.notify.as_ref().is_none_or(fits), "no vLLM engine says {:?}", post.notify);
    }

    fn ranks(&self, _: &mut Script<'_>) -> Vec<RankRecord> {
        Vec::new()
    }

    fn gone(&mut self, way: &Way, _: WayEnd) {
        let Way::Agent { metadata, .. } = way else { return };
        for writers in self.writers.values_mut() {
            writers.told.remove(metadata);
        }
    }

    fn comes_back(&mut self, session: SessionId, pages: &PageList) {
        let registered = |writers: &Writers| pages.iter().any(|page| writers.blocks.contains(&page));
        let found = self.writers.iter().find(|(_, writers)| registered(writers));
        let Some(request) = found.map(|(request, _)| request.clone()) else { return };
        let Some(writers) = self.writers.remove(&request) else { return };
        assert!(writers.are_quiet(), "pages of {session} come back, and may be written: {writers:?}");
    }
}
