//! We read from a prefill worker of vLLM.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Descriptor, MemoryKind, Op, PeerId, Post, PostId, Time, Transport, TransportEvent, WayEnd};
use kv_nixl::ForeignRegion;
use serde::Deserialize;
use serde_json::{Value, json};
use zeromq::{ReqSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::control::command;
use crate::shape::{BLOCK_TOKENS, Seed, Shape};
use crate::{Cache, Vllm, control};

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

impl Cache {
    /// Reads blocks of all regions into the same blocks of ours, and tells the peer so at the end.
    fn read(&mut self, post: u64, blocks: &[usize], notify: String) {
        let len = self.shape.block_bytes() as u64;
        let descriptor = |region: usize, block: usize| Descriptor {
            local_region: region as u32,
            remote_region: region as u32,
            local_offset: block as u64 * len,
            remote_offset: block as u64 * len,
            len,
        };
        let descriptors = (0..self.shape.layers)
            .flat_map(|region| blocks.iter().map(move |block| descriptor(region, *block)));
        let (id, descriptors, notify) = (PostId(post), descriptors.collect(), Some(Bytes::from(notify)));
        self.transport.post(P, Post { id, op: Op::Read, descriptors, notify }).unwrap();
    }

    /// Checks that blocks of all regions are vLLM's.
    fn check(&self, blocks: &[usize]) {
        for region in 0..self.shape.layers {
            for index in blocks.iter().copied() {
                let mut bytes = vec![0; self.shape.block_bytes()];
                self.pool.read(self.shape.offset(region, index), &mut bytes).unwrap();
                assert!(bytes == self.shape.block(region, index), "block {index} of region {region}");
            }
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&[TransportEvent]) -> bool) -> Vec<TransportEvent> {
        let (deadline, mut events) = (Instant::now() + Duration::from_secs(60), Vec::new());
        while !done(&events) {
            assert!(Instant::now() < deadline, "{what}: {events:?}");
            self.transport.poll(Time::ZERO, &mut events);
        }
        events
    }
}

/// A prefill worker of vLLM, and what it was lent out for.
struct Prefill {
    vllm: Vllm,
    control: String,
    /// Of all runs so far, the requests that were released.
    released: usize,
}

impl Prefill {
    fn state(&self) -> Value {
        command(&self.control, "/state", None)
    }

    /// Has vLLM lend the blocks of finished requests; the ids under which we know these.
    fn lend(&self, run: usize, blocks: &[Vec<usize>], cache: &mut Cache) -> Vec<String> {
        let request = |(at, blocks): (usize, &Vec<usize>)| {
            let id = format!("cmpl-{run}-{at}");
            json!({"id": id, "blocks": blocks, "ntok": blocks.len() * BLOCK_TOKENS})
        };
        let requests: Vec<Value> = blocks.iter().enumerate().map(request).collect();
        let answer = command(&self.control, "/finish", Some(json!({"reqs": requests})));
        let lent = answer["params"].as_array().unwrap();
        let id = |params: &Value| params["remote_request_id"].as_str().expect("vLLM lends").to_owned();
        let ids: Vec<String> = lent.iter().map(id).collect();
        // A release that came before vLLM's next step would be of a request that its worker does not know.
        let known = |leases: &Value| ids.iter().all(|id| !leases[id].is_null());
        assert_eq!(cache.until("vLLM has lent the blocks", |_| known(&self.state()["leases"])), []);
        ids
    }

    /// Waits until vLLM has freed the blocks of all requests, and checks what it has heard.
    fn freed(&mut self, run: usize, requests: usize, cache: &mut Cache) {
        self.released += requests;
        let freed = |state: Value| state["sent"].as_array().unwrap().len() == self.released;
        cache.until("vLLM frees the blocks", |_| freed(self.state()));
        // The driver's answer is written beside its engine's loop: what it says was sent may be newer than the
        // leases in it. So it is asked once more.
        let state = self.state();
        let mut heard = state["notifs"].as_object().unwrap().clone();
        assert_eq!(heard.remove("HB"), Some(json!(run + 1)), "{state}");
        assert_eq!(heard.len(), self.released, "one release of each request, and nothing of ours: {state}");
        assert!(heard.values().all(|count| *count == json!(1)), "{state}");
        assert_eq!((&state["leases"], &state["in_process"]), (&json!({}), &json!([])), "{state}");
    }
}

#[test]
fn the_pages_of_a_vllm_prefill_worker_are_read_and_freed_and_it_hears_nothing_else() {
    let mut seed = Seed::any();
    for shape in Shape::all() {
        println!("{shape:?}");
        let Some(vllm) = Vllm::start("prefill", &shape) else { return };
        let Some(mut cache) = Cache::new(&shape) else { return };
        let hello = vllm.line();
        let agent = handshake(hello["side_channel"].as_str().unwrap());
        let regions = agent.regions();
        assert_eq!((regions.len(), agent.num_blocks), (shape.layers, shape.blocks as u64));
        cache.transport.connect_foreign(P, &agent.agent_metadata, &regions).unwrap();

        let mut prefill = Prefill { vllm, control: control::address(&hello), released: 0 };
        for (run, sizes) in shape.runs.iter().enumerate() {
            let mut order = shape.shuffled(&mut seed).into_iter();
            let blocks: Vec<Vec<usize>> =
                sizes.iter().map(|size| order.by_ref().take(*size).collect()).collect();
            let ids = prefill.lend(run, &blocks, &mut cache);
            cache.transport.send(P, format!("HB:{}", ids.join(",")).into()).unwrap();
            for (post, (id, blocks)) in ids.iter().zip(&blocks).enumerate() {
                cache.read(post as u64, blocks, format!("{id}:1"));
            }
            let mut events = cache.until("the reads", |events| events.len() >= ids.len());
            events.sort_by_key(|event| match event {
                TransportEvent::Posted { post, .. } => post.0,
                _ => u64::MAX,
            });
            let read = |post| TransportEvent::Posted { post: PostId(post as u64), result: Ok(()) };
            assert_eq!(events, (0..ids.len()).map(read).collect::<Vec<TransportEvent>>());
            blocks.iter().for_each(|blocks| cache.check(blocks));
            prefill.freed(run, ids.len(), &mut cache);
            // A silence in which a peer of ours would be probed.
            let silence = Instant::now() + Duration::from_millis(2500);
            assert_eq!(cache.until("time passes", |_| Instant::now() >= silence), []);
        }

        // It dies, which nobody says.
        prefill.vllm.process.kill().unwrap();
        prefill.vllm.process.wait().unwrap();
        let events = cache.until("the end", |events| !events.is_empty());
        assert_eq!(events, [TransportEvent::PeerGone { peer: P, end: WayEnd::Lost }]);
    }
}
