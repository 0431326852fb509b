//! [`Pair`]: two workers in the test's process, and the events that each of them was told.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{Descriptor, PeerId, PostId, Time, Transport, TransportError, TransportEvent};
use rustix::time::{ClockId, clock_gettime};

use crate::sys::{MOMENT, Sleep, sleep_until_one_wakes};
use crate::{Harness, Random};

/// The memory of one worker, as its server reads and writes it.
pub trait Regions {
    /// Copies bytes out of a region, from `offset` on.
    fn read(&self, region: usize, offset: usize, out: &mut [u8]);
    /// Copies bytes into a region, from `offset` on.
    fn write(&self, region: usize, offset: usize, bytes: &[u8]);
}

/// A worker: a transport and the regions that are registered with it. Dropping a side drops the transport
/// before the memory.
pub struct Side<P> {
    /// The transport of this worker.
    pub transport: P,
    /// Length of each region, in bytes.
    pub lens: Vec<usize>,
    /// The memory of the regions.
    pub memory: Box<dyn Regions>,
}

/// Lengths of regions, in bytes, that make every check meaningful: several regions, one of an odd length.
pub const LENS: [usize; 3] = [1 << 20, 64 << 10, (256 << 10) + 13];

/// The peer id by which the first worker of a pair connects the second.
pub const A_KNOWS_B: PeerId = PeerId(11);
/// The peer id by which the second worker of a pair connects the first.
pub const B_KNOWS_A: PeerId = PeerId(22);

/// Two workers, and the events that each of them was told.
pub struct Pair<P> {
    /// The first worker of the pair.
    pub a: Side<P>,
    /// The second worker of the pair.
    pub b: Side<P>,
    /// The events of the first worker, oldest first.
    pub a_events: Vec<TransportEvent>,
    /// The events of the second worker, oldest first.
    pub b_events: Vec<TransportEvent>,
    patience: Duration,
}

impl<P: Transport> Pair<P> {
    /// Two workers of a harness, neither of which has connected the other. Their regions have the lengths
    /// `lens`.
    pub fn strangers<H: Harness<Transport = P>>(harness: &H, lens: &[usize]) -> Pair<P> {
        let mut pair = Pair::new(harness.worker(lens), harness.partner(lens));
        pair.patience = harness.patience();
        pair
    }

    /// Two workers of a harness that are connected in both directions.
    pub fn connected<H: Harness<Transport = P>>(harness: &H, lens: &[usize]) -> Pair<P> {
        Pair::strangers(harness, lens).introduce()
    }

    /// A pair of these two workers, which are not connected. Waits end after 60 s.
    pub fn new(a: Side<P>, b: Side<P>) -> Pair<P> {
        let patience = Duration::from_secs(60);
        Pair { a, b, a_events: Vec::new(), b_events: Vec::new(), patience }
    }

    /// Connects the first worker to the second, then the second to the first.
    pub fn introduce(mut self) -> Pair<P> {
        let metadata = self.b.transport.metadata().unwrap();
        connect(&mut self.a.transport, A_KNOWS_B, &metadata).unwrap();
        self.send_until_heard(b"hello");
        let metadata = self.a.transport.metadata().unwrap();
        connect(&mut self.b.transport, B_KNOWS_A, &metadata).unwrap();
        self.a_events.clear();
        self.b_events.clear();
        self
    }

    /// Polls both sides once.
    pub fn turn(&mut self) {
        let now = boottime();
        self.a.transport.poll(now, &mut self.a_events);
        self.b.transport.poll(now, &mut self.b_events);
    }

    /// Polls both sides once. If neither was told anything, sleeps until one has something to do, but no longer than
    /// [`MOMENT`].
    pub(crate) fn turn_and_rest(&mut self) {
        let told = |pair: &Pair<P>| pair.a_events.len() + pair.b_events.len();
        let before = told(self);
        self.turn();
        if told(self) == before {
            sleep_until_one_wakes([&Sleep::of(&self.a.transport), &Sleep::of(&self.b.transport)], MOMENT);
        }
    }

    /// Polls both sides until `done` returns true. Panics with `what` if that takes longer than the harness's
    /// patience.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Pair<P>) -> bool) {
        let deadline = Instant::now() + self.patience;
        while !done(self) {
            assert!(Instant::now() < deadline, "{what}: not within {:?}", self.patience);
            self.turn_and_rest();
        }
    }

    /// Fills all regions of both sides with random bytes.
    pub fn scramble(&self, random: &mut Random) {
        for side in [&self.a, &self.b] {
            for (region, len) in side.lens.iter().enumerate() {
                side.memory.write(region, 0, &random.bytes(*len));
            }
        }
    }

    pub(crate) fn send_until_heard(&mut self, frame: &'static [u8]) {
        let mut next = Instant::now();
        self.until("a frame is heard", |pair| {
            if Instant::now() >= next {
                let _ = pair.a.transport.send(A_KNOWS_B, Bytes::from_static(frame));
                next = Instant::now() + Duration::from_millis(200);
            }
            heard(&pair.b_events, frame)
        });
    }

    pub(crate) fn await_post(&mut self, post: PostId) -> Result<(), TransportError> {
        self.until("a post ends", |pair| ended(&pair.a_events, post).is_some());
        ended(&self.a_events, post).unwrap()
    }
}

/// The result of a post, if the events tell its end.
pub(crate) fn ended(events: &[TransportEvent], wanted: PostId) -> Option<Result<(), TransportError>> {
    events.iter().find_map(|event| match event {
        TransportEvent::Posted { post, result } if *post == wanted => Some(result.clone()),
        _ => None,
    })
}

/// True if the events have a frame of exactly these bytes.
pub fn heard(events: &[TransportEvent], wanted: &[u8]) -> bool {
    events.iter().any(|event| matches!(event, TransportEvent::Frame { frame, .. } if frame[..] == *wanted))
}

/// Connects a transport to a peer, and permits its writes for ever.
pub fn connect<P: Transport>(transport: &mut P, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
    transport.connect(peer, metadata)?;
    transport.permit(peer, Time::MAX);
    Ok(())
}

/// A copy of all regions of a side.
pub fn snapshot<P>(side: &Side<P>) -> Vec<Vec<u8>> {
    let regions = side.lens.iter().enumerate();
    regions
        .map(|(region, len)| {
            let mut bytes = vec![0; *len];
            side.memory.read(region, 0, &mut bytes);
            bytes
        })
        .collect()
}

/// A descriptor of `len` bytes, with region and offset of each side.
pub(crate) fn descriptor(local: (u32, u64), remote: (u32, u64), len: u64) -> Descriptor {
    Descriptor {
        local_region: local.0,
        local_offset: local.1,
        remote_region: remote.0,
        remote_offset: remote.1,
        len,
    }
}

/// The time since the host's boot (CLOCK_BOOTTIME): the clock of transports that move real bytes.
pub fn boottime() -> Time {
    let time = clock_gettime(ClockId::Boottime);
    Time::ZERO + Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
