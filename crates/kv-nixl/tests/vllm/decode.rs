//! A decode worker of vLLM reads from us.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Time, Transport, TransportEvent};
use serde::Serialize;
use serde_json::{Value, json};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::shape::{BLOCK_TOKENS, Seed, Shape};
use crate::{Cache, Vllm, control};

const ENGINE: &str = "a prefill engine that is no vLLM";

impl Cache {
    fn fill(&self) {
        let Shape { layers, blocks, .. } = self.shape;
        for (layer, index) in (0..layers).flat_map(|layer| (0..blocks).map(move |index| (layer, index))) {
            self.pool.write(self.shape.offset(layer, index), &self.shape.block(layer, index)).unwrap();
        }
    }

    /// Changes one byte of a block of a region.
    fn spoil(&self, region: usize, block: usize) {
        let (at, mut byte) = (self.shape.offset(region, block) + 1234, [0]);
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
        let base = |layer| self.pool.addr() + self.shape.offset(layer, 0) as u64;
        let Shape { layers, blocks, .. } = self.shape;
        let agent = Agent {
            engine_id: ENGINE,
            agent_metadata: self.transport.agent_metadata().unwrap(),
            kv_caches_base_addr: (0..layers).map(base).collect(),
            device_id: 0,
            num_blocks: blocks,
            block_lens: vec![self.shape.block_bytes(); layers],
            block_strides: vec![self.shape.block_bytes(); layers],
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

/// Requests that were prefilled elsewhere.
struct Requests {
    requests: Vec<Request>,
    /// One more, of which a byte is wrong.
    spoiled: String,
    /// Where vLLM's handshake is answered.
    port: u16,
}

struct Request {
    id: String,
    blocks: Vec<usize>,
}

impl Requests {
    /// Requests of a run; those of one run have no block in common.
    fn new(run: usize, sizes: &[usize], cache: &mut Cache, port: u16, seed: &mut Seed) -> Requests {
        let mut blocks = cache.shape.shuffled(seed).into_iter();
        let mut request =
            |id: String, size: usize| Request { id, blocks: blocks.by_ref().take(size).collect() };
        let name = |at: usize| format!("cmpl-{run}-{at}");
        let mut requests: Vec<Request> =
            sizes.iter().enumerate().map(|(at, size)| request(name(at), *size)).collect();
        let spoiled = request(format!("cmpl-{run}-spoiled"), 1);
        let id = spoiled.id.clone();
        cache.spoil(seed.below(cache.shape.layers), spoiled.blocks[0]);
        requests.push(spoiled);
        Requests { requests, spoiled: id, port }
    }

    /// Has vLLM read all of them at once; the answer comes when it has.
    fn ask(&self, control: &str) -> Receiver<Value> {
        let ask = |Request { id, blocks }: &Request| {
            let tokens = blocks.len() * BLOCK_TOKENS;
            let params = json!({
                "do_remote_prefill": true, "do_remote_decode": false, "transfer_mode": "pull",
                "remote_engine_id": ENGINE, "remote_request_id": id, "remote_block_ids": [blocks],
                "remote_host": "127.0.0.1", "remote_port": self.port, "remote_num_tokens": tokens,
                "tp_size": 1, "dcp_size": 1, "pp_size": 1,
            });
            json!({"id": format!("d-{id}"), "params": params, "ntok": tokens, "src_blocks": blocks})
        };
        let body = json!({"reqs": self.requests.iter().map(ask).collect::<Vec<Value>>(), "timeout": 120});
        let (tell, answer) = channel();
        let control = control.to_owned();
        thread::spawn(move || tell.send(control::command(&control, "/recv", Some(body))));
        answer
    }

    /// Serves vLLM until it has read all requests and released each of them once.
    fn serve(&self, cache: &mut Cache, answer: &Receiver<Value>) -> Value {
        let mut held: BTreeMap<&str, &Request> =
            self.requests.iter().map(|one| (one.id.as_str(), one)).collect();
        let (deadline, mut beats) = (Instant::now() + Duration::from_secs(150), 0);
        let (mut result, mut events, mut agents) = (None, Vec::<TransportEvent>::new(), BTreeSet::new());
        while result.is_none() || !held.is_empty() {
            assert!(Instant::now() < deadline, "still held: {:?}, result: {result:?}", held.keys());
            match answer.try_recv() {
                Ok(answer) => result = Some(answer),
                Err(TryRecvError::Disconnected) if result.is_none() => panic!("vLLM does not answer"),
                Err(_) => {}
            }
            cache.transport.poll(Time::ZERO, &mut events);
            while let Some(raw) = cache.transport.next_notification() {
                agents.insert(raw.agent.to_string());
                let text = std::str::from_utf8(&raw.message).expect("vLLM's notifications are text");
                if let Some(ids) = text.strip_prefix("HB:") {
                    let known = |id: &str| self.requests.iter().any(|request| request.id == id);
                    assert!(ids.split(',').all(known), "{text}");
                    beats += 1;
                    continue;
                }
                let id = text.strip_suffix(":1").unwrap_or_else(|| panic!("one consumer releases: {text}"));
                assert!(held.remove(id).is_some(), "released twice, or never held: {text}");
            }
        }
        println!("{beats} heartbeats");
        assert_eq!((agents.len(), events), (1, Vec::new()), "one agent, and nothing but its notifications");
        result.unwrap()
    }

    /// Checks what vLLM says of its reading: every byte is right, but in one block of one region.
    fn check(&self, result: &Value, shape: &Shape) {
        let count = self.requests.len();
        assert_eq!((&result["n"], &result["done"]), (&json!(count), &json!(count)), "{result}");
        assert_eq!((&result["failed"], &result["timed_out"]), (&json!([]), &json!([])), "{result}");
        assert_eq!(result["wrong_bytes"], json!({format!("d-{}", self.spoiled): 1}), "{result}");
        let blocks: usize = self.requests.iter().map(|request| request.blocks.len()).sum();
        assert_eq!(result["bytes"], json!(blocks * shape.layers * shape.block_bytes()));
    }
}

#[test]
fn a_vllm_decode_worker_reads_the_bytes_and_releases_every_request_once() {
    let mut seed = Seed::any();
    for shape in Shape::all() {
        println!("{shape:?}");
        let Some(decode) = Vllm::start("decode", &shape) else { return };
        let Some(mut cache) = Cache::new(&shape) else { return };
        let hello = decode.line();
        let hash = hello["compat_hash"].as_str().expect("its first line has the hash of its configuration");
        let control = control::address(&decode.line());
        let port = side_channel(cache.handshake(hash));
        for (run, sizes) in shape.runs.iter().enumerate() {
            cache.fill();
            let requests = Requests::new(run, sizes, &mut cache, port, &mut seed);
            let result = requests.serve(&mut cache, &requests.ask(&control));
            requests.check(&result, &shape);
        }
        let stats = cache.transport.stats();
        assert_eq!((stats.strangers, stats.foreign_dropped), (0, 0));
    }
}
