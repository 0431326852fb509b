//! Cache groups against a peer that names what is not there, or leaves out what it must not.

use std::time::Duration;

use kv_core::proto::{Command, Input, Output, Resource};
use kv_core::wire::{Body, Failed, Granted};
use kv_core::{
    Attempt, CacheGroup, CacheGroupItems, CacheGroupList, CacheGroupLists, CacheGroupSpan, Cause, Holds,
    KvArgs, KvPoll, Layout, Pages, Parallel, PeerCause, PeerId, RankRecord, Region, RegionRole,
    RequestCacheGroups, Room, SessionId, SessionOptions, TransferMode, WayEnd,
};

use crate::solo::{OPTIONAL, SLOTS, Solo, destination, done, list, record, record_with, register, with};

const ROOM: Room = Room::Number(1);
const ONE: Attempt = Attempt(1);

fn lists(all: &[(u16, u32, &[u32])]) -> CacheGroupLists {
    let lists = all.iter().map(|&(group, first, items)| CacheGroupList { group, first, items: list(items) });
    lists.collect::<Vec<_>>().try_into().unwrap()
}

fn groups(all: &[(u16, u32, &[u32])]) -> RequestCacheGroups {
    let mut groups = RequestCacheGroups::none();
    for &(group, first, items) in all {
        let items = Pages::unpooled(list(items)).unwrap();
        groups.push(CacheGroupItems::from_number(group, first, items)).unwrap();
    }
    groups
}

fn give(solo: &mut Solo, session: SessionId, all: &[(u16, u32, &[u32])]) {
    solo.input(Input::Command(Command::RequestCacheGroups { session, groups: groups(all) }));
}

/// What came back with the last input.
fn returned(solo: &Solo) -> Option<(CacheGroupLists, Vec<u16>)> {
    solo.said.iter().find_map(|output| match output {
        Output::Release { resource: Resource::RequestCacheGroups { groups, skipped }, .. } => {
            Some((groups.lists(), skipped.clone()))
        }
        _ => None,
    })
}

/// What no cache of the peer holds: items, groups, items named twice.
fn bad() -> [CacheGroupLists; 5] {
    [
        lists(&[(SLOTS, 0, &[8])]),
        lists(&[(OPTIONAL, 0, &[6])]),
        lists(&[(2, 0, &[0])]),
        lists(&[(SLOTS, 0, &[1]), (u16::MAX, 0, &[0])]),
        lists(&[(SLOTS, 0, &[3, 4, 3])]),
    ]
}

#[test]
fn registered_items_that_do_not_exist_are_refused_and_the_sender_is_told() {
    for groups in bad() {
        let mut solo = Solo::serving(|_| {});
        let sender = solo.open_sender(ROOM, 1);
        solo.says(1, Body::Register(with(register(1, ROOM, &[0]), |to| to.groups = groups)));
        let cause = PeerCause::OutOfRange;
        assert!(solo.frames().contains(&Body::Failed(Failed { attempt: ONE, cause, quiet: true })));
        assert_eq!(solo.cause(sender), Cause::ByPeer(PeerCause::OutOfRange));
    }
}

#[test]
fn items_of_a_waiting_registration_count_against_its_bound() {
    let mut solo =
        Solo::serving(|config| (config.limits.max_waiting_runs, config.limits.connections_share) = (4, 1));
    let groups = lists(&[(SLOTS, 0, &[1, 3, 5, 7])]);
    solo.says(1, Body::Register(with(register(1, ROOM, &[0]), |to| to.groups = groups)));
    let cause = PeerCause::Overloaded;
    assert!(solo.frames().contains(&Body::Failed(Failed { attempt: ONE, cause, quiet: true })));
    let groups = lists(&[(SLOTS, 0, &[1, 3, 5])]);
    solo.says(1, Body::Register(with(register(2, ROOM, &[0]), |to| to.groups = groups)));
    assert_eq!(solo.node().gauges().registrations, 1);
}

/// A push receiver that has registered these groups.
fn receiving(all: &[(u16, u32, &[u32])]) -> (Solo, SessionId) {
    let (mut solo, session) = Solo::receiving();
    give(&mut solo, session, all);
    solo.init_receiver(session, &[7], None);
    let Body::Register(register) = solo.answer() else { panic!("no registration") };
    assert_eq!(destination(&register).groups, lists(all));
    (solo, session)
}

#[test]
fn a_sender_that_leaves_out_what_is_not_optional_fails_the_session() {
    for total in [None, Some(2)] {
        let all: &[(u16, u32, &[u32])] = &[(SLOTS, 0, &[2]), (OPTIONAL, 3, &[4, 5])];
        let (mut solo, session) = receiving(all);
        let skipped = vec![SLOTS, OPTIONAL];
        // The last part may come first.
        if total.is_some() {
            solo.says(1, done(1, 1, total, skipped.clone()));
        }
        solo.says(1, done(1, 0, total.or(Some(1)), skipped));
        let wanted = Some(CacheGroupSpan { first: 0, len: 1 });
        assert_eq!(solo.cause(session), Cause::GroupItems { group: SLOTS, sent: None, wanted });
        assert_eq!(returned(&solo), None, "the peer may still write");
        solo.says(1, Body::AbortAck(kv_core::wire::AbortAck { attempt: ONE }));
        assert_eq!(returned(&solo), Some((lists(all), vec![])));
    }
}

#[test]
fn what_a_sender_left_out_is_told_and_what_was_not_asked_for_is_no_news() {
    let all: &[(u16, u32, &[u32])] = &[(SLOTS, 0, &[2]), (OPTIONAL, 3, &[4, 5])];
    let (mut solo, session) = receiving(all);
    // Before the last part it means nothing.
    solo.says(1, done(1, 1, None, vec![SLOTS]));
    let skipped = vec![OPTIONAL, 5, u16::MAX, OPTIONAL];
    solo.says(1, done(1, 0, Some(2), skipped));
    assert_eq!(solo.poll(session), KvPoll::Success);
    assert_eq!(returned(&solo), Some((lists(all), vec![OPTIONAL])));
}

#[test]
fn granted_items_that_do_not_exist_fail_the_session() {
    for groups in bad() {
        let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Pull));
        let mut solo = Solo::new(|_| {});
        let session = solo.open_receiver_with(ROOM, options);
        let lookup = solo.lookups()[0].0;
        solo.found(lookup, vec![record(1)]);
        solo.welcome(1, 1);
        let granted = Granted {
            attempt: ONE,
            number: 1,
            lease_id: SessionId(55),
            pages: list(&[4]),
            aux: None,
            lease_ms: 6000,
            interval_ms: 1000,
            groups,
        };
        solo.says(1, Body::Granted(granted));
        assert_eq!(solo.cause(session), Cause::Protocol("a lease of pages that do not exist"));
        assert!(solo.take_posts().is_empty());
    }
}

/// What rank `stage` of two tells of itself: the one layer that it has, and the slots, if they are there.
fn stage(stage: u32, slots: CacheGroup, held: &[u32]) -> KvArgs {
    let stages = vec![(0, 1), (1, 2)];
    let args = KvArgs::builder("peers", stage)
        .pages(16, 16)
        .parallel(Parallel::default().with(|parallel| {
            parallel.pp_size = 2;
            parallel.pp_rank = stage;
        }))
        .region(Region::dram(RegionRole::Kv, 0x1000, 16 * 64, 64).layer(stage).holds(Holds::Latent))
        .layout(Layout::default().with(|layout| {
            layout.stages = stages;
            layout.groups = vec![slots];
        }));
    let state = Region::dram(RegionRole::State, 0x9000, 8 * 32, 32).layer(stage).holds(Holds::State(0));
    let args = if held.contains(&stage) { args.region(state) } else { args };
    args.build().unwrap()
}

/// A receiver of both layers and of the slots, which lie in some of them, registered with a peer for each
/// stage.
fn receiving_of_stages(slots: CacheGroup, held: &[u32], all: &[(u16, u32, &[u32])]) -> (Solo, SessionId) {
    let mut solo = Solo::new(|config| {
        let latent = Region::dram(RegionRole::Kv, 0x1000, 16 * 128, 128).layers(0..2).holds(Holds::Latent);
        let mut args = KvArgs::builder("us", 0).pages(16, 16).region(latent);
        for &layer in held {
            let addr = 0x9000 + 0x1000 * u64::from(layer);
            let state = Region::dram(RegionRole::State, addr, 8 * 32, 32);
            args = args.region(state.layer(layer).holds(Holds::State(0)));
        }
        let layout = Layout::default().with(|layout| layout.groups = vec![slots]);
        config.args = args.layout(layout).build().unwrap();
    });
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    let records = [1, 2].map(|peer| {
        let args = stage(peer as u32 - 1, slots, held);
        RankRecord { worker: args.worker().clone(), ..record_with(peer, args.geometry()) }
    });
    solo.found(lookup, records.to_vec());
    solo.welcome(1, 1);
    solo.welcome(2, 1);
    give(&mut solo, session, all);
    solo.init_receiver(session, &[7], None);
    assert_eq!(solo.poll(session), KvPoll::Transferring);
    (solo, session)
}

#[test]
fn items_that_have_come_were_not_left_out_though_their_source_leaves_before_the_others_are_done() {
    let all: &[(u16, u32, &[u32])] = &[(SLOTS, 0, &[2])];
    let complete = || done(1, 0, Some(1), Vec::new());
    for leaves in [0, 1] {
        let (mut solo, session) = receiving_of_stages(CacheGroup::slots(1, 1), &[1], all);
        // Sources are in the order of their rows: that of the last stage first.
        let (first, second) = if leaves == 0 { (2, 1) } else { (1, 2) };
        solo.says(first, complete());
        solo.input(Input::PeerGone {
            peer: PeerId(leaves),
            end: WayEnd::Dead { quiet_after: Duration::ZERO },
        });
        solo.says(second, complete());
        assert_eq!(solo.poll(session), KvPoll::Success);
        assert_eq!(returned(&solo), Some((lists(all), vec![])));
    }
}

/// Half of an item is none.
#[test]
fn items_that_one_of_their_sources_left_out_are_left_out() {
    let all: &[(u16, u32, &[u32])] = &[(SLOTS, 0, &[2])];
    let complete = |skipped: Vec<u16>| done(1, 0, Some(1), skipped);
    for leaves_out in [vec![], vec![1], vec![2], vec![1, 2]] {
        let (mut solo, session) = receiving_of_stages(CacheGroup::slots(1, 1).optional(), &[0, 1], all);
        for peer in [1, 2] {
            let skipped = if leaves_out.contains(&peer) { vec![SLOTS] } else { vec![] };
            solo.says(peer, complete(skipped));
        }
        assert_eq!(solo.poll(session), KvPoll::Success);
        let expected = if leaves_out.is_empty() { vec![] } else { vec![SLOTS] };
        assert_eq!(returned(&solo), Some((lists(all), expected)), "{leaves_out:?}");
    }
}
