//! Our prefill rank and SGLang's decode ranks, from the registration to the last word.

use super::*;
use crate::sglang::codec::{Registration, Request};
use kv_core::{ChunkId, FinalLayers, Holds, QuarantineReason, TransportError};

pub(super) const DECODE: (&str, u16) = ("10.0.0.3", 5001);

/// The registration of a decode rank with two regions of 64 bytes a page.
pub(super) fn registration(name: &str, port: u16) -> Registration {
    Registration {
        ip: DECODE.0.to_owned(),
        port,
        agent: name.to_owned(),
        metadata: Bytes::from_static(b"nixlSerDes|theirs"),
        kv_ptrs: vec![0x10_0000, 0x20_0000],
        kinds: vec![MemoryKind::Dram; 2],
        item_lens: vec![64; 2],
        layer_ids: vec![],
        aux_ptrs: (0..10).map(|buffer| 0x100_0000 + buffer * 0x1_0000).collect(),
        has_state: false,
        device: 0,
        tp_size: 1,
        tp_rank: 0,
        slots: 32,
        dcp_size: 1,
        dcp_rank: 0,
    }
}

pub(super) fn request(name: &str, port: u16, room: u64, pages: &[u32]) -> Request {
    Request {
        room,
        ip: DECODE.0.to_owned(),
        port,
        agent: name.to_owned(),
        pages: pages.to_vec(),
        aux: 3,
        required: 1,
        has_state: false,
        prefix_tokens: 0,
        dummy: false,
    }
}

impl Rig {
    pub(super) fn prefill() -> Rig {
        Rig::new(&args(tp(1, 0)), WorkerRole::Prefill)
    }

    pub(super) fn take(&mut self, frames: Vec<Bytes>) {
        let frame = Incoming::Message { peer: None, message: Message(frames) }.encode();
        self.input(Input::Frame { from: kv_core::Origin(1), frame });
    }

    pub(super) fn sender(&mut self, session: u64, room: u64) -> SessionId {
        let (session, room, options) = (SessionId(session), Room::Number(room), Box::default());
        self.input(Input::Command(Command::OpenSender { session, room, receivers: 0, options }));
        session
    }

    pub(super) fn announce(&mut self, session: SessionId, num_pages: usize, aux: u32) {
        let aux = Some(AuxIndex(aux));
        self.input(Input::Command(Command::InitSender { session, num_pages, aux }));
    }

    pub(super) fn send(&mut self, session: SessionId, pages: &[u32]) {
        let chunk = self.pages(pages);
        self.input(Input::Command(Command::Send { session, chunk }));
    }

    /// The descriptors of the posts since the last look, as (local region, offset, remote region, offset, len).
    pub(super) fn posted(&self) -> Vec<(u32, u64, u32, u64, u64)> {
        let all = self.posts.iter().flat_map(|(_, post)| &post.descriptors);
        all.map(|d| (d.local_region, d.local_offset, d.remote_region, d.remote_offset, d.len)).collect()
    }

    /// Ends all posts.
    pub(super) fn end_posts(&mut self, result: Result<(), TransportError>) {
        for (_, post) in std::mem::take(&mut self.posts) {
            assert_eq!(post.notify, None, "SGLang's agents get no notification");
            self.input(Input::Posted { post: post.id, result: result.clone() });
        }
    }

    /// The way to an agent that was opened last.
    pub(super) fn agent_way(&mut self) -> (PeerId, Vec<crate::message::AgentRegion>) {
        let at = self.ways.iter().position(|(_, way)| matches!(way, Way::Agent { .. })).unwrap();
        let (peer, Way::Agent { metadata, regions }) = self.ways.remove(at) else { panic!() };
        assert_eq!((metadata, self.permits.pop()), (Bytes::from_static(b"nixlSerDes|theirs"), Some(peer)));
        (peer, regions)
    }

    /// What was said to decode ranks, without the peers.
    pub(super) fn words(&mut self) -> Vec<String> {
        self.said().into_iter().map(|(_, parts)| parts.join(" ")).collect()
    }
}

/// A sender of room 9 whose decode rank has asked for pages 20 and 21.
pub(super) fn asked(rig: &mut Rig) -> SessionId {
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 9, &[20, 21]).encode());
    rig.sender(1, 9)
}

#[test]
fn chunks_are_written_page_by_page_and_the_aux_row_behind_the_last() {
    let mut rig = Rig::prefill();
    let session = asked(&mut rig);
    let (peer, regions) = rig.agent_way();
    assert_eq!((regions.len(), regions[0].len, regions[0].addr), (12, 32 * 64, 0x10_0000));
    assert_eq!((regions[11].addr, regions[11].len, regions[11].stride), (0x109_0000, u64::MAX, 64));
    assert_eq!(rig.states(session), "WaitingForInput");
    rig.announce(session, 2, 1);
    rig.send(session, &[5]);
    assert_eq!(rig.posted(), [(0, 5 * 64, 0, 20 * 64, 64), (1, 5 * 64, 1, 20 * 64, 64)]);
    assert!(rig.posts.iter().all(|(to, post)| *to == peer && post.op == kv_core::Op::Write));
    rig.end_posts(Ok(()));
    rig.send(session, &[9]);
    let (kv, aux): (Vec<_>, Vec<_>) = rig.posted().into_iter().partition(|descriptor| descriptor.0 < 2);
    assert_eq!(kv, [(0, 9 * 64, 0, 21 * 64, 64), (1, 9 * 64, 1, 21 * 64, 64)]);
    let expected = AUX_ITEM_LENS.iter().zip(2..).map(|(len, region)| (region, *len, region, 3 * len, *len));
    assert_eq!(aux, expected.collect::<Vec<_>>());
    assert_eq!((rig.words(), rig.states(session).as_str()), (vec![], "WaitingForInput Transferring"));
    rig.end_posts(Ok(()));
    assert_eq!(rig.words(), ["KV_STATUS 9 4 0 "]);
    assert_eq!(
        (rig.states(session).as_str(), rig.back(session)),
        ("WaitingForInput Transferring Success", Some(2))
    );
    assert_eq!(rig.ways[0].1, Way::Push { addr: "10.0.0.3:5001".to_owned() });
}

#[test]
fn the_sender_may_come_first_and_waits_for_every_decode_rank() {
    let mut rig = Rig::prefill();
    let session = rig.sender(1, 9);
    rig.announce(session, 1, 1);
    rig.send(session, &[5]);
    for port in [5001, 5002] {
        rig.take(registration(&format!("d{port}"), port).encode());
        assert_eq!(rig.states(session), "");
        rig.take(Request { required: 2, ..request(&format!("d{port}"), port, 9, &[7]) }.encode());
    }
    assert_eq!((rig.states(session).as_str(), rig.posts.len()), ("WaitingForInput Transferring", 2));
    let first = rig.posts.remove(0);
    rig.end_posts(Ok(()));
    assert_eq!(rig.words(), ["KV_STATUS 9 4 0 "], "the second rank has everything");
    assert_eq!(rig.back(session), None);
    rig.posts.push(first);
    rig.end_posts(Ok(()));
    assert_eq!((rig.words().len(), rig.back(session)), (1, Some(1)));
}

#[test]
fn the_prefix_of_the_decode_rank_is_not_written() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(Request { prefix_tokens: 32, ..request("d", DECODE.1, 9, &[20]) }.encode());
    let session = rig.sender(1, 9);
    rig.announce(session, 3, 1);
    rig.send(session, &[5, 6]);
    assert_eq!(rig.posts.len(), 0, "both pages are in the prefix");
    rig.send(session, &[8]);
    assert_eq!(rig.posted()[0], (0, 8 * 64, 0, 20 * 64, 64));
    rig.end_posts(Ok(()));
    assert_eq!((rig.words(), rig.back(session)), (vec!["KV_STATUS 9 4 0 ".to_owned()], Some(3)));
    // All pages are in the prefix: the aux row alone is written.
    rig.take(Request { prefix_tokens: 32, ..request("d", DECODE.1, 10, &[]) }.encode());
    let session = rig.sender(2, 10);
    rig.announce(session, 2, 1);
    rig.send(session, &[1, 2]);
    assert_eq!(rig.posted().len(), 10);
    rig.end_posts(Ok(()));
    assert_eq!(rig.words(), ["KV_STATUS 10 4 0 "]);
    // Prefix and pages must be all pages.
    rig.take(Request { prefix_tokens: 16, ..request("d", DECODE.1, 11, &[3]) }.encode());
    let session = rig.sender(3, 11);
    rig.announce(session, 3, 1);
    assert_eq!(rig.cause(session), "3 pages are to be sent, but the receiver registered 2");
    assert_eq!(rig.words(), ["KV_STATUS 11 0 0 3 pages are to be sent, but the receiver registered 2"]);
}

#[test]
fn an_abort_is_acknowledged_when_the_last_post_has_ended() {
    let mut rig = Rig::prefill();
    let session = asked(&mut rig);
    rig.announce(session, 2, 1);
    rig.send(session, &[5]);
    rig.hear(&["ABORT", "9", DECODE.0, "5001", "77"]);
    assert_eq!(rig.cause(session), "ended by the peer: its scheduler aborted the request");
    assert_eq!((rig.cancelled.len(), rig.words(), rig.back(session)), (1, vec![], None));
    assert_eq!(rig.quarantine()[0].reason, QuarantineReason::OwnPosts);
    rig.end_posts(Err(TransportError::Cancelled));
    assert_eq!((rig.words(), rig.back(session)), (vec!["ABORT_ACK 9 0 77".to_owned()], Some(1)));
    // Nothing is under way for a room that nobody knows, or knows no more; but only ranks that have registered
    // are answered.
    rig.hear(&["ABORT", "9", DECODE.0, "5001", "78"]);
    rig.hear(&["ABORT", "9", "10.0.0.66", "5001", "79"]);
    rig.hear(&["ABORT", "9", DECODE.0, "5001"]);
    assert_eq!(
        (rig.words(), rig.gauges.of(Ignored::UnknownRequest)),
        (vec!["ABORT_ACK 9 0 78".to_owned()], 1)
    );
}

#[test]
fn a_room_that_was_aborted_before_its_sender_came_fails_that_sender_only() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    rig.hear(&["ABORT", "9", DECODE.0, "5001", "77"]);
    assert_eq!(rig.words(), ["ABORT_ACK 9 0 77"]);
    let late = rig.sender(1, 9);
    assert_eq!(rig.cause(late), "ended by the peer: its scheduler aborted the request");
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    let next = rig.sender(2, 9);
    assert_eq!((rig.states(next).as_str(), rig.words()), ("WaitingForInput", vec![]));
}

#[test]
fn decode_ranks_are_told_of_each_failure_once_nothing_writes_any_more() {
    type End = fn(&mut Rig, SessionId);
    let ends: [(&str, End); 4] = [
        ("aborted by the local scheduler", |rig, session| rig.abort(session)),
        ("the local worker is stopping", |rig, _| rig.input(Input::Command(Command::Shutdown))),
        ("not finished within 300s (1 data operations to d/0 have not ended)", |rig, _| {
            rig.wait(Duration::from_secs(300));
        }),
        ("the data operation failed: the peer is gone", |rig, _| {
            rig.end_posts(Err(TransportError::PeerGone))
        }),
    ];
    for (cause, end) in ends {
        let mut rig = Rig::prefill();
        let session = asked(&mut rig);
        rig.announce(session, 2, 1);
        rig.send(session, &[5]);
        end(&mut rig, session);
        assert_eq!(rig.cause(session), cause);
        if !rig.posts.is_empty() {
            assert_eq!((rig.words(), rig.back(session)), (vec![], None), "{cause}");
            rig.end_posts(Err(TransportError::Cancelled));
        }
        assert_eq!((rig.words(), rig.back(session)), (vec![format!("KV_STATUS 9 0 0 {cause}")], Some(1)));
        assert_eq!(rig.quarantine().len(), 0);
    }
}

#[test]
fn a_decode_worker_that_dies_is_told_nothing_and_the_pages_come_back_with_the_posts() {
    let dead = WayEnd::Dead { quiet_after: Duration::from_secs(2) };
    let mut rig = Rig::prefill();
    let session = asked(&mut rig);
    let (agent, _) = rig.agent_way();
    rig.announce(session, 2, 1);
    rig.send(session, &[5]);
    rig.gone(agent, WayEnd::Lost);
    assert_eq!(
        (rig.cause(session).as_str(), rig.back(session)),
        ("the connection to the peer was lost", None)
    );
    rig.end_posts(Err(TransportError::PeerGone));
    assert_eq!((rig.back(session), rig.words().len()), (Some(1), 1));
    let push = rig.ways.remove(0).0;
    // The next request opens the agent's way anew.
    rig.take(request("d", DECODE.1, 10, &[20]).encode());
    let next = rig.sender(2, 10);
    rig.agent_way();
    rig.announce(next, 1, 1);
    rig.send(next, &[6]);
    rig.gone(push, dead);
    assert_eq!(rig.cause(next), "the peer's process has ended or has closed its transport");
    rig.end_posts(Err(TransportError::PeerGone));
    assert_eq!((rig.back(next), rig.words()), (Some(1), vec![]));
    // Its successor registers under another name; the dead one is forgotten.
    rig.take(request("d", DECODE.1, 11, &[20]).encode());
    assert_eq!(rig.words(), ["KV_STATUS 11 0 0 the agent has not registered with this prefill rank"]);
}

#[test]
fn layers_that_are_final_one_by_one_make_a_chunk_that_is_written_whole() {
    let region = |at: u64, holds| Region::dram(RegionRole::Kv, at, 64 * 64, 64).layer(0).holds(holds);
    let mut args = KvArgs::builder("ours", 0).pages(64, 16).dtype("f16").heads(1, 2);
    for layer in 0..2 {
        let at = 0x1_0000 * (1 + 2 * u64::from(layer));
        args = args
            .region(region(at, Holds::Key).layer(layer))
            .region(region(at + 0x1_0000, Holds::Value).layer(layer));
    }
    for (buffer, len) in (0..).zip(AUX_ITEM_LENS) {
        args = args.region(Region::dram(RegionRole::Aux, 0x10_0000 + buffer * 0x1_0000, 8 * len, len));
    }
    let mut rig = Rig::new(&args.build().unwrap(), WorkerRole::Prefill);
    let theirs = registration("d", DECODE.1);
    let kv_ptrs = (1..5).map(|n| n * 0x10_0000).collect();
    rig.take(
        Registration { kv_ptrs, kinds: vec![MemoryKind::Dram; 4], item_lens: vec![64; 4], ..theirs }.encode(),
    );
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    let session = rig.sender(1, 9);
    rig.announce(session, 1, 1);
    let chunk = rig.pages(&[5]);
    rig.input(Input::Command(Command::BeginChunk { session, chunk }));
    let layers = |layers| FinalLayers::new(ChunkId(0), layers);
    rig.input(Input::Command(Command::LayersFinal { session, layers: layers(1..2) }));
    assert_eq!(rig.posts.len(), 0);
    rig.input(Input::Command(Command::LayersFinal { session, layers: layers(0..1) }));
    // Keys of both layers come before values at SGLang's side.
    let mut pairs: Vec<_> = rig.posted().iter().map(|d| (d.0, d.2)).filter(|pair| pair.0 < 4).collect();
    pairs.sort_unstable();
    assert_eq!(pairs, [(0, 0), (1, 2), (2, 1), (3, 3)]);
    rig.input(Input::Command(Command::LayersFinal { session, layers: layers(0..1) }));
    assert!(rig.cause(session).contains("announced before"), "{}", rig.cause(session));
}

#[test]
fn each_rank_of_a_larger_engine_writes_its_heads_into_the_pages_of_a_smaller_one() {
    // Four heads of 2 bytes over 16 tokens: two heads here, all four at the decode rank.
    let region = |at: u64, holds| Region::dram(RegionRole::Kv, at, 64 * 64, 64).layer(0).holds(holds);
    for (rank, first) in [(0, 0), (1, 4)] {
        let mut args =
            KvArgs::builder("ours", rank).pages(64, 16).dtype("f16").heads(2, 1).parallel(tp(2, rank));
        args = args.region(region(0x1_0000, Holds::Key)).region(region(0x2_0000, Holds::Value));
        for (buffer, len) in (0..).zip(AUX_ITEM_LENS) {
            args = args.region(Region::dram(RegionRole::Aux, 0x10_0000 + buffer * 0x1_0000, 8 * len, len));
        }
        let mut rig = Rig::new(&args.build().unwrap(), WorkerRole::Prefill);
        rig.take(Registration { item_lens: vec![128; 2], ..registration("d", DECODE.1) }.encode());
        rig.take(request("d", DECODE.1, 9, &[20]).encode());
        let session = rig.sender(1, 9);
        rig.announce(session, 1, 1);
        rig.send(session, &[5]);
        let kv: Vec<_> = rig.posted().into_iter().filter(|d| d.0 == 0).collect();
        assert_eq!((kv.len(), kv[0]), (16, (0, 5 * 64, 0, 20 * 128 + first, 4)));
        assert_eq!(kv[1], (0, 5 * 64 + 4, 0, 20 * 128 + 8 + first, 4));
        rig.end_posts(Ok(()));
        assert_eq!(rig.words(), [format!("KV_STATUS 9 4 {rank} ")]);
    }
}

#[test]
fn a_registration_or_request_that_does_not_fit_is_answered_with_field_and_values() {
    let answer = |change: &dyn Fn(&mut Registration), ask: &dyn Fn(&mut Request)| {
        let mut rig = Rig::prefill();
        let (mut theirs, mut wanted) = (registration("d", DECODE.1), request("d", DECODE.1, 9, &[20]));
        change(&mut theirs);
        ask(&mut wanted);
        let session = rig.sender(1, 9);
        rig.take(theirs.encode());
        rig.take(wanted.encode());
        assert_eq!(rig.posts.len(), 0);
        let words = rig.words();
        let told = format!("KV_STATUS 9 0 0 {}", rig.cause(session));
        assert_eq!(words, [told]);
        rig.cause(session)
    };
    let registered = |change: &dyn Fn(&mut Registration)| answer(change, &|_| {});
    let differs = |field: &str, ours: &str, theirs: &str| {
        format!("the peer's cache does not fit: {field} differs: {ours} here, {theirs} at the peer")
    };
    let lens = registered(&|theirs| theirs.item_lens = vec![64, 128]);
    assert_eq!(lens, differs("kv_item_lens[1]", "64", "128"));
    let regions = registered(&|theirs| {
        theirs.kv_ptrs.push(0x30_0000);
        theirs.item_lens.push(64);
        theirs.kinds.push(MemoryKind::Dram);
    });
    assert_eq!(regions, differs("kv_data_ptrs (count)", "2", "3"));
    let aux = registered(&|theirs| theirs.aux_ptrs.truncate(9));
    assert_eq!(aux, differs("aux_data_ptrs (count)", "10", "9"));
    assert_eq!(registered(&|theirs| theirs.slots = 0), differs("dst_num_slots", "1 to 16777216", "0"));
    assert_eq!(registered(&|theirs| theirs.dcp_size = 2), differs("dst_dcp_size (--dcp-size)", "1", "2"));
    let far = answer(&|_| {}, &|wanted| wanted.pages = vec![31, 32]);
    assert_eq!(far, "page 32 is out of range: the cache has 32 pages");
    let prefix = answer(&|_| {}, &|wanted| wanted.prefix_tokens = 8);
    assert_eq!(prefix, differs("decode_prefix_len", "whole pages of 16 tokens", "8"));
}

#[test]
fn requests_without_a_sender_are_bounded_and_forgotten_in_time() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(request("d", DECODE.1, 9, &[20]).encode());
    rig.wait(Duration::from_secs(300));
    assert_eq!(rig.words(), ["KV_STATUS 9 0 0 no sender has opened the room"]);
    let session = rig.sender(1, 9);
    assert_eq!(rig.cause(session), "ended by the peer: its deadline passed");
    rig.take(request("d", DECODE.1, 10, &[20]).encode());
    rig.wait(Duration::from_secs(300));
    assert_eq!(rig.words(), ["KV_STATUS 10 0 0 no sender has opened the room"]);
    rig.wait(Duration::from_secs(300));
    let session = rig.sender(2, 10);
    assert_eq!(rig.states(session), "", "nothing is left of the request");
    let config = SglangConfig::new(WorkerRole::Prefill);
    rig.machine = SglangMachine::new(
        &args(tp(1, 0)),
        config.with(|config| {
            (config.limits.unclaimed_rooms, config.limits.unclaimed_pages, config.limits.agents) = (2, 5, 1);
            config.gauges = rig.gauges.clone();
        }),
        agent(),
    )
    .unwrap();
    rig.take(registration("d", DECODE.1).encode());
    let full = "too many requests wait for their prefill";
    for (room, pages) in [(1, &[1, 2, 3][..]), (2, &[4, 5, 6]), (3, &[4]), (4, &[5])] {
        rig.take(request("d", DECODE.1, room, pages).encode());
    }
    assert_eq!(rig.words(), [format!("KV_STATUS 2 0 0 {full}"), format!("KV_STATUS 4 0 0 {full}")]);
    rig.take(registration("other", 5002).encode());
    assert_eq!(rig.gauges.of(Ignored::UnknownRequest), 3, "the only agent is in use");
}

#[test]
fn a_registration_counts_once_and_other_memory_under_a_name_is_another_life() {
    let mut rig = Rig::prefill();
    let session = asked(&mut rig);
    let (agent, _) = rig.agent_way();
    rig.take(registration("d", DECODE.1).encode());
    assert_eq!((rig.states(session).as_str(), rig.disconnected.len()), ("WaitingForInput", 0));
    rig.take(Registration { slots: 31, ..registration("d", DECODE.1) }.encode());
    assert_eq!(
        (rig.cause(session).as_str(), &rig.disconnected[..]),
        ("the peer was restarted", &[agent][..])
    );
}

#[test]
fn an_agent_that_the_transport_refuses_fails_its_requests_with_the_transports_words() {
    let mut rig = Rig::prefill();
    let session = asked(&mut rig);
    let (peer, _) = rig.agent_way();
    let error = TransportError::Foreign("backends differ".to_owned());
    rig.input(Input::ConnectFailed { peer, error });
    assert!(rig.cause(session).ends_with("backends differ"), "{}", rig.cause(session));
    assert_eq!(rig.words().len(), 1);
    rig.take(request("d", DECODE.1, 10, &[20]).encode());
    assert!(rig.words()[0].ends_with("backends differ"));
}

#[test]
fn a_room_for_which_only_a_dummy_has_asked_is_given_up_without_a_word() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(Request { dummy: true, pages: vec![], ..request("d", DECODE.1, 9, &[]) }.encode());
    rig.wait(Duration::from_secs(300));
    assert_eq!(rig.words(), [""; 0]);
    let session = rig.sender(1, 9);
    assert_eq!(rig.states(session), "", "nobody was told that it has failed");
}

#[test]
fn a_dummy_counts_as_a_decode_rank_and_gets_nothing() {
    let mut rig = Rig::prefill();
    rig.take(registration("d", DECODE.1).encode());
    rig.take(Request { dummy: true, pages: vec![], ..request("d", DECODE.1, 9, &[]) }.encode());
    let session = rig.sender(1, 9);
    assert_eq!(rig.states(session), "WaitingForInput");
    rig.announce(session, 1, 1);
    rig.send(session, &[5]);
    assert_eq!((rig.posts.len(), rig.words(), rig.back(session)), (0, vec![], Some(1)));
    assert_eq!(rig.states(session), "WaitingForInput Transferring Success");
    assert_eq!(rig.ways.len(), 0);
}
