//! Writes the corpus again: `cargo run --release -p kv-fuzz --example corpus -- DIRECTORY [CASES]`.
//!
//! The corpus has one input of every kind that a decoder accepts, and some that it refuses, which are named so. For the
//! machine it has the shortest scripts, out of `CASES` random ones, that together show everything that any of them
//! has shown; with 0 cases the scripts stay as they are.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

mod dialects;
mod timelines;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bytes::Bytes;
use kv_bootstrap::{LeaseJson, RankJson, SglangRank};
use kv_core::wire::{
    Abort, AbortAck, Acquire, Body, ConversationId, Delivery, Destination, Failed, Frame, Granted, Heartbeat,
    HeartbeatAck, Hello, Progress, Refused, Register, Registered, Release, Released, VERSIONS, Welcome,
    XferReq,
};
use kv_core::{
    Attempt, AuxIndex, CacheGroupList, ContentHash, Incarnation, KvArgs, Lease, LeaseRef, Mismatch, PageList,
    PeerCause, RankRecord, Region, RegionRole, Room, SessionId, TransferMode, WorkerRole,
};
#[cfg(feature = "fabric")]
use kv_fabric::fuzz::samples as fabric;
use kv_fuzz::driver::Cases;
use kv_fuzz::machine::{self, Outcome};
use kv_local::fuzz::samples as local;
#[cfg(feature = "nixl")]
use kv_nixl::fuzz::samples as nixl;
use kv_poll::queue::{AuxLayout, AuxRow, Logprob};
use kv_tcp::fuzz::samples as tcp;
use kv_transfer::params::{RemoteKv, TransferParams};
#[cfg(feature = "ucx")]
use kv_ucx::fuzz::samples as ucx;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let into = arguments.next().expect("the directory to write into");
    let cases = arguments.next().map_or(20_000, |text| text.parse().unwrap());
    let accepted = [
        ("wire", frames()),
        ("http_requests", requests()),
        ("http_responses", responses()),
        ("rank_record", ranks()),
        ("local_metadata", local::metadata().unwrap()),
        ("local_hello", local::hello().unwrap()),
        ("local_messages", local::messages().unwrap()),
        #[cfg(feature = "fabric")]
        ("fabric_metadata", fabric::metadata().unwrap()),
        #[cfg(feature = "fabric")]
        ("fabric_messages", fabric::messages()),
        ("tcp_metadata", tcp::metadata().unwrap()),
        ("tcp_greetings", tcp::greetings()),
        ("tcp_requests", tcp::requests()),
        ("tcp_replies", tcp::replies()),
        #[cfg(feature = "nixl")]
        ("nixl_metadata", nixl::metadata().unwrap()),
        #[cfg(feature = "nixl")]
        ("nixl_notification", nixl::notifications()),
        #[cfg(feature = "nixl")]
        ("nixl_datagram", nixl::datagrams()),
        #[cfg(feature = "nixl")]
        ("nixl_agent", nixl::agent_metadata()),
        #[cfg(feature = "ucx")]
        ("ucx_metadata", ucx::metadata().unwrap()),
        #[cfg(feature = "ucx")]
        ("ucx_messages", ucx::messages()),
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
    let refused = [
        ("http_requests", refused_requests()),
        ("aux_row", vec![vec![1, 1, 8, 0]]),
        ("zmtp", refused_zmtp()),
        ("side_channel", vec![b"\x93\xa3msg\0\0".to_vec()]),
    ];
    write(Path::new(&into), "", accepted);
    write(Path::new(&into), "refused-", refused);
}

fn write(into: &Path, prefix: &str, corpora: impl IntoIterator<Item = (&'static str, Vec<Vec<u8>>)>) {
    for (target, inputs) in corpora {
        let folder = into.join(target);
        std::fs::create_dir_all(&folder).unwrap();
        let bytes: usize = inputs.iter().map(Vec::len).sum();
        println!("{target}: {} {prefix}inputs, {bytes} bytes", inputs.len());
        for (number, input) in inputs.into_iter().enumerate() {
            std::fs::write(folder.join(format!("{prefix}{number:03}")), input).unwrap();
        }
    }
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
            failed_ms_ago: None,
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

/// Records of ranks, and a rank of SGLang.
fn ranks() -> Vec<Vec<u8>> {
    let of_sglang = SglangRank::new("10.0.0.1", 7000, 64).with(|rank| {
        (rank.parallel.tp_size, rank.parallel.tp_rank) = (4, 3);
        rank.kv_cache_dtype = Some("torch.bfloat16".to_owned());
        rank.dsv41_spec_layout = Some(serde_json::json!({"layers": [1, 2]}));
        rank.prefill_http_port = Some(30_000);
    });
    vec![rank(Some(5000)).into_bytes(), rank(None).into_bytes(), of_sglang.encode().to_vec()]
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
    let lease = serde_json::to_string(&LeaseJson { worker, incarnation, lease_ms: Some(9000) }).unwrap();
    let route = r#"{"attn_tp_size":1,"attn_tp_rank":0,"attn_cp_size":1,"attn_cp_rank":0,"attn_dp_size":1,
        "attn_dp_rank":0,"pp_size":1,"pp_rank":0,"system_dp_size":1,"system_dp_rank":0,"rank_ip":"10.0.0.1",
        "rank_port":1,"page_size":16,"kv_cache_dtype":"bf16","load_balance_method":"x","lease_ttl_s":5}"#;
    // The target's requests come to two desks in turn, and each has SGLang's ranks of its own.
    let put_route = request("PUT", "/route", route).repeat(2);
    let all = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    let texts = [
        put.clone() + "GET /v1/ranks?role=prefill&service=kv&dp_rank=0 HTTP/1.1\r\n\r\n",
        put.clone() + "GET /v1/ranks?role=prefill&modulo=4711&engine=prefill HTTP/1.1\r\n\r\n",
        put.clone() + &request("POST", "/v1/ranks/renew", &lease) + &request("DELETE", "/v1/ranks", &lease),
        put_route.clone() + &format!("GET /route?{all} HTTP/1.1\r\n\r\n"),
        put_route + &format!("GET /route?{} HTTP/1.1\r\n\r\n", all.replace("-1", "0")),
        request("POST", "/register_dp_rank", r#"{"bootstrap_room":7,"dp_rank":1}"#)
            + &request("POST", "/query_dp_ranks", r#"{"bootstrap_rooms":[7,"8"]}"#),
        "HEAD /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET http://h/health HTTP/1.1\r\n\r\n"
            .to_owned(),
        "POST /query_dp_ranks HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n\
         14;a=b\r\n{\"bootstrap_rooms\":[\r\n2\r\n]}\r\n0\r\nTrailer: x\r\n\r\n"
            .to_owned(),
    ];
    texts.map(String::into_bytes).to_vec()
}

fn refused_requests() -> Vec<Vec<u8>> {
    let of_a_rank = "GET /v1/ranks?role=%70refill&dp_rank=%zz HTTP/1.1\r\nConnection: close\r\n\r\n";
    let cut_off = "POST /query_dp_ranks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;a=b\r\n{\"\r\n";
    vec![of_a_rank.into(), cut_off.into()]
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
    vec![sealed(AuxLayout::default(), first), sealed(layout, full)]
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
    let blocks = PageList::from_pages([7, 8, 3]).unwrap();
    kv_ec::host::fuzz::samples(&ContentHash::new("3f9a").unwrap(), &blocks).unwrap()
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

/// The stream of a socket that has a peer of the given kind: greeting, READY, and what follows.
fn stream(how: u8, socket_type: &str, rest: &[&[u8]]) -> Vec<u8> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9], greeting[10], greeting[11]) = (0xff, 1, 0x7f, 3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(socket_type.len() as u8);
    ready.extend(socket_type.as_bytes());
    ready.extend(b"\x08Identity\0\0\0\0");
    [&[how][..], &greeting, &[4, ready.len() as u8], &ready, &rest.concat()].concat()
}

/// Streams of PUSH, ROUTER and REQ sockets with a heartbeat, and messages of several parts.
fn zmtp() -> Vec<Vec<u8>> {
    let long = [&b"\x02\0\0\0\0\0\0\x01\x2c"[..], &[7; 300]].concat();
    let ping = b"\x04\x0a\x04PING\0\x0aabc";
    vec![
        // This side is REQ, PUSH, PULL, ROUTER; the pieces are of 1, 5, 9 and 33 bytes.
        stream(0, "ROUTER", &[b"\x01\0\x01\x03one\0\x03two", b"\x01\0", &long]),
        stream(1 + 4 * 4, "PULL", &[ping, b"\x04\x06\x05OTHER"]),
        stream(2 + 8 * 4, "PUSH", &[b"\x01\x09KV_STATUS\0\x014", ping, &long]),
        stream(3 + 32 * 4, "REQ", &[b"\x01\0\0\x11\x93\xc4\x0cget_meta_msg\0\0"]),
    ]
}

fn refused_zmtp() -> Vec<Vec<u8>> {
    vec![stream(2, "PUSH", &[b"\x02\xff\xff\xff\xff\xff\xff\xff\xff"]), stream(2, "DEALER", &[])]
}

fn side_channel() -> Vec<Vec<u8>> {
    let request = |ranks: &[u8]| [&b"\x93\xc4\x0cget_meta_msg"[..], ranks].concat();
    vec![request(b"\0\0"), request(b"\xcd\x01\0\xce\0\0\0\x07")]
}
