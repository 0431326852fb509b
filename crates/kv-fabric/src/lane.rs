//! [`Lane`]: a device here and an endpoint of a peer that move bytes of posts between them; and [`Link`]: any device and
//! any endpoint, between which the peer may have a connection. Both are parts of a [`Reach`].

use std::cmp::Reverse;
use std::time::Duration;

use kv_core::{Op, Time};
use kv_host::Latency;

use crate::ffi::Address;

/// For so long after something was heard on a lane, slices are begun on it. Then it is asked first.
const FRESH: Duration = Duration::from_secs(1);
/// How long after a question the next one is asked: at first, and at most.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(1));

/// Any device of this side and any endpoint of a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    pub(crate) device: usize,
    pub(crate) endpoint: usize,
    pub(crate) address: Address,
    pub(crate) probe: Probe,
}

/// What is known about bytes of a dead peer on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    /// Nothing.
    None,
    /// A probe is under way.
    UnderWay,
    /// libfabric has had no room for a probe so often: there is no connection, or libfabric is busy with one.
    Refused(u8),
    /// Nothing comes by this link any more.
    Drained,
}

/// How the devices of this side reach a peer.
#[derive(Debug)]
pub(crate) struct Reach {
    /// The peer's first endpoint, to which messages go from the first device here.
    pub(crate) address: Address,
    /// All devices here and all endpoints there that are of one kind of network.
    pub(crate) links: Vec<Link>,
    /// Those that move bytes, the first device and the first endpoint before the others.
    pub(crate) lanes: Vec<Lane>,
}

/// A device of this side and the endpoint of a peer that it is paired with.
///
/// The first lane of a way carries messages, too: without it, the peer cannot be reached. Another one is used while
/// something is heard on it. So a device whose link does not work gets no more slices than those under way.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) device: usize,
    pub(crate) endpoint: usize,
    pub(crate) address: Address,
    /// The NUMA nodes of the two devices, where they are known.
    pub(crate) nodes: (Option<u16>, Option<u16>),
    /// What is under way: slices of writes and of reads, and their bytes.
    pub(crate) writing: usize,
    pub(crate) reading: usize,
    pub(crate) bytes: u64,
    /// Bytes of all slices that have begun.
    pub(crate) begun: u64,
    pub(crate) latency: Latency,
    /// When a slice has ended or an answer has come last; never for a lane that has not opened.
    heard: Option<Time>,
    /// True while a question is being sent.
    asking: bool,
    ask_at: Time,
    pause: Duration,
}

impl Lane {
    pub(crate) fn new(link: &Link, nodes: (Option<u16>, Option<u16>)) -> Lane {
        Lane {
            device: link.device,
            endpoint: link.endpoint,
            address: link.address,
            nodes,
            writing: 0,
            reading: 0,
            bytes: 0,
            begun: 0,
            latency: Latency::default(),
            heard: None,
            asking: false,
            ask_at: Time::ZERO,
            pause: ASK_AGAIN.0,
        }
    }

    pub(crate) fn is_fresh(&self, now: Time) -> bool {
        self.heard.is_some_and(|heard| now.since(heard) < FRESH)
    }

    pub(crate) fn is_heard(&mut self, now: Time) {
        self.heard = Some(now);
        self.pause = ASK_AGAIN.0;
    }

    /// Nothing more is begun until an answer has come.
    pub(crate) fn close(&mut self) {
        self.heard = None;
    }

    /// True if it is time to ask whether the lane leads to the peer.
    pub(crate) fn may_ask(&self, now: Time) -> bool {
        !self.asking && !self.is_fresh(now) && self.ask_at <= now
    }

    /// A question was begun, or libfabric had no room for it.
    pub(crate) fn asked(&mut self, begun: bool, now: Time) {
        self.asking = begun;
        self.ask_at = now + self.pause;
        self.pause = (2 * self.pause).min(ASK_AGAIN.1);
    }

    /// The question was sent, or could not be.
    pub(crate) fn has_asked(&mut self) {
        self.asking = false;
    }

    /// When the next question is due, for a lane that has never been heard.
    pub(crate) fn due(&self) -> Option<Time> {
        (self.heard.is_none() && !self.asking).then_some(self.ask_at)
    }

    /// True if the peer's permission lasts for longer than a write takes that is begun now.
    pub(crate) fn may_write(&self, now: Time, permitted: Time) -> bool {
        now + self.latency.expected(now) < permitted
    }

    /// Which lane is better for bytes between memory of these NUMA nodes; the least is the best. One whose devices are
    /// beside the memory, then the one with the least bytes under way, then the one that has carried the least.
    pub(crate) fn cost(&self, (here, there): (Option<u16>, Option<u16>)) -> impl Ord + use<> {
        let beside =
            |device: Option<u16>, memory: Option<u16>| usize::from(memory.is_some() && device == memory);
        (Reverse(beside(self.nodes.0, here) + beside(self.nodes.1, there)), self.bytes, self.begun)
    }

    /// A slice was begun.
    pub(crate) fn begin(&mut self, op: Op, bytes: u64) {
        match op {
            Op::Write => self.writing += 1,
            Op::Read => self.reading += 1,
        }
        self.bytes += bytes;
        self.begun += bytes;
    }

    /// A slice has ended.
    pub(crate) fn end(&mut self, op: Op, bytes: u64) {
        match op {
            Op::Write => self.writing -= 1,
            Op::Read => self.reading -= 1,
        }
        self.bytes -= bytes;
    }

    /// Slices under way.
    pub(crate) fn moving(&self) -> usize {
        self.writing + self.reading
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    fn lane(nodes: (Option<u16>, Option<u16>)) -> Lane {
        let link = Link { device: 1, endpoint: 1, address: Address::default(), probe: Probe::None };
        Lane::new(&link, nodes)
    }

    #[test]
    fn a_lane_is_used_while_it_is_heard_and_is_asked_less_and_less_often_while_it_is_not() {
        let mut lane = lane((None, None));
        assert!(!lane.is_fresh(at(0)) && lane.may_ask(at(0)));
        let mut times = Vec::new();
        for millis in 0..10_000 {
            if lane.may_ask(at(millis)) {
                times.push(millis);
                lane.asked(false, at(millis));
            }
        }
        assert_eq!(times[..5], [0, 1, 3, 7, 15]);
        assert!(times.len() < 25, "{times:?}");
        lane.asked(true, at(20_000));
        assert!(!lane.may_ask(at(30_000)), "the first question is still being sent");
        lane.has_asked();
        lane.is_heard(at(30_000));
        assert!(lane.is_fresh(at(30_999)) && !lane.may_ask(at(30_999)));
        assert!(!lane.is_fresh(at(31_000)) && lane.may_ask(at(31_000)));
        lane.is_heard(at(31_000));
        lane.close();
        assert!(!lane.is_fresh(at(31_000)));
    }

    #[test]
    fn slices_go_beside_their_memory_first_and_then_where_the_least_is_under_way() {
        let (mut near, mut far) = (lane((Some(0), Some(0))), lane((Some(1), Some(1))));
        let nodes = (Some(0), Some(0));
        near.begin(Op::Write, 1 << 20);
        assert!(near.cost(nodes) < far.cost(nodes));
        assert!(far.cost((Some(1), None)) < near.cost((Some(1), None)));
        let unknown = (None, None);
        assert!(far.cost(unknown) < near.cost(unknown));
        far.begin(Op::Read, 1 << 20);
        far.begin(Op::Read, 1);
        assert!(near.cost(unknown) < far.cost(unknown));
        far.end(Op::Read, 1 << 20);
        far.end(Op::Read, 1);
        near.end(Op::Write, 1 << 20);
        assert!(near.cost(unknown) < far.cost(unknown), "it has carried less");
    }
}
