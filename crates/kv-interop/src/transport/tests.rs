//! The transport over agents that are none: what it keeps, names and passes on.

use kv_core::{MemoryKind, WayEnd};

use super::*;
use crate::message::AgentRegion;

const AGENT: PeerId = PeerId(3);

/// Agents that a test plays.
#[derive(Debug, Default)]
pub(crate) struct Script {
    /// Why no region can be registered.
    refuses: Option<TransportError>,
    /// Why the agent has no metadata.
    unknown: Option<TransportError>,
    /// What the agents' events can be waited for with.
    fds: Vec<RawFd>,
    /// Notifications that `send` still takes.
    room: usize,
    sent: Vec<(PeerId, Bytes)>,
    connected: Vec<PeerId>,
    notifications: VecDeque<(Arc<str>, Bytes)>,
    events: Vec<TransportEvent>,
}

impl Script {
    /// Agents that register no region.
    pub(crate) fn without_regions(refuses: TransportError) -> Script {
        Script { refuses: Some(refuses), ..Script::default() }
    }

    /// Agents without metadata.
    pub(crate) fn without_metadata(unknown: TransportError) -> Script {
        Script { unknown: Some(unknown), ..Script::default() }
    }
}

impl Transport for Script {
    fn name(&self) -> &'static str {
        "script"
    }

    fn register(&mut self, _: &Region) -> Result<(), TransportError> {
        self.refuses.clone().map_or(Ok(()), Err)
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        Ok(Bytes::from_static(b"native"))
    }

    fn connect(&mut self, _: PeerId, _: &[u8]) -> Result<(), TransportError> {
        Err(TransportError::Metadata("nobody is native here"))
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.connected.retain(|connected| *connected != peer);
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        self.room = self.room.checked_sub(1).ok_or(TransportError::WouldBlock)?;
        self.sent.push((peer, frame));
        Ok(())
    }

    fn post(&mut self, _: PeerId, _: Post) -> Result<(), TransportError> {
        Ok(())
    }

    fn cancel(&mut self, _: PostId) {}

    fn permit(&mut self, _: PeerId, _: Time) {}

    fn write_fence(&self, _: PeerId) -> WriteFence {
        WriteFence::AtDeath
    }

    fn poll(&mut self, _: Time, events: &mut Vec<TransportEvent>) {
        events.append(&mut self.events);
    }

    fn wait(&self) -> TransportWait {
        TransportWait::ReadableOrAfter(self.fds.clone(), Duration::from_millis(20))
    }
}

impl Agents for Script {
    fn agent_name(&self) -> String {
        "ours".to_owned()
    }

    fn agent_metadata(&self) -> Result<Bytes, TransportError> {
        self.unknown.clone().map_or(Ok(Bytes::from_static(b"nixlSerDes|")), Err)
    }

    fn connect_agent(
        &mut self,
        peer: PeerId,
        metadata: &[u8],
        _: &[AgentRegion],
    ) -> Result<(), TransportError> {
        if metadata != b"theirs" {
            return Err(TransportError::Foreign("bad".to_owned()));
        }
        self.connected.push(peer);
        Ok(())
    }

    fn next_notification(&mut self) -> Option<(Arc<str>, Bytes)> {
        self.notifications.pop_front()
    }
}

fn transport() -> InteropTransport<Script> {
    InteropTransport::new(Script { fds: vec![7], ..Script::default() }, ChannelConfig::default()).unwrap()
}

fn agent(metadata: &'static [u8]) -> TransportOffer {
    let region = AgentRegion { addr: 0, len: 1, stride: 1, memory: MemoryKind::Dram, device: 0 };
    Way::Agent { metadata: Bytes::from_static(metadata), regions: vec![region] }.offer()
}

fn polled(transport: &mut InteropTransport<Script>) -> Vec<TransportEvent> {
    let mut events = Vec::new();
    transport.poll(Time::ZERO, &mut events);
    events
}

#[test]
fn notifications_that_an_agent_has_no_room_for_are_sent_later_in_their_order() {
    let mut here = transport();
    assert_eq!(here.connect_by(AGENT, &agent(b"x")), Err(TransportError::Foreign("bad".to_owned())));
    here.connect_by(AGENT, &agent(b"theirs")).unwrap();
    let said = |number: usize| Bytes::from(vec![number as u8; 100_000]);
    here.agents.room = 1;
    let taken = (0..100).take_while(|number| here.send(AGENT, said(*number)).is_ok()).count();
    assert_eq!((taken, here.agents.sent.len()), (1 + MAX_KEPT / (100_000 + OVERHEAD), 1));
    assert_eq!(here.send(AGENT, said(0)), Err(TransportError::WouldBlock));
    let TransportWait::ReadableOrAfter(_, sleep) = here.wait() else { panic!("no sleep") };
    assert!(sleep <= KEPT_RETRY);
    // With room for some, the others go on waiting, and so does what is sent now.
    here.agents.room = 3;
    assert_eq!(polled(&mut here), []);
    here.agents.room = 1;
    here.send(AGENT, said(taken)).unwrap();
    here.agents.room = usize::MAX;
    assert_eq!(polled(&mut here), []);
    let order: Vec<usize> = here.agents.sent.iter().map(|(_, bytes)| usize::from(bytes[0])).collect();
    assert_eq!(order, (0..=taken).collect::<Vec<_>>());
    assert_eq!(here.waiting[&AGENT].size, 0);

    // What waits for an agent that is gone is forgotten with it.
    here.agents.room = 0;
    here.send(AGENT, said(1)).unwrap();
    let gone = TransportEvent::PeerGone { peer: AGENT, end: WayEnd::Lost };
    here.agents.events.push(gone.clone());
    assert_eq!(polled(&mut here), [gone]);
    assert_eq!(here.send(AGENT, said(1)), Err(TransportError::PeerGone));
    here.connect_by(AGENT, &agent(b"theirs")).unwrap();
    assert_eq!((polled(&mut here).len(), here.waiting[&AGENT].size), (0, 0));
    here.disconnect(AGENT);
    assert_eq!(here.agents.connected, []);
}

#[test]
fn every_agent_has_an_origin_of_its_own_and_native_frames_are_passed_over() {
    let mut here = transport();
    let mut origins = Vec::new();
    for name in ["a", "b", "a"] {
        here.agents.notifications.push_back((name.into(), Bytes::from_static(b"HB:1")));
    }
    here.agents.events = vec![
        TransportEvent::Frame { from: Origin(0), frame: Bytes::from_static(b"native") },
        TransportEvent::Posted { post: PostId(1), result: Ok(()) },
    ];
    let mut events = polled(&mut here).into_iter();
    assert_eq!(events.next(), Some(TransportEvent::Posted { post: PostId(1), result: Ok(()) }));
    for (event, name) in events.by_ref().zip(["a", "b", "a"]) {
        let TransportEvent::Frame { from, frame } = event else { panic!("{event:?}") };
        let expected = Incoming::Notification { agent: name.to_owned(), bytes: Bytes::from_static(b"HB:1") };
        assert_eq!(Incoming::decode(&frame), Some(expected));
        origins.push(from);
    }
    assert_eq!((origins[0], origins.len()), (origins[2], 3));
    assert_ne!(origins[0], origins[1]);

    // The table of names is bounded, a poll is, and what is left is polled for at once.
    for name in 0..MAX_NAMES + 10 {
        here.agents.notifications.push_back((name.to_string().into(), Bytes::new()));
    }
    assert_eq!(polled(&mut here).len(), NOTIFICATIONS_PER_POLL);
    assert_eq!(here.wait(), TransportWait::Now);
    let mut last = Vec::new();
    while here.more {
        last = polled(&mut here);
    }
    assert_eq!(here.origins.len(), MAX_NAMES);
    let [.., TransportEvent::Frame { from, .. }] = last[..] else { panic!("{last:?}") };
    assert_eq!(from, Origin(MAX_NAMES as u64));
    // A notification that has no room in a frame with its agent's name is dropped and counted.
    here.agents.notifications.push_back(("a".into(), Bytes::from(vec![0; MAX_FRAME])));
    assert_eq!(polled(&mut here), []);
    assert_eq!(here.counts().gauges().dropped, 1);
}

#[test]
fn the_transport_sleeps_shortly_while_notifications_are_expected_and_long_otherwise() {
    let mut here = transport();
    let fd = here.channels.as_raw_fd();
    let sleep = |here: &InteropTransport<Script>| match here.wait() {
        TransportWait::ReadableOrAfter(fds, sleep) if fds == [7, fd] => sleep,
        other => panic!("{other:?}"),
    };
    assert_eq!(sleep(&here), Duration::from_millis(20), "nothing was said to an agent");
    here.connect_by(AGENT, &agent(b"theirs")).unwrap();
    assert_eq!(sleep(&here), EXPECTING_SLEEP);
    let long_ago = Instant::now().checked_sub(EXPECTING);
    for stir in 0..4 {
        here.stirred = long_ago;
        assert_eq!(sleep(&here), Duration::from_millis(20), "an agent that is connected and silent");
        match stir {
            0 => {
                here.agents.room = 1;
                here.send(AGENT, Bytes::new()).unwrap();
            }
            1 => {
                let post = Post { id: PostId(1), op: kv_core::Op::Read, descriptors: vec![], notify: None };
                here.post(AGENT, post).unwrap();
            }
            2 => {
                here.agents.notifications.push_back(("a".into(), Bytes::new()));
                assert_eq!(polled(&mut here).len(), 1);
            }
            // The side channels have a descriptor.
            _ => continue,
        }
        assert_eq!(sleep(&here), EXPECTING_SLEEP);
    }
}

#[test]
fn offers_of_other_transports_and_frames_without_a_message_are_refused() {
    let mut here = transport();
    let none = Err(TransportError::Metadata("the offer holds no way to a foreign engine"));
    assert_eq!(here.connect_by(AGENT, &TransportOffer::new("nixl", agent(b"theirs").metadata)), none);
    assert_eq!(here.connect(AGENT, b"x"), none);
    let way = Way::Push { addr: "127.0.0.1".to_owned() };
    let error = here.connect_by(AGENT, &way.offer()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the foreign peer cannot be connected: the address is \"127.0.0.1\"; it must be host:port"
    );
    here.connect_by(AGENT, &Way::Push { addr: "127.0.0.1:1".to_owned() }.offer()).unwrap();
    let form = TransportError::Foreign("a frame to a side channel holds no message".to_owned());
    for frame in [Bytes::new(), Bytes::from_static(b"HB:1"), Message(Vec::new()).encode()] {
        assert_eq!(here.send(AGENT, frame), Err(form.clone()));
    }
    here.connect(PeerId(9), &agent(b"theirs").metadata).unwrap();
    assert_eq!((here.metadata(), here.offers()), (Ok(Bytes::new()), Ok(Vec::new())));
}
