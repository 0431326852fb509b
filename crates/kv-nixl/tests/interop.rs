//! The transport of a dialect over NIXL, as a decode worker of ours meets a prefill worker that is not: the
//! handshake over the side channel, a read, and notifications in both directions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    Descriptor, MemoryKind, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportError,
    TransportEvent, TransportWait,
};
use kv_interop::message::{AgentRegion, Incoming, Message, Way};
use kv_interop::{ChannelConfig, InteropTransport, SideChannel};
use kv_nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
use nixl_sys::{Agent, AgentConfig, MemoryRegion, NixlRegistration, NotificationMap, SystemStorage};

const LEN: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);
const SIDE: PeerId = PeerId(1);
const AGENT: PeerId = PeerId(2);

fn nixl() -> Option<Nixl> {
    kv_conformance::needed("NIXL", Nixl::load(&Search::default()))
}

/// UCX over TCP on any machine.
fn engine() -> (String, String) {
    ("engine_config".to_owned(), "TLS=tcp".to_owned())
}

fn transport(nixl: &Nixl) -> (InteropTransport<NixlTransport>, HostMemory) {
    let config = NixlConfig::default().with(|config| {
        config.backend_params = vec![engine()];
        config.reads_over_tcp = true;
        config.foreign_bytes = 16 << 20;
    });
    let pool = HostMemory::new(LEN).unwrap();
    let mut agents = NixlTransport::new(nixl, config).unwrap();
    agents.add_memory(&pool).unwrap();
    let mut transport = InteropTransport::new(agents, ChannelConfig::default()).unwrap();
    transport.register(&Region::dram(RegionRole::Kv, pool.addr(), LEN as u64, 4096)).unwrap();
    assert_eq!(transport.metadata(), Ok(Bytes::new()));
    assert_eq!(transport.offers(), Ok(Vec::new()));
    (transport, pool)
}

/// A prefill worker that is plain NIXL.
struct Stranger {
    agent: Agent,
    memory: SystemStorage,
}

impl Stranger {
    fn new(name: &str) -> Stranger {
        let agent = Agent::new_configured(name, &AgentConfig::default()).unwrap();
        let (_, mut params) = agent.get_plugin_params("UCX").unwrap();
        let (key, value) = engine();
        params.set(&key, &value).unwrap();
        agent.create_backend("UCX", &params).unwrap();
        let mut memory = SystemStorage::new(LEN).unwrap();
        memory.memset(7);
        memory.register(&agent, None).unwrap();
        Stranger { agent, memory }
    }

    fn addr(&self) -> u64 {
        // SAFETY: the pointer becomes a number, and is not followed here.
        unsafe { self.memory.as_ptr() as u64 }
    }

    /// The notifications that have come from this agent.
    fn heard(&self, agent: &str) -> Vec<Vec<u8>> {
        let mut heard = NotificationMap::new().unwrap();
        self.agent.get_notifications(&mut heard, None).unwrap();
        if heard.is_empty().unwrap() {
            return Vec::new();
        }
        let count = heard.get_notifications_size(agent).unwrap();
        (0..count).map(|index| heard.get_notification_bytes(agent, index).unwrap()).collect()
    }
}

fn next(transport: &mut InteropTransport<NixlTransport>) -> TransportEvent {
    let (deadline, mut events) = (Instant::now() + PATIENCE, Vec::new());
    while events.is_empty() {
        assert!(Instant::now() < deadline, "nothing comes");
        transport.poll(Time::ZERO, &mut events);
    }
    assert_eq!(events.len(), 1, "{events:?}");
    events.remove(0)
}

#[test]
fn a_handshake_a_read_and_notifications_go_between_a_foreign_agent_and_this_transport() {
    let Some(nixl) = nixl() else { return };
    let (mut here, pool) = transport(&nixl);
    let there = Stranger::new("a prefill worker");
    let side_channel = SideChannel::bind("127.0.0.1:0").unwrap();
    side_channel.publish(0, 3, there.agent.get_local_md().unwrap().into());

    // The metadata come over the side channel.
    let addr = side_channel.local_addr().to_string();
    here.connect_by(SIDE, &Way::Request { addr }.offer()).unwrap();
    let question = rmp_serde::to_vec(&(Bytes::from_static(b"get_meta_msg"), 0, 3)).unwrap();
    here.send(SIDE, Message(vec![question.into()]).encode()).unwrap();
    let TransportEvent::Frame { frame, .. } = next(&mut here) else { panic!("no frame") };
    let Some(Incoming::Message { peer, message: Message(parts) }) = Incoming::decode(&frame) else {
        panic!("{frame:?}")
    };
    assert_eq!((peer, parts.len()), (Some(SIDE.0), 2));

    let (addr, memory) = (there.addr(), MemoryKind::Dram);
    let region = AgentRegion { addr, len: LEN as u64, stride: 4096, memory, device: 0 };
    let way = Way::Agent { metadata: parts[0].clone(), regions: vec![region] };
    here.connect_by(AGENT, &way.offer()).unwrap();
    let twice = TransportError::Unsupported("the id is that of a connected peer");
    assert_eq!(here.connect_by(AGENT, &way.offer()), Err(twice.clone()));
    assert_eq!(here.connect_by(SIDE, &way.offer()), Err(twice));

    // A read, and what the agent is told at its end.
    let len = LEN as u64;
    let all = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len };
    let notify = Some(Bytes::from_static(b"request:1"));
    let post = Post { id: PostId(5), op: Op::Read, descriptors: vec![all], notify };
    assert!(matches!(here.post(SIDE, post.clone()), Err(TransportError::Unsupported(_))));
    here.post(AGENT, post).unwrap();
    assert_eq!(next(&mut here), TransportEvent::Posted { post: PostId(5), result: Ok(()) });
    let mut bytes = vec![0; LEN];
    pool.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    let (name, deadline, mut heard) = (here.agents().agent_name(), Instant::now() + PATIENCE, Vec::new());
    here.send(AGENT, Bytes::from_static(b"HB:request")).unwrap();
    while heard.len() < 2 {
        assert!(Instant::now() < deadline, "{heard:?}");
        heard.extend(there.heard(&name));
        here.poll(Time::ZERO, &mut Vec::new());
    }
    heard.sort();
    assert_eq!(heard, [&b"HB:request"[..], b"request:1"]);

    // Notifications of the agent, with its name, from one origin.
    there.agent.load_remote_md(&here.agents().agent_metadata().unwrap()).unwrap();
    let mut origins = Vec::new();
    for said in [&b"PUSH_REG:\xff"[..], b"", b"request:2"] {
        there.agent.send_notification(&name, said, None).unwrap();
        let TransportEvent::Frame { from, frame } = next(&mut here) else { panic!("no frame") };
        let (agent, bytes) = ("a prefill worker".to_owned(), Bytes::copy_from_slice(said));
        assert_eq!(Incoming::decode(&frame), Some(Incoming::Notification { agent, bytes }));
        origins.push(from);
    }
    assert!(origins.iter().all(|from| *from == origins[0]), "{origins:?}");
    // While notifications are expected, the sleep is short; the side channel has a descriptor.
    let TransportWait::ReadableOrAfter(fds, sleep) = here.wait() else { panic!("no sleep") };
    assert!(fds.len() == 2 && sleep <= Duration::from_micros(500), "{fds:?} {sleep:?}");

    here.disconnect(AGENT);
    assert_eq!(here.send(AGENT, Bytes::from_static(b"HB:request")), Err(TransportError::PeerGone));
    let none = TransportError::Foreign("a frame to a side channel holds no message".to_owned());
    assert_eq!(here.send(SIDE, Bytes::from_static(b"HB:request")), Err(none));
    // The end of the side channel is seen while nothing is being sent.
    drop(side_channel);
    assert!(matches!(next(&mut here), TransportEvent::PeerGone { peer: SIDE, .. }));
}
