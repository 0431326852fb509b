//! An unmodified vLLM decode worker reads KV pages from this transport, as a foreign agent.
//!
//! vLLM and its driver are no part of this project: `KV_PEERS` names the folder of the driver,
//! `vllm_pair.py`, and `PEER` the folder in which its `setup.sh` has installed vLLM. Without them there is
//! nothing to test. This is a process of its own, because UCX takes its network from the environment.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Plane, Region, RegionRole, Time};
use kv_nixl::{HostPool, NixlConfig, NixlPlane};
use serde::Serialize;
use serde_json::{Value, json};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// vLLM has a region for each layer, in which blocks of 16 tokens lie one after the other.
const LAYERS: usize = 4;
const BLOCKS: usize = 200;
const BLOCK_TOKENS: usize = 16;
/// Keys and values of one head of 128 elements of two bytes.
const BLOCK_BYTES: usize = BLOCK_TOKENS * 2 * 128 * 2;
const ENGINE: &str = "a prefill engine that is no vLLM";

/// Where the driver and vLLM are, if they are.
fn peers() -> Option<[PathBuf; 2]> {
    let folder = |name: &str| {
        let folder = env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_dir());
        if folder.is_none() {
            println!("SKIPPED: {name} names no folder; this test needs vLLM and its driver, see its header");
        }
        folder?.canonicalize().ok()
    };
    Some([folder("KV_PEERS")?, folder("PEER")?])
}

/// The fill with which the driver compares what vLLM has read.
fn block(region: usize, block: usize) -> Vec<u8> {
    let constant = ((block as u32) << 8).wrapping_add(region as u32 + 977);
    let word = |at: u32| at.wrapping_mul(2_654_435_761).wrapping_add(constant);
    (0..BLOCK_BYTES as u32 / 4).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// A KV cache on our plane, as vLLM lays it out.
struct Cache {
    plane: NixlPlane,
    pool: HostPool,
}

impl Cache {
    fn new() -> Option<Cache> {
        // SAFETY: this process has one test, and UCX has not started.
        unsafe { env::set_var("UCX_NET_DEVICES", "lo") };
        let nixl = workers::nixl()?;
        let region = BLOCKS * BLOCK_BYTES;
        let pool = HostPool::new(LAYERS * region).unwrap();
        let config = NixlConfig { foreign_bytes: 16 << 20, ..NixlConfig::default() };
        let mut plane = NixlPlane::new(nixl, config).unwrap();
        plane.add_pool(&pool).unwrap();
        for layer in 0..LAYERS {
            let addr = pool.addr() + (layer * region) as u64;
            plane.register(&Region::dram(RegionRole::Kv, addr, region as u64, BLOCK_BYTES as u64)).unwrap();
            for index in 0..BLOCKS {
                pool.write(layer * region + index * BLOCK_BYTES, &block(layer, index)).unwrap();
            }
        }
        Some(Cache { plane, pool })
    }

    /// Changes one byte of a block of a region.
    fn spoil(&self, region: usize, block: usize) {
        let at = (region * BLOCKS + block) * BLOCK_BYTES + 1234;
        let mut byte = [0];
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
        let base = |layer| self.pool.addr() + (layer * BLOCKS * BLOCK_BYTES) as u64;
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

/// vLLM's process. It ends with its owner.
struct Decode {
    process: Child,
    lines: Receiver<Value>,
}

impl Drop for Decode {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Decode {
    fn start([driver, installed]: &[PathBuf; 2]) -> Decode {
        // A port for its own side channel, which nobody asks anything.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(installed.join("nx/bin/python"));
        command.arg("-u").arg(driver.join("vllm_pair.py"));
        command.args(["--role", "decode", "--heads", "1", "--params-file", "-", "--timeout", "120"]);
        let numbers = [("--layers", LAYERS), ("--nblocks", BLOCKS), ("--my-port", usize::from(port))];
        for (name, number) in numbers {
            command.arg(name).arg(number.to_string());
        }
        command.env("PEER", installed).env("UCX_NET_DEVICES", "lo").stdin(Stdio::piped());
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = channel();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                println!("vLLM: {line}");
                if let Ok(line) = serde_json::from_str(&line) {
                    let _ = tell.send(line);
                }
            }
        });
        Decode { process, lines }
    }

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
    let Some(peers) = peers() else { return };
    let Some(mut cache) = Cache::new() else { return };
    let mut decode = Decode::start(&peers);
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
