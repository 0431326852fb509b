//! What goes wrong: refusals, silence, deaths, restarts, aborts.

use std::time::Duration;

use kv_core::{Cause, KvPoll, Mismatch, SessionId, TransferMode, TransportError, WayEnd};

use super::rig::{Engine, HASH, ONE, Rig, SECOND};
use crate::gauges::Ignored;
use crate::vllm::metadata::NixlAgentMetadata;

const S: SessionId = SessionId(1);

fn opened() -> (Rig, Engine) {
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Pull), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4, 5]), |_| ());
    (rig, engine)
}

fn reading() -> (Rig, Engine) {
    let (mut rig, engine) = opened();
    rig.shake(&engine);
    rig.init(1, &[7, 8]);
    rig.notified();
    assert!(!rig.posts.is_empty());
    (rig, engine)
}

fn refused(rig: &Rig) -> Mismatch {
    match rig.failures.get(&S).map(|error| error.cause.clone()) {
        Some(Cause::Incompatible(mismatch)) => mismatch,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_engine_that_does_not_fit_is_refused_with_the_field_and_both_values() {
    let (mut rig, mut engine) = opened();
    engine.hash = "another".to_owned();
    rig.answer(&engine);
    let hash = refused(&rig);
    assert_eq!(
        (hash.field.as_str(), hash.ours.as_str(), hash.theirs.as_str()),
        ("compatibility_hash", HASH, "another")
    );
    assert!(rig.cause(S).contains("enforce_handshake_compat"), "{}", rig.cause(S));

    type Change = fn(&mut NixlAgentMetadata);
    let changes: [(&str, Change); 4] = [
        ("kv_cache_layout", |metadata| metadata.kv_cache_layout = "LHBNC".to_owned()),
        ("block_lens[1]", |metadata| metadata.block_lens[1] += 1),
        ("dcp_size", |metadata| metadata.dcp_size = 2),
        ("layers", |metadata| {
            metadata.kv_caches_base_addr.pop();
            metadata.block_lens.pop();
            metadata.block_strides.pop();
            (metadata.region_num_blocks, metadata.region_group_ids) = (None, None);
            metadata.region_mem_types = None;
        }),
    ];
    for (field, change) in changes {
        let (mut rig, mut engine) = opened();
        engine.change = change;
        rig.init(1, &[7, 8]);
        rig.answer(&engine);
        assert_eq!(refused(&rig).field, field);
        assert_eq!((rig.back[&S], rig.consumer.engines.len()), (2, 0), "{field}");
        assert_eq!(rig.closed.len(), rig.ways.len(), "every way is closed");
    }
}

#[test]
fn what_cannot_be_asked_at_all_is_refused_when_the_session_opens() {
    let engine = Engine::new(ONE.tp(3, 0));
    let mut rig = Rig::new(ONE.tp(2, 0), TransferMode::Pull);
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    assert_eq!((refused(&rig).field.as_str(), rig.ways.len()), ("tp_size", 0));
    let one = Engine::new(ONE);
    for addr in ["", "host", "host:", "host:0", ":5600", "host:65536", "host:x"] {
        let mut rig = Rig::new(ONE, TransferMode::Pull);
        rig.open_at(1, addr, Rig::remote(&one, "r", &[4]), |_| ());
        assert!(matches!(rig.failures[&S].cause, Cause::Bootstrap(_)), "{addr}: {}", rig.cause(S));
    }
    let mut rig = Rig::new(ONE, TransferMode::Pull);
    rig.open(1, Rig::remote(&one, "r", &[4]), |options| options.remote = None);
    assert_eq!(refused(&rig).field, "kv_transfer_params");
    let mut rig = Rig::new(ONE, TransferMode::Pull);
    rig.open(1, Rig::remote(&one, "r", &[4]).with(|remote| remote.pp_size = 0), |_| ());
    assert_eq!(refused(&rig).field, "pp_size");
}

#[test]
fn garbage_for_an_answer_is_another_version_and_unasked_answers_are_counted() {
    let (mut rig, _) = opened();
    let channel = rig.channel();
    assert!(rig.consumer.message(&mut rig.cx, channel, &[b"\xff".as_slice().into(), b"".as_slice().into()]));
    rig.drain();
    let refusal = refused(&rig);
    assert_eq!(
        (refusal.field.as_str(), refusal.ours.as_str()),
        ("NixlHandshakePayload", "connector version 15")
    );

    let (mut rig, _) = reading();
    let channel = rig.channel();
    assert!(rig.consumer.message(&mut rig.cx, channel, &[]));
    assert_eq!(rig.cx.gauges.of(Ignored::NotAsked), 1);
    assert_eq!(rig.poll(S), KvPoll::Transferring);
}

#[test]
fn an_engine_that_does_not_answer_is_asked_three_times_and_delays_no_other() {
    let (mut rig, _) = opened();
    let other = Engine { name: "p-1".to_owned(), ..Engine::new(ONE) };
    rig.pass(4 * SECOND);
    rig.sent.clear();
    rig.open_at(2, "10.0.0.2:5600", Rig::remote(&other, "s", &[9]), |_| ());
    rig.init(2, &[3]);
    rig.shake(&other);
    rig.finish_posts(&other, &[9], Ok(()));
    assert_eq!((rig.poll(SessionId(2)), rig.poll(S)), (KvPoll::Success, KvPoll::Bootstrapping));
    // 5 s, half a second, 5 s, a second, 5 s.
    rig.pass(Duration::from_millis(12_400));
    assert_eq!(rig.poll(S), KvPoll::Bootstrapping);
    rig.pass(Duration::from_millis(200));
    assert!(rig.cause(S).contains("nothing heard from the peer for 5s"), "{}", rig.cause(S));
    let asked =
        rig.sent.iter().filter(|(peer, _)| !matches!(rig.ways[peer], crate::message::Way::Agent { .. }));
    assert_eq!(asked.count(), 2, "the second and the third try");
    assert_eq!(rig.consumer.engines.len(), 1);
}

#[test]
fn a_way_that_cannot_be_opened_is_tried_again_and_the_cause_is_told() {
    for agent in [false, true] {
        let (mut rig, engine) = opened();
        for _ in 0..3 {
            let peer = if agent {
                rig.answer(&engine);
                *rig.agents().values().next().unwrap()
            } else {
                rig.channel()
            };
            assert_eq!(rig.poll(S), KvPoll::Bootstrapping);
            let error = TransportError::Foreign("no backend".to_owned());
            assert!(rig.consumer.connect_failed(&mut rig.cx, peer, &error));
            rig.drain();
            rig.sent.clear();
            rig.pass(2 * SECOND);
        }
        assert!(rig.cause(S).contains("no backend"), "{}", rig.cause(S));
        assert_eq!(rig.closed.len(), rig.ways.len());
    }
}

#[test]
fn an_abort_before_the_handshake_ends_is_told_after_it() {
    let (mut rig, engine) = opened();
    rig.abort(1);
    assert_eq!(rig.poll(S), KvPoll::Failed);
    rig.shake(&engine);
    assert_eq!(rig.notified(), [("agent p-0 0 0 life 1".to_owned(), "r:1".to_owned())]);
    // And between the handshake and the pages.
    let (mut rig, engine) = opened();
    rig.shake(&engine);
    rig.notified();
    rig.abort(1);
    assert_eq!(rig.notified()[0].1, "r:1");
    assert_eq!((rig.poll(S), rig.posts.len()), (KvPoll::Failed, 0));
}

#[test]
fn an_abort_during_the_read_waits_for_the_reads_and_then_tells_the_holder_once() {
    for result in [Ok(()), Err(TransportError::Cancelled)] {
        let (mut rig, engine) = reading();
        rig.abort(1);
        rig.abort(1);
        assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(2, None)]));
        assert!(rig.back.is_empty() && !rig.cancelled.is_empty());
        assert_eq!(rig.notified(), []);
        rig.finish_posts(&engine, &[4, 5], result);
        assert_eq!((rig.back[&S], rig.held()), (2, vec![]));
        assert_eq!(rig.notified(), [("agent p-0 0 0 life 1".to_owned(), "r:1".to_owned())]);
    }
}

#[test]
fn a_failed_read_fails_the_session_once_and_frees_the_pages_at_the_holder() {
    let (mut rig, mut engine) = (Rig::new(ONE, TransferMode::Pull), Engine::new(ONE.tp(2, 0)));
    engine.life = 3;
    rig.open(1, Rig::remote(&engine, "r", &[4, 5]), |_| ());
    rig.shake(&engine);
    rig.init(1, &[7, 8]);
    rig.notified();
    assert_eq!(rig.posts.len(), 2, "one for each rank");
    let (_, first) = rig.posts.remove(0);
    rig.consumer.posted(&mut rig.cx, first.id, Err(TransportError::PeerGone));
    rig.drain();
    assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(2, None)]), "the other rank is still read");
    assert!(rig.notified().is_empty());
    rig.finish_posts(&engine, &[4, 5], Ok(()));
    assert_eq!((rig.back[&S], rig.notified().len()), (2, 2));
}

#[test]
fn a_session_lasts_until_the_last_rank_was_read_and_its_pages_until_the_last_read_has_ended() {
    for abort in [false, true] {
        let (mut rig, engine) = (Rig::new(ONE, TransferMode::Pull), Engine::new(ONE.tp(2, 0)));
        rig.open(1, Rig::remote(&engine, "r", &[4, 5]), |_| ());
        rig.shake(&engine);
        rig.init(1, &[7, 8]);
        rig.notified();
        let second = rig.posts.pop().unwrap();
        if abort {
            rig.abort(1);
        }
        rig.finish_posts(&engine, &[4, 5], Ok(()));
        let state = if abort { KvPoll::Failed } else { KvPoll::Transferring };
        assert_eq!((rig.poll(S), rig.back.get(&S).copied(), rig.notified().len()), (state, None, 0));
        rig.posts.push(second);
        rig.finish_posts(&engine, &[4, 5], Ok(()));
        let state = if abort { KvPoll::Failed } else { KvPoll::Success };
        assert_eq!((rig.poll(S), rig.back[&S], rig.notified().len()), (state, 2, 2));
    }
}

#[test]
fn the_death_of_the_engine_does_not_free_pages_that_are_still_read_into() {
    let (mut rig, engine) = reading();
    rig.abort(1);
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Dead { quiet_after: SECOND });
    rig.pass(10 * SECOND);
    assert_eq!((rig.held(), rig.back.get(&S)), (vec![(2, None)], None));
    rig.finish_posts(&engine, &[4, 5], Err(TransportError::PeerGone));
    assert_eq!((rig.held(), rig.back[&S]), (vec![], 2));
}

#[test]
fn a_deadline_ends_the_session_and_names_what_is_stuck() {
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Pull), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4, 5]), |options| options.deadline = Some(20 * SECOND));
    rig.shake(&engine);
    rig.init(1, &[7, 8]);
    rig.pass(20 * SECOND);
    assert!(rig.cause(S).contains("1 data operations to p-0"), "{}", rig.cause(S));
    assert_eq!(rig.held(), [(2, None)]);
    rig.finish_posts(&engine, &[4, 5], Err(TransportError::Cancelled));
    assert_eq!(rig.back[&S], 2);
}

#[test]
fn the_death_of_the_engine_ends_its_sessions_and_the_next_session_asks_anew() {
    for dead in [true, false] {
        let (mut rig, engine) = reading();
        let agent = *rig.agents().values().next().unwrap();
        rig.finish_posts(&engine, &[4, 5], Err(TransportError::PeerGone));
        assert_eq!(rig.poll(S), KvPoll::Failed);
        rig.open(2, Rig::remote(&engine, "s", &[6]), |_| ());
        assert_eq!(rig.poll(SessionId(2)), KvPoll::WaitingForInput);
        if dead {
            let channel = rig.channel();
            rig.gone(channel, WayEnd::Dead { quiet_after: SECOND });
        } else {
            rig.gone(agent, WayEnd::Lost);
        }
        assert_eq!(rig.poll(SessionId(2)), KvPoll::Failed);
        assert_eq!((rig.closed.len(), rig.consumer.engines.len()), (rig.ways.len(), 0));
        let next = Engine { life: 2, ..engine };
        rig.open(3, Rig::remote(&next, "t", &[4]), |_| ());
        rig.init(3, &[9]);
        rig.shake(&next);
        rig.finish_posts(&next, &[4], Ok(()));
        assert_eq!(rig.poll(SessionId(3)), KvPoll::Success);
    }
}

#[test]
fn a_restart_under_the_same_engine_id_is_seen_by_the_agents_metadata() {
    let (mut rig, engine) = reading();
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Lost);
    let next = Engine { life: 2, ..engine };
    rig.answer(&next);
    assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(2, None)]));
    assert!(rig.cause(S).contains("restarted"), "{}", rig.cause(S));
    rig.finish_posts(&next, &[4, 5], Err(TransportError::PeerGone));
    assert_eq!((rig.back[&S], rig.closed.len()), (2, rig.ways.len()));
}

#[test]
fn while_a_lost_agent_may_live_another_one_in_its_place_has_pages_of_nobody_knows_which_process() {
    // The side channel is silent and the engine is lost, while its agent is still being read from.
    let (mut rig, engine) = reading();
    let channel = rig.channel();
    let agent = *rig.agents().values().next().unwrap();
    rig.gone(channel, WayEnd::Lost);
    rig.pass(20 * SECOND);
    assert_eq!((rig.poll(S), rig.back.get(&S)), (KvPoll::Failed, None));
    rig.open(2, Rig::remote(&engine, "s", &[6]), |_| ());
    rig.init(2, &[9]);
    rig.notified();
    let (next, posts) = (Engine { life: 2, ..engine }, rig.posts.len());
    rig.answer(&next);
    assert!(rig.cause(SessionId(2)).contains("restarted"), "{}", rig.cause(SessionId(2)));
    assert_eq!((rig.back[&SessionId(2)], rig.posts.len()), (1, posts));
    assert_eq!(
        rig.notified(),
        [("agent p-0 0 0 life 1".to_owned(), "HB:".to_owned())],
        "its end is asked for"
    );
    // The end of the first process is known, and so is whose the next parameters are.
    rig.gone(agent, WayEnd::Lost);
    rig.finish_posts(&next, &[], Err(TransportError::PeerGone));
    assert_eq!(rig.back[&S], 2);
    rig.open(3, Rig::remote(&next, "t", &[4]), |_| ());
    rig.init(3, &[10]);
    rig.shake(&next);
    rig.finish_posts(&next, &[4], Ok(()));
    assert_eq!((rig.poll(SessionId(3)), rig.right(&[10], 0).0), (KvPoll::Success, rig.right(&[10], 0).1));
}

#[test]
fn an_engine_that_answers_a_second_try_with_another_agent_has_restarted() {
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Pull), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    rig.answer(&engine);
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Lost);
    rig.pass(2 * SECOND);
    rig.answer(&Engine { life: 2, ..engine });
    assert!(rig.cause(S).contains("restarted"), "{}", rig.cause(S));
}

#[test]
fn another_engine_at_the_address_is_a_restart() {
    let (mut rig, _) = opened();
    rig.answer(&Engine { name: "p-9".to_owned(), ..Engine::new(ONE) });
    assert!(rig.cause(S).contains("restarted"), "{}", rig.cause(S));
}

#[test]
fn a_higher_registration_generation_asks_again_and_a_lower_one_has_no_pages() {
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Pull), Engine::new(ONE));
    let remote = |request, generation| {
        Rig::remote(&engine, request, &[4]).with(|remote| remote.registration_generation = generation)
    };
    rig.open(1, remote("r", Some(1)), |_| ());
    rig.shake(&engine);
    rig.init(1, &[7]);
    rig.open(2, remote("s", None), |_| ());
    rig.open(3, remote("t", Some(2)), |_| ());
    assert_eq!((rig.poll(S), rig.poll(SessionId(2))), (KvPoll::Failed, KvPoll::Failed));
    assert_eq!((rig.poll(SessionId(3)), rig.held()), (KvPoll::Bootstrapping, vec![(1, None)]));
    rig.finish_posts(&engine, &[4], Err(TransportError::Cancelled));
    rig.init(3, &[9]);
    rig.shake(&engine);
    rig.finish_posts(&engine, &[4], Ok(()));
    assert_eq!((rig.poll(SessionId(3)), rig.back[&S]), (KvPoll::Success, 1));
    rig.open(4, remote("u", Some(1)), |_| ());
    assert!(rig.cause(SessionId(4)).contains("restarted"));
}

#[test]
fn a_request_that_is_being_read_is_not_opened_a_second_time() {
    let (mut rig, engine) = reading();
    rig.open(2, Rig::remote(&engine, "r", &[4, 5]), |_| ());
    assert!(matches!(rig.failures[&SessionId(2)].cause, Cause::AmbiguousRoom { .. }));
    rig.abort(1);
    rig.open(3, Rig::remote(&engine, "r", &[4, 5]), |_| ());
    assert!(matches!(rig.failures[&SessionId(3)].cause, Cause::AmbiguousRoom { .. }), "the first is held");
    rig.finish_posts(&engine, &[4, 5], Err(TransportError::Cancelled));
    rig.open(4, Rig::remote(&engine, "r", &[6, 5]), |_| ());
    assert_eq!(rig.poll(SessionId(4)), KvPoll::WaitingForInput, "the engine has computed the request again");
}

#[test]
fn parameters_that_an_engine_was_told_about_open_no_second_session() {
    // The engine may have given the blocks to another request, and would count the same rank twice.
    for before in ["the handshake has ended", "the reads have ended", "nothing"] {
        let (mut rig, engine) = if before == "the handshake has ended" { opened() } else { reading() };
        if before == "nothing" {
            rig.finish_posts(&engine, &[4, 5], Ok(()));
            assert_eq!(rig.poll(S), KvPoll::Success);
        }
        rig.abort(1);
        rig.finish_posts(&engine, &[4, 5], Err(TransportError::Cancelled));
        rig.open(2, Rig::remote(&engine, "r", &[4, 5]), |_| ());
        assert_eq!(rig.failures[&SessionId(2)].cause, Cause::LeaseExpired, "aborted before {before}");
        rig.shake(&engine);
        let told = rig.notified().iter().filter(|(_, text)| text == "r:1").count();
        assert_eq!((told, rig.posts.len()), (1, 0), "aborted before {before}");
    }
}

#[test]
fn parameters_of_which_the_engine_was_told_nothing_may_be_used_again_and_grow_no_younger() {
    for (more, fresh) in [(8_000, true), (8_500, false)] {
        let (mut rig, engine) = opened();
        rig.pass(Duration::from_millis(16_600));
        assert!(rig.cause(S).contains("nothing heard from the peer"), "{}", rig.cause(S));
        rig.open(2, Rig::remote(&engine, "r", &[4, 5]), |_| ());
        rig.init(2, &[7, 8]);
        rig.pass(Duration::from_millis(more));
        // The lease may be over 25 s after the first session was opened.
        rig.shake(&engine);
        rig.finish_posts(&engine, &[4, 5], Ok(()));
        let cause = rig.failures.get(&SessionId(2)).map(|error| error.cause.clone());
        assert_eq!(cause, (!fresh).then_some(Cause::LeaseExpired));
        assert_eq!(rig.back[&SessionId(2)], 2);
    }
}

#[test]
fn pages_that_are_wrong_or_given_twice_fail_the_session_and_come_back() {
    let (mut rig, _) = opened();
    rig.init(1, &[7]);
    rig.init(1, &[8, 9]);
    assert!(rig.cause(S).contains("init was called again"), "{}", rig.cause(S));
    assert_eq!(rig.back[&S], 3);
    assert!(rig.held().is_empty());
    let mut rig = Rig::new(ONE, TransferMode::Pull);
    let engine = Engine::new(ONE);
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    let pages = kv_core::PagePool::new(99).adopt(kv_core::PageList::from_pages([40]).unwrap()).unwrap();
    rig.consumer.init(&mut rig.cx, S, pages, None);
    rig.drain();
    assert!(matches!(rig.failures[&S].cause, Cause::BadPages(_)), "{}", rig.cause(S));
    assert_eq!(rig.back[&S], 1);
    let mut rig = Rig::new(ONE, TransferMode::Pull);
    rig.open(1, Rig::remote(&engine, "r", &[4]), |_| ());
    let pages = kv_core::PagePool::new(9).adopt(kv_core::PageList::from_pages([1]).unwrap()).unwrap();
    rig.consumer.init(&mut rig.cx, S, pages, Some(kv_core::AuxIndex(0)));
    rig.drain();
    assert!(rig.cause(S).contains("an aux row is given on one side only"), "{}", rig.cause(S));
    assert_eq!(rig.back[&S], 1);
}

#[test]
fn a_worker_that_stops_ends_all_sessions_and_opens_none() {
    let (mut rig, engine) = reading();
    rig.open(2, Rig::remote(&engine, "s", &[9]), |_| ());
    rig.consumer.stop(&mut rig.cx);
    rig.drain();
    rig.open(3, Rig::remote(&engine, "t", &[9]), |_| ());
    assert!([1, 2, 3].iter().all(|n| rig.poll(SessionId(*n)) == KvPoll::Failed));
    rig.finish_posts(&engine, &[4, 5], Err(TransportError::Cancelled));
    assert_eq!((rig.back[&S], rig.held()), (2, vec![]));
}

#[test]
fn no_more_engines_are_known_than_the_limit_and_idle_ones_go_first() {
    let mut rig = Rig::new(ONE, TransferMode::Pull);
    for n in 0..1024 {
        let engine = Engine { name: format!("p-{n}"), ..Engine::new(ONE) };
        rig.open(n + 1, Rig::remote(&engine, "r", &[4]), |_| ());
    }
    let more = Engine { name: "more".to_owned(), ..Engine::new(ONE) };
    rig.open(2000, Rig::remote(&more, "r", &[4]), |_| ());
    assert!(matches!(rig.failures[&SessionId(2000)].cause, Cause::TooManyPeers { max: 1024 }));
    let first = Engine { name: "p-0".to_owned(), ..Engine::new(ONE) };
    rig.sent.truncate(1);
    rig.shake(&first);
    rig.abort(1);
    rig.open(2001, Rig::remote(&more, "r", &[4]), |_| ());
    assert_eq!((rig.poll(SessionId(2001)), rig.consumer.engines.len()), (KvPoll::Bootstrapping, 1024));
}

#[test]
fn what_waits_for_a_handshake_to_be_told_goes_with_an_engine_that_dies() {
    let (mut rig, _) = opened();
    rig.abort(1);
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Dead { quiet_after: SECOND });
    assert_eq!((rig.consumer.engines.len(), rig.closed.len()), (0, rig.ways.len()));
}
