//! RequestCacheGroups that only one side names: whether they may be left out.

use kv_core::{Cause, KvArgs, KvPoll, PeerCause, Region, RegionRole, RequestCacheGroups, TransferMode};

use crate::groups::{DRAFT, ROOM, SLOTS, World, args_with, copy, groups, items, span};
use crate::pair::{D, P, list};

/// A request whose sender or receiver names one group fails on both sides, and everything comes back.
fn disagree(args: [KvArgs; 2], group: u16) {
    for mode in [TransferMode::Push, TransferMode::Pull] {
        for names in [P, D] {
            let mut world = World::with(args.clone());
            let side = |node| {
                if names == node { groups([items(group, 0, &[1, 2])]) } else { RequestCacheGroups::none() }
            };
            let (sender, receiver) = world.request(mode, (&[4], side(P)), (&[8], side(D)));
            world.carry_out();
            let both = span(0, 2);
            let (sent, wanted) = if names == P { (both, None) } else { (None, both) };
            let (finds, told) = if mode == TransferMode::Push { (P, D) } else { (D, P) };
            let session = |node| if node == P { sender } else { receiver };
            let here = Cause::GroupItems { group, sent, wanted };
            let there = Cause::ByPeer(PeerCause::GroupItems { group, sent, wanted });
            assert_eq!(world.pair.failure(finds, session(finds)), here);
            assert_eq!(world.pair.failure(told, session(told)), there);
            world.pair.run_for(std::time::Duration::from_secs(60));
            world.check(&[]);
            world.assert_back((sender, side(P)), (receiver, side(D)), &[]);
            assert_eq!(world.pair.released(P, sender), [list(&[4])]);
            assert_eq!(world.pair.released(D, receiver), [list(&[8])]);
            world.pair.assert_empty();
        }
    }
}

#[test]
fn a_group_that_one_side_does_not_call_optional_is_not_left_out() {
    let args = |engine, optional| args_with(engine, (16, 4, 4), true, optional);
    disagree([args("prefill", false), args("decode", true)], DRAFT);
    disagree([args("prefill", true), args("decode", false)], DRAFT);
    disagree([args("prefill", false), args("decode", false)], DRAFT);
}

/// One KV region, and slots of which nobody says anything.
fn undescribed(engine: &str) -> KvArgs {
    let slots = Region::dram(RegionRole::State, 0x2_0000, 8 * 24, 24);
    let builder = KvArgs::builder(engine, 0).pages(32, 16);
    builder.region(Region::dram(RegionRole::Kv, 0x1_0000, 32 * 64, 64)).region(slots).build().unwrap()
}

#[test]
fn slots_that_nobody_described_are_moved_and_never_left_out() {
    disagree([undescribed("prefill"), undescribed("decode")], SLOTS);
    for mode in [TransferMode::Push, TransferMode::Pull] {
        let mut world = World::with([undescribed("prefill"), undescribed("decode")]);
        let (sent, wanted) = (groups([items(SLOTS, 0, &[5])]), groups([items(SLOTS, 0, &[2])]));
        let (sender, receiver) = world.request(mode, (&[4], copy(&sent)), (&[8], copy(&wanted)));
        world.carry_out();
        assert_eq!(world.pair.poll(D, receiver), KvPoll::Success);
        world.check(&[(0, 64, &[(4, 8)]), (1, 24, &[(5, 2)])]);
        world.assert_back((sender, sent), (receiver, wanted), &[]);
    }
}

#[test]
fn items_given_to_a_session_that_has_failed_come_back_at_once() {
    let mut world = World::with([undescribed("prefill"), undescribed("decode")]);
    let given = || groups([items(SLOTS, 0, &[5])]);
    let options =
        || kv_core::SessionOptions::default().with(|options| options.mode = Some(TransferMode::Push));
    let sender = world.pair.open_sender_with(ROOM, 1, options());
    let receiver = world.pair.open_receiver_with(ROOM, options());
    world.pair.init_receiver(receiver, &[7, 8], None);
    world.pair.init_sender(sender, 2, None);
    world.pair.send(sender, &[4]);
    assert_eq!(world.pair.posts(), 1);
    world.pair.abort(P, sender);
    world.pair.give_groups(P, sender, given());
    assert_eq!(world.pair.released_groups(P, sender), [(given().lists(), vec![])]);
    assert_eq!(world.pair.released(P, sender), [], "a write is in flight");
    world.carry_out();
    assert_eq!(world.pair.released(P, sender), [list(&[4])]);
    assert_eq!(world.pair.released_groups(P, sender).len(), 1);
}
