//! Push: registrations, completions, and what a vLLM writer may still do.

use kv_core::{Cause, KvPoll, SessionId, TransferMode, TransportError, WayEnd};

use super::rig::{Engine, ONE, Rig, SECOND, Shape};
use crate::gauges::Ignored;
use crate::message::Way;
use crate::vllm::notification::{Notification, PushRegistration};

const S: SessionId = SessionId(1);

/// A session whose pages 7 and 8 an engine of this shape may write.
fn registered(ours: Shape, theirs: Shape) -> (Rig, Engine) {
    let (mut rig, engine) = (Rig::new(ours, TransferMode::Push), Engine::new(theirs));
    rig.open(1, Rig::remote(&engine, "cmpl-1-0-0123abcd", &[]), |_| ());
    rig.shake(&engine);
    rig.init(1, &[7, 8]);
    (rig, engine)
}

/// The registrations that were sent.
fn registrations(rig: &mut Rig) -> Vec<PushRegistration> {
    let sent = std::mem::take(&mut rig.sent);
    let decode = |bytes: &[u8]| match Notification::decode(bytes) {
        Ok(Notification::Registration(found)) => Some(*found),
        _ => None,
    };
    sent.iter().filter_map(|(_, bytes)| decode(bytes)).collect()
}

/// Every agent that is connected ends.
fn end_agents(rig: &mut Rig) {
    for agent in rig.agents().into_values() {
        rig.gone(agent, WayEnd::Lost);
    }
}

fn written(rig: &mut Rig, agent: &str, id: &str, count: u32) -> bool {
    let known = rig.consumer.written(&mut rig.cx, agent, id, count);
    rig.drain();
    known
}

#[test]
fn the_pages_are_registered_once_at_every_rank_and_success_needs_every_rank() {
    let (mut rig, _) = registered(ONE, ONE.tp(2, 0));
    let found = registrations(&mut rig);
    assert_eq!((found.len(), &found[0]), (2, &found[1]));
    let id = found[0].request_id.clone();
    assert!(
        id.starts_with("cmpl-1-0-") && id.len() == "cmpl-1-0-".len() + 8 && !id.ends_with("0123abcd"),
        "{id}"
    );
    let expected = PushRegistration {
        request_id: id.clone(),
        decode_engine_id: "d-0".to_owned(),
        decode_host: "10.0.0.9".to_owned(),
        decode_port: 5601,
        decode_tp_size: 1,
        local_block_ids: vec![vec![7, 8]],
        remote_engine_id: "p-0".to_owned(),
        remote_host: "10.0.0.1".to_owned(),
        remote_port: 5600,
        remote_tp_size: 2,
        remote_pp_size: 1,
    };
    assert_eq!(found[0], expected);
    let no_regions = |way: &Way| !matches!(way, Way::Agent { regions, .. } if !regions.is_empty());
    assert!(rig.ways.values().all(no_regions), "nothing of the writer's memory is touched");
    rig.pass(20 * SECOND);
    assert!(registrations(&mut rig).is_empty(), "a registration is never repeated");
    assert!(written(&mut rig, "a", &id, 2));
    assert_eq!(rig.poll(S), KvPoll::Transferring);
    assert!(written(&mut rig, "a", &id, 2));
    assert_eq!((rig.poll(S), rig.cx.gauges.of(Ignored::Repeated)), (KvPoll::Transferring, 1));
    assert!(written(&mut rig, "b", &id, 2));
    assert_eq!((rig.poll(S), rig.back[&S], rig.held()), (KvPoll::Success, 2, vec![]));
    assert!(!written(&mut rig, "b", &id, 2), "the request is over");
}

#[test]
fn ranks_that_share_a_writer_register_once_under_one_id_and_each_is_written() {
    let (mut first, _) = registered(ONE.tp(2, 0), ONE);
    let (mut second, _) = registered(ONE.tp(2, 1), ONE);
    let id = registrations(&mut first)[0].request_id.clone();
    assert!(registrations(&mut second).is_empty(), "vLLM would keep the second registration for ever");
    for rig in [&mut first, &mut second] {
        assert!(written(rig, "a", &id, 1));
        assert_eq!((rig.poll(S), rig.back[&S]), (KvPoll::Success, 2));
    }
    // Another try of the same request has another id, again the same on both ranks.
    let ids = [first, second].map(|mut rig| {
        rig.open(2, Rig::remote(&Engine::new(ONE), "cmpl-1-0-0123abcd", &[]), |_| ());
        rig.consumer.registered.keys().next().cloned().unwrap()
    });
    assert_eq!(ids[0], ids[1]);
    assert_ne!(ids[0], id);
}

#[test]
fn a_rank_that_another_rank_has_registered_may_be_written_before_its_own_handshake_ends() {
    let open = |shape: Shape| {
        let (mut rig, engine) = (Rig::new(shape, TransferMode::Push), Engine::new(ONE));
        rig.open(1, Rig::remote(&engine, "r", &[]), |_| ());
        let id = rig.consumer.registered.keys().next().cloned().unwrap();
        (rig, engine, id)
    };
    let (mut rig, engine, id) = open(ONE.tp(2, 1));
    assert!(written(&mut rig, "a", &id, 1));
    assert_eq!(rig.poll(S), KvPoll::Bootstrapping);
    rig.shake(&engine);
    rig.init(1, &[7]);
    assert_eq!((rig.poll(S), rig.back[&S]), (KvPoll::Success, 1));
    // A writer of two stages has written from one: the other one will write, too.
    let (mut rig, engine) = (Rig::new(ONE.tp(2, 1), TransferMode::Push), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[]).with(|remote| remote.pp_size = 2), |_| ());
    let id = rig.consumer.registered.keys().next().cloned().unwrap();
    rig.init(1, &[7]);
    assert!(written(&mut rig, "a", &id, 1));
    rig.abort(1);
    assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(1, None)]));
    assert!(written(&mut rig, "b", &id, 1));
    assert_eq!((rig.back[&S], rig.held()), (1, vec![]));
}

#[test]
fn a_writer_that_vllm_would_leave_silent_is_refused_with_the_field() {
    let small = Shape { page_size: 8, ..ONE };
    let packed = Shape { axes: kv_core::layout::NHD_PACKED, ..ONE };
    for (ours, theirs, field) in [
        (small, ONE, Some("block_size")),
        (Shape { total_heads: 1, ..small }, Shape { total_heads: 1, ..ONE }, None),
        (Shape { axes: kv_core::layout::NHD_PACKED, ..small }, packed, None),
        (ONE, small, Some("block_size")),
        (small.tp(2, 0), ONE, Some("block_size")),
        (Shape { page_size: 8, ..packed.tp(2, 0) }, packed, Some("block_size")),
        (packed, packed, None),
        (packed, ONE, Some("kv_cache_layout")),
    ] {
        let (rig, _) = registered(ours, theirs);
        let found = rig.failures.get(&S).map(|error| match &error.cause {
            kv_core::Cause::Incompatible(mismatch) => mismatch.field.clone(),
            other => panic!("{other}"),
        });
        assert_eq!(found.as_deref(), field);
    }
}

#[test]
fn more_pages_than_the_writer_has_blocks_for_are_refused_before_the_writer_hears_of_them() {
    let large = Shape { page_size: 32, latent: true, total_heads: 1, ..ONE };
    let small = Shape { page_size: 16, ..large };
    for (theirs, most) in [(small, 2), (large, 4)] {
        for pages in [most, most + 1] {
            let (mut rig, engine) = (Rig::new(small, TransferMode::Push), Engine::new(theirs));
            rig.open(1, Rig::remote(&engine, "cmpl-1-0-0123abcd", &[4, 5]), |_| ());
            rig.shake(&engine);
            rig.init(1, &(0..pages).collect::<Vec<u32>>());
            let fits = pages == most;
            assert_eq!(registrations(&mut rig).len(), usize::from(fits), "{}", rig.cause(S));
            let cause = rig.failures.get(&S).map(|error| error.cause.clone());
            let (sent, registered) = (most as usize, pages as usize);
            assert_eq!(cause, (!fits).then_some(Cause::PageCount { sent, registered }));
            assert_eq!(rig.back.get(&S).copied(), (!fits).then_some(registered));
        }
    }
}

#[test]
fn a_side_channel_that_ends_while_the_agents_are_connected_is_opened_again() {
    // Nothing else tells of the death of the writer, in whose hands the pages are.
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Push), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "cmpl-1-0-0123abcd", &[]), |_| ());
    rig.init(1, &[7, 8]);
    rig.answer(&engine);
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Lost);
    for agent in rig.agents().into_values() {
        assert!(rig.consumer.connected(&mut rig.cx, agent));
        rig.drain();
    }
    rig.pass(SECOND);
    rig.shake(&engine);
    assert_eq!((rig.poll(S), registrations(&mut rig).len()), (KvPoll::Transferring, 1));
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Dead { quiet_after: SECOND });
    assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(2, None)]));
    end_agents(&mut rig);
    assert_eq!(rig.held(), [(2, Some(SECOND))]);
}

#[test]
fn heartbeats_keep_the_request_at_the_writer() {
    let (mut rig, _) = registered(ONE, ONE);
    let beat = ("agent p-0 0 0 life 1".to_owned(), "HB:cmpl-1-0-0123abcd".to_owned());
    assert_eq!(rig.notified()[0], beat);
    rig.pass(5 * SECOND);
    assert_eq!(rig.notified(), [beat]);
}

#[test]
fn pages_of_an_aborted_request_stay_until_the_writer_is_done_after_all() {
    let (mut rig, engine) = registered(ONE, ONE);
    let id = registrations(&mut rig)[0].request_id.clone();
    rig.abort(1);
    assert_eq!((rig.poll(S), rig.held(), rig.back.len()), (KvPoll::Failed, vec![(2, None)], 0));
    rig.notified();
    rig.pass(1000 * SECOND);
    assert_eq!(rig.notified(), [], "vLLM has no message that takes a registration back");
    assert_eq!(rig.held(), [(2, None)]);
    // The same request again would be taken for this one.
    rig.open(2, Rig::remote(&engine, "cmpl-1-0-76543210", &[]), |_| ());
    assert!(rig.cause(SessionId(2)).contains("the same id"), "{}", rig.cause(SessionId(2)));
    assert!(written(&mut rig, "a", &id, 1));
    assert_eq!((rig.back[&S], rig.held()), (2, vec![]));
    rig.open(3, Rig::remote(&engine, "cmpl-1-0-76543210", &[]), |_| ());
    rig.init(3, &[20]);
    let next = registrations(&mut rig)[0].request_id.clone();
    assert_ne!(next, id);
    assert!(!written(&mut rig, "a", &id, 1), "a late word for the first attempt is not for the second");
    assert_eq!(rig.poll(SessionId(3)), KvPoll::Transferring);
    assert!(written(&mut rig, "a", &next, 1));
    assert_eq!(rig.poll(SessionId(3)), KvPoll::Success);
}

#[test]
fn pages_of_an_aborted_request_are_free_once_the_writer_is_dead_and_quiet() {
    for ranks in [1, 2] {
        let (mut rig, _) = registered(ONE, ONE.tp(ranks, 0));
        rig.abort(1);
        let channel = rig.channel();
        rig.gone(channel, WayEnd::Dead { quiet_after: 3 * SECOND });
        end_agents(&mut rig);
        assert_eq!(rig.held(), [(2, Some(3 * SECOND))]);
        rig.pass(3 * SECOND - SECOND / 2);
        assert!(rig.back.is_empty());
        rig.pass(SECOND);
        assert_eq!((rig.back[&S], rig.held(), rig.consumer.engines.len()), (2, vec![], 0));
        assert_eq!(rig.closed.len(), rig.ways.len());
    }
}

#[test]
fn the_death_of_the_writer_fails_the_session_and_holds_its_pages_until_it_is_quiet() {
    let (mut rig, _) = registered(ONE, ONE);
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Dead { quiet_after: 3 * SECOND });
    assert_eq!((rig.poll(S), &rig.failures[&S].cause), (KvPoll::Failed, &Cause::PeerLost));
    end_agents(&mut rig);
    assert_eq!(rig.held(), [(2, Some(3 * SECOND))]);
    rig.pass(3 * SECOND);
    assert_eq!(rig.back[&S], 2);
}

#[test]
fn a_writer_that_outlives_its_side_channel_keeps_its_pages_until_its_last_agent_ends() {
    let (mut rig, _) = registered(ONE, ONE.tp(2, 0));
    rig.notified();
    let agents: Vec<_> = rig.agents().into_values().collect();
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Dead { quiet_after: 3 * SECOND });
    assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(2, None)]));
    let test = |rank| (format!("agent p-0 0 {rank} life 1"), "HB:".to_owned());
    assert_eq!(rig.notified(), [test(0), test(1)], "agents whose end nothing else tells are tested");
    rig.pass(SECOND);
    rig.gone(agents[1], WayEnd::Lost);
    rig.notified();
    rig.pass(600 * SECOND);
    let tests = rig.notified();
    assert!(tests.len() == 600 && tests.iter().all(|found| *found == test(0)), "{}", tests.len());
    assert_eq!((rig.held(), rig.back.len()), (vec![(2, None)], 0), "the other rank may write");
    rig.gone(agents[0], WayEnd::Lost);
    assert_eq!(rig.held(), [(2, Some(3 * SECOND))]);
    rig.pass(3 * SECOND);
    assert_eq!((rig.back[&S], rig.notified(), rig.consumer.engines.len()), (2, vec![], 0));
}

#[test]
fn a_word_of_a_writer_without_a_side_channel_frees_its_pages_and_ends_the_tests() {
    let (mut rig, _) = registered(ONE, ONE);
    let id = registrations(&mut rig)[0].request_id.clone();
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Dead { quiet_after: SECOND });
    assert!(written(&mut rig, "a", &id, 1));
    assert_eq!((rig.back[&S], rig.consumer.engines.len()), (2, 0));
    rig.notified();
    rig.pass(60 * SECOND);
    assert_eq!((rig.notified(), rig.closed.len()), (vec![], rig.ways.len()));
}

#[test]
fn a_lost_agent_proves_nothing_and_the_side_channel_tells_of_the_death_later() {
    let (mut rig, engine) = registered(ONE, ONE);
    let agent = *rig.agents().values().next().unwrap();
    rig.gone(agent, WayEnd::Lost);
    assert_eq!((rig.poll(S), rig.held()), (KvPoll::Failed, vec![(2, None)]));
    // Another session of the same engine asks anew, beside the lost one.
    rig.open(2, Rig::remote(&engine, "other", &[]), |_| ());
    assert_eq!(rig.poll(SessionId(2)), KvPoll::Bootstrapping);
    let channel = *rig.ways.iter().find(|(_, way)| matches!(way, Way::Request { .. })).unwrap().0;
    rig.gone(channel, WayEnd::Dead { quiet_after: SECOND });
    // The network may have lost the way: the agent is connected again, and tested, until its end is seen.
    assert_eq!((rig.held(), rig.agents().len(), rig.closed.contains(&agent)), (vec![(2, None)], 1, true));
    let again = *rig.agents().values().next().unwrap();
    let refused = TransportError::Foreign("no way".to_owned());
    assert!(rig.consumer.connect_failed(&mut rig.cx, again, &refused));
    rig.pass(SECOND);
    assert_eq!(rig.held(), [(2, None)], "a way that is not made proves nothing");
    rig.notified();
    let again = *rig.agents().values().next().unwrap();
    assert!(rig.consumer.connected(&mut rig.cx, again));
    rig.drain();
    assert_eq!(rig.notified()[0].1, "HB:");
    rig.gone(again, WayEnd::Lost);
    assert_eq!(rig.held(), [(2, Some(SECOND))]);
    rig.pass(SECOND);
    assert_eq!(rig.back[&S], 2);
}

#[test]
fn a_lost_side_channel_is_asked_again_until_the_writer_is_known_to_be_gone() {
    let (mut rig, engine) = registered(ONE, ONE);
    rig.abort(1);
    let channel = rig.channel();
    rig.gone(channel, WayEnd::Lost);
    rig.sent.clear();
    // Nobody answers for a long time.
    rig.pass(600 * SECOND);
    assert_eq!(rig.held(), [(2, None)]);
    // Then another process has the port.
    let next = Engine { life: 2, ..engine };
    rig.pass(40 * SECOND);
    let questions = rig.sent.len();
    assert!(questions > 3, "{questions}");
    rig.notified();
    for _ in 0..60 {
        rig.pass(SECOND);
        rig.answer(&next);
    }
    assert_eq!((rig.held(), rig.notified().is_empty()), (vec![(2, None)], false), "the old agent may live");
    end_agents(&mut rig);
    assert_eq!(rig.held(), [(2, Some(5 * SECOND))]);
    rig.pass(4 * SECOND);
    assert_eq!((rig.held(), rig.closed.contains(&rig.last_channel())), (vec![(2, Some(SECOND))], true));
    rig.pass(SECOND);
    assert_eq!((rig.back[&S], rig.held()), (2, vec![]));
}

#[test]
fn a_deadline_of_a_registered_request_ends_the_session_and_holds_its_pages() {
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Push), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[]), |options| options.deadline = Some(10 * SECOND));
    rig.shake(&engine);
    rig.init(1, &[7]);
    rig.pass(10 * SECOND);
    assert!(rig.cause(S).contains("not finished within 10s"), "{}", rig.cause(S));
    assert_eq!(rig.held(), [(1, None)]);
}

#[test]
fn an_abort_before_the_registration_returns_the_pages_at_once() {
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Push), Engine::new(ONE));
    rig.open(1, Rig::remote(&engine, "r", &[]), |_| ());
    rig.init(1, &[7]);
    rig.abort(1);
    assert_eq!((rig.back[&S], rig.held()), (1, vec![]));
    rig.shake(&engine);
    assert!(registrations(&mut rig).is_empty());
}

#[test]
fn a_worker_without_a_side_channel_registers_nothing() {
    let (mut rig, engine) = (Rig::new(ONE, TransferMode::Push), Engine::new(ONE));
    rig.consumer.config.side_channel = None;
    rig.open(1, Rig::remote(&engine, "r", &[]), |_| ());
    rig.shake(&engine);
    rig.init(1, &[7]);
    assert!(rig.cause(S).contains("side_channel"), "{}", rig.cause(S));
    assert_eq!((rig.back[&S], registrations(&mut rig).len()), (1, 0));
}

#[test]
fn pages_are_registered_only_at_an_engine_that_has_said_push_or_where_the_session_says_so() {
    use TransferMode::{Auto, Pull, Push};
    let refused = |ours: &str, theirs: &str| Err((ours.to_owned(), theirs.to_owned()));
    let unsaid = "not said by the engine";
    for (worker, session, said, blocks, expected) in [
        (Auto, None, Some(Push), &[][..], Ok(Push)),
        (Auto, None, Some(Push), &[4], Ok(Push)),
        (Auto, None, Some(Pull), &[4], Ok(Pull)),
        (Auto, None, Some(Pull), &[], Ok(Pull)),
        (Auto, None, None, &[4], Ok(Pull)),
        (Auto, None, None, &[], refused("auto", unsaid)),
        (Auto, None, Some(Auto), &[], refused("auto", unsaid)),
        (Push, None, None, &[], refused("push", unsaid)),
        (Push, None, Some(Push), &[], Ok(Push)),
        (Push, None, Some(Pull), &[], refused("push", "pull")),
        (Auto, Some(Push), None, &[], Ok(Push)),
        (Auto, Some(Push), Some(Pull), &[], refused("push", "pull")),
        (Pull, None, Some(Push), &[4], refused("pull", "push")),
        (Pull, None, None, &[4], Ok(Pull)),
    ] {
        let (mut rig, engine) = (Rig::new(ONE, worker), Engine::new(ONE));
        rig.consumer.config.compatibility = crate::vllm::Compatibility::Unchecked;
        let remote = Rig::remote(&engine, "r", blocks).with(|remote| {
            remote.mode = said;
            remote.block_ids.retain(|pages| !pages.is_empty());
        });
        let room = kv_core::Room::Request(remote.request.clone());
        let options = kv_core::SessionOptions::default().with(|options| {
            (options.mode, options.remote) = (session, Some(Box::new(remote)));
        });
        rig.consumer.open(&mut rig.cx, S, (room, "10.0.0.1:5600".to_owned()), options);
        rig.drain();
        rig.shake(&engine);
        let pages: Vec<u32> = if expected == Ok(Push) { vec![7] } else { (7..).take(blocks.len()).collect() };
        rig.init(1, &pages);
        let registered = !registrations(&mut rig).is_empty();
        let found = match rig.failures.get(&S).map(|error| &error.cause) {
            Some(Cause::Incompatible(mismatch)) if mismatch.field == "transfer_mode" => {
                Err((mismatch.ours.clone(), mismatch.theirs.clone()))
            }
            Some(other) => panic!("{other}"),
            None => Ok(if registered { Push } else { Pull }),
        };
        let of = format!("a worker of {worker}, a session of {session:?}, an engine of {said:?}");
        assert_eq!(found, expected, "{of}, {blocks:?}");
        let dialled = rig.ways.len();
        assert_eq!(dialled == 0, expected.is_err(), "{of}: nothing is sent to an engine of another mode");
    }
}
