//! Flows: the data operations of one request with one peer, cut into posts. A bounded number of posts is in
//! flight to each peer, and the flows of a peer take turns.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use kv_core::plan::Plan;
use kv_core::{Descriptor, Op, PeerId, Post, PostId, TransportError};

use crate::cache::ForeignCache;
use crate::effects::Effects;

/// The number of a flow within its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FlowId(u64);

/// The bounds of posts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Most descriptors of a post.
    pub(crate) descriptors: usize,
    /// Most bytes of a post, unless one descriptor alone is longer.
    pub(crate) bytes: u64,
    /// Most posts in flight to one peer.
    pub(crate) in_flight: usize,
}

/// All flows of a machine.
#[derive(Debug)]
pub(crate) struct Flows {
    bounds: Bounds,
    last: u64,
    flows: BTreeMap<FlowId, Flow>,
    posts: BTreeMap<PostId, FlowId>,
    /// The flows of each peer that have more to post, and the number of posts in flight.
    lines: BTreeMap<PeerId, Line>,
}

#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<FlowId>,
    in_flight: usize,
}

#[derive(Debug)]
struct Flow {
    peer: PeerId,
    op: Op,
    /// What was planned and not posted.
    rest: VecDeque<Descriptor>,
    /// The notification that follows the last byte.
    notify: Option<Bytes>,
    in_flight: usize,
    bytes: u64,
    error: Option<TransportError>,
}

/// A flow that has ended: no data operation of the flow touches memory any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) flow: FlowId,
    /// How many bytes were moved, if all were.
    pub(crate) result: Result<u64, TransportError>,
}

impl Flows {
    pub(crate) fn new(bounds: Bounds) -> Flows {
        let (flows, posts, lines) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Flows { bounds, last: 0, flows, posts, lines }
    }

    /// Starts a flow, whose descriptors are one or more. Without descriptors there is no post that could carry the
    /// notification, and the caller sends the notification itself.
    pub(crate) fn start(
        &mut self,
        effects: &mut Effects,
        peer: PeerId,
        op: Op,
        descriptors: VecDeque<Descriptor>,
        notify: Option<Bytes>,
    ) -> FlowId {
        self.last += 1;
        let id = FlowId(self.last);
        let flow = Flow { peer, op, rest: descriptors, notify, in_flight: 0, bytes: 0, error: None };
        self.flows.insert(id, flow);
        self.lines.entry(peer).or_default().waiting.push_back(id);
        self.fill(effects, peer);
        id
    }

    /// True if the post is in flight for one of these flows.
    pub(crate) fn has(&self, post: PostId) -> bool {
        self.posts.contains_key(&post)
    }

    /// Takes the end of a post, and begins what waits for it. Returns the flow if that was the flow's last post.
    pub(crate) fn posted(
        &mut self,
        effects: &mut Effects,
        post: PostId,
        result: Result<(), TransportError>,
    ) -> Option<Ended> {
        let (peer, ended) = self.post_ended(post, result)?;
        self.fill(effects, peer);
        ended
    }

    /// Takes the end of a post, and begins nothing: the caller does that with [`fill`](Flows::fill). Returns the
    /// peer, and the flow if that was the flow's last post.
    pub(crate) fn post_ended(
        &mut self,
        post: PostId,
        result: Result<(), TransportError>,
    ) -> Option<(PeerId, Option<Ended>)> {
        let id = self.posts.remove(&post)?;
        let flow = self.flows.get_mut(&id)?;
        flow.in_flight -= 1;
        if let Err(error) = result {
            flow.error.get_or_insert(error);
            flow.rest.clear();
        }
        let peer = flow.peer;
        let ended = flow.in_flight == 0 && flow.rest.is_empty();
        if let Some(line) = self.lines.get_mut(&peer) {
            line.in_flight -= 1;
        }
        Some((peer, ended.then(|| self.take(id)).flatten()))
    }

    /// The flow whose turn it is at a peer.
    pub(crate) fn next(&self, peer: PeerId) -> Option<FlowId> {
        let has_more = |id: &&FlowId| self.flows.get(id).is_some_and(|flow| !flow.rest.is_empty());
        self.lines.get(&peer)?.waiting.iter().find(has_more).copied()
    }

    /// Posts nothing more of a flow, and asks for the end of what is in flight. The flow still ends, with an
    /// error; at once if nothing was in flight.
    pub(crate) fn cancel(&mut self, effects: &mut Effects, id: FlowId) -> Option<Ended> {
        let flow = self.flows.get_mut(&id)?;
        flow.error.get_or_insert(TransportError::Cancelled);
        flow.rest.clear();
        for (post, _) in self.posts.iter().filter(|(_, of)| **of == id) {
            effects.cancel(*post);
        }
        (flow.in_flight == 0).then(|| self.take(id)).flatten()
    }

    /// The number of posts in flight to a peer.
    pub(crate) fn in_flight(&self, peer: PeerId) -> usize {
        self.lines.get(&peer).map_or(0, |line| line.in_flight)
    }

    fn take(&mut self, id: FlowId) -> Option<Ended> {
        let flow = self.flows.remove(&id)?;
        if let Some(line) = self.lines.get_mut(&flow.peer) {
            line.waiting.retain(|waiting| *waiting != id);
            if line.waiting.is_empty() && line.in_flight == 0 {
                self.lines.remove(&flow.peer);
            }
        }
        Some(Ended { flow: id, result: flow.error.map_or(Ok(flow.bytes), Err) })
    }

    /// Begins what waits for a peer and has room.
    pub(crate) fn fill(&mut self, effects: &mut Effects, peer: PeerId) {
        let Some(line) = self.lines.get_mut(&peer) else { return };
        // The notification of a flow goes with the flow's last post, which waits for the posts before it.
        for _ in 0..line.waiting.len() {
            if line.in_flight >= self.bounds.in_flight {
                return;
            }
            let Some(id) = line.waiting.pop_front() else { return };
            let Some(flow) = self.flows.get_mut(&id) else { continue };
            while line.in_flight < self.bounds.in_flight {
                let Some((count, last)) = flow.next(self.bounds) else { break };
                if last && flow.notify.is_some() && flow.in_flight > 0 {
                    break;
                }
                let descriptors: Vec<Descriptor> = flow.rest.drain(..count).collect();
                flow.bytes += descriptors.iter().map(|descriptor| descriptor.len).sum::<u64>();
                let notify = if last { flow.notify.take() } else { None };
                let post = Post { id: effects.next_post(), op: flow.op, descriptors, notify };
                self.posts.insert(post.id, id);
                flow.in_flight += 1;
                line.in_flight += 1;
                effects.post(peer, post);
                if !line.waiting.is_empty() {
                    break;
                }
            }
            if !flow.rest.is_empty() {
                line.waiting.push_back(id);
            }
        }
    }
}

impl Flow {
    /// How many descriptors the next post has, and whether these are all; `None` if nothing is left.
    fn next(&self, bounds: Bounds) -> Option<(usize, bool)> {
        let (mut count, mut bytes) = (0, 0_u64);
        for descriptor in self.rest.iter().take(bounds.descriptors.max(1)) {
            bytes = bytes.saturating_add(descriptor.len);
            if count > 0 && bytes > bounds.bytes {
                break;
            }
            count += 1;
        }
        (count > 0).then_some((count, count == self.rest.len()))
    }
}

/// All descriptors of a plan towards a foreign cache, with the offsets that the cache really has.
pub(crate) fn descriptors(mut plan: Plan, cache: &ForeignCache) -> VecDeque<Descriptor> {
    let (mut planned, mut all) = (Vec::new(), VecDeque::new());
    while !plan.is_done() {
        planned.clear();
        if plan.fill(&mut planned, 4096, u64::MAX).descriptors == 0 {
            break;
        }
        for descriptor in &planned {
            cache.place(*descriptor, &mut all);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::machine::Output;

    const PEER: PeerId = PeerId(3);

    fn bounds() -> Bounds {
        Bounds { descriptors: 2, bytes: 100, in_flight: 2 }
    }

    fn pieces(count: u64, len: u64) -> VecDeque<Descriptor> {
        (0..count)
            .map(|n| Descriptor {
                local_region: 0,
                remote_region: 0,
                local_offset: n * len,
                remote_offset: n * len,
                len,
            })
            .collect()
    }

    fn posts(effects: &mut Effects) -> Vec<Post> {
        std::iter::from_fn(|| effects.poll())
            .filter_map(|out| match out {
                Output::Post { post, .. } => Some(post),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn the_notification_goes_with_the_last_post_after_all_others_have_ended() {
        let (mut flows, mut effects) = (Flows::new(bounds()), Effects::default());
        let notify = Bytes::from_static(b"done");
        let flow = flows.start(&mut effects, PEER, Op::Write, pieces(5, 10), Some(notify.clone()));
        let first = posts(&mut effects);
        assert_eq!(first.iter().map(|post| post.descriptors.len()).collect::<Vec<_>>(), [2, 2]);
        assert!(first.iter().all(|post| post.notify.is_none()));
        assert_eq!(flows.posted(&mut effects, first[0].id, Ok(())), None);
        assert_eq!(posts(&mut effects), [], "the second post has not ended");
        assert_eq!(flows.posted(&mut effects, first[1].id, Ok(())), None);
        let last = posts(&mut effects);
        assert_eq!((last.len(), last[0].descriptors.len(), last[0].notify.clone()), (1, 1, Some(notify)));
        assert_eq!(flows.posted(&mut effects, last[0].id, Ok(())), Some(Ended { flow, result: Ok(50) }));
        assert_eq!((flows.flows.len(), flows.posts.len(), flows.lines.len()), (0, 0, 0));
    }

    #[test]
    fn flows_of_one_peer_take_turns_and_bytes_bound_a_post() {
        let (mut flows, mut effects) = (Flows::new(bounds()), Effects::default());
        flows.start(&mut effects, PEER, Op::Read, pieces(6, 80), None);
        let first = posts(&mut effects);
        assert_eq!(first.len(), 2, "a post for each piece of 80 bytes");
        let small = flows.start(&mut effects, PEER, Op::Read, pieces(1, 10), None);
        assert_eq!(flows.posted(&mut effects, first[0].id, Ok(())), None);
        assert_eq!(flows.posted(&mut effects, first[1].id, Ok(())), None);
        let next = posts(&mut effects);
        assert_eq!(next.iter().map(|post| post.descriptors[0].len).collect::<Vec<_>>(), [80, 10]);
        assert_eq!(
            flows.posted(&mut effects, next[1].id, Ok(())),
            Some(Ended { flow: small, result: Ok(10) })
        );
    }

    #[test]
    fn a_flow_that_fails_or_is_cancelled_ends_when_its_posts_have_ended() {
        let (mut flows, mut effects) = (Flows::new(bounds()), Effects::default());
        let flow = flows.start(&mut effects, PEER, Op::Write, pieces(8, 10), None);
        let first = posts(&mut effects);
        assert_eq!(flows.posted(&mut effects, first[0].id, Err(TransportError::PeerGone)), None);
        assert_eq!(posts(&mut effects), []);
        let ended = flows.posted(&mut effects, first[1].id, Ok(()));
        assert_eq!(ended, Some(Ended { flow, result: Err(TransportError::PeerGone) }));

        let flow = flows.start(&mut effects, PEER, Op::Write, pieces(8, 10), None);
        let [one, two] = [0, 1].map({
            let posted = posts(&mut effects);
            move |n: usize| posted[n].id
        });
        assert_eq!(flows.cancel(&mut effects, flow), None);
        assert_eq!(flows.posted(&mut effects, one, Ok(())), None);
        let cancelled = Some(Ended { flow, result: Err(TransportError::Cancelled) });
        assert_eq!(flows.posted(&mut effects, two, Ok(())), cancelled);
        assert_eq!(flows.in_flight(PEER), 0);
    }
}
