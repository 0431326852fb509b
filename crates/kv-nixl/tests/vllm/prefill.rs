//! We read from a prefill worker of vLLM.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Desc, MemoryKind, Op, PeerId, Plane, PlaneEvent, Post, PostId, Time, WayEnd};
use kv_nixl::ForeignRegion;
use serde::Deserialize;
use serde_json::{Value, json};
use zeromq::{ReqSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::{BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, Cache, LAYERS, Vllm, block, offset};

const P: PeerId = PeerId(7);

/// What of vLLM's handshake concerns us.
#[derive(Deserialize)]
struct Handshake {
    agent_metadata_bytes: Bytes,
}

#[derive(Deserialize)]
struct Agent {
    agent_metadata: Bytes,
    kv_caches_base_addr: Vec<u64>,
    device_id: u64,
    num_blocks: u64,
    block_lens: Vec<u64>,
}

impl Agent {
    fn regions(&self) -> Vec<ForeignRegion> {
        let region = |(addr, len): (&u64, &u64)| ForeignRegion {
            addr: *addr,
            len: len * self.num_blocks,
            item_len: *len,
            memory: MemoryKind::Dram,
            device: self.device_id,
        };
        self.kv_caches_base_addr.iter().zip(&self.block_lens).map(region).collect()
    }
}

/// Asks a side channel of vLLM.
fn handshake(address: &str) -> Agent {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let frames = runtime.block_on(async {
        let mut socket = ReqSocket::new();
        socket.connect(&format!("tcp://{address}")).await.unwrap();
        let question = rmp_serde::to_vec(&(Bytes::from_static(b"get_meta_msg"), 0, 0)).unwrap();
        socket.send(ZmqMessage::from(question)).await.unwrap();
        socket.recv().await.unwrap().into_vec()
    });
    let [answer, _clock] = &frames[..] else { panic!("{} frames", frames.len()) };
    let answer: Handshake = rmp_serde::from_slice(answer).unwrap();
    rmp_serde::from_slice(&answer.agent_metadata_bytes).unwrap()
}

/// A command of the driver: JSON over HTTP.
fn command(address: &str, path: &str, body: Option<Value>) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    let (method, body) = body.map_or(("GET", String::new()), |body| ("POST", body.to_string()));
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str(body).unwrap()
}

impl Cache {
    /// Reads blocks of all regions into the same blocks of ours, and tells the peer so at the end.
    fn read(&mut self, post: u64, blocks: &[u64], notify: String) {
        let desc = |region: usize, block: u64| Desc {
            local_region: region as u32,
            remote_region: region as u32,
            local_offset: block * BLOCK_BYTES as u64,
            remote_offset: block * BLOCK_BYTES as u64,
            len: BLOCK_BYTES as u64,
        };
        let descs = (0..LAYERS).flat_map(|region| blocks.iter().map(move |block| desc(region, *block)));
        let (id, descs, notify) = (PostId(post), descs.collect(), Some(Bytes::from(notify)));
        self.plane.post(P, Post { id, op: Op::Read, descs, notify }).unwrap();
    }

    /// Checks that blocks of all regions are vLLM's.
    fn check(&self, blocks: &[u64]) {
        for region in 0..LAYERS {
            for index in blocks.iter().map(|index| *index as usize) {
                let mut bytes = vec![0; BLOCK_BYTES];
                self.pool.read(offset(region, index), &mut bytes).unwrap();
                assert!(bytes == block(region, index), "block {index} of region {region}");
            }
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&[PlaneEvent]) -> bool) -> Vec<PlaneEvent> {
        let (deadline, mut events) = (Instant::now() + Duration::from_secs(60), Vec::new());
        while !done(&events) {
            assert!(Instant::now() < deadline, "{what}: {events:?}");
            self.plane.poll(Time::ZERO, &mut events);
        }
        events
    }
}

#[test]
fn the_pages_of_a_vllm_prefill_worker_are_read_and_freed_and_it_hears_nothing_else() {
    let Some(mut prefill) = Vllm::start(&["--role", "prefill", "--ctl", "0"]) else { return };
    let Some(mut cache) = Cache::new() else { return };
    let hello = prefill.lines.recv_timeout(Duration::from_secs(120)).expect("vLLM starts");
    let agent = handshake(hello["side_channel"].as_str().unwrap());
    let control = hello["ctl"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    let regions = agent.regions();
    assert_eq!((regions.len(), agent.num_blocks), (LAYERS, BLOCKS as u64));
    cache.plane.connect_foreign(P, &agent.agent_metadata, &regions).unwrap();

    // Two rounds, and between them a silence in which a peer of ours would be probed.
    let rounds: [&[u64]; 2] = [&[1, 2, 3, 10, 40], &[199, 7]];
    for (round, blocks) in rounds.into_iter().enumerate() {
        let tokens = blocks.len() * BLOCK_TOKENS;
        let request = json!({"id": format!("cmpl-{round}"), "blocks": blocks, "ntok": tokens});
        let answer = command(&control, "/finish", Some(json!({"reqs": [request]})));
        let id = answer["params"][0]["remote_request_id"].as_str().expect("vLLM lends the blocks").to_owned();
        // A release that came before vLLM's next step would be of a request that its worker does not know.
        let lent = |_: &[PlaneEvent]| !command(&control, "/state", None)["leases"][&id].is_null();
        assert_eq!(cache.until("vLLM has lent the blocks", lent), []);
        cache.plane.send(P, format!("HB:{id}").into()).unwrap();
        cache.read(round as u64, blocks, format!("{id}:1"));
        let events = cache.until("a read", |events| !events.is_empty());
        assert_eq!(events, [PlaneEvent::Posted { post: PostId(round as u64), result: Ok(()) }]);
        cache.check(blocks);
        let mut state = Value::Null;
        cache.until("vLLM frees the blocks", |_| {
            state = command(&control, "/state", None);
            state["sent"].as_array().unwrap().len() == round + 1
        });
        let mut heard = state["notifs"].as_object().unwrap().clone();
        assert_eq!(heard.remove("HB"), Some(json!(round + 1)), "{state}");
        assert_eq!(heard.len(), round + 1, "one release of each request, and nothing of ours: {state}");
        assert!(heard.values().all(|count| *count == json!(1)), "{state}");
        let silence = Instant::now() + Duration::from_millis(2500);
        let events = cache.until("time passes", |_| Instant::now() >= silence);
        assert_eq!(events, []);
    }

    // It dies, which nobody says.
    prefill.process.kill().unwrap();
    prefill.process.wait().unwrap();
    let events = cache.until("the end", |events| !events.is_empty());
    assert_eq!(events, [PlaneEvent::PeerGone { peer: P, end: WayEnd::Lost }]);
}
