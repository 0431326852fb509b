//! This worker writes into the blocks that a vLLM engine has registered.

use bytes::Bytes;
use kv_core::machine::{Machine, Output};
use kv_core::proto::Command;
use kv_core::{
    Cause, ChunkId, Descriptor, FinalLayers, KvPoll, Mismatch, Op, QuarantineReason, SessionId,
    TransportError,
};

use super::decoder::{HASH, of, push, rig, told};
use crate::gauges::Ignored;
use crate::vllm::geometry::tests::{args, metadata};
use crate::vllm::metadata::NixlAgentMetadata;
use crate::vllm::notification::{done, heartbeat};
use crate::vllm::rig::{Rig, SECOND, at};
use KvPoll::{Failed, Success, Transferring, WaitingForInput};

/// Bytes of a page in one layer, all four heads.
const PAGE: u64 = 4 * 16 * 2 * 8 * 2;

fn sent(rig: &mut Rig, number: u64, request: &str, pages: &[u32]) -> SessionId {
    let session = rig.open(number, request, push());
    rig.announce(session, pages.len());
    rig.send(session, pages);
    session
}

#[test]
fn pages_are_written_to_registered_blocks_and_the_notification_goes_with_the_last_post() {
    for registered_first in [true, false] {
        let mut rig = rig((1, 0));
        let registration = of("r-11111111", 1, &[7, 8]);
        if registered_first {
            rig.register("d-0", &registration);
            assert!(rig.out.is_empty(), "nobody is dialed for a receiver without a sender");
        }
        let session = sent(&mut rig, 1, "r-00000001", &[3, 5]);
        if !registered_first {
            assert_eq!((rig.machine.leased(), rig.out.len()), (2, 0));
            rig.register("d-0", &registration);
        }
        assert_eq!(rig.machine.leased(), 0, "the receiver is there");
        let agents = rig.shake_hands(1);
        let posts = rig.posts();
        assert_eq!((posts.len(), posts[0].0, posts[0].1.op), (1, agents[0], Op::Write));
        // Layer 0 is region 0 of the receiver and region 1 here.
        let one = |local_region, remote_region, from: u64, to: u64| Descriptor {
            local_region,
            remote_region,
            local_offset: from * PAGE,
            remote_offset: to * PAGE,
            len: PAGE,
        };
        let mut descriptors = posts[0].1.descriptors.clone();
        descriptors.sort();
        assert_eq!(descriptors, [one(0, 1, 3, 7), one(0, 1, 5, 8), one(1, 0, 3, 7), one(1, 0, 5, 8)]);
        assert_eq!(posts[0].1.notify, Some(Bytes::from_static(b"r-11111111:1")));
        assert_eq!(rig.told(session), (Transferring, &[][..]));
        rig.posted(&posts[0].1, Ok(()));
        assert_eq!(rig.told(session), (Success, &[3, 5][..]));
        assert!(rig.out.is_empty() && rig.gauges.total() == 0, "the way to the receiver stays");
    }
}

#[test]
fn a_second_request_of_the_same_receiver_needs_no_handshake() {
    let mut rig = rig((1, 0));
    for (number, request) in [(1, "a"), (2, "b")] {
        let session = sent(&mut rig, number, request, &[1]);
        rig.register("d-0", &of(request, 1, &[2]));
        assert_eq!(rig.asked().len(), usize::from(number == 1));
        if number == 1 {
            rig.register("d-0", &of(request, 1, &[2]));
            rig.abort(session);
            let session = sent(&mut rig, 9, "c", &[1]);
            rig.register("d-0", &of("c", 1, &[2]));
            rig.shake_hands(1);
            rig.write_all();
            assert_eq!(rig.state(session), Success);
        }
    }
    assert_eq!(rig.write_all().len(), 0, "taken by asked()");
}

#[test]
fn each_rank_of_a_larger_receiver_gets_its_heads_and_is_told_when_all_ranks_have_theirs() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r", &[1, 2, 4]);
    rig.register("d-1", &of("r", 2, &[5, 6, 7]));
    rig.register("d-0", &of("r", 2, &[5, 6, 7]));
    let agents = rig.shake_hands(2);
    assert_eq!(agents.len(), 2);
    let posts = rig.posts();
    assert_eq!(posts.iter().map(|(peer, _)| *peer).collect::<Vec<_>>(), agents);
    for (_, post) in &posts {
        let bytes: u64 = post.descriptors.iter().map(|descriptor| descriptor.len).sum();
        assert_eq!((bytes, post.notify.clone()), (3 * 2 * PAGE / 2, None));
    }
    let heads = |post: usize| posts[post].1.descriptors[0].local_offset % PAGE;
    assert_eq!((heads(0), heads(1)), (0, PAGE / 2));
    // The pages of a rank that is told may be used again on both ranks.
    rig.posted(&posts[0].1, Ok(()));
    assert_eq!((rig.state(session), rig.notified()), (Transferring, vec![]));
    rig.posted(&posts[1].1, Ok(()));
    assert_eq!(rig.notified(), agents.iter().map(|agent| (*agent, done("r", 1))).collect::<Vec<_>>());
    assert_eq!(rig.told(session), (Success, &[1, 2, 4][..]));
    rig.register("d-1", &of("r", 2, &[5, 6, 7]));
    assert_eq!(rig.ignored(Ignored::Repeated), 1, "a late rank of the same receiver");
}

#[test]
fn a_smaller_receiver_is_told_how_many_ranks_write() {
    let mut rig = rig((2, 1));
    let session = sent(&mut rig, 1, "r", &[1]);
    rig.register("d-0", &of("r", 1, &[5]));
    let agents = rig.shake_hands(1);
    // The second half of the heads, in two layers.
    assert_eq!(rig.write_all(), [(agents[0], PAGE, Some(done("r", 2)))]);
    assert_eq!(rig.state(session), Success);
}

#[test]
fn a_receiver_with_a_prefix_gets_the_last_pages() {
    let mut rig = rig((1, 0));
    let session = rig.open(1, "r", push());
    rig.announce(session, 4);
    rig.register("d-0", &of("r", 1, &[9, 8]));
    rig.shake_hands(1);
    rig.send(session, &[1, 2, 3]);
    let posts = rig.posts();
    let places = |post: &kv_core::Post| {
        let place = |one: &Descriptor| (one.local_offset / PAGE, one.remote_offset / PAGE, one.len / PAGE);
        post.descriptors.iter().map(place).collect::<Vec<_>>()
    };
    assert_eq!(places(&posts[0].1), [(3, 9, 1), (3, 9, 1)]);
    rig.posted(&posts[0].1, Ok(()));
    rig.send(session, &[4]);
    let posts = rig.posts();
    assert_eq!(places(&posts[0].1), [(4, 8, 1), (4, 8, 1)]);
    rig.posted(&posts[0].1, Ok(()));
    assert_eq!(rig.told(session), (Success, &[1, 2, 3, 4][..]));
}

#[test]
fn a_receiver_that_needs_nothing_is_told_at_once() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r", &[1]);
    rig.register("d-0", &of("r", 1, &[]));
    let agents = rig.shake_hands(1);
    let said = |out: &_| matches!(out, Output::Send { peer, frame } if *peer == agents[0] && frame == "r:1");
    assert!(rig.out.iter().any(said));
    assert_eq!(rig.posts(), []);
    assert_eq!(rig.told(session), (Success, &[1][..]));
}

#[test]
fn more_blocks_than_pages_are_refused_with_both_numbers() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r", &[1, 2]);
    rig.register("d-0", &of("r", 1, &[1, 2, 3]));
    rig.shake_hands(1);
    assert_eq!(rig.cause(session), Some(Cause::PageCount { sent: 2, registered: 3 }));
    let session = sent(&mut rig, 2, "q", &[1]);
    rig.register("d-0", &of("q", 1, &[10]));
    assert!(matches!(rig.cause(session), Some(Cause::Protocol(_))), "the receiver has ten blocks");
    assert_eq!((rig.posts().len(), rig.back(session)), (0, &[1][..]));
}

#[test]
fn chunks_are_written_as_they_come_and_the_notification_waits_for_all_of_them() {
    let mut rig = rig((1, 0));
    rig.register("d-0", &of("r", 1, &[5, 6, 7]));
    let session = rig.open(1, "r", push());
    assert_eq!(rig.state(session), WaitingForInput);
    rig.shake_hands(1);
    rig.announce(session, 3);
    rig.send(session, &[1]);
    let first = rig.posts();
    assert_eq!((first.len(), first[0].1.notify.clone()), (1, None));
    rig.send(session, &[2]);
    let second = rig.posts();
    rig.send(session, &[3]);
    assert_eq!(rig.posts(), [], "the last chunk waits");
    rig.posted(&second[0].1, Ok(()));
    assert_eq!(rig.posts(), []);
    rig.posted(&first[0].1, Ok(()));
    let last = rig.posts();
    assert_eq!(last[0].1.notify, Some(done("r", 1)));
    rig.posted(&last[0].1, Ok(()));
    assert_eq!(rig.told(session), (Success, &[1, 2, 3][..]));
}

#[test]
fn layers_are_written_when_they_are_final() {
    let mut rig = rig((1, 0));
    rig.register("d-0", &of("r", 1, &[5]));
    let session = rig.open(1, "r", push());
    rig.shake_hands(1);
    rig.announce(session, 1);
    let chunk = rig.pages(&[2]);
    rig.command(Command::BeginChunk { session, chunk });
    assert_eq!(rig.posts(), []);
    for layer in [1, 0] {
        let layers = FinalLayers::new(ChunkId(0), layer..layer + 1);
        rig.command(Command::LayersFinal { session, layers });
        let posts = rig.posts();
        assert_eq!(posts[0].1.descriptors.len(), 1);
        // This cache names its regions in the reverse order of layers.
        assert_eq!(posts[0].1.descriptors[0].local_region, 1 - layer);
        assert_eq!(posts[0].1.notify, (layer == 0).then(|| done("r", 1)));
        rig.posted(&posts[0].1, Ok(()));
    }
    assert_eq!(rig.told(session), (Success, &[2][..]));
}

#[test]
fn a_receiver_is_told_after_its_last_byte_also_where_what_is_final_last_is_not_for_the_receiver() {
    let mut rig = rig((1, 0));
    // The receiver has the first page already.
    rig.register("d-0", &of("r", 1, &[5]));
    let session = rig.open(1, "r", push());
    rig.shake_hands(1);
    rig.announce(session, 2);
    for page in [1, 2] {
        let chunk = rig.pages(&[page]);
        rig.command(Command::BeginChunk { session, chunk });
    }
    let mut posts = Vec::new();
    for chunk in [1, 0] {
        rig.command(Command::LayersFinal { session, layers: FinalLayers::new(ChunkId(chunk), 0..2) });
        posts.extend(rig.posts());
    }
    assert_eq!((posts.len(), posts[0].1.notify.clone(), rig.notified()), (1, None, vec![]));
    rig.posted(&posts[0].1, Ok(()));
    assert_eq!(rig.notified()[0].1, done("r", 1));
    assert_eq!(rig.told(session), (Success, &[1, 2][..]));
}

#[test]
fn pages_of_an_aborted_session_come_back_when_the_last_of_its_writes_has_ended() {
    let mut rig = rig((1, 0));
    rig.register("d-0", &of("r", 1, &[5, 6, 7]));
    let session = rig.open(1, "r", push());
    rig.shake_hands(1);
    rig.announce(session, 3);
    rig.send(session, &[1]);
    rig.send(session, &[2]);
    let posts = rig.posts();
    rig.abort(session);
    rig.posted(&posts[0].1, Err(TransportError::Cancelled));
    assert_eq!((rig.told(session), rig.quarantine().len()), ((Failed, &[][..]), 1));
    rig.posted(&posts[1].1, Ok(()));
    assert_eq!((rig.told(session), rig.quarantine().len()), ((Failed, &[1, 2][..]), 0));
}

#[test]
fn pages_with_room_between_them_are_written_one_by_one() {
    for page_major_here in [true, false] {
        let mut rig = Rig::new(args((1, 0), page_major_here), |_| ());
        let session = sent(&mut rig, 1, "r", &[1, 2]);
        rig.register("d-0", &of("r", 1, &[5, 6]));
        let (channel, _) = rig.asked()[0];
        let mut theirs = metadata((1, 0), true);
        (theirs.engine_id, theirs.agent_metadata) = ("D-engine".to_owned(), super::decoder::blob("d-0"));
        rig.answer(channel, HASH, &theirs);
        let agent = rig.agent();
        rig.connected(agent);
        let posts = rig.posts();
        let mut to: Vec<u64> = posts[0].1.descriptors.iter().map(|one| one.remote_offset).collect();
        to.sort_unstable();
        assert_eq!(to, [10 * PAGE, 10 * PAGE, 12 * PAGE, 12 * PAGE]);
        rig.posted(&posts[0].1, Ok(()));
        assert_eq!(rig.state(session), Success);
    }
}

#[test]
fn a_receiver_whose_engine_step_would_fail_is_refused_with_both_values() {
    // vLLM's receiver raises an exception at the notification of a write from blocks that are not as its own.
    type Change = fn(&mut NixlAgentMetadata);
    let of_blocks = |size: u32| {
        move |told: &mut NixlAgentMetadata| {
            let len = PAGE * u64::from(size) / 16;
            (told.block_size, told.num_blocks) = (size, 160 / u64::from(size));
            (told.block_lens, told.block_strides) = (vec![len; 2], vec![len; 2]);
            told.region_num_blocks = None;
        }
    };
    let joined: Change = |told| told.physical_blocks_per_logical_kv_block = 2;
    let order: Change = |told| told.kv_cache_layout = "LBNHC".to_owned();
    let mut refused = Vec::new();
    let changes: [&dyn Fn(&mut NixlAgentMetadata); 5] =
        [&of_blocks(16), &of_blocks(8), &of_blocks(32), &joined, &order];
    for change in changes {
        let mut rig = rig((1, 0));
        let session = sent(&mut rig, 1, "r", &[1, 2]);
        rig.register("d-0", &of("r", 1, &[4]));
        let (channel, _) = rig.asked()[0];
        let mut theirs = told((1, 0), "d-0");
        change(&mut theirs);
        rig.answer(channel, HASH, &theirs);
        let Some(cause) = rig.cause(session) else { continue };
        let Cause::Incompatible(Mismatch { field, ours, theirs }) = cause else { panic!("{cause}") };
        let said = |out: &_| matches!(out, Output::Post { .. } | Output::Send { .. });
        assert!(!rig.out.iter().any(said), "nothing is written, and the receiver is told nothing");
        assert_eq!(rig.back(session), [1, 2]);
        refused.push(format!("{field}: {ours}, {theirs}"));
    }
    let ratio = "physical_blocks_per_logical_kv_block: 1, 2";
    assert_eq!(refused, ["block_size: 16, 8", "block_size: 16, 32", ratio, "kv_cache_layout: LBHNC, LBNHC"]);
}

#[test]
fn a_listener_is_told_what_a_session_does_from_its_opening_to_its_end() {
    let mut rig = rig((1, 0));
    rig.machine.listen(true);
    let session = sent(&mut rig, 1, "r", &[1]);
    rig.register("d-0", &of("r", 1, &[5]));
    rig.shake_hands(1);
    let posts = rig.posts();
    rig.now = at(2);
    rig.posted(&posts[0].1, Ok(()));
    let aborted = rig.open(2, "q", push());
    rig.abort(aborted);
    let mut names = Vec::new();
    while let Some(event) = rig.machine.poll_trace() {
        names.push((event.who.session.is_some_and(|of| of == session), event.what.name()));
    }
    let own: Vec<&str> = names.iter().filter(|(own, _)| *own).map(|(_, name)| *name).collect();
    let states =
        ["opened", "chunk_given", "state", "state", "receiver_came", "ended", "pages_back", "closed"];
    let mut sorted = (own.clone(), states.to_vec());
    sorted.0.sort_unstable();
    sorted.1.sort_unstable();
    assert_eq!(sorted.0, sorted.1);
    assert_eq!(own.last(), Some(&"closed"));
    let rest: Vec<&str> = names.iter().filter(|(own, _)| !*own).map(|(_, name)| *name).collect();
    assert_eq!(rest, ["post_started", "post_ended", "opened", "state", "failed", "closed"]);
}

#[test]
fn without_a_receiver_the_lease_ends_the_session_and_heartbeats_extend_it() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r-00000001", &[1]);
    rig.wait_until(at(29));
    rig.notify("d-0", heartbeat(["r-22222222"]));
    rig.wait_until(at(48));
    assert_eq!(rig.state(session), Transferring);
    rig.wait_until(at(49));
    assert_eq!((rig.told(session), rig.cause(session)), ((Failed, &[1][..]), Some(Cause::LeaseExpired)));
    rig.register("d-0", &of("r-22222222", 1, &[4]));
    assert!(rig.out.is_empty());
}

#[test]
fn a_reader_of_a_request_that_is_written_is_ignored() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r", &[1]);
    rig.notify("d-0", done("r", 1));
    assert_eq!((rig.ignored(Ignored::OtherMode), rig.state(session)), (1, Transferring));
}

#[test]
fn an_abort_during_a_write_keeps_the_pages_until_the_write_has_ended() {
    for by_stop in [false, true] {
        let mut rig = rig((1, 0));
        let session = sent(&mut rig, 1, "r", &[1, 2]);
        rig.register("d-0", &of("r", 1, &[5, 6]));
        let agent = rig.shake_hands(1)[0];
        let posts = rig.posts();
        if by_stop {
            rig.command(Command::Shutdown);
        } else {
            rig.abort(session);
        }
        assert_eq!(rig.told(session), (Failed, &[][..]));
        assert_eq!(rig.out, [Output::Cancel { post: posts[0].1.id }]);
        let shown = rig.quarantine();
        assert_eq!((shown[0].reason, shown[0].pages), (QuarantineReason::OwnPosts, 2));
        assert_eq!(shown[0].peer.as_ref().map(ToString::to_string), Some("D-engine/0".to_owned()));
        assert!(!rig.disconnected(agent), "a write is in flight there");
        rig.posted(&posts[0].1, Err(TransportError::Cancelled));
        assert_eq!((rig.back(session), rig.quarantine()), (&[1, 2][..], vec![]));
        rig.wait_until(at(3600));
        assert_eq!(rig.machine.next_timeout(), None);
    }
}

#[test]
fn a_failed_write_fails_the_session_and_the_next_one_asks_the_side_channel_anew() {
    let mut rig = rig((1, 0));
    let session = rig.open(1, "r", push());
    rig.announce(session, 3);
    rig.register("d-0", &of("r", 1, &[5, 6, 7]));
    let agent = rig.shake_hands(1)[0];
    rig.send(session, &[1]);
    rig.send(session, &[2]);
    let posts = rig.posts();
    rig.posted(&posts[0].1, Err(TransportError::PeerGone));
    assert_eq!(rig.told(session), (Failed, &[][..]));
    assert_eq!(rig.cause(session), Some(Cause::Post(TransportError::PeerGone)));
    assert!(!rig.disconnected(agent), "the other write is in flight");
    rig.posted(&posts[1].1, Ok(()));
    assert_eq!(rig.back(session), [1, 2]);
    assert!(rig.disconnected(agent));
    let next = sent(&mut rig, 2, "q", &[1]);
    rig.register("d-0", &of("q", 1, &[5]));
    rig.shake_hands(1);
    rig.write_all();
    assert_eq!(rig.state(next), Success);
}

#[test]
fn a_receiver_that_dies_fails_its_sessions_and_frees_their_pages_when_their_writes_have_ended() {
    let mut rig = rig((1, 0));
    let writing = sent(&mut rig, 1, "a", &[1]);
    let waiting = rig.open(2, "b", push());
    let other = sent(&mut rig, 3, "c", &[3]);
    for request in ["a", "b"] {
        rig.register("d-0", &of(request, 1, &[5]));
    }
    let agent = rig.shake_hands(1)[0];
    let posts = rig.posts();
    rig.gone(agent);
    assert_eq!((rig.cause(writing), rig.cause(waiting)), (Some(Cause::WayLost), Some(Cause::WayLost)));
    assert_eq!((rig.back(writing), rig.state(other)), (&[][..], Transferring));
    rig.posted(&posts[0].1, Err(TransportError::PeerGone));
    assert_eq!(rig.back(writing), [1]);
}

#[test]
fn a_deadline_ends_a_session_in_every_phase_of_push() {
    for phase in 0..4 {
        let mut rig = rig((1, 0));
        let options = push().with(|options| options.deadline = Some(4 * SECOND));
        let session = rig.open(1, "r", options);
        rig.announce(session, 1);
        rig.send(session, &[1]);
        let mut posts = Vec::new();
        if phase > 0 {
            rig.register("d-0", &of("r", 1, &[5]));
        }
        if phase > 1 {
            let (channel, _) = rig.asked()[0];
            rig.answer(channel, HASH, &told((1, 0), "d-0"));
        }
        if phase > 2 {
            let agent = rig.agent();
            rig.connected(agent);
            posts = rig.posts();
        }
        rig.wait_until(at(4));
        assert_eq!(rig.cause(session), Some(Cause::DeadlineExceeded { after: 4 * SECOND, last: None }));
        assert_eq!(rig.back(session).len(), usize::from(phase < 3), "phase {phase}");
        for (_, post) in posts {
            rig.posted(&post, Ok(()));
        }
        assert_eq!(rig.back(session), [1]);
        rig.wait_until(at(999));
        assert_eq!(rig.machine.next_timeout(), None);
    }
}

#[test]
fn side_channels_that_do_not_fit_fail_the_session_with_the_field() {
    let refusal = |answer: &dyn Fn(&mut Rig, kv_core::PeerId)| {
        let mut rig = rig((1, 0));
        let session = sent(&mut rig, 1, "r", &[1]);
        rig.register("d-0", &of("r", 1, &[5]));
        let (channel, _) = rig.asked()[0];
        answer(&mut rig, channel);
        assert_eq!(rig.told(session), (Failed, &[1][..]));
        rig.wait_until(at(999));
        assert_eq!(rig.machine.next_timeout(), None);
        rig.cause(session).unwrap()
    };
    let field = |cause: Cause| match cause {
        Cause::Incompatible(mismatch) => mismatch.field,
        other => format!("{other:?}"),
    };
    let hash = refusal(&|rig, channel| rig.answer(channel, "another", &told((1, 0), "d-0")));
    assert_eq!(field(hash), "compatibility_hash");
    let engine = refusal(&|rig, channel| {
        let mut told = told((1, 0), "d-0");
        told.engine_id = "another".to_owned();
        rig.answer(channel, HASH, &told);
    });
    assert_eq!(field(engine), "engine_id");
    let lens = refusal(&|rig, channel| {
        let mut told = told((1, 0), "d-0");
        told.block_lens[1] = 8;
        rig.answer(channel, HASH, &told);
    });
    assert_eq!(field(lens), "block_lens[1]");
    let damaged = refusal(&|rig, channel| rig.reply(channel, vec![Bytes::from_static(b"x")]));
    assert!(matches!(damaged, Cause::Protocol(_)));
    let gone = refusal(&|rig, channel| rig.gone(channel));
    assert_eq!(gone, Cause::WayLost);
    let silent = refusal(&|rig, _| rig.wait_until(at(5)));
    assert_eq!(silent, Cause::PeerUnresponsive { silent_for: 5 * SECOND });
    let refused = refusal(&|rig, channel| {
        rig.answer(channel, HASH, &told((1, 0), "d-0"));
        let (peer, error) = (rig.agent(), TransportError::Foreign("no such backend".to_owned()));
        rig.input(kv_core::machine::Input::ConnectFailed { peer, error });
    });
    assert!(matches!(refused, Cause::Connect(TransportError::Foreign(_))));
}
