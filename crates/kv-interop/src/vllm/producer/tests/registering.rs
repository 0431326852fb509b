//! Which receiver gets the KV of which attempt, and what a registration may make this worker do.

use kv_core::machine::Machine;
use kv_core::{Cause, KvPoll, TransportError};

use super::decoder::{HASH, of, push, rig, told};
use crate::gauges::Ignored;
use crate::vllm::geometry::tests::LEN;
use crate::vllm::notification::{PushRegistration, done, heartbeat};
use crate::vllm::rig::{Rig, at};
use KvPoll::{Failed, Success, Transferring};

fn sent(rig: &mut Rig, number: u64, request: &str, pages: &[u32]) -> kv_core::SessionId {
    let session = rig.open(number, request, push());
    rig.announce(session, pages.len());
    rig.send(session, pages);
    session
}

#[test]
fn a_registration_of_an_aborted_attempt_does_not_take_the_next_attempts_pages() {
    let mut rig = rig((1, 0));
    let first = rig.open(1, "r-00000001", push());
    rig.register("d-0", &of("r-11111111", 1, &[5]));
    rig.abort(first);
    assert_eq!(rig.state(first), Failed);
    rig.register("d-0", &of("r-11111111", 1, &[5]));
    assert_eq!(rig.ignored(Ignored::Repeated), 1, "another rank of the first attempt's receiver");
    let second = sent(&mut rig, 2, "r-00000002", &[1]);
    assert_eq!(rig.machine.leased(), 1, "nobody has registered for the second attempt");
    rig.out.clear();
    rig.register("d-0", &of("r-22222222", 1, &[6]));
    rig.shake_hands(1);
    let written = rig.write_all();
    assert_eq!(written[0].2, Some(done("r-22222222", 1)));
    assert_eq!(rig.state(second), Success);
}

#[test]
fn of_two_registrations_of_one_base_the_newest_gets_the_pages() {
    let mut rig = rig((1, 0));
    rig.register("d-0", &of("r-11111111", 1, &[5]));
    rig.register("d-0", &of("r-22222222", 1, &[6]));
    let session = sent(&mut rig, 1, "r-00000001", &[1]);
    rig.shake_hands(1);
    let written = rig.write_all();
    assert_eq!((written.len(), written[0].2.clone()), (1, Some(done("r-22222222", 1))));
    assert_eq!(rig.state(session), Success);
}

#[test]
fn a_late_rank_of_an_earlier_attempt_does_not_take_the_place_of_the_newest_registration() {
    let mut rig = rig((1, 0));
    rig.register("d-0", &of("r-11111111", 2, &[5]));
    rig.register("d-0", &of("r-22222222", 1, &[6]));
    rig.register("d-0", &of("r-11111111", 2, &[5]));
    assert_eq!(rig.ignored(Ignored::Repeated), 1);
    let session = sent(&mut rig, 1, "r-00000001", &[1]);
    rig.shake_hands(1);
    let written = rig.write_all();
    assert_eq!((written.len(), written[0].2.clone()), (1, Some(done("r-22222222", 1))));
    assert_eq!(rig.state(session), Success);
}

#[test]
fn a_newer_receiver_takes_the_place_of_one_that_is_being_written_to() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r", &[1]);
    rig.register("d-0", &of("r-11111111", 1, &[5]));
    rig.shake_hands(1);
    let first = rig.posts();
    rig.register("d-0", &of("r-22222222", 1, &[6]));
    let second = rig.posts();
    assert_eq!(second[0].1.notify, Some(done("r-22222222", 1)));
    rig.posted(&second[0].1, Ok(()));
    assert_eq!(rig.told(session), (Transferring, &[][..]), "the first write may still read the pages");
    rig.posted(&first[0].1, Err(TransportError::Cancelled));
    assert_eq!(rig.told(session), (Success, &[1][..]));
    rig.register("d-0", &of("r-11111111", 1, &[5]));
    assert_eq!(rig.ignored(Ignored::Repeated), 1);
}

#[test]
fn a_rank_of_a_receiver_that_was_replaced_may_be_lost_and_the_newer_receiver_is_written() {
    for reached in [false, true] {
        for unresponsive in [false, true] {
            let mut rig = rig((1, 0));
            let session = sent(&mut rig, 1, "r", &[1]);
            rig.register("d-0", &of("r-11111111", 2, &[5]));
            let (lost, written) = match reached {
                true => {
                    let agent = rig.shake_hands(2)[1];
                    (agent, rig.posts())
                }
                false => (rig.asked()[1].0, Vec::new()),
            };
            rig.wait_until(at(3));
            rig.register("d-0", &of("r-22222222", 1, &[6]));
            let newer = rig.asked();
            match unresponsive {
                true => rig.wait_until(at(6)),
                false => rig.gone(lost),
            }
            assert_eq!(rig.told(session), (Transferring, &[][..]), "nothing of the newer receiver is lost");
            rig.answer(newer[0].0, HASH, &told((1, 0), "d-0"));
            let agent = rig.agent();
            rig.connected(agent);
            let posts = rig.posts();
            assert_eq!((posts.len(), posts[0].0), (1, agent));
            assert_eq!(posts[0].1.notify, Some(done("r-22222222", 1)));
            written.iter().for_each(|(_, post)| rig.posted(post, Err(TransportError::Cancelled)));
            rig.posted(&posts[0].1, Ok(()));
            assert_eq!(rig.told(session), (Success, &[1][..]));
        }
    }
}

#[test]
fn each_rank_of_a_larger_writer_asks_and_writes_the_receivers_rank_that_has_its_head() {
    for rank in 0..4 {
        let mut rig = rig((4, rank));
        let session = sent(&mut rig, 1, "r", &[1]);
        rig.register("d-0", &of("r", 2, &[5]));
        let asked = rig.asked();
        assert_eq!((asked.len(), asked[0].1), (1, rank / 2), "rank {rank}");
        rig.answer(asked[0].0, HASH, &told((2, rank / 2), "d-0"));
        let agent = rig.agent();
        rig.connected(agent);
        let posts = rig.posts();
        // A block of the receiver's rank has two heads, each of a quarter of what all four heads take.
        let inside = |one: &kv_core::Descriptor| (one.len, one.remote_offset % LEN);
        let places: Vec<_> = posts[0].1.descriptors.iter().map(inside).collect();
        assert_eq!(places, [(LEN / 2, u64::from(rank % 2) * LEN / 2); 2], "rank {rank}");
        rig.posted(&posts[0].1, Ok(()));
        assert_eq!(rig.told(session), (Success, &[1][..]));
    }
}

#[test]
fn registrations_without_a_sender_expire_are_bounded_and_dial_nobody() {
    let mut rig = Rig::new(crate::vllm::geometry::tests::args((1, 0), false), |config| {
        config.limits.max_registrations = 2;
    });
    for request in ["a", "b", "c"] {
        rig.register("d-0", &of(request, 1, &[5]));
    }
    assert_eq!((rig.ignored(Ignored::NoRoom), rig.out.len()), (1, 0));
    rig.wait_until(at(50));
    rig.notify("d-0", heartbeat(["c"]));
    rig.wait_until(at(109));
    assert_eq!(rig.ignored(Ignored::NoRoom), 2, "b has expired");
    let kept = rig.open(1, "c", push());
    assert_eq!((rig.asked().len(), rig.state(kept)), (1, KvPoll::WaitingForInput));
    let lost = rig.open(2, "b", push());
    assert_eq!((rig.asked().len(), rig.state(lost)), (0, KvPoll::WaitingForInput));
}

#[test]
fn a_registration_for_another_engine_is_ignored() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r", &[1]);
    let other = PushRegistration { remote_engine_id: "p-9".to_owned(), ..of("r", 1, &[5]) };
    rig.register("d-0", &other);
    assert_eq!((rig.ignored(Ignored::OtherEngine), rig.state(session)), (1, Transferring));
    assert!(rig.out.is_empty());
}

#[test]
fn two_open_requests_with_one_base_cannot_be_told_apart() {
    let mut rig = rig((1, 0));
    let first = rig.open(1, "r-00000001", push());
    let second = rig.open(2, "r-00000002", push());
    assert!(matches!(rig.cause(second), Some(Cause::AmbiguousRoom { .. })));
    rig.register("d-0", &of("r-11111111", 1, &[5]));
    assert_eq!((rig.asked().len(), rig.state(first)), (1, KvPoll::WaitingForInput));
}

#[test]
fn an_engine_that_was_restarted_under_its_address_is_asked_anew() {
    let mut rig = rig((1, 0));
    let first = sent(&mut rig, 1, "a", &[1]);
    rig.register("d-0", &of("a", 1, &[5]));
    let before = rig.shake_hands(1)[0];
    rig.write_all();
    assert_eq!(rig.state(first), Success);
    let second = sent(&mut rig, 2, "b", &[1]);
    rig.register("new-0", &of("b", 1, &[5]));
    let asked = rig.asked();
    assert_eq!(asked.len(), 1, "the agent is none of those that were known");
    rig.answer(asked[0].0, HASH, &told((1, 0), "new-0"));
    let after = rig.agent();
    rig.connected(after);
    let written = rig.write_all();
    assert_eq!((written.len(), written[0].0), (1, after));
    assert_eq!(rig.state(second), Success);
    assert_ne!(before, after);
}

#[test]
fn the_end_of_one_ranks_agent_lets_all_ranks_of_the_engine_be_asked_anew() {
    let mut rig = rig((1, 0));
    let first = sent(&mut rig, 1, "a", &[1]);
    rig.register("d-0", &of("a", 2, &[5]));
    let agents = rig.shake_hands(2);
    assert_eq!((agents.len(), rig.write_all().len()), (2, 2));
    assert_eq!(rig.state(first), Success);
    rig.gone(agents[0]);
    rig.out.clear();
    sent(&mut rig, 2, "b", &[1]);
    rig.register("new-0", &of("b", 2, &[5]));
    let asked: Vec<u32> = rig.asked().into_iter().map(|(_, rank)| rank).collect();
    assert_eq!(asked, [0, 1], "an engine starts with all its ranks");
}

#[test]
fn an_agent_that_registers_for_another_agents_engine_gets_nothing() {
    let mut rig = rig((1, 0));
    let session = sent(&mut rig, 1, "r", &[1]);
    rig.register("stranger", &of("r", 1, &[5]));
    for _ in 0..2 {
        rig.shake_hands(1);
    }
    assert_eq!((rig.ignored(Ignored::OtherEngine), rig.posts().len()), (1, 0));
    assert_eq!((rig.state(session), rig.machine.leased()), (Transferring, 1), "the lease runs again");
    rig.register("d-0", &of("r-11111111", 1, &[5]));
    assert_eq!(rig.write_all().len(), 1);
    assert_eq!(rig.state(session), Success);
}

#[test]
fn few_side_channels_are_asked_at_once_and_few_ranks_of_one_engine() {
    let mut rig = rig((1, 0));
    let many = sent(&mut rig, 1, "many", &[1]);
    rig.register("d-0", &of("many", 65_536, &[5]));
    assert!(
        matches!(rig.cause(many), Some(Cause::Incompatible(mismatch)) if mismatch.field == "decode_tp_size")
    );
    let session = sent(&mut rig, 2, "r", &[1]);
    rig.register("d-0", &of("r", 64, &[5]));
    let asked = rig.asked();
    assert_eq!(asked.len(), 32);
    rig.gone(asked[0].0);
    assert_eq!((rig.state(session), rig.asked().len()), (Failed, 0), "nobody needs the other ranks");
    rig.wait_until(at(999));
    assert_eq!(rig.machine.next_timeout(), None);
}

#[test]
fn a_table_full_of_engines_in_use_refuses_another() {
    let mut rig = Rig::new(crate::vllm::geometry::tests::args((1, 0), false), |config| {
        config.limits.max_engines = 1;
    });
    let first = rig.open(1, "a", push());
    rig.register("d-0", &of("a", 1, &[5]));
    let second = rig.open(2, "b", push());
    let elsewhere = PushRegistration { decode_engine_id: "E".to_owned(), ..of("b", 1, &[5]) };
    rig.register("e-0", &elsewhere);
    assert_eq!(rig.cause(second), Some(Cause::TooManyPeers { max: 1 }));
    assert_ne!(rig.state(first), Failed);
}

#[test]
fn blocks_of_several_cache_groups_are_refused() {
    let mut rig = rig((1, 0));
    let session = rig.open(1, "r", push());
    let groups = PushRegistration { local_block_ids: vec![vec![1], vec![2]], ..of("r", 1, &[]) };
    rig.register("d-0", &groups);
    assert!(
        matches!(rig.cause(session), Some(Cause::Incompatible(found)) if found.field == "local_block_ids")
    );
    assert!(rig.out.is_empty());
}
