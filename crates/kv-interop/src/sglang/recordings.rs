//! Recorded exchanges of SGLang 0.5.23 with itself, with this machine in the place of either side.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use kv_bootstrap::SglangRank;
use kv_core::layout::NHD;
use kv_core::machine::Input;
use kv_core::proto::Command;
use kv_core::{
    AuxIndex, EngineId, Holds, Incarnation, KvArgs, Layout, Op, Parallel, RankRecord, Region, RegionRole,
    Room, SessionId, SessionOptions, WorkerId, WorkerRole,
};

use super::aux_rows::AUX_ITEM_LENS;
use super::config::{SglangAgent, SglangConfig};
use super::machine::SglangMachine;
use crate::message::Way;
use crate::replay::{APART, BASE, Recording, Stage};

const SGLANG: &str = include_str!("../../tests/recordings/sglang.jsonl");
/// The engines of the recording: two layers of keys and two of values, with items of 4096 bytes in 12 pages.
const ITEM: u64 = 4096;
const PAGES: u32 = 12;
const AUX_ROWS: u64 = 256;

fn args() -> KvArgs {
    let layout = Layout::default().with(|layout| layout.axes = NHD);
    let mut args = KvArgs::builder("ours", 0).pages(PAGES, 16).dtype("f16").heads(8, 16).layout(layout);
    for (number, holds) in (0..).zip([Holds::Key, Holds::Key, Holds::Value, Holds::Value]) {
        let region = Region::dram(RegionRole::Kv, BASE + number * APART, u64::from(PAGES) * ITEM, ITEM);
        args = args.region(region.layer((number % 2) as u32).holds(holds));
    }
    for (buffer, len) in (0..).zip(AUX_ITEM_LENS) {
        let at = 2 * BASE + buffer * APART;
        args = args.region(Region::dram(RegionRole::Aux, at, AUX_ROWS * len, len));
    }
    args.build().unwrap()
}

/// The machine with the recorded decode engine's name and address. `row` is what its aux rows hold.
fn stage(role: WorkerRole, row: &Arc<Mutex<u64>>) -> Stage<SglangMachine> {
    let agent = SglangAgent {
        name: "decode-agent".to_owned(),
        metadata: Bytes::from_static(b"metadata of decode-agent"),
        pull: ("127.0.0.1".to_owned(), 5601),
    };
    let (args, row) = (args(), Arc::clone(row));
    let config = SglangConfig::new(role).with(|config| {
        config.seed = Some(1);
        config.aux_rooms = Some(Box::new(move |_: AuxIndex| *row.lock().unwrap()));
    });
    Stage::new(SglangMachine::new(&args, config, agent).unwrap(), &args)
}

/// The requests of the recorded decode engine: each room, its pages and its aux row.
fn requests(recording: &Recording) -> Vec<(u64, Vec<u32>, u32)> {
    let number = |part: &Bytes| std::str::from_utf8(part).unwrap().parse::<u64>().unwrap();
    let messages = recording.said("D", "zmq").into_iter().skip(1);
    let request = |parts: Vec<Bytes>| {
        let pages = parts[5].chunks_exact(4).map(|page| u32::from_le_bytes(page.try_into().unwrap()));
        (number(&parts[1]), pages.collect(), number(&parts[6]) as u32)
    };
    messages.map(request).collect()
}

#[test]
fn our_receiver_says_to_a_recorded_prefill_engine_what_sglang_has_said() {
    let recording = Recording::new(SGLANG);
    let row = Arc::default();
    let mut stage = stage(WorkerRole::Decode, &row);
    let (said, statuses) = (recording.said("D", "zmq"), recording.said("P", "zmq"));
    for (number, (room, pages, aux)) in requests(&recording).into_iter().enumerate() {
        let (session, bootstrap_addr) = (SessionId(number as u64), "10.0.0.1:8998".to_owned());
        let (room, options) = (Room::Number(room), Box::<SessionOptions>::default());
        stage.command(Command::OpenReceiver { session, room: room.clone(), bootstrap_addr, options });
        if number == 0 {
            let lookup = stage.lookup();
            stage.input(Input::Found { lookup, ranks: vec![prefill_rank()] });
            assert_eq!(stage.way().unwrap().1, Way::Push { addr: "127.0.0.1:5600".to_owned() });
        }
        let (pages, aux) = (stage.pages(&pages), Some(AuxIndex(aux)));
        stage.command(Command::InitReceiver { session, pages, aux });
        let first = if number == 0 { 0 } else { number + 1 };
        assert_eq!(stage.said(), said[first..number + 2]);
        if let Room::Number(room) = room {
            *row.lock().unwrap() = room;
        }
        stage.hear(None, &statuses[number]);
    }
    stage.succeeded(2);
}

#[test]
fn our_sender_takes_a_recorded_decode_engine_and_ends_with_sglangs_words() {
    let recording = Recording::new(SGLANG);
    let mut stage = stage(WorkerRole::Prefill, &Arc::default());
    let (said, statuses) = (recording.said("D", "zmq"), recording.said("P", "zmq"));
    stage.hear(None, &said[0]);
    let mut ways = Vec::new();
    for (number, (room, pages, _)) in requests(&recording).into_iter().enumerate() {
        let session = SessionId(number as u64);
        let options = Box::default();
        stage.command(Command::OpenSender { session, room: Room::Number(room), receivers: 0, options });
        stage.hear(None, &said[number + 1]);
        stage.command(Command::InitSender { session, num_pages: pages.len(), aux: Some(AuxIndex(0)) });
        let chunk = stage.pages(&pages);
        stage.command(Command::Send { session, chunk });
        let mut bytes = 0;
        loop {
            ways.extend(std::iter::from_fn(|| stage.way()).map(|(_, way)| way));
            let posts = stage.posts();
            if posts.is_empty() {
                break;
            }
            assert!(posts.iter().all(|post| post.op == Op::Write && post.notify.is_none()));
            bytes += posts.iter().flat_map(|post| &post.descriptors).map(|piece| piece.len).sum::<u64>();
        }
        assert_eq!(bytes, pages.len() as u64 * 4 * ITEM + AUX_ITEM_LENS.iter().sum::<u64>());
        assert_eq!(stage.said(), [statuses[number].clone()]);
    }
    let agent = ways.iter().find_map(|way| match way {
        Way::Agent { metadata, regions } => Some((metadata.clone(), regions.len())),
        _ => None,
    });
    assert_eq!(agent, Some((Bytes::from_static(b"metadata of decode-agent"), 4 + 10)));
    assert!(ways.contains(&Way::Push { addr: "127.0.0.1:5601".to_owned() }), "{ways:?}");
    assert_eq!(ways.len(), 2);
    stage.succeeded(2);
}

/// The record of the recorded prefill engine, as a bootstrap client gives it.
fn prefill_rank() -> RankRecord {
    let rank = SglangRank::new("127.0.0.1", 5600, 16);
    let rank = rank.with(|rank| rank.kv_cache_dtype = Some("torch.float16".to_owned()));
    let worker = WorkerId { engine: EngineId::new("theirs").unwrap(), rank: 0 };
    let who = (worker, Incarnation::from_random(7));
    RankRecord::new(who, WorkerRole::Prefill, Parallel::default(), Vec::new(), vec![rank.offer()]).unwrap()
}
