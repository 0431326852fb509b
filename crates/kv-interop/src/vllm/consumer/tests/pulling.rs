//! Pull: pages are read, their holders are told, and leases are kept.

use std::time::Duration;

use kv_core::layout::{HND, NHD_PACKED};
use kv_core::{KvPoll, SessionId, Time, TransferMode, TransportError, WayEnd, WorkerRole};

use super::rig::{Engine, ONE, Rig, SECOND, Shape};
use crate::message::Way;
use crate::vllm::config::VllmConfig;

const S: SessionId = SessionId(1);

fn pull(shape: Shape) -> Rig {
    Rig::new(shape, TransferMode::Pull)
}

#[test]
fn a_request_is_read_and_its_holder_is_told_once_after_the_last_byte() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "cmpl-1-0-0123abcd", &[4, 5, 9]), |_| ());
    assert_eq!(rig.poll(S), KvPoll::Bootstrapping);
    rig.shake(&engine);
    assert_eq!(rig.poll(S), KvPoll::WaitingForInput);
    let first = rig.notified();
    assert_eq!(first, [("agent p-0 0 0 life 1".to_owned(), "HB:cmpl-1-0-0123abcd".to_owned())]);
    rig.init(1, &[7, 3, 8]);
    assert_eq!((rig.poll(S), rig.notified()), (KvPoll::Transferring, vec![]));
    rig.finish_posts(&engine, &[4, 5, 9], Ok(()));
    assert_eq!(rig.poll(S), KvPoll::Success);
    let (right, all) = rig.right(&[7, 3, 8], 0);
    assert_eq!(right, all);
    assert_eq!(rig.notified(), [("agent p-0 0 0 life 1".to_owned(), "cmpl-1-0-0123abcd:1".to_owned())]);
    assert_eq!((rig.back[&S], rig.held()), (3, vec![]));
}

#[test]
fn pages_may_be_given_before_the_handshake_ends() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.init(1, &[7]);
    assert!(rig.posts.is_empty());
    rig.shake(&engine);
    rig.finish_posts(&engine, &[4], Ok(()));
    assert_eq!((rig.poll(S), rig.right(&[7], 0).0), (KvPoll::Success, rig.right(&[7], 0).1));
}

#[test]
fn one_handshake_serves_all_sessions_of_an_engine() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    for n in 1..=30 {
        rig.open(n, Rig::remote(&engine, &format!("r{n}"), &[n as u32]), |_| ());
        rig.init(n, &[n as u32 + 5]);
    }
    rig.shake(&engine);
    assert_eq!(rig.ways.len(), 2, "one side channel and one agent");
    rig.finish_posts(&engine, &(1..=30).collect::<Vec<_>>(), Ok(()));
    assert!((1..=30).all(|n| rig.poll(SessionId(n)) == KvPoll::Success));
    let told = rig.notified();
    let beats = told.iter().filter(|(_, text)| text.starts_with("HB:r1,r10,r11")).count();
    let ends = told.iter().filter(|(_, text)| text.ends_with(":1")).count();
    assert_eq!((beats, ends, rig.back.len()), (0, 30, 30));
}

#[test]
fn a_worker_that_was_stopped_beyond_its_lease_begins_no_read_when_an_earlier_one_ends() {
    let (blocks, pages) =
        ((0..40).step_by(2).collect::<Vec<u32>>(), (1..40).step_by(2).collect::<Vec<u32>>());
    for (stopped, goes_on) in [(24, true), (26, false)] {
        // Each of the 2 * 40 reads is a post of its own, and 64 are in flight at most.
        let mut rig = Rig::with(ONE, TransferMode::Pull, |config| config.limits.max_post_bytes = 1);
        let engine = Engine::new(ONE);
        rig.open(1, Rig::remote(&engine, "r1", &blocks), |_| ());
        rig.open(2, Rig::remote(&engine, "r2", &blocks), |_| ());
        rig.shake(&engine);
        rig.init(1, &blocks);
        rig.init(2, &pages);
        assert_eq!(rig.posts.len(), 64);
        rig.cx.now = rig.cx.now + stopped * SECOND;
        let (_, first) = rig.posts.remove(0);
        rig.consumer.posted(&mut rig.cx, first.id, Ok(()));
        rig.drain();
        assert_eq!(rig.posts.len(), if goes_on { 64 } else { 63 }, "stopped for {stopped} s");
        let cause = if goes_on { "" } else { "lease" };
        assert!(rig.cause(SessionId(2)).contains(cause), "{}", rig.cause(SessionId(2)));
        assert_eq!(rig.poll(SessionId(2)) == KvPoll::Failed, !goes_on);
        rig.finish_posts(&engine, &blocks, Err(TransportError::Cancelled));
        assert_eq!((rig.back[&S], rig.back[&SessionId(2)]), (20, 20));
    }
}

#[test]
fn a_read_that_cannot_reach_its_engine_ends_all_sessions_there_because_heartbeats_did_not_reach_it_either() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    for n in 1..=3 {
        rig.open(n, Rig::remote(&engine, &format!("r{n}"), &[n as u32]), |_| ());
    }
    rig.shake(&engine);
    rig.init(1, &[7]);
    rig.init(2, &[8]);
    let (_, post) = rig.posts.remove(0);
    rig.consumer.posted(&mut rig.cx, post.id, Err(TransportError::PeerGone));
    rig.drain();
    assert!((1..=3).all(|n| rig.poll(SessionId(n)) == KvPoll::Failed), "{:?}", rig.told);
    assert_eq!((rig.back.get(&S), rig.back.get(&SessionId(2))), (Some(&1), None), "the second is being read");
    rig.finish_posts(&engine, &[2], Err(TransportError::Cancelled));
    assert_eq!(rig.back[&SessionId(2)], 1);
    // The engine is known still: its next session needs no handshake, and notices a restart.
    rig.open(4, Rig::remote(&engine, "r4", &[4]), |_| ());
    rig.init(4, &[9]);
    rig.finish_posts(&engine, &[4], Ok(()));
    assert_eq!((rig.poll(SessionId(4)), rig.right(&[9], 0).0), (KvPoll::Success, rig.right(&[9], 0).1));
}

#[test]
fn after_a_prefix_only_the_last_pages_are_read() {
    for prefix in [0, 2] {
        let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
        rig.open(1, Rig::remote(&engine, "r", &[4, 5, 9, 2]), |options| options.prefix_pages = prefix);
        rig.shake(&engine);
        rig.init(1, &[7, 3]);
        rig.finish_posts(&engine, &[4, 5, 9, 2], Ok(()));
        let (right, all) = rig.right(&[7, 3], 32);
        assert_eq!((rig.poll(S), right), (KvPoll::Success, all));
        assert_eq!(rig.right(&[0, 1], 0).0, 0, "nothing was written beside the pages");
    }
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4, 5, 9, 2]), |options| options.prefix_pages = 1);
    rig.shake(&engine);
    rig.init(1, &[7, 3]);
    assert!(
        rig.cause(S).contains("4 pages are to be sent, but the receiver registered 3"),
        "{}",
        rig.cause(S)
    );
    assert!(rig.posts.is_empty());
}

#[test]
fn who_has_all_pages_reads_nothing_and_still_tells_the_holder() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4, 5]), |options| options.prefix_pages = 2);
    rig.init(1, &[]);
    assert_eq!(rig.poll(S), KvPoll::Bootstrapping);
    rig.shake(&engine);
    assert_eq!((rig.poll(S), rig.posts.len()), (KvPoll::Success, 0));
    assert!(rig.notified().iter().any(|(_, text)| text == "r:1"));
}

#[test]
fn more_pages_than_the_holder_has_are_refused_and_the_holder_is_told() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.shake(&engine);
    rig.notified();
    rig.init(1, &[7, 8]);
    assert_eq!(rig.poll(S), KvPoll::Failed);
    assert_eq!((rig.back[&S], rig.notified()[0].1.as_str()), (2, "r:1"));
    // A block that the engine does not have.
    rig.open(2, Rig::remote(&engine, "s", &[40]), |_| ());
    rig.init(2, &[9]);
    assert!(rig.cause(SessionId(2)).contains("the lease names a page that does not exist"));
}

#[test]
fn every_shape_on_both_sides_gives_the_right_bytes() {
    let latent = Shape { latent: true, total_heads: 1, ..ONE };
    let (small, big) = (Shape { page_size: 8, ..ONE }, Shape { page_size: 32, ..ONE });
    let major = Shape { page_major: true, ..ONE };
    let few = Shape { total_heads: 2, ..ONE };
    let shapes = [
        ("page-major here", major, ONE),
        ("page-major there", ONE, major),
        ("two ranks there", ONE, ONE.tp(2, 0)),
        ("four ranks there, page-major on both sides", major.tp(2, 1), major.tp(4, 0)),
        ("two ranks here", ONE.tp(2, 1), ONE),
        ("the second of four ranks here", ONE.tp(4, 1), ONE.tp(2, 0)),
        ("the third of four ranks here", ONE.tp(4, 2), ONE.tp(2, 0)),
        ("heads on several ranks there", few, few.tp(4, 0)),
        ("heads on several ranks here", few.tp(4, 3), few.tp(2, 0)),
        ("latents", latent, latent),
        ("latents, two ranks there", latent, latent.tp(2, 0)),
        ("latents, two ranks here", latent.tp(2, 1), latent),
        ("smaller pages there", ONE, small),
        ("larger pages there", ONE, big),
        ("smaller pages on two ranks there", ONE, small.tp(2, 0)),
        ("token-major here", Shape { axes: NHD_PACKED, ..ONE }, ONE),
        ("keys before values here", Shape { axes: HND, ..ONE }, ONE.tp(2, 0)),
    ];
    for (name, ours, theirs) in shapes {
        let (mut rig, engine) = (pull(ours), Engine::new(theirs));
        let tokens = 64;
        let blocks: Vec<u32> = (0..tokens / theirs.page_size).map(|n| 3 + 2 * n).collect();
        let pages: Vec<u32> = (0..tokens / ours.page_size).map(|n| 30 - n).collect();
        rig.open(1, Rig::remote(&engine, "r", &blocks), |_| ());
        rig.shake(&engine);
        rig.notified();
        rig.init(1, &pages);
        rig.finish_posts(&engine, &blocks, Ok(()));
        let (right, all) = rig.right(&pages, 0);
        assert_eq!((rig.poll(S), right), (KvPoll::Success, all), "{name}: {}", rig.cause(S));
        let readers = (ours.tp_size / theirs.tp_size).max(1);
        let told = rig.notified();
        let ranks = (theirs.tp_size / ours.tp_size).max(1);
        assert_eq!(told.len(), ranks as usize, "{name}: every rank is told, also one that was not read");
        assert!(told.iter().all(|(_, text)| *text == format!("r:{readers}")), "{name}: {told:?}");
    }
}

#[test]
fn heartbeats_name_all_open_requests_every_sixth_of_the_lease() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE.tp(2, 0)));
    for n in 1..=3 {
        rig.open(n, Rig::remote(&engine, &format!("r{n}"), &[n as u32]), |_| ());
    }
    rig.shake(&engine);
    let beat =
        |ids: &str| [0, 1].map(|rank| (format!("agent p-0 0 {rank} life 1"), format!("HB:{ids}"))).to_vec();
    assert_eq!(rig.notified(), beat("r1,r2,r3"));
    rig.pass(Duration::from_millis(4999));
    assert_eq!(rig.notified(), []);
    rig.pass(Duration::from_millis(1));
    assert_eq!(rig.notified(), beat("r1,r2,r3"));
    rig.abort(2);
    rig.notified();
    rig.open(4, Rig::remote(&engine, "a,b", &[5]), |_| ());
    rig.pass(5 * SECOND);
    assert_eq!(rig.notified(), beat("r1,r3"), "an id with a comma would be cut");
    rig.abort(1);
    rig.abort(3);
    rig.abort(4);
    rig.notified();
    rig.pass(60 * SECOND);
    assert_eq!(rig.notified(), []);
}

#[test]
fn a_lease_of_any_length_overflows_nothing_and_lets_time_pass() {
    for lease in [Duration::MAX, Duration::ZERO] {
        for source in [None, Some(WorkerRole::Decode)] {
            let change = |config: &mut VllmConfig| {
                config.timing.kv_lease_duration = lease;
                config.reader.engine_ttl = lease;
            };
            let (mut rig, engine) = (Rig::with(ONE, TransferMode::Pull, change), Engine::new(ONE));
            let told = Rig::remote(&engine, "r", &[4]);
            let told = told.with(|remote| remote.expires_at = Some(Duration::MAX));
            rig.open(1, told, |options| options.source = source);
            rig.shake(&engine);
            rig.pass(SECOND);
            rig.init(1, &[7]);
            rig.finish_posts(&engine, &[4], Ok(()));
            assert_eq!((rig.poll(S), rig.back[&S]), (KvPoll::Success, 1), "{lease:?}, {source:?}");
        }
    }
}

#[test]
fn a_read_that_ends_after_the_lease_may_be_over_never_succeeds() {
    // Heartbeats keep the lease.
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.shake(&engine);
    rig.pass(120 * SECOND);
    rig.init(1, &[7]);
    rig.pass(10 * SECOND);
    rig.finish_posts(&engine, &[4], Ok(()));
    assert_eq!(rig.poll(S), KvPoll::Success);

    // A worker that was stopped for a while has sent none.
    for (stopped, poll) in [(9, KvPoll::Success), (16, KvPoll::Failed)] {
        let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
        rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
        rig.shake(&engine);
        rig.pass(60 * SECOND);
        rig.init(1, &[7]);
        rig.cx.now = rig.cx.now + stopped * SECOND;
        rig.finish_posts(&engine, &[4], Ok(()));
        assert_eq!((rig.poll(S), rig.back[&S]), (poll, 1), "{}", rig.cause(S));
    }

    // A handshake that takes too long.
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.init(1, &[7]);
    rig.cx.now = rig.cx.now + 25 * SECOND;
    rig.shake(&engine);
    assert_eq!((rig.poll(S), rig.posts.len()), (KvPoll::Failed, 0));
    assert!(rig.cause(S).contains("lease"), "{}", rig.cause(S));
}

#[test]
fn reads_that_a_silent_network_delays_end_the_sessions_whose_heartbeats_it_delayed_too() {
    // Two sessions read and a third one waits for pages. The network carries nothing for 60 seconds, in which the
    // engine's leases end; then everything arrives, heartbeats and the first read.
    for (old, silent, outlasts) in [(60, 10, true), (60, 11, false), (0, 24, true), (0, 60, false)] {
        let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
        for n in 1..=3 {
            rig.open(n, Rig::remote(&engine, &format!("r{n}"), &[n as u32]), |_| ());
        }
        rig.shake(&engine);
        rig.pass(old * SECOND);
        rig.init(1, &[7]);
        rig.init(2, &[8]);
        rig.pass(silent * SECOND);
        rig.finish_posts(&engine, &[1, 2], Ok(()));
        let all = [KvPoll::Success, KvPoll::Success, KvPoll::WaitingForInput];
        let expected = if outlasts { all } else { [KvPoll::Failed; 3] };
        assert_eq!(
            [1, 2, 3].map(|n| rig.poll(SessionId(n))),
            expected,
            "{silent} s of silence after {old} s"
        );
        assert_eq!((rig.back[&S], rig.back[&SessionId(2)]), (1, 1));
    }
}

#[test]
fn a_read_that_was_cancelled_in_a_silence_ends_the_sessions_that_wait_as_well() {
    for (silent, outlasts) in [(10, true), (40, false)] {
        let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
        for n in 1..=2 {
            rig.open(n, Rig::remote(&engine, &format!("r{n}"), &[n as u32]), |_| ());
        }
        rig.shake(&engine);
        rig.pass(60 * SECOND);
        rig.init(1, &[7]);
        rig.pass(silent / 2 * SECOND);
        rig.abort(1);
        rig.pass(silent / 2 * SECOND);
        rig.finish_posts(&engine, &[1], Err(TransportError::Cancelled));
        let expected = if outlasts { KvPoll::WaitingForInput } else { KvPoll::Failed };
        assert_eq!(rig.poll(SessionId(2)), expected, "{silent} s of silence");
        assert_eq!(rig.back[&S], 1);
    }
}

#[test]
fn a_session_that_is_read_for_long_lasts_while_any_read_at_its_engine_ends_now_and_then() {
    let mut rig = Rig::with(ONE, TransferMode::Pull, |config| config.limits.max_post_bytes = 1);
    let engine = Engine::new(ONE);
    for n in 1..=2 {
        rig.open(n, Rig::remote(&engine, &format!("r{n}"), &[4, 5, 6, 8]), |_| ());
    }
    rig.shake(&engine);
    rig.pass(60 * SECOND);
    rig.init(1, &[7, 9, 11, 13]);
    rig.init(2, &[1, 3, 15, 17]);
    // The first session's reads end one by one; the second one's end last.
    assert_eq!(rig.posts.len(), 16);
    for _ in 0..15 {
        rig.pass(10 * SECOND);
        let (_, post) = rig.posts.remove(0);
        rig.consumer.posted(&mut rig.cx, post.id, Ok(()));
        rig.drain();
    }
    rig.pass(10 * SECOND);
    rig.finish_posts(&engine, &[4, 5, 6, 8], Ok(()));
    assert_eq!([1, 2].map(|n| rig.poll(SessionId(n))), [KvPoll::Success; 2]);
    // Without a read in flight there is no silence.
    rig.open(3, Rig::remote(&engine, "r3", &[4]), |_| ());
    rig.pass(100 * SECOND);
    rig.init(3, &[33]);
    rig.finish_posts(&engine, &[4], Ok(()));
    assert_eq!(rig.poll(SessionId(3)), KvPoll::Success);
}

#[test]
fn a_lease_that_runs_out_during_a_read_holds_the_pages_until_the_read_has_ended() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.shake(&engine);
    rig.init(1, &[7]);
    rig.notified();
    rig.cx.now = rig.cx.now + 40 * SECOND;
    rig.consumer.timeout(&mut rig.cx);
    rig.drain();
    assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(1, None)]));
    assert_eq!(rig.cancelled.len(), 1);
    assert_eq!(rig.notified(), [], "the holder is not told while a read is in flight");
    rig.finish_posts(&engine, &[4], Ok(()));
    assert_eq!((rig.back[&S], rig.held(), rig.notified().len()), (1, vec![], 1));
}

#[test]
fn turn_two_ends_by_the_decode_engines_own_clock() {
    let open = |expires: Option<u64>, transit: u64| {
        let (mut rig, mut engine) = (pull(ONE), Engine::new(ONE));
        engine.clock = 5000 * SECOND;
        let expires = expires.map(Duration::from_secs);
        let remote = Rig::remote(&engine, "r", &[4]).with(|remote| remote.expires_at = expires);
        rig.open(1, remote, |options| options.source = Some(WorkerRole::Decode));
        rig.pass(Duration::from_secs(transit));
        rig.shake(&engine);
        let beats = rig.notified().iter().any(|(_, text)| text.starts_with("HB:"));
        assert!(!beats, "{expires:?}: nobody can extend such a lease");
        rig.init(1, &[7]);
        (rig, engine)
    };
    // Ten seconds left, five of them are the margin.
    for (wait, poll) in [(4, KvPoll::Success), (5, KvPoll::Failed)] {
        let (mut rig, engine) = open(Some(5010), 0);
        rig.cx.now = rig.cx.now + wait * SECOND;
        rig.finish_posts(&engine, &[4], Ok(()));
        assert_eq!(rig.poll(S), poll);
    }
    for (expires, transit) in [(Some(5005), 0), (Some(4000), 0), (None, 0), (Some(5007), 3)] {
        let (rig, _) = open(expires, transit);
        assert_eq!((rig.poll(S), rig.posts.len()), (KvPoll::Failed, 0), "{expires:?} after {transit}");
    }
}

#[test]
fn pipeline_stages_are_read_layer_by_layer() {
    let (mut rig, mut engine) = (pull(ONE), Engine::new(ONE));
    // Each stage shows one of the two layers: the second stage has the second.
    engine.change = |metadata| {
        let stage = usize::from(metadata.agent_metadata.starts_with(b"agent p-0 1"));
        metadata.kv_caches_base_addr = vec![metadata.kv_caches_base_addr[stage]];
        metadata.block_lens.truncate(1);
        metadata.block_strides.truncate(1);
        (metadata.region_num_blocks, metadata.region_group_ids) = (None, None);
        metadata.region_mem_types = None;
    };
    rig.open(1, Rig::remote(&engine, "r", &[4]).with(|remote| remote.pp_size = 2), |_| ());
    rig.shake(&engine);
    rig.init(1, &[7]);
    let regions = |way: &Way| match way {
        Way::Agent { regions, .. } => regions.iter().map(|region| region.addr).collect(),
        Way::Request { .. } | Way::Push { .. } => Vec::new(),
    };
    let places: Vec<Vec<u64>> = rig.ways.values().map(regions).collect();
    assert_eq!(places, [vec![], vec![0x10_0000], vec![0x80_0000]]);
    let layers: Vec<(u32, u32)> = rig
        .posts
        .iter()
        .flat_map(|(_, post)| post.descriptors.iter().map(|d| (d.local_region, d.remote_region)))
        .collect();
    assert_eq!(layers, [(0, 0), (1, 0)]);
}

#[test]
fn an_engine_that_nobody_needs_is_forgotten_after_a_while() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.shake(&engine);
    rig.abort(1);
    rig.pass(3599 * SECOND);
    assert_eq!(rig.closed.len(), 0);
    rig.pass(10 * SECOND);
    assert_eq!((rig.closed.len(), rig.consumer.next_timeout()), (2, None));
    assert_eq!(rig.consumer.engines.len(), 0);
}

#[test]
fn a_side_channel_that_comes_back_as_the_same_engine_disturbs_nothing() {
    let (mut rig, engine) = (pull(ONE), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.shake(&engine);
    rig.init(1, &[7]);
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Lost);
    assert_ne!(rig.channel(), channel);
    rig.open(2, Rig::remote(&engine, "s", &[5]), |_| ());
    rig.init(2, &[8]);
    rig.answer(&engine);
    assert_eq!(rig.poll(SessionId(2)), KvPoll::Transferring);
    rig.finish_posts(&engine, &[4, 5], Ok(()));
    assert_eq!((rig.poll(S), rig.poll(SessionId(2))), (KvPoll::Success, KvPoll::Success));
    assert_eq!(rig.agents().len(), 1);
    assert!(rig.cx.now > Time::ZERO);
}
