//! Every check of the conformance suite can fail: for each check there is a faulty transport that it finds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod virtual_net;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bytes::Bytes;
use kv_conformance::{A_KNOWS_B, B_KNOWS_A};
use kv_core::{
    Descriptor, Op, Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent,
    TransportWait, WayEnd, WriteFence,
};
use kv_sim::{VirtualNet, VirtualTransport};
use virtual_net::{Virtual, Wrapped};

/// What is wrong with a faulty transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    /// Nothing is wrong with the transport.
    None,
    /// Every tenth descriptor is not moved.
    ForgetsADescriptor,
    /// Descriptors that are good are moved before a bad one is noticed.
    MovesBeforeItChecks,
    /// A post is cut off where a request of the backend would be full.
    CutsLongPosts,
    /// The notify frame is sent when the post is made.
    NotifiesEarly,
    /// The notify frame is sent when the first part of the post is in place.
    NotifiesAfterAPart,
    /// Frames over 64 KiB lose their ends.
    ShortensFrames,
    /// Frames are taken from peers only that were connected.
    DeafToStrangers,
    /// Posts to the peer that connects second are not moved.
    OneConnectsOnly,
    /// The end of a cancelled post is reported when it is cancelled, and once more when it ends.
    EndsTwice,
    /// Cancelled posts are reported as ended while they still move.
    EndsBeforeQuiet,
    /// The posts of a peer are forgotten when the peer is disconnected.
    ForgetsPosts,
    /// Posts of a forgotten peer are reported as ended while they still move.
    ForgetsWire,
    /// The transport accepts any metadata.
    Credulous,
    /// Of posts to several peers at once, all are moved to one peer.
    MixesPeersUp,
    /// The second half of a peer's page is taken to be zero.
    WritesHalves,
    /// Posts that fail are reported as done.
    HidesFailures,
    /// Deaths are not reported.
    HidesDeaths,
    /// The writes of a dead peer are reported to be over at once.
    PromisesQuietEarly,
    /// A reader that dies takes its source with it.
    KillsWhatItReads,
    /// A connection to a dead peer is never given up.
    WaitsForTheDead,
    /// A new peer under a known id is taken for the peer that had the id before.
    RemembersIds,
    /// Writes are allowed from the connect on.
    AllowsItself,
    /// A permission once given is good for ever.
    IgnoresTheEnd,
    /// A right to write is reported as revoked, and is not.
    RevokesNothing,
    /// After a way was lost, the peer's right to write is reported as revoked, and is not.
    RevokesNothingOnceLost,
    /// All frames have one origin.
    OneOrigin,
    /// When one peer dies, every peer is reported dead.
    AllDieWithOne,
    /// The worker that knows its peer by this id sleeps on, whatever happens.
    Oversleeps(PeerId),
}

/// Each check of the suite, with a bug that it must find; a check stands here once for each of its bugs.
const FINDS: [(&str, Bug); 29] = [
    ("posts_move_exactly_the_described_bytes", Bug::ForgetsADescriptor),
    ("descriptors_out_of_bounds_are_refused_and_touch_nothing", Bug::MovesBeforeItChecks),
    ("one_and_very_many_descriptors_move_their_bytes", Bug::CutsLongPosts),
    ("the_notify_frame_comes_after_the_bytes", Bug::NotifiesEarly),
    ("the_notify_frame_of_a_large_post_comes_after_all_its_bytes", Bug::NotifiesAfterAPart),
    ("frames_arrive_whole_in_both_directions", Bug::ShortensFrames),
    ("the_first_frame_arrives_before_the_receiver_connects", Bug::DeafToStrangers),
    ("both_sides_may_connect_at_once", Bug::OneConnectsOnly),
    ("workers_that_sleep_wake_for_frames_and_for_the_ends_of_posts", Bug::Oversleeps(A_KNOWS_B)),
    ("workers_that_sleep_wake_for_frames_and_for_the_ends_of_posts", Bug::Oversleeps(B_KNOWS_A)),
    ("every_post_ends_exactly_once_also_when_cancelled", Bug::EndsTwice),
    ("a_cancelled_post_is_quiet_once_it_has_ended", Bug::EndsBeforeQuiet),
    ("disconnect_ends_the_posts", Bug::ForgetsPosts),
    ("disconnected_posts_are_quiet_once_they_have_ended", Bug::ForgetsWire),
    ("strangers_are_refused", Bug::Credulous),
    ("three_workers_exchange_pages_at_once", Bug::MixesPeersUp),
    ("pages_move_to_and_from_a_worker_elsewhere", Bug::WritesHalves),
    ("a_peer_killed_during_our_posts_ends_them_and_is_reported", Bug::HidesFailures),
    ("an_idle_peer_that_is_killed_is_reported", Bug::HidesDeaths),
    ("a_killed_writer_is_quiet_once_that_was_promised", Bug::PromisesQuietEarly),
    ("a_killed_reader_leaves_its_source_in_service", Bug::KillsWhatItReads),
    ("a_peer_that_died_before_the_connect_is_told_dead_and_quiet", Bug::WaitsForTheDead),
    ("a_peer_that_comes_back_under_its_id_serves_its_new_bytes", Bug::RemembersIds),
    ("a_write_waits_for_its_permission_and_moves_nothing_before", Bug::AllowsItself),
    ("no_byte_of_a_write_moves_after_its_permission_has_ended", Bug::IgnoresTheEnd),
    ("after_a_right_is_revoked_no_byte_arrives", Bug::RevokesNothing),
    (
        "a_right_revoked_after_the_way_was_lost_is_gone_for_good_and_a_new_way_has_a_new_one",
        Bug::RevokesNothingOnceLost,
    ),
    ("frames_of_a_peer_have_its_origin_and_no_others", Bug::OneOrigin),
    ("death_is_told_of_the_dead_only", Bug::AllDieWithOne),
];

/// A virtual transport with a bug.
struct Faulty {
    inner: VirtualTransport,
    bug: Bug,
    known: BTreeMap<PeerId, Bytes>,
    lost: BTreeSet<PeerId>,
    /// The posts that were reported as ended.
    told: BTreeSet<PostId>,
    /// The posts that are in flight, with their peers.
    under_way: BTreeMap<PostId, PeerId>,
    /// To be reported by the next poll.
    late: Vec<TransportEvent>,
    has_read: bool,
}

impl Faulty {
    fn tell_ended(&mut self, post: PostId, error: TransportError) {
        if self.under_way.remove(&post).is_some() && self.told.insert(post) {
            self.late.push(TransportEvent::Posted { post, result: Err(error) });
        }
    }
}

impl Wrapped for Faulty {
    fn bare(&self) -> &VirtualTransport {
        &self.inner
    }

    fn crash(&self, net: &VirtualNet) {
        net.crash(&self.inner.metadata().unwrap());
        if self.bug == Bug::KillsWhatItReads && self.has_read {
            self.known.values().for_each(|source| net.crash(source));
        }
    }
}

impl Transport for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.inner.register(region)
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.inner.metadata()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        let first = self.known.entry(peer).or_insert_with(|| Bytes::copy_from_slice(metadata)).clone();
        match self.bug {
            Bug::RemembersIds => self.inner.connect(peer, &first),
            Bug::Credulous => {
                let _ = self.inner.connect(peer, metadata);
                Ok(())
            }
            _ => self.inner.connect(peer, metadata),
        }
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.inner.disconnect(peer);
        if matches!(self.bug, Bug::ForgetsPosts | Bug::ForgetsWire) {
            let posts: Vec<PostId> =
                self.under_way.iter().filter(|(_, to)| **to == peer).map(|(post, _)| *post).collect();
            for post in posts {
                self.tell_ended(post, TransportError::Cancelled);
            }
        }
        if self.bug == Bug::ForgetsPosts {
            self.late.clear();
        }
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        self.inner.send(peer, frame)
    }

    fn post(&mut self, peer: PeerId, mut post: Post) -> Result<(), TransportError> {
        let (id, mut to) = (post.id, peer);
        self.has_read |= post.op == Op::Read;
        match self.bug {
            Bug::ForgetsADescriptor if post.descriptors.len() >= 10 => {
                let numbered = post.descriptors.iter().enumerate();
                post.descriptors =
                    numbered.filter(|(at, _)| at % 10 != 9).map(|(_, descriptor)| *descriptor).collect();
            }
            Bug::MovesBeforeItChecks => {
                for (at, descriptor) in post.descriptors.iter().enumerate() {
                    let id = PostId(1 << 40 | at as u64);
                    self.told.insert(id);
                    self.inner
                        .post(peer, Post { id, descriptors: vec![*descriptor], op: post.op, notify: None })
                        .map_err(|error| match error {
                            TransportError::OutOfBounds { side, region, len, offset, size, .. } => {
                                TransportError::OutOfBounds {
                                    descriptor: at,
                                    side,
                                    region,
                                    len,
                                    offset,
                                    size,
                                }
                            }
                            error => error,
                        })?;
                }
            }
            Bug::CutsLongPosts => post.descriptors.truncate(1 << 16),
            Bug::NotifiesEarly => {
                if let Some(notify) = post.notify.take() {
                    self.inner.send(peer, notify)?;
                }
            }
            Bug::NotifiesAfterAPart if post.descriptors.len() > 1 => {
                let rest = post.descriptors.split_off(1);
                let first = PostId(1 << 40 | id.0);
                self.told.insert(first);
                let (descriptors, notify) =
                    (std::mem::replace(&mut post.descriptors, rest), post.notify.take());
                self.inner.post(peer, Post { id: first, op: post.op, descriptors, notify })?;
            }
            Bug::OneConnectsOnly if peer == B_KNOWS_A => {
                post.descriptors = vec![Descriptor { len: 1, ..post.descriptors[0] }];
            }
            Bug::MixesPeersUp if id.0 % 16 == 3 => {
                to = self.known.keys().copied().find(|known| *known != peer).unwrap_or(peer);
            }
            Bug::WritesHalves if post.op == Op::Write => {
                for descriptor in &mut post.descriptors {
                    descriptor.len = descriptor.len.div_ceil(2);
                }
            }
            _ => {}
        }
        self.inner.post(to, post)?;
        self.under_way.insert(id, peer);
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        self.inner.cancel(post);
        match self.bug {
            Bug::EndsBeforeQuiet => self.tell_ended(post, TransportError::Cancelled),
            Bug::EndsTwice if self.under_way.contains_key(&post) => {
                self.late.push(TransportEvent::Posted { post, result: Err(TransportError::Cancelled) });
            }
            _ => {}
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        let until = match self.bug {
            Bug::AllowsItself => Time::MAX,
            Bug::IgnoresTheEnd if until > Time::ZERO => Time::MAX,
            _ => until,
        };
        self.inner.permit(peer, until);
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        if self.bug == Bug::RevokesNothing { WriteFence::Revocable } else { self.inner.write_fence(peer) }
    }

    fn revoke(&mut self, peer: PeerId) {
        let is_lost = self.bug == Bug::RevokesNothingOnceLost && self.lost.contains(&peer);
        if is_lost || self.bug == Bug::RevokesNothing {
            self.late.push(TransportEvent::Revoked { peer });
        } else {
            self.inner.revoke(peer);
        }
    }

    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        events.append(&mut self.late);
        let mut fresh = Vec::new();
        self.inner.poll(now, &mut fresh);
        for event in fresh {
            match &event {
                TransportEvent::Posted { post, result } => {
                    if self.told.remove(post) {
                        continue;
                    }
                    self.under_way.remove(post);
                    let hide = self.bug == Bug::HidesFailures && result == &Err(TransportError::PeerGone);
                    let result = if hide { Ok(()) } else { result.clone() };
                    events.push(TransportEvent::Posted { post: *post, result });
                    continue;
                }
                TransportEvent::Frame { from, frame } => {
                    if self.bug == Bug::OneOrigin {
                        events.push(TransportEvent::Frame { from: Origin(0), frame: frame.clone() });
                        continue;
                    }
                    if self.bug == Bug::DeafToStrangers && self.known.is_empty() {
                        continue;
                    }
                    if self.bug == Bug::ShortensFrames && frame.len() > 64 << 10 {
                        events.push(TransportEvent::Frame { from: *from, frame: frame.slice(..64 << 10) });
                        continue;
                    }
                }
                TransportEvent::PeerGone { peer, end } => match self.bug {
                    Bug::RevokesNothingOnceLost => _ = self.lost.insert(*peer),
                    Bug::AllDieWithOne => {
                        let others = self.known.keys().filter(|known| *known != peer);
                        events.extend(others.map(|peer| TransportEvent::PeerGone { peer: *peer, end: *end }));
                    }
                    Bug::HidesDeaths | Bug::WaitsForTheDead => continue,
                    Bug::PromisesQuietEarly => {
                        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
                        events.push(TransportEvent::PeerGone { peer: *peer, end });
                        continue;
                    }
                    _ => {}
                },
                TransportEvent::Revoked { .. } => {}
            }
            events.push(event);
        }
    }

    fn wait(&self) -> TransportWait {
        match self.bug {
            Bug::Oversleeps(peer) if self.known.contains_key(&peer) => {
                TransportWait::ReadableOrAfter(Vec::new(), Duration::from_secs(60))
            }
            _ => self.inner.wait(),
        }
    }
}

fn run(check: &'static str, bug: Bug, seed: u64) {
    let wrap = move |inner| Faulty {
        inner,
        bug,
        known: BTreeMap::new(),
        lost: BTreeSet::new(),
        told: BTreeSet::new(),
        under_way: BTreeMap::new(),
        late: Vec::new(),
        has_read: false,
    };
    let patience = Duration::from_secs(5);
    kv_conformance::some(|| Virtual { net: VirtualNet::new(seed), wrap, patience }, |name| name == check);
}

#[test]
fn every_check_finds_the_bug_that_is_planted_for_it() {
    let names: BTreeSet<&str> = kv_conformance::checks::<Virtual<fn(VirtualTransport) -> VirtualTransport>>()
        .iter()
        .map(|(name, _)| *name)
        .collect();
    let covered: BTreeSet<&str> = FINDS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, covered, "each check has a bug, and each bug a check");
    let mut blind = Vec::new();
    for (check, bug) in FINDS {
        let fails = |bug, seed| catch_unwind(AssertUnwindSafe(|| run(check, bug, seed))).is_err();
        // Some are only seen when the network's moments are right.
        let found = (0..20).find(|seed| fails(bug, *seed));
        assert!(found.is_none_or(|seed| !fails(Bug::None, seed)), "{check} fails without a bug, too");
        let found = found.is_some();
        println!("{check}: {bug:?} {}", if found { "found" } else { "NOT FOUND" });
        if !found {
            blind.push((check, bug));
        }
    }
    assert!(blind.is_empty(), "these checks did not fail: {blind:?}");
}
