//! Cache groups between two nodes: slots, a sliding window, and the pages of a draft model, with bytes.

use std::time::Duration;

use kv_core::proto::Command;
use kv_core::wire::Body;
use kv_core::{
    CacheGroup, CacheGroupItems, CacheGroupSpan, Cause, Holds, KvArgs, KvPoll, Layout, Lease, Op, PagesError,
    PeerCause, Region, RegionRole, RequestCacheGroups, Room, SessionId, SessionOptions, TransferMode,
};

use crate::pair::{D, P, Pair, list, pages};

pub const ROOM: Room = Room::Number(7);
pub const SLOTS: u16 = 0;
const WINDOW: u16 = 1;
pub const DRAFT: u16 = 2;
/// Bytes of a token in each of the regions.
const TOKEN: u64 = 4;

/// A hybrid model of one attention layer, one recurrent one, one with a sliding window, and maybe the
/// one layer of a draft model: a page has `page_size` tokens, one of the window `window`, one of the
/// draft model `draft`.
pub fn args(engine: &str, sizes: (u32, u32, u32), has_draft: bool) -> KvArgs {
    args_with(engine, sizes, has_draft, true)
}

/// The same, whose draft model must perhaps not be left out.
pub fn args_with(
    engine: &str,
    (page_size, window, draft): (u32, u32, u32),
    has_draft: bool,
    optional: bool,
) -> KvArgs {
    let page = u64::from(page_size) * TOKEN;
    let (window_page, draft_page) = (u64::from(window) * TOKEN, u64::from(draft) * TOKEN);
    let builder = KvArgs::builder(engine, 0)
        .pages(32, page_size)
        .heads(1, 4)
        .region(Region::dram(RegionRole::Kv, 0x1_0000, 32 * page, page).layer(0).holds(Holds::Key))
        .region(Region::dram(RegionRole::Kv, 0x2_0000, 32 * page, page).layer(0).holds(Holds::Value))
        .region(Region::dram(RegionRole::Aux, 0x3_0000, 4 * 16, 16))
        .region(Region::dram(RegionRole::State, 0x4_0000, 8 * 24, 24).layer(1).holds(Holds::State(0)))
        .region(Region::dram(RegionRole::State, 0x5_0000, 8 * 40, 40).layer(1).holds(Holds::State(1)))
        .region(
            Region::dram(RegionRole::State, 0x6_0000, 16 * window_page, window_page)
                .layer(2)
                .holds(Holds::Key)
                .group(WINDOW),
        );
    let draft_region = Region::dram(RegionRole::State, 0x7_0000, 20 * draft_page, draft_page);
    let builder = match has_draft {
        true => builder.region(draft_region.layer(0).holds(Holds::Key).group(DRAFT)),
        false => builder,
    };
    let drafts = CacheGroup::pages(draft, 1, 1);
    let drafts = if optional { drafts.optional() } else { drafts };
    let groups = vec![CacheGroup::slots(1, 1), CacheGroup::pages(window, 1, 1), drafts];
    builder.layout(Layout::default().with(|layout| layout.groups = groups)).max_inflight(8).build().unwrap()
}

/// Two nodes with memory: every byte of the prefill side is a number of its own, as far as a byte goes.
pub struct World {
    pub pair: Pair,
    memory: [Vec<Vec<u8>>; 2],
}

impl World {
    fn new() -> World {
        World::with([args("prefill", (16, 4, 4), true), args("decode", (16, 4, 4), true)])
    }

    pub fn with(args: [KvArgs; 2]) -> World {
        let pair = Pair::with(|config| {
            let engine = config.args.worker().engine.to_string();
            config.args = args[usize::from(engine == "decode")].clone();
        });
        let regions = |args: &KvArgs| args.geometry().regions.clone();
        let number = |region: usize, at: u64| 1 + ((region as u64 * 83 + at * 7 + at / 251) % 255) as u8;
        let filled = regions(&args[P]).into_iter().enumerate();
        let filled = filled.map(|(region, shape)| (0..shape.len).map(|at| number(region, at)).collect());
        let empty = regions(&args[D]).iter().map(|shape| vec![0; shape.len as usize]).collect();
        World { pair, memory: [filled.collect(), empty] }
    }

    fn open(&mut self, mode: TransferMode) -> (SessionId, SessionId) {
        let options = || SessionOptions::default().with(|options| options.mode = Some(mode));
        let sender = self.pair.open_sender_with(ROOM, 1, options());
        (sender, self.pair.open_receiver_with(ROOM, options()))
    }

    /// A request of as many pages on each side, with these groups.
    pub fn request(
        &mut self,
        mode: TransferMode,
        (from, sent): (&[u32], RequestCacheGroups),
        (to, wanted): (&[u32], RequestCacheGroups),
    ) -> (SessionId, SessionId) {
        let (sender, receiver) = self.open(mode);
        self.pair.give_groups(D, receiver, wanted);
        self.pair.init_receiver(receiver, to, None);
        self.pair.init_sender(sender, from.len(), None);
        self.pair.give_groups(P, sender, sent);
        self.pair.send(sender, from);
        (sender, receiver)
    }

    /// Carries out all posts, and those that follow.
    pub fn carry_out(&mut self) {
        while let Some((node, post)) = self.pair.take_first() {
            for descriptor in &post.descriptors {
                let local = (node, descriptor.local_region, descriptor.local_offset);
                let remote = (1 - node, descriptor.remote_region, descriptor.remote_offset);
                let (from, to) = if post.op == Op::Write { (local, remote) } else { (remote, local) };
                assert_eq!((from.0, to.0), (P, D), "bytes go from prefill to decode");
                let range = |at: u64| at as usize..(at + descriptor.len) as usize;
                let bytes = self.memory[P][from.1 as usize][range(from.2)].to_vec();
                self.memory[D][to.1 as usize][range(to.2)].copy_from_slice(&bytes);
            }
            self.pair.complete(node, post, Ok(()));
        }
    }

    /// Checks all memory of the decode side. Of each region, `moved` says which tokens (here, there)
    /// have moved, each of so many bytes; everything else is as it was.
    pub fn check(&self, moved: &[Moved]) {
        let mut expected: Vec<Vec<u8>> = self.memory[D].iter().map(|region| vec![0; region.len()]).collect();
        for &(region, len, tokens) in moved {
            for &(from, to) in tokens {
                for byte in 0..len {
                    let at = |token: u32| (u64::from(token) * len + byte) as usize;
                    expected[region][at(to)] = self.memory[P][region][at(from)];
                }
            }
        }
        for (region, (got, wanted)) in self.memory[D].iter().zip(&expected).enumerate() {
            assert!(got == wanted, "region {region}: {got:?} instead of {wanted:?}");
        }
    }

    /// All items are back, on both sides, once each; the receiver is told what was left out.
    pub fn assert_back(
        &self,
        (sender, sent): (SessionId, RequestCacheGroups),
        (receiver, wanted): (SessionId, RequestCacheGroups),
        skipped: &[u16],
    ) {
        assert_eq!(self.pair.released_groups(P, sender), [(sent.lists(), vec![])]);
        assert_eq!(self.pair.released_groups(D, receiver), [(wanted.lists(), skipped.to_vec())]);
    }
}

pub fn items(group: u16, first: u32, items: &[u32]) -> CacheGroupItems {
    CacheGroupItems::from_number(group, first, pages(items))
}

pub fn groups<const N: usize>(all: [CacheGroupItems; N]) -> RequestCacheGroups {
    let mut groups = RequestCacheGroups::none();
    all.into_iter().for_each(|items| groups.push(items).unwrap());
    groups
}

pub fn span(first: u32, len: u32) -> Option<CacheGroupSpan> {
    Some(CacheGroupSpan { first, len })
}

/// A region, bytes of a token or item, and which of them have moved (here, there).
pub type Moved<'a> = (usize, u64, &'a [(u32, u32)]);

/// What both sides give, the group they disagree about, and both values.
type Disagreement =
    (RequestCacheGroups, RequestCacheGroups, u16, Option<CacheGroupSpan>, Option<CacheGroupSpan>);

const BOTH: [TransferMode; 2] = [TransferMode::Push, TransferMode::Pull];

#[test]
fn success_means_that_slots_window_and_draft_pages_are_in_place() {
    for mode in BOTH {
        let mut world = World::new();
        let sent = || groups([items(SLOTS, 0, &[5]), items(WINDOW, 8, &[3, 9]), items(DRAFT, 0, &[1, 2, 7])]);
        let wanted =
            || groups([items(SLOTS, 0, &[2]), items(WINDOW, 8, &[6, 7]), items(DRAFT, 0, &[4, 0, 9])]);
        let (sender, receiver) = world.request(mode, (&[4, 9], sent()), (&[8, 1], wanted()));
        assert_eq!(world.pair.released_groups(D, receiver), []);
        world.carry_out();
        assert_eq!(world.pair.poll(P, sender), KvPoll::Success);
        assert_eq!(world.pair.poll(D, receiver), KvPoll::Success);
        let kv: &[(u32, u32)] = &[(4, 8), (9, 1)];
        world.check(&[
            (0, 64, kv),
            (1, 64, kv),
            (3, 24, &[(5, 2)]),
            (4, 40, &[(5, 2)]),
            (5, 16, &[(3, 6), (9, 7)]),
            (6, 16, &[(1, 4), (2, 0), (7, 9)]),
        ]);
        world.assert_back((sender, sent()), (receiver, wanted()), &[]);
        world.pair.assert_empty();
    }
}

#[test]
fn groups_are_not_sent_before_the_last_chunk() {
    let mut world = World::new();
    let (sender, receiver) = world.open(TransferMode::Push);
    world.pair.give_groups(D, receiver, groups([items(SLOTS, 0, &[2])]));
    world.pair.init_receiver(receiver, &[8, 1], None);
    world.pair.init_sender(sender, 2, None);
    world.pair.send(sender, &[4]);
    world.carry_out();
    world.check(&[(0, 64, &[(4, 8)]), (1, 64, &[(4, 8)])]);
    // Late, but not too late.
    world.pair.give_groups(P, sender, groups([items(SLOTS, 0, &[5])]));
    world.carry_out();
    assert_eq!(world.pair.poll(D, receiver), KvPoll::Transferring);
    world.pair.send(sender, &[9]);
    world.carry_out();
    let kv: &[(u32, u32)] = &[(4, 8), (9, 1)];
    world.check(&[(0, 64, kv), (1, 64, kv), (3, 24, &[(5, 2)]), (4, 40, &[(5, 2)])]);
    assert_eq!(world.pair.poll(D, receiver), KvPoll::Success);
}

#[test]
fn pages_of_groups_may_differ_in_size_and_a_window_may_begin_within_one() {
    for mode in BOTH {
        let mut world = World::with([args("prefill", (16, 4, 2), true), args("decode", (8, 2, 6), true)]);
        // 19 tokens; the window are the last 6: 13 to 18.
        let sent = || {
            groups([
                items(SLOTS, 0, &[1]),
                items(WINDOW, 3, &[8, 2]),
                items(DRAFT, 0, &[0, 2, 4, 6, 8, 1, 3, 5, 7, 9]),
            ])
        };
        let wanted = || {
            groups([items(SLOTS, 0, &[0]), items(WINDOW, 6, &[9, 1, 5, 6]), items(DRAFT, 0, &[3, 2, 1, 0])])
        };
        let (sender, receiver) = world.request(mode, (&[4, 9], sent()), (&[8, 1, 5], wanted()));
        world.carry_out();
        assert_eq!(world.pair.poll(D, receiver), KvPoll::Success, "{mode}");
        let tokens = |from: &[u32], size: u32, first: u32| -> Vec<(u32, u32)> {
            let each = from
                .iter()
                .zip(first..)
                .flat_map(|(page, number)| (0..size).map(move |at| (page, number, at)));
            each.map(|(page, number, at)| (number * size + at, page * size + at)).collect()
        };
        let join = |from: Vec<(u32, u32)>, to: Vec<(u32, u32)>| -> Vec<(u32, u32)> {
            let at = |token: u32| from.iter().find(|(number, _)| *number == token).map(|(_, place)| *place);
            to.iter().filter_map(|&(token, place)| Some((at(token)?, place))).collect()
        };
        let kv = join(tokens(&[4, 9], 16, 0), tokens(&[8, 1, 5], 8, 0));
        let window = join(tokens(&[8, 2], 4, 3), tokens(&[9, 1, 5, 6], 2, 6));
        let draft = join(tokens(&[0, 2, 4, 6, 8, 1, 3, 5, 7, 9], 2, 0), tokens(&[3, 2, 1, 0], 6, 0));
        assert_eq!((kv.len(), window.len(), draft.len()), (24, 8, 20));
        world.check(&[
            (0, TOKEN, &kv),
            (1, TOKEN, &kv),
            (3, 24, &[(1, 0)]),
            (4, 40, &[(1, 0)]),
            (5, TOKEN, &window),
            (6, TOKEN, &draft),
        ]);
        world.assert_back((sender, sent()), (receiver, wanted()), &[]);
    }
}

#[test]
fn an_optional_group_of_one_side_only_is_left_out_and_the_receiver_is_told() {
    for mode in BOTH {
        for (sender_names, receiver_names) in [(true, false), (false, true)] {
            for lossy in [false, true] {
                let mut world = World::new();
                // Then the notice comes with the answer to a question.
                let mut asked = false;
                world.pair.lose(move |body| {
                    asked |= matches!(body, Body::Heartbeat(asks) if !asks.asked.is_empty());
                    lossy && !asked && matches!(body, Body::Progress(_))
                });
                let side = |names: bool, slot: u32, draft: u32| {
                    let mut groups = groups([items(SLOTS, 0, &[slot])]);
                    if names {
                        groups.push(items(DRAFT, 0, &[draft])).unwrap();
                    }
                    groups
                };
                let (sent, wanted) = (|| side(sender_names, 5, 1), || side(receiver_names, 2, 4));
                let (sender, receiver) = world.request(mode, (&[4], sent()), (&[8], wanted()));
                world.carry_out();
                world.pair.run_for(Duration::from_secs(20));
                assert_eq!(world.pair.poll(D, receiver), KvPoll::Success);
                let kv: &[(u32, u32)] = &[(4, 8)];
                world.check(&[(0, 64, kv), (1, 64, kv), (3, 24, &[(5, 2)]), (4, 40, &[(5, 2)])]);
                let skipped: &[u16] = if receiver_names { &[DRAFT] } else { &[] };
                world.assert_back((sender, sent()), (receiver, wanted()), skipped);
            }
        }
    }
}

#[test]
fn a_draft_model_of_one_side_only_is_left_out() {
    for mode in BOTH {
        for has in [P, D] {
            let mut world =
                World::with([args("prefill", (16, 4, 4), has == P), args("decode", (16, 4, 4), has == D)]);
            let side = |node: usize, draft: u32| match has == node {
                true => groups([items(DRAFT, 0, &[draft])]),
                false => RequestCacheGroups::none(),
            };
            let (sender, receiver) = world.request(mode, (&[4], side(P, 1)), (&[8], side(D, 4)));
            world.carry_out();
            assert_eq!(world.pair.poll(D, receiver), KvPoll::Success);
            world.check(&[(0, 64, &[(4, 8)]), (1, 64, &[(4, 8)])]);
            let skipped: &[u16] = if has == D { &[DRAFT] } else { &[] };
            world.assert_back((sender, side(P, 1)), (receiver, side(D, 4)), skipped);
        }
    }
}

#[test]
fn disagreements_about_items_fail_both_sides_with_both_values() {
    let none = RequestCacheGroups::none;
    let cases: [Disagreement; 7] = [
        (groups([items(SLOTS, 0, &[5])]), none(), SLOTS, span(0, 1), None),
        (none(), groups([items(SLOTS, 0, &[5])]), SLOTS, None, span(0, 1)),
        (groups([items(SLOTS, 0, &[5])]), groups([items(SLOTS, 0, &[1, 2])]), SLOTS, span(0, 1), span(0, 2)),
        (groups([items(SLOTS, 0, &[5, 6])]), groups([items(SLOTS, 0, &[1])]), SLOTS, span(0, 2), span(0, 1)),
        // The same tail is longer here than there.
        (
            groups([items(WINDOW, 8, &[3, 9])]),
            groups([items(WINDOW, 7, &[6, 7, 8])]),
            WINDOW,
            span(8, 2),
            span(7, 3),
        ),
        // It ends elsewhere.
        (
            groups([items(WINDOW, 8, &[3, 9])]),
            groups([items(WINDOW, 8, &[6])]),
            WINDOW,
            span(8, 2),
            span(8, 1),
        ),
        (groups([items(DRAFT, 0, &[3])]), groups([items(DRAFT, 0, &[6, 7])]), DRAFT, span(0, 1), span(0, 2)),
    ];
    for mode in BOTH {
        for (sent, wanted, group, has, wants) in &cases {
            let mut world = World::new();
            let copy = |groups: &RequestCacheGroups| self::copy(groups);
            let (sender, receiver) = world.request(mode, (&[4], copy(sent)), (&[8], copy(wanted)));
            world.carry_out();
            let here = Cause::GroupItems { group: *group, sent: *has, wanted: *wants };
            let there = Cause::ByPeer(PeerCause::GroupItems { group: *group, sent: *has, wanted: *wants });
            let (finds, told) = if mode == TransferMode::Push { (P, D) } else { (D, P) };
            let session = |node| if node == P { sender } else { receiver };
            assert_eq!(world.pair.failure(finds, session(finds)), here);
            assert_eq!(world.pair.failure(told, session(told)), there);
            world.pair.run_for(Duration::from_secs(60));
            world.assert_back((sender, copy(sent)), (receiver, copy(wanted)), &[]);
            assert_eq!(world.pair.released(P, sender), [list(&[4])]);
            assert_eq!(world.pair.released(D, receiver), [list(&[8])]);
            world.pair.assert_empty();
        }
    }
}

/// The same items again, for a second request.
pub fn copy(groups: &RequestCacheGroups) -> RequestCacheGroups {
    let mut copy = RequestCacheGroups::none();
    for list in groups.lists().iter() {
        let again = kv_core::Pages::unpooled(list.items.clone()).unwrap();
        copy.push(CacheGroupItems::from_number(list.group, list.first, again)).unwrap();
    }
    copy
}

#[test]
fn items_that_do_not_exist_here_fail_the_session_and_come_back() {
    let bad = [
        (
            items(SLOTS, 0, &[8]),
            Cause::BadGroup { group: SLOTS, error: PagesError::OutOfRange { page: 8, num_pages: 8 } },
        ),
        (
            items(WINDOW, 0, &[16]),
            Cause::BadGroup { group: WINDOW, error: PagesError::OutOfRange { page: 16, num_pages: 16 } },
        ),
        (items(3, 0, &[0]), Cause::UnknownGroup { group: 3 }),
        (items(u16::MAX, 0, &[]), Cause::UnknownGroup { group: u16::MAX }),
    ];
    for (items, cause) in bad {
        let mut world = World::new();
        let (sender, receiver) = world.open(TransferMode::Push);
        let given = groups([items]);
        for (node, session) in [(P, sender), (D, receiver)] {
            world.pair.give_groups(node, session, copy(&given));
            if node == P {
                assert_eq!(world.pair.failure(node, session), cause);
            }
            assert_eq!(world.pair.released_groups(node, session), [(given.lists(), vec![])]);
        }
        world.pair.assert_empty();
    }
}

#[test]
fn groups_given_twice_or_too_late_fail_the_session_and_come_back() {
    for late in [false, true] {
        for node in [P, D] {
            let mut world = World::new();
            let (sender, receiver) = world.open(TransferMode::Push);
            let session = [sender, receiver][node];
            if !late {
                world.pair.give_groups(node, session, groups([items(SLOTS, 0, &[1])]));
            } else if node == P {
                world.pair.init_sender(sender, 1, None);
                world.pair.send(sender, &[4]);
            } else {
                world.pair.init_receiver(receiver, &[8], None);
            }
            world.pair.give_groups(node, session, groups([items(SLOTS, 0, &[2])]));
            assert_eq!(world.pair.failure(node, session), Cause::InitOrder);
            world.pair.run_for(Duration::from_secs(60));
            let mut back: Vec<u32> = Vec::new();
            for (lists, _) in world.pair.released_groups(node, session) {
                back.extend(lists.iter().flat_map(|list| list.items.iter()));
            }
            back.sort_unstable();
            assert_eq!(back, if late { vec![2] } else { vec![1, 2] });
        }
    }
    // And those of sessions that nobody knows, or that have ended.
    let mut pair = Pair::new();
    let ghost = SessionId(99);
    pair.command(P, Command::RequestCacheGroups { session: ghost, groups: groups([items(0, 0, &[1])]) });
    assert_eq!(pair.released_groups(P, ghost).len(), 1);
}

#[test]
fn items_of_an_aborted_receiver_come_back_when_no_write_is_in_flight() {
    let mut world = World::new();
    let given = |slot: u32| groups([items(SLOTS, 0, &[slot]), items(WINDOW, 2, &[slot])]);
    let (sender, receiver) = world.request(TransferMode::Push, (&[4], given(5)), (&[8], given(2)));
    assert_eq!(world.pair.posts(), 1);
    world.pair.abort(D, receiver);
    assert_eq!(world.pair.poll(D, receiver), KvPoll::Failed);
    assert_eq!(
        (world.pair.released_groups(D, receiver), world.pair.released_groups(P, sender)),
        (vec![], vec![])
    );
    world.carry_out();
    world.assert_back((sender, given(5)), (receiver, given(2)), &[]);
    world.pair.assert_empty();
}

#[test]
fn items_of_a_dead_peers_reader_come_back_when_its_reads_have_ended_and_granted_ones_when_the_lease_has() {
    let mut world = World::new();
    let given = |slot: u32| groups([items(SLOTS, 0, &[slot])]);
    let lease = Some(Lease::Fixed(Duration::from_secs(9)));
    let options = |mode, lease| {
        SessionOptions::default().with(|options| {
            options.mode = Some(mode);
            options.lease = lease;
        })
    };
    let sender = world.pair.open_sender_with(ROOM, 1, options(TransferMode::Pull, lease));
    let receiver = world.pair.open_receiver_with(ROOM, options(TransferMode::Pull, None));
    world.pair.init_sender(sender, 1, None);
    world.pair.give_groups(P, sender, given(5));
    world.pair.send(sender, &[4]);
    world.pair.give_groups(D, receiver, given(2));
    world.pair.init_receiver(receiver, &[8], None);
    assert_eq!(world.pair.posts(), 1);
    world.pair.lose(|_| true);
    world.pair.peer_gone(D, Duration::ZERO);
    assert_eq!(world.pair.poll(D, receiver), KvPoll::Failed);
    assert_eq!(world.pair.released_groups(D, receiver), []);
    let (node, post) = world.pair.take_first().unwrap();
    world.pair.complete(node, post, Err(kv_core::TransportError::Cancelled));
    assert_eq!(world.pair.released_groups(D, receiver), [(given(2).lists(), vec![])]);
    // The sender knows nothing of it: its lease ends it.
    world.pair.run_for(Duration::from_secs(4));
    assert_eq!(world.pair.released_groups(P, sender), []);
    world.pair.run_for(Duration::from_secs(26));
    assert_eq!(world.pair.poll(P, sender), KvPoll::Failed);
    assert_eq!(world.pair.released_groups(P, sender), [(given(5).lists(), vec![])]);
}

#[test]
fn a_prefix_that_is_there_does_not_shorten_the_groups() {
    for mode in BOTH {
        for prefix in [1, 2] {
            let mut world = World::new();
            let options = SessionOptions::default().with(|options| {
                options.mode = Some(mode);
                options.prefix_pages = prefix;
            });
            let sender = world.pair.open_sender_with(
                ROOM,
                1,
                SessionOptions::default().with(|options| options.mode = Some(mode)),
            );
            let receiver = world.pair.open_receiver_with(ROOM, options);
            let (sent, wanted) = (|| groups([items(SLOTS, 0, &[5])]), || groups([items(SLOTS, 0, &[2])]));
            world.pair.give_groups(D, receiver, wanted());
            world.pair.init_receiver(receiver, &[8][..2 - prefix], None);
            world.pair.init_sender(sender, 2, None);
            world.pair.give_groups(P, sender, sent());
            world.pair.send(sender, &[4, 9]);
            world.carry_out();
            assert_eq!(world.pair.poll(D, receiver), KvPoll::Success, "{mode}, prefix {prefix}");
            let kv: &[(u32, u32)] = if prefix == 1 { &[(9, 8)] } else { &[] };
            world.check(&[(0, 64, kv), (1, 64, kv), (3, 24, &[(5, 2)]), (4, 40, &[(5, 2)])]);
            world.assert_back((sender, sent()), (receiver, wanted()), &[]);
        }
    }
}

#[test]
fn a_reader_that_gives_neither_pages_nor_groups_only_releases_the_senders() {
    let mut world = World::new();
    let (sender, receiver) = world.open(TransferMode::Pull);
    world.pair.init_receiver(receiver, &[], None);
    world.pair.init_sender(sender, 1, None);
    world.pair.give_groups(P, sender, groups([items(SLOTS, 0, &[5])]));
    world.pair.send(sender, &[4]);
    assert_eq!(world.pair.posts(), 0);
    assert_eq!(world.pair.poll(D, receiver), KvPoll::Success);
    assert_eq!(world.pair.poll(P, sender), KvPoll::Success);
    assert_eq!(world.pair.released_groups(P, sender).len(), 1);
    world.pair.assert_empty();
}
