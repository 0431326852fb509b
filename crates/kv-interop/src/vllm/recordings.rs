//! Recorded exchanges of vLLM 0.33.0 with itself, with this machine in the place of either side.

use bytes::Bytes;
use kv_core::layout::HND_PACKED;
use kv_core::proto::Command;
use kv_core::{
    EngineId, Holds, KvArgs, Layout, Op, PageList, Region, RegionRole, RemoteRequest, RequestId, Room,
    SessionId, SessionOptions, TransferMode,
};
use serde_json::Value;

use super::config::{SideChannelAddr, VllmConfig};
use super::geometry::own_metadata;
use super::hash::{Compatibility, Factors, NIXL_CONNECTOR_VERSION};
use super::machine::VllmMachine;
use super::metadata::{NixlAgentMetadata, NixlHandshakePayload, answer};
use super::notification::Notification;
use crate::message::Way;
use crate::replay::{APART, BASE, Recording, Stage};

const PULL: &str = include_str!("../../tests/recordings/vllm-pull.jsonl");
const PUSH: &str = include_str!("../../tests/recordings/vllm-push.jsonl");
/// The engines of the recordings: layers, heads, elements of a head, blocks, tokens of a block, and the bytes
/// of a block in one layer.
const LAYERS: u64 = 2;
const HEADS: u32 = 2;
const HEAD_DIM: u32 = 8;
const BLOCKS: u32 = 12;
const TOKENS: u32 = 16;
const BLOCK_BYTES: u64 = 16 * 2 * 2 * 8 * 2;

fn args(engine: &str, mode: TransferMode) -> KvArgs {
    let layout = Layout::default().with(|layout| layout.axes = HND_PACKED);
    let mut args = KvArgs::builder(engine, 0).pages(BLOCKS, TOKENS).dtype("bf16").heads(HEADS, HEAD_DIM);
    args = args.layout(layout).transfer_mode(mode);
    for layer in 0..LAYERS {
        let (at, len) = (BASE + layer * APART, u64::from(BLOCKS) * BLOCK_BYTES);
        let region = Region::dram(RegionRole::Kv, at, len, BLOCK_BYTES);
        args = args.region(region.layer(layer as u32).holds(Holds::KeyValue));
    }
    args.build().unwrap()
}

fn compatibility() -> Compatibility {
    Compatibility::Factors(Box::new(Factors {
        vllm_version: "0.33.0".to_owned(),
        nixl_connector_version: NIXL_CONNECTOR_VERSION,
        model: "fake/model".to_owned(),
        dtype: "torch.bfloat16".to_owned(),
        num_kv_heads: HEADS,
        head_size: HEAD_DIM,
        num_hidden_layers: LAYERS as u32,
        attn_backend_name: "FLASH_ATTN".to_owned(),
        cache_dtype: "auto".to_owned(),
        is_hma_enabled: true,
        speculative_config: Value::Null,
    }))
}

fn stage(engine: &str, mode: TransferMode) -> Stage<VllmMachine> {
    let args = args(engine, mode);
    let config = VllmConfig::default().with(|config| {
        config.compatibility = compatibility();
        config.side_channel = Some(SideChannelAddr { host: "127.0.0.1".to_owned(), port: 5601 });
        config.seed = Some(1);
    });
    Stage::new(VllmMachine::new(&args, &config).unwrap(), &args)
}

/// Opens a receiver as a router's parameters say.
fn receive(stage: &mut Stage<VllmMachine>, session: u64, params: &Value, mode: TransferMode) -> usize {
    let text = |key: &str| params[key].as_str().unwrap().to_owned();
    let request = RequestId::new(&text("remote_request_id")).unwrap();
    let blocks: Vec<u32> = serde_json::from_value(params["remote_block_ids"][0].clone()).unwrap();
    let count = blocks.len();
    let remote = RemoteRequest::new(EngineId::new(&text("remote_engine_id")).unwrap(), request.clone());
    let remote = remote.with(|remote| {
        remote.block_ids = vec![PageList::from_pages(blocks).unwrap()];
        remote.num_tokens = params["remote_num_tokens"].as_u64().map(|tokens| tokens as u32);
        remote.registration_generation = params["remote_registration_generation"].as_u64();
    });
    let options = SessionOptions::default().with(|options| {
        options.remote = Some(Box::new(remote));
        options.mode = Some(mode);
        options.tokens = Some(count * TOKENS as usize);
    });
    let bootstrap_addr = format!("{}:{}", text("remote_host"), params["remote_port"]);
    let (session, room, options) = (SessionId(session), Room::Request(request), Box::new(options));
    stage.command(Command::OpenReceiver { session, room, bootstrap_addr, options });
    count
}

/// Gives a receiver the first blocks of its cache, after the block that vLLM gives to nobody.
fn give(stage: &mut Stage<VllmMachine>, session: u64, count: usize) {
    let pages = stage.pages(&(1..=count as u32).collect::<Vec<u32>>());
    stage.command(Command::InitReceiver { session: SessionId(session), pages, aux: None });
}

/// Opens a sender for the request of a router's parameters, and gives it the blocks in them.
fn send(stage: &mut Stage<VllmMachine>, session: u64, params: &Value, mode: TransferMode) {
    let room = Room::request(params["remote_request_id"].as_str().unwrap()).unwrap();
    let blocks: Vec<u32> = serde_json::from_value(params["remote_block_ids"][0].clone()).unwrap();
    let options = Box::new(SessionOptions::default().with(|options| options.mode = Some(mode)));
    let session = SessionId(session);
    stage.command(Command::OpenSender { session, room, receivers: 0, options });
    stage.command(Command::InitSender { session, num_pages: blocks.len(), aux: None });
    let chunk = stage.pages(&blocks);
    stage.command(Command::Send { session, chunk });
}

/// The metadata of the agent that a way leads to.
fn metadata(way: &Way) -> String {
    let Way::Agent { metadata, .. } = way else { panic!("{way:?}") };
    String::from_utf8_lossy(metadata).into_owned()
}

/// The metadata that the recordings give to the agent of an engine: no more than its name.
fn metadata_of(engine: &str) -> String {
    let name = format!("agent of {engine}");
    let len = (name.len() as u64).to_le_bytes();
    format!("nixlSerDes|Agent{}{name}", String::from_utf8_lossy(&len))
}

/// The regions of that agent: the address, the length and the stride of each.
fn regions(way: &Way) -> Vec<(u64, u64, u64)> {
    let Way::Agent { regions, .. } = way else { panic!("{way:?}") };
    regions.iter().map(|region| (region.addr, region.len, region.stride)).collect()
}

fn recorded_regions() -> Vec<(u64, u64, u64)> {
    let len = u64::from(BLOCKS) * BLOCK_BYTES;
    vec![(BASE, len, BLOCK_BYTES), (BASE + APART, len, BLOCK_BYTES)]
}

/// A worker of ours sends heartbeats from the first moment on, and vLLM's after some seconds.
fn without_heartbeats(told: impl IntoIterator<Item = Bytes>) -> Vec<Bytes> {
    told.into_iter().filter(|notification| !notification.starts_with(b"HB:")).collect()
}

/// What the side channel of our engine answers, and what the recorded engine has answered: equal in
/// everything but the keys that vLLM does not need.
fn is_recorded_payload(engine: &str, mode: TransferMode, recorded: &[Bytes]) {
    let metadata = Bytes::from(metadata_of(engine));
    let ours = own_metadata(&args(engine, mode), metadata, "FLASH_ATTN").unwrap();
    let (theirs, _clock) = answer(recorded).unwrap();
    assert_eq!(compatibility().shown(mode), theirs.compatibility_hash);
    let theirs = NixlAgentMetadata::decode(&theirs.agent_metadata_bytes).unwrap();
    // What vLLM gives a name is not compared.
    let mut same = theirs.clone();
    (same.region_names, same.region_mem_types) = (ours.region_names.clone(), ours.region_mem_types.clone());
    (same.region_num_blocks, same.region_group_ids) =
        (ours.region_num_blocks.clone(), ours.region_group_ids.clone());
    assert_eq!(ours, same);
    let payload = NixlHandshakePayload {
        compatibility_hash: compatibility().shown(mode),
        agent_metadata_bytes: ours.encode(),
    };
    assert_eq!(NixlHandshakePayload::decode(&payload.encode()).unwrap(), payload);
}

#[test]
fn our_reader_says_to_a_recorded_prefill_engine_what_vllm_has_said() {
    let recording = Recording::new(PULL);
    let mut stage = stage("D-engine", TransferMode::Pull);
    let (questions, answers) = (recording.said("D", "zmq"), recording.said("P", "zmq"));
    for (number, params) in recording.params().iter().enumerate() {
        let session = number as u64;
        let count = receive(&mut stage, session, params, TransferMode::Pull);
        if number == 0 {
            let (peer, way) = stage.way().unwrap();
            assert_eq!(way, Way::Request { addr: "127.0.0.1:5600".to_owned() });
            assert_eq!(stage.said(), questions[..1]);
            stage.hear(Some(peer), &answers[0]);
            let (_, agent) = stage.way().unwrap();
            assert_eq!(metadata(&agent), metadata_of("P-engine"));
            assert_eq!(regions(&agent), recorded_regions());
        }
        give(&mut stage, session, count);
        let posts = stage.posts();
        let bytes: u64 = posts.iter().flat_map(|post| &post.descriptors).map(|piece| piece.len).sum();
        assert_eq!(bytes, count as u64 * LAYERS * BLOCK_BYTES);
        assert!(posts.iter().all(|post| post.op == Op::Read));
        let told = posts.into_iter().filter_map(|post| post.notify).chain(stage.sent());
        assert_eq!(without_heartbeats(told), [recording.notified("D")[number].clone()]);
    }
    stage.succeeded(2);
}

#[test]
fn our_prefill_engine_shows_a_recorded_reader_what_vllm_has_shown_and_frees_at_its_word() {
    let recording = Recording::new(PULL);
    is_recorded_payload("P-engine", TransferMode::Pull, &recording.said("P", "zmq")[0]);
    let mut stage = stage("P-engine", TransferMode::Pull);
    for (number, notification) in recording.notified("D").iter().enumerate() {
        send(&mut stage, number as u64, &recording.params()[number], TransferMode::Pull);
        stage.notified("agent of D-engine", notification);
        stage.succeeded(number + 1);
    }
}

#[test]
fn our_writer_takes_recorded_registrations_and_ends_them_with_vllms_words() {
    let recording = Recording::new(PUSH);
    let mut stage = stage("P-engine", TransferMode::Push);
    let notified = recording.notified("D");
    let registrations = notified.iter().filter(|notification| notification.starts_with(b"PUSH_REG:"));
    for (number, notification) in registrations.enumerate() {
        send(&mut stage, number as u64, &recording.params()[number], TransferMode::Push);
        stage.notified("agent of D-engine", notification);
        if number == 0 {
            let (peer, way) = stage.way().unwrap();
            assert_eq!(way, Way::Request { addr: "127.0.0.1:5601".to_owned() });
            let question = recording.said("P", "zmq").into_iter().find(|parts| parts.len() == 1);
            assert_eq!(stage.said(), [question.unwrap()]);
            let shown = recording.said("D", "zmq").into_iter().find(|parts| parts.len() == 2);
            stage.hear(Some(peer), &shown.unwrap());
            let (_, agent) = stage.way().unwrap();
            assert_eq!(metadata(&agent), metadata_of("D-engine"));
            assert_eq!(regions(&agent), recorded_regions());
        }
        let posts = stage.posts();
        assert!(!posts.is_empty() && posts.iter().all(|post| post.op == Op::Write), "{:?}", stage.failures());
        let told: Vec<Bytes> = posts.into_iter().filter_map(|post| post.notify).chain(stage.sent()).collect();
        assert_eq!(told, [recording.notified("P")[number].clone()]);
        stage.succeeded(number + 1);
    }
}

#[test]
fn our_registrations_are_those_of_a_recorded_receiver_but_for_the_suffix_of_the_request() {
    let recording = Recording::new(PUSH);
    let shown = recording.said("D", "zmq").into_iter().find(|parts| parts.len() == 2).unwrap();
    is_recorded_payload("D-engine", TransferMode::Push, &shown);
    let mut stage = stage("D-engine", TransferMode::Push);
    let recorded: Vec<_> = recording.notified("D").iter().filter_map(registration).collect();
    for (number, params) in recording.params().iter().enumerate() {
        let session = number as u64;
        let count = receive(&mut stage, session, params, TransferMode::Push);
        if number == 0 {
            let (peer, _) = stage.way().unwrap();
            assert_eq!(stage.said(), recording.said("D", "zmq")[..1]);
            let answer = recording.said("P", "zmq").into_iter().find(|parts| parts.len() == 2);
            stage.hear(Some(peer), &answer.unwrap());
            // A receiver that is written to needs none of the writer's regions.
            assert_eq!(metadata(&stage.way().unwrap().1), metadata_of("P-engine"));
        }
        give(&mut stage, session, count);
        let said: Vec<Bytes> = stage.sent();
        let ours = said.iter().filter_map(registration).next().expect("a registration");
        let base = |id: &str| id.rsplit_once('-').map(|(base, _)| base.to_owned());
        assert_eq!(base(&ours.request_id), base(&recorded[number].request_id));
        let mut same = recorded[number].clone();
        same.request_id.clone_from(&ours.request_id);
        assert_eq!(ours, same);
        // The recorded writer names the request as its receiver did.
        stage.notified("agent of P-engine", &Bytes::from(format!("{}:1", ours.request_id)));
    }
    stage.succeeded(2);
}

fn registration(notification: &Bytes) -> Option<super::notification::PushRegistration> {
    match Notification::decode(notification).unwrap() {
        Notification::Registration(found) => Some(*found),
        _ => None,
    }
}
