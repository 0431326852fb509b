//! Writes the corpus again: `cargo run --release -p kv-fuzz --example corpus -- DIRECTORY [CASES]`.
//!
//! The corpus has one input of every kind that a decoder accepts, and some that it refuses. For the machine
//! it has the shortest scripts, out of `CASES` random ones, that together show everything that any of them
//! has shown.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

mod dialects;
mod timelines;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bytes::Bytes;
use kv_bootstrap::{LeaseJson, RankJson};
use kv_core::hash::Fnv1a;
use kv_core::wire::{
    Abort, AbortAck, Acquire, Body, ConversationId, Delivery, Destination, Failed, Frame, Granted, Heartbeat,
    HeartbeatAck, Hello, Progress, Refused, Register, Registered, Release, Released, VERSIONS, Welcome,
    XferReq,
};
use kv_core::{
    Attempt, AuxIndex, CacheGroupList, ContentHash, Incarnation, KvArgs, Lease, LeaseRef, MemoryKind,
    Mismatch, PageList, PeerCause, RankRecord, Region, RegionRole, Room, SessionId, TransferMode, WorkerRole,
};
use kv_fuzz::driver::Cases;
use kv_fuzz::machine::{self, Outcome};
use kv_poll::queue::{AuxLayout, AuxRow, Logprob};
use kv_transfer::params::{RemoteKv, TransferParams};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let into = arguments.next().expect("the directory to write into");
    let cases = arguments.next().map_or(20_000, |text| text.parse().unwrap());
    let targets: [(&str, Vec<Vec<u8>>); 29] = [
        ("wire", frames()),
        ("http_requests", requests()),
        ("http_responses", responses()),
        ("rank_record", vec![rank(Some(5000)).into_bytes(), rank(None).into_bytes()]),
        ("local_metadata", vec![local_metadata(0), local_metadata(3)]),
        ("local_hello", vec![local_hello()]),
        ("local_messages", messages()),
        ("tcp_metadata", vec![tcp_metadata(0), tcp_metadata(2)]),
        ("tcp_greetings", tcp_greetings()),
        ("tcp_requests", tcp_requests()),
        ("tcp_replies", vec![tcp_replies()]),
        ("nixl_metadata", vec![nixl_metadata(0), nixl_metadata(2)]),
        ("nixl_notification", notifications()),
        ("nixl_datagram", datagrams()),
        ("nixl_agent", vec![nixl_agent(0), nixl_agent(3)]),
        ("aux_row", aux_rows()),
        ("params", params()),
        ("ec_params", ec_params()),
        ("ec_host", ec_host()),
        ("timeline", timelines::records()),
        ("zmtp", zmtp()),
        ("side_channel", side_channel()),
        ("vllm_answer", dialects::vllm_answers()),
        ("vllm_notification", dialects::vllm_notifications()),
        ("sglang_message", dialects::sglang_messages()),
        ("machine", scripts("machine", machine::run, cases)),
        ("entries", scripts("entries", machine::run_entries, cases)),
        ("vllm_machine", scripts("vllm_machine", machine::run_vllm, cases)),
        ("sglang_machine", scripts("sglang_machine", machine::run_sglang, cases)),
    ];
    let with_headers = [
        ("fabric_metadata", vec![fabric_metadata(0), fabric_metadata(2)]),
        ("fabric_messages", fabric_messages()),
        ("ucx_metadata", vec![ucx_metadata(0), ucx_metadata(2)]),
        ("ucx_messages", ucx_messages()),
    ];
    for (target, inputs) in targets.into_iter().chain(with_headers) {
        let folder = Path::new(&into).join(target);
        std::fs::create_dir_all(&folder).unwrap();
        let bytes: usize = inputs.iter().map(Vec::len).sum();
        println!("{target}: {} inputs, {bytes} bytes", inputs.len());
        for (number, input) in inputs.into_iter().enumerate() {
            std::fs::write(folder.join(format!("{number:03}")), input).unwrap();
        }
    }
}

fn fabric_metadata(regions: usize) -> Vec<u8> {
    let (host, process) = (((1_u64, 2_u64), 3_u64), (4_u64, 5_u64, 6_i32, 7_u64));
    let name = Bytes::from_static(b"\x02\0\x1f\x90\x7f\0\0\x01\0\0\0\0\0\0\0\0");
    let ports = vec![(name.clone(), None), (name, Some(1_u16))];
    let mut bytes = b"KVF\x02".to_vec();
    // A key for both endpoints, and one for each.
    let regions: Vec<_> = (0..regions)
        .map(|region| (0_u64, 1_u64 << 20, vec![0xfeed_u64; 1 + region % 2], Some(0_u16)))
        .collect();
    rmp_serde::encode::write(
        &mut bytes,
        &((8_u64, 9_u64), "tcp;ofi_rxm", host, process, ports, 8_u8, regions),
    )
    .unwrap();
    bytes
}

/// Steps of a guest: messages, each after its length, and writes that carry a number.
fn fabric_messages() -> Vec<Vec<u8>> {
    let message = |kind: u8, [len, count, sequence]: [u32; 3], body: &[u8]| {
        let numbers = [len, count, sequence].map(u32::to_le_bytes).concat();
        let message = [&7_u64.to_le_bytes()[..], &[kind, 0, 0, 0], &numbers, body].concat();
        [&[128 | (message.len() >> 8) as u8, message.len() as u8], &message[..]].concat()
    };
    let hello = message(1, [0; 3], &[5; 16 + 16 + 32 + 16]);
    let frames =
        [message(3, [4, 0, 0], b"done"), message(3, [8, 0, 0], b"two "), message(4, [0; 3], b"part")];
    let counted = [message(3, [4, 2, 9], b"done"), vec![0, 9, 0, 9], message(5, [0, 0, 9], b"")];
    let withdrawn = [message(3, [4, 3, 9], b"done"), vec![0, 9], message(5, [0, 2, 9], b""), vec![0, 9]];
    let questions = [message(8, [0, 128, 0], b""), message(8, [0, 0, 1], b""), message(9, [0, 0, 1], b"")];
    vec![hello, frames.concat(), counted.concat(), withdrawn.concat(), questions.concat()]
}

fn ucx_metadata(regions: usize) -> Vec<u8> {
    let (host, process) = (((1_u64, 2_u64), 3_u64), (4_u64, 5_u64, 6_i32, 7_u64));
    let name = ((8_u64, 9_u64), Bytes::from_static(b"a worker's address"));
    let mut bytes = b"KVU\x02".to_vec();
    rmp_serde::encode::write(&mut bytes, &(name, host, process, vec![(0xfeed_u64, 1_u64 << 20); regions]))
        .unwrap();
    bytes
}

/// A header, a hello, and welcomes with the keys of no region and of two.
fn ucx_messages() -> Vec<Vec<u8>> {
    let (host, process) = (((1_u64, 2_u64), 3_u64), (4_u64, 5_u64, 6_i32, 7_u64));
    let name = ((8_u64, 9_u64), Bytes::from_static(b"a worker's address"));
    let parting = (10_u64, 11_u64);
    let welcome = |keys| {
        let keys = vec![Bytes::from_static(b"a region's key"); keys];
        rmp_serde::to_vec(&((5_u64, 6_u64), keys, parting)).unwrap()
    };
    let hello = rmp_serde::to_vec(&((8_u64, 9_u64), [5_u8; 32], name, host, process, parting)).unwrap();
    vec![[&b"KU\x02\x03"[..], &[7; 16]].concat(), hello, welcome(0), welcome(2)]
}

fn args() -> KvArgs {
    KvArgs::builder("prefill", 0)
        .pages(32, 16)
        .region(Region::dram(RegionRole::Kv, 0x1_0000, 32 * 64, 64).layer(0))
        .region(Region::dram(RegionRole::Aux, 0x3_0000, 4 * 16, 16))
        .build()
        .unwrap()
}

fn frames() -> Vec<Vec<u8>> {
    let (attempt, low_watermark, conversation) = (Attempt(3), Attempt(2), ConversationId::new(1, 9));
    let pages = PageList::from_pages([4, 5, 9]).unwrap();
    let groups: kv_core::CacheGroupLists =
        vec![CacheGroupList { group: 1, first: 6, items: pages.clone() }].try_into().unwrap();
    let args = args();
    let hello = Hello {
        versions: VERSIONS,
        to: Incarnation::from_random(9),
        worker: args.worker().clone(),
        incarnation: Incarnation::from_random(1),
        conversation,
        nonce: 7,
        transport: "local".to_owned(),
        metadata: Bytes::from_static(b"memory"),
        geometry: Some(Box::new(args.geometry().clone())),
        suffixed: true,
        service: "kv".to_owned(),
    };
    let mismatch = Mismatch { field: "dtype".to_owned(), ours: "bf16".to_owned(), theirs: "f32".to_owned() };
    let newer = PeerCause::Other { name: "Preempted".to_owned() };
    let (room, request) = (Room::Number(7), Room::request("cmpl-1-0123abcd").unwrap());
    let runs = vec![(4, 5)];
    let register = |delivery| {
        let room = request.clone();
        Body::Register(Register { attempt, low_watermark, room, ranks: 2, ttl_ms: 60_000, delivery })
    };
    let bodies = [
        Body::Hello(hello),
        Body::Welcome(Welcome { versions: VERSIONS, nonce: 7, conversation, ask: 4 }),
        Body::Refused(Refused {
            versions: VERSIONS,
            nonce: 7,
            cause: PeerCause::Incompatible(mismatch),
            conversation,
        }),
        Body::XferReq(XferReq {
            attempt,
            low_watermark,
            hash: ContentHash::new("image-1").unwrap(),
            compatibility: "model".to_owned(),
            bytes: 4096,
            ttl_ms: 60_000,
            delivery: Delivery::Read(Acquire { lease_id: None, number: 3 }),
        }),
        register(Delivery::Write(Destination {
            pages: pages.clone(),
            first_page: 1,
            total_pages: 4,
            aux: Some(AuxIndex(2)),
            aux_here: true,
            groups: groups.clone(),
            ask: 4,
            permit_ms: 10_000,
        })),
        register(Delivery::Read(Acquire { lease_id: None, number: 6 })),
        Body::Registered(Registered { attempt }),
        Body::Progress(Progress { attempt, done: vec![(1, 1)], total: Some(2), skipped: vec![3] }),
        Body::Progress(Progress { attempt, done: vec![(0, 2), (5, 1)], total: Some(9), skipped: vec![3] }),
        Body::Failed(Failed { attempt, cause: PeerCause::LeaseConsumed { lease_id: 7 }, quiet: true }),
        Body::Failed(Failed { attempt, cause: newer, quiet: false }),
        Body::Abort(Abort {
            low_watermark: Attempt(0),
            attempt,
            room,
            lease_id: Some(SessionId(5)),
            cause: PeerCause::Aborted,
        }),
        Body::AbortAck(AbortAck { attempt }),
        Body::Granted(Granted {
            attempt,
            number: 6,
            lease_id: SessionId(5),
            pages,
            aux: None,
            lease_ms: 30_000,
            interval_ms: 5000,
            groups,
        }),
        Body::Heartbeat(Heartbeat {
            number: 6,
            low_watermark,
            leases: runs.clone(),
            asked: vec![(10, 1)],
            writes: true,
        }),
        Body::HeartbeatAck(HeartbeatAck {
            number: 6,
            low_watermark,
            lease_ms: 20_000,
            leases: runs.clone(),
            permit_ms: 10_000,
        }),
        Body::Release(Release { low_watermark, attempts: runs.clone(), answer: true }),
        Body::Released(Released { attempts: runs }),
    ];
    bodies.into_iter().map(|body| Frame { conversation, body }.encode().unwrap().to_vec()).collect()
}

fn record() -> RankRecord {
    let args = args();
    let who = (args.worker().clone(), Incarnation::from_random(77));
    let way = ("local", Bytes::from_static(b"memory"));
    RankRecord::serving_kv(who, WorkerRole::Prefill, way, args.geometry()).unwrap()
}

fn rank(lease_ms: Option<u64>) -> String {
    serde_json::to_string(&RankJson::new(&record(), lease_ms)).unwrap()
}

fn request(method: &str, target: &str, body: &str) -> String {
    format!("{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

fn requests() -> Vec<Vec<u8>> {
    let put = request("PUT", "/v1/ranks", &rank(Some(5000)));
    let RankRecord { worker, incarnation, .. } = record();
    let lease = serde_json::to_string(&LeaseJson { worker, incarnation, lease_ms: Some(9) }).unwrap();
    let route = r#"{"attn_tp_size":1,"attn_tp_rank":0,"attn_cp_size":1,"attn_cp_rank":0,"attn_dp_size":1,
        "attn_dp_rank":0,"pp_size":1,"pp_rank":0,"system_dp_size":1,"system_dp_rank":0,"rank_ip":"10.0.0.1",
        "rank_port":1,"page_size":16,"kv_cache_dtype":"bf16","load_balance_method":"x","lease_ttl_s":5}"#;
    let all = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    let texts = [
        put.clone() + "GET /v1/ranks?role=prefill&service=kv&dp_rank=0 HTTP/1.1\r\n\r\n",
        put.clone() + "GET /v1/ranks?role=prefill&modulo=4711&engine=prefill HTTP/1.1\r\n\r\n",
        put.clone() + &request("POST", "/v1/ranks/renew", &lease) + &request("DELETE", "/v1/ranks", &lease),
        request("PUT", "/route", route) + &format!("GET /route?{all} HTTP/1.1\r\n\r\n"),
        request("PUT", "/route", route) + &format!("GET /route?{} HTTP/1.1\r\n\r\n", all.replace("-1", "0")),
        request("POST", "/register_dp_rank", r#"{"bootstrap_room":7,"dp_rank":1}"#)
            + &request("POST", "/query_dp_ranks", r#"{"bootstrap_rooms":[7,"8"]}"#),
        "HEAD /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET http://h/health HTTP/1.1\r\n\r\n"
            .to_owned(),
        "POST /query_dp_ranks HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n\
         13;a=b\r\n{\"bootstrap_rooms\":[\r\n2\r\n]}\r\n0\r\nTrailer: x\r\n\r\n"
            .to_owned(),
        "GET /v1/ranks?role=%70refill&dp_rank=%zz HTTP/1.1\r\nConnection: close\r\n\r\n".to_owned(),
    ];
    texts.map(String::into_bytes).to_vec()
}

fn responses() -> Vec<Vec<u8>> {
    let ranks = format!("[{}]", rank(None));
    let texts = [
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{ranks}", ranks.len()),
        "HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 204 None\r\nConnection: close\r\n\r\n".to_owned(),
        "HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n".to_owned(),
        "HTTP/1.0 503 Later\r\n\r\n{\"error\":\"x\",\"registered\":1,\"expected\":2}".to_owned(),
    ];
    texts.map(String::into_bytes).to_vec()
}

type Place = (Option<u32>, u64, u64);

fn local_metadata(regions: usize) -> Vec<u8> {
    let (host, token) = (((1_u64, 2_u64), 3_u64), (4_u64, 5_u64));
    let places: Vec<Place> = vec![(Some(0), 64, 128); regions];
    let arenas = [4096_u64, 8192];
    let mut bytes = b"KVL\x01".to_vec();
    rmp_serde::encode::write(&mut bytes, &(host, token, "kv-local-0a", arenas, places)).unwrap();
    bytes
}

fn local_hello() -> Vec<u8> {
    [b"KVH\x01".to_vec(), vec![7; 16], local_metadata(2)].concat()
}

fn messages() -> Vec<Vec<u8>> {
    let message = |kind: u8, body: &[u8]| {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend(body);
        bytes
    };
    let all = [message(1, &local_hello()), message(2, b"frame"), message(2, &[9; 5000]), message(3, b"")];
    vec![[vec![255], all.concat()].concat(), [vec![6], all[..2].concat()].concat()]
}

fn tcp_metadata(regions: usize) -> Vec<u8> {
    let addresses = ["10.0.0.1:9000", "[fd00::1]:9001"];
    let addresses = addresses.map(|address| address.parse::<std::net::SocketAddr>().unwrap());
    let mut bytes = b"KVT\x02".to_vec();
    let all = ((4_u64, 5_u64), addresses, vec![4096_u64; regions]);
    rmp_serde::encode::write(&mut bytes, &all).unwrap();
    bytes
}

fn tcp_greetings() -> Vec<Vec<u8>> {
    let (identity, way) = ([7; 48], [9; 16]);
    let hello = [&b"KVt\x02"[..], &1_u32.to_le_bytes(), &identity, &identity, &way].concat();
    let welcome = [&b"KVw\x02"[..], &[0; 4], &identity, &way, &77_u64.to_le_bytes()].concat();
    vec![hello, welcome]
}

/// The beginning of a message: kind and verdict, ranges, length of the frame, bytes, time, number.
fn tcp_header(kind: [u8; 2], ranges: u16, frame: u32, bytes: u64, number: u32) -> Vec<u8> {
    let (ranges, frame, bytes) = (ranges.to_le_bytes(), frame.to_le_bytes(), bytes.to_le_bytes());
    let (time, number) = ((1_u64 << 60).to_le_bytes(), u64::from(number).to_le_bytes());
    [&kind[..], &ranges, &frame, &bytes, &time, &number].concat()
}

fn tcp_requests() -> Vec<Vec<u8>> {
    let range = |region: u32, len: u32, offset: u64| {
        [&region.to_le_bytes()[..], &len.to_le_bytes(), &offset.to_le_bytes()].concat()
    };
    let frame = [tcp_header([1, 0], 0, 5, 0, 0), b"frame".to_vec()].concat();
    let ranges = [range(0, 100, 900), range(1, 200, 69_000)].concat();
    let write = [tcp_header([2, 0], 2, 6, 300, 1), ranges, vec![8; 300], b"\x01notify".to_vec()].concat();
    let read = [tcp_header([3, 0], 1, 0, 70_000, 2), range(1, 70_000, 0)].concat();
    let all = [frame.clone(), write.clone(), read, frame.clone()].concat();
    vec![
        [vec![255], all].concat(),
        [vec![5], write.clone(), write].concat(),
        [vec![0], frame.clone(), frame].concat(),
    ]
}

fn tcp_replies() -> Vec<u8> {
    let answers = [0, 1, 2].map(|verdict| tcp_header([4, verdict], 0, 0, 0, 3));
    [answers.concat(), tcp_header([5, 0], 0, 0, 1000, 4)].concat()
}

fn nixl_metadata(regions: usize) -> Vec<u8> {
    let name = format!("kv-{:016x}", 7);
    let mut nixl = b"nixlSerDes|Agent".to_vec();
    nixl.extend((name.len() as u64).to_le_bytes());
    nixl.extend(name.as_bytes());
    nixl.extend(b"|rest");
    let digest = Fnv1a::of(&nixl);
    let places = vec![(4096_u64, 8192_u64, 64_u64, MemoryKind::Dram, 0_u64); regions];
    let (host, process, reach) = (((1_u64, 2_u64), 3_u64), (4_u64, 5_u64, 6_i32, 7_u64), (true, true, true));
    let all = ("kv-nixl", 4_u32, 7_u64, "UCX", host, process, reach, places, digest, Bytes::from(nixl));
    rmp_serde::to_vec(&all).unwrap()
}

/// The metadata of an agent of another framework with `ranges` ranges of host memory, as NIXL writes it.
fn nixl_agent(ranges: u64) -> Vec<u8> {
    let mut out = b"nixlSerDes|".to_vec();
    let mut put = |tag: &str, value: &[u8]| {
        out.extend(tag.as_bytes());
        out.extend((value.len() as u64).to_le_bytes());
        out.extend(value);
        out.push(b'|');
    };
    put("Agent", b"0f8fad5b-d9cb-469f");
    put("Conns", &1_u64.to_le_bytes());
    put("t", b"UCX");
    put("c", &[9; 40]);
    put("", b"MemSection");
    put("nixlSecElms", &u64::from(ranges > 0).to_le_bytes());
    if ranges > 0 {
        put("bknd", b"UCX");
        put("nixlDList", b"nixlSDList");
        put("t", &0_u32.to_le_bytes());
        put("n", &ranges.to_le_bytes());
    }
    for range in 1..=ranges {
        put("", &[[range << 12, 4096, 0].map(u64::to_le_bytes).concat(), vec![8; 20]].concat());
    }
    out
}

fn notifications() -> Vec<Vec<u8>> {
    let head = |kind: u8| [vec![2, kind], vec![7; 16]].concat();
    let frame = [head(0), b"frame".to_vec()].concat();
    vec![frame, [head(1), vec![5; 8]].concat(), head(2), [head(3), vec![6; 8]].concat(), head(4)]
}

/// Datagrams with every kind of notification: all of them, two before one that is cut off, and a ring.
fn datagrams() -> Vec<Vec<u8>> {
    let put = |bytes: Vec<u8>| [&(bytes.len() as u16).to_le_bytes()[..], &bytes].concat();
    let all = notifications().into_iter().map(put).collect::<Vec<_>>().concat();
    let cut = all[..60].to_vec();
    vec![all, cut, vec![0]]
}

/// The layout of the reader, a wish to seal the row, and the row.
fn aux_rows() -> Vec<Vec<u8>> {
    let sealed = |layout: AuxLayout, row: AuxRow| {
        let mut bytes = vec![0; layout.row_len() as usize];
        row.encode(&layout, &Room::Number(7), &mut bytes).unwrap();
        let of_layout = [layout.logprobs as u8, layout.top_logprobs as u8, layout.hidden_bytes as u8, 1];
        [of_layout.to_vec(), bytes].concat()
    };
    let first = AuxRow { first_token: 4711, prompt_tokens: 40, cached_tokens: 32, ..AuxRow::default() };
    let logprob = Logprob { token: 4711, logprob: -0.25, top: vec![(4711, -0.25), (9, f32::NEG_INFINITY)] };
    let full = AuxRow { logprobs: vec![logprob, Logprob::default()], hidden: vec![7; 48], ..first.clone() };
    let layout = AuxLayout { logprobs: 3, top_logprobs: 2, hidden_bytes: 64 };
    vec![sealed(AuxLayout::default(), first), sealed(layout, full), vec![1, 1, 8, 0]]
}

fn params() -> Vec<Vec<u8>> {
    let args = args();
    let pages = PageList::from_pages([7, 8, 3]).unwrap();
    let lease_refs = [LeaseRef::new(Incarnation::from_random(77), SessionId(5))];
    let kept = |room, lease| {
        RemoteKv::granted(&args, "10.0.0.1:8998", room, 40, &pages, &lease_refs, lease).unwrap()
    };
    let second = std::time::Duration::from_secs(1);
    let of_vllm = r#"{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[4, 5, 6, 9]],
        "remote_engine_id": "b7a1c2f0", "remote_request_id": "cmpl-9f0c-0-1a2b3c4d", "remote_host": "10.1.2.3",
        "remote_port": 5600, "tp_size": 2, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 61,
        "remote_blocks_expiry_time": null, "remote_registration_generation": 0, "transfer_mode": "pull",
        "of_another": {"x": [1.5, "\u00e4"]}}"#;
    let of_a_proxy = r#"{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null}"#;
    vec![
        TransferParams::prefill(TransferMode::Push).to_json().into_bytes(),
        TransferParams::decode(TransferMode::Pull, kept(Room::Number(42), Lease::Renewable(30 * second)))
            .to_json()
            .into_bytes(),
        TransferParams::next_turn(kept(Room::request("cmpl-1").unwrap(), Lease::Fixed(480 * second)))
            .to_json()
            .into_bytes(),
        of_vllm.into(),
        of_a_proxy.into(),
    ]
}

fn ec_params() -> Vec<Vec<u8>> {
    let held = r#"{"3f9a": {"modality": "image", "item_indices": [0, 2], "metadata": {"image_grid_thw": [1, 4, 5]},
        "peer_host": "10.0.0.7", "peer_port": 5601, "size_bytes": 573440, "shape": [80, 3584]},
        "77b0": {"modality": "audio", "item_indices": ["1"], "metadata": {}, "of_another": {"x": [1.5, null]}}}"#;
    vec![held.into(), b"{}".to_vec()]
}

fn ec_host() -> Vec<Vec<u8>> {
    let pages = PageList::from_pages([7, 8, 3]).unwrap();
    let named = |number: u64, ask: serde_json::Value| rmp_serde::to_vec(&(number, ask)).unwrap();
    let held = BTreeMap::from([("Ok", BTreeMap::from([("Held", (4_u64, 8000_u64, 2_u32, pages))]))]);
    let held = rmp_serde::to_vec(&(9_u64, held)).unwrap();
    let welcome = rmp_serde::to_vec(&BTreeMap::from([("Welcome", (64_u32, 4096_u32, "one model"))])).unwrap();
    vec![
        named(1, serde_json::json!({"Reserve": ["3f9a", 10_000]})),
        named(2, serde_json::json!({"Commit": 4})),
        named(3, serde_json::json!({"Pin": "3f9a"})),
        named(4, serde_json::json!({"Runs": [4, 1]})),
        held,
        [b"kvec\x01\0\0\0".to_vec(), welcome].concat(),
    ]
}

/// Scripts that show everything that was shown, the shortest first.
fn scripts(target: &str, run: fn(&[u8]) -> Outcome, cases: u64) -> Vec<Vec<u8>> {
    let mut all = Cases::new(kv_fuzz::driver::corpus(target), 256, 24301);
    let mut shown: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    for _ in 0..cases {
        let case = all.next_case();
        let outcome = run(&case);
        let features: BTreeSet<u32> = outcome.features.into_iter().collect();
        let mut fresh = false;
        for feature in features {
            let shortest = shown.entry(feature).or_default();
            if shortest.is_empty() || case.len() < shortest.len() {
                fresh |= shortest.is_empty();
                *shortest = case.clone();
            }
        }
        if fresh {
            all.keep(&case, outcome.steps);
        }
    }
    let mut candidates: Vec<Vec<u8>> = shown.into_values().collect();
    candidates.sort_by_key(|case| (case.len(), case.clone()));
    candidates.dedup();
    // Those that add nothing to the shorter ones before them are left out.
    let mut seen = BTreeSet::new();
    candidates
        .retain(|case| run(case).features.into_iter().filter(|&feature| seen.insert(feature)).count() > 0);
    candidates
}

/// Streams of PUSH, ROUTER and REQ sockets: greeting, READY, a heartbeat, and messages of several parts.
fn zmtp() -> Vec<Vec<u8>> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9], greeting[10], greeting[11]) = (0xff, 1, 0x7f, 3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    let stream = |how: u8, socket_type: &str, rest: &[&[u8]]| {
        let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        ready.push(socket_type.len() as u8);
        ready.extend(socket_type.as_bytes());
        ready.extend(b"\x08Identity\0\0\0\0");
        [&[how][..], &greeting, &[4, ready.len() as u8], &ready, &rest.concat()].concat()
    };
    let long = [&b"\x02\0\0\0\0\0\0\x01\x2c"[..], &[7; 300]].concat();
    let ping = b"\x04\x0a\x04PING\0\x0aabc";
    vec![
        // This side is REQ, PUSH, PULL, ROUTER; the pieces are of 1, 5, 9 and 33 bytes.
        stream(0, "ROUTER", &[b"\x01\0\x01\x03one\0\x03two", b"\x01\0", &long]),
        stream(1 + 4 * 4, "PULL", &[ping, b"\x04\x06\x05OTHER"]),
        stream(2 + 8 * 4, "PUSH", &[b"\x01\x09KV_STATUS\0\x014", ping, &long]),
        stream(3 + 32 * 4, "REQ", &[b"\x01\0\0\x11\x93\xc4\x0cget_meta_msg\0\0"]),
        stream(2, "PUSH", &[b"\x02\xff\xff\xff\xff\xff\xff\xff\xff"]),
        stream(2, "DEALER", &[]),
    ]
}

fn side_channel() -> Vec<Vec<u8>> {
    let request = |ranks: &[u8]| [&b"\x93\xc4\x0cget_meta_msg"[..], ranks].concat();
    vec![request(b"\0\0"), request(b"\xcd\x01\0\xce\0\0\0\x07"), b"\x93\xa3msg\0\0".to_vec()]
}
