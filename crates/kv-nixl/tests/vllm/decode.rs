//! A decode worker of vLLM reads from us.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Plane, Time};
use serde::Serialize;
use serde_json::json;
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::{BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, Cache, LAYERS, Vllm, block, offset};

const ENGINE: &str = "a prefill engine that is no vLLM";

impl Cache {
    fn fill(&self) {
        for (layer, index) in (0..LAYERS).flat_map(|layer| (0..BLOCKS).map(move |index| (layer, index))) {
            self.pool.write(offset(layer, index), &block(layer, index)).unwrap();
        }
    }

    /// Changes one byte of a block of a region.
    fn spoil(&self, region: usize, block: usize) {
        let (at, mut byte) = (offset(region, block) + 1234, [0]);
        self.pool.read(at, &mut byte).unwrap();
        self.pool.write(at, &[!byte[0]]).unwrap();
    }

    /// What the side channel answers: vLLM's two layers of msgpack around our agent's metadata.
    fn handshake(&self, compatibility_hash: &str) -> Vec<u8> {
        #[derive(Serialize)]
        struct Handshake<'a> {
            compatibility_hash: &'a str,
            agent_metadata_bytes: Bytes,
        }
        #[derive(Serialize)]
        struct Agent {
            engine_id: &'static str,
            agent_metadata: Bytes,
            kv_caches_base_addr: Vec<u64>,
            device_id: u32,
            num_blocks: usize,
            block_lens: Vec<usize>,
            block_strides: Vec<usize>,
            kv_cache_layout: &'static str,
            block_size: usize,
            ssm_sizes: (u32, u32),
            attn_backend_name: &'static str,
            physical_blocks_per_logical_kv_block: u32,
        }
        let base = |layer| self.pool.addr() + offset(layer, 0) as u64;
        let agent = Agent {
            engine_id: ENGINE,
            agent_metadata: self.plane.agent_metadata().unwrap(),
            kv_caches_base_addr: (0..LAYERS).map(base).collect(),
            device_id: 0,
            num_blocks: BLOCKS,
            block_lens: vec![BLOCK_BYTES; LAYERS],
            block_strides: vec![BLOCK_BYTES; LAYERS],
            kv_cache_layout: "LBHNC",
            block_size: BLOCK_TOKENS,
            ssm_sizes: (0, 0),
            attn_backend_name: "FLASH_ATTN",
            physical_blocks_per_logical_kv_block: 1,
        };
        let agent_metadata_bytes = rmp_serde::to_vec_named(&agent).unwrap().into();
        rmp_serde::to_vec_named(&Handshake { compatibility_hash, agent_metadata_bytes }).unwrap()
    }
}

/// vLLM's side channel: answers every request with this payload and a clock reading. Returns its port.
fn side_channel(payload: Vec<u8>) -> u16 {
    let (tell, told) = channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut socket = RouterSocket::new();
            let endpoint = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
            tell.send(endpoint.rsplit(':').next().unwrap().parse().unwrap()).unwrap();
            loop {
                let request = socket.recv().await.unwrap().into_vec();
                let [from, empty, question] = &request[..] else { panic!("{request:?}") };
                assert!(question.windows(12).any(|word| word == b"get_meta_msg"), "{question:?}");
                let clock = rmp_serde::to_vec(&1.5_f64).unwrap();
                let frames = [from.clone(), empty.clone(), payload.clone().into(), clock.into()];
                socket.send(ZmqMessage::try_from(frames.to_vec()).unwrap()).await.unwrap();
            }
        });
    });
    told.recv_timeout(Duration::from_secs(30)).unwrap()
}

impl Vllm {
    /// Requests that were prefilled elsewhere, which it reads in one go.
    fn ask(&mut self, requests: &[Request], port: u16) {
        let mut stdin = self.process.stdin.take().unwrap();
        for Request { id, blocks } in requests {
            let tokens = blocks.len() * BLOCK_TOKENS;
            let params = json!({
                "do_remote_prefill": true, "do_remote_decode": false, "transfer_mode": "pull",
                "remote_engine_id": ENGINE, "remote_request_id": id, "remote_block_ids": [blocks],
                "remote_host": "127.0.0.1", "remote_port": port, "remote_num_tokens": tokens,
                "tp_size": 1, "dcp_size": 1, "pp_size": 1,
            });
            let line =
                json!({"id": format!("d-{id}"), "params": params, "ntok": tokens, "src_blocks": blocks});
            writeln!(stdin, "{line}").unwrap();
        }
    }
}

struct Request {
    id: String,
    blocks: Vec<usize>,
}

#[test]
fn a_vllm_decode_worker_reads_the_bytes_and_releases_every_request_once() {
    let arguments = ["--role", "decode", "--params-file", "-", "--timeout", "120"];
    let Some(mut decode) = Vllm::start(&arguments) else { return };
    let Some(mut cache) = Cache::new() else { return };
    cache.fill();
    let hello = decode.lines.recv_timeout(Duration::from_secs(120)).expect("vLLM starts");
    let hash = hello["compat_hash"].as_str().expect("its first line has the hash of its configuration");
    let port = side_channel(cache.handshake(hash));

    // Eleven requests of scattered blocks, some of one and some of many; a byte of the last is wrong.
    let request = |(at, blocks): (usize, usize)| Request {
        id: format!("cmpl-{at}"),
        blocks: (0..blocks).map(|block| 1 + (at * 37 + block * 11) % (BLOCKS - 1)).collect(),
    };
    let sizes = [1, 4, 4, 16, 1, 2, 3, 30, 1, 1];
    let mut requests: Vec<Request> = sizes.into_iter().enumerate().map(request).collect();
    let used: BTreeSet<usize> = requests.iter().flat_map(|request| request.blocks.clone()).collect();
    let spoiled = (1..BLOCKS).find(|block| !used.contains(block)).unwrap();
    requests.push(Request { id: "cmpl-spoiled".to_owned(), blocks: vec![spoiled] });
    cache.spoil(2, spoiled);
    decode.ask(&requests, port);

    let mut held: BTreeMap<String, &Request> = requests.iter().map(|one| (one.id.clone(), one)).collect();
    let (deadline, mut beats, mut agents) = (Instant::now() + Duration::from_secs(150), 0, BTreeSet::new());
    let (mut result, mut events) = (None, Vec::new());
    while result.is_none() || !held.is_empty() {
        assert!(Instant::now() < deadline, "still held: {:?}, result: {result:?}", held.keys());
        result = result.or_else(|| decode.lines.try_recv().ok());
        cache.plane.poll(Time::ZERO, &mut events);
        while let Some(raw) = cache.plane.next_notification() {
            agents.insert(raw.agent.to_string());
            let text = std::str::from_utf8(&raw.message).expect("vLLM's notifications are text");
            if let Some(ids) = text.strip_prefix("HB:") {
                let known = |id: &str| requests.iter().any(|request| request.id == id);
                assert!(ids.split(',').all(known), "{text}");
                beats += 1;
                continue;
            }
            let id = text.strip_suffix(":1").unwrap_or_else(|| panic!("one consumer releases: {text}"));
            assert!(held.remove(id).is_some(), "released twice, or never held: {text}");
        }
    }
    let result = result.unwrap();
    println!("{beats} heartbeats");
    assert_eq!((&result["n"], &result["done"]), (&json!(11), &json!(11)), "{result}");
    assert_eq!((&result["failed"], &result["timed_out"]), (&json!([]), &json!([])), "{result}");
    // Every byte of the ten others, and of the spoiled one all but a block of one region.
    assert_eq!(result["wrong_bytes"], json!({"d-cmpl-spoiled": 1}), "{result}");
    let bytes: usize = requests.iter().map(|request| request.blocks.len() * LAYERS * BLOCK_BYTES).sum();
    assert_eq!(result["bytes"], json!(bytes));
    assert_eq!((agents.len(), events), (1, Vec::new()), "one agent, and nothing but its notifications");
    let stats = cache.plane.stats();
    assert_eq!((stats.strangers, stats.foreign_dropped), (0, 0));
}
