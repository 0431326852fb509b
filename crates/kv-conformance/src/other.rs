//! What workers elsewhere do, in a process of their own or on a virtual host.

use bytes::Bytes;
use kv_core::{Descriptor, Op, PeerId, Post, PostId, Time, Transport, TransportEvent};

use crate::{Side, connect};

/// Posts that a worker with the job `Write` or `Read` keeps under way.
const BUSY: u64 = 8;
const PARTNER: PeerId = PeerId(1);

/// A worker elsewhere. Dropping the value kills the worker.
pub trait Other {
    /// The metadata of the worker's transport.
    fn metadata(&self) -> &[u8];

    /// Lets the worker work for a moment. Does nothing for a worker that runs by itself.
    fn turn(&mut self);

    /// Kills the worker, as SIGKILL does: it does nothing more, and sends no goodbye.
    fn kill(&mut self);

    /// False once the worker is dead.
    fn is_alive(&mut self) -> bool;
}

/// What a worker elsewhere does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// Sends every frame back.
    Serve,
    /// Writes its region over its partner's region, again and again, and sends every frame back.
    Write,
    /// Reads its partner's region, again and again, and sends every frame back.
    Read,
}

impl Job {
    /// The job's name, one word, for a command line.
    pub fn name(self) -> &'static str {
        match self {
            Job::Serve => "serve",
            Job::Write => "write",
            Job::Read => "read",
        }
    }

    /// The job with this name.
    pub fn named(name: &str) -> Option<Job> {
        [Job::Serve, Job::Write, Job::Read].into_iter().find(|job| job.name() == name)
    }
}

/// A worker that does its job whenever [`turn`](Puppet::turn) is called.
pub struct Puppet<P> {
    /// The worker's transport and memory: one region.
    pub side: Side<P>,
    job: Job,
    partner: Vec<u8>,
    connected: bool,
    posted: u64,
    ended: u64,
}

impl<P: Transport> Puppet<P> {
    /// A worker whose region is filled with [`pattern`], and which works with the worker of the metadata
    /// `partner`.
    pub fn new(side: Side<P>, job: Job, partner: &[u8]) -> Puppet<P> {
        side.memory.write(0, 0, &pattern(side.lens[0]));
        Puppet { side, job, partner: partner.to_vec(), connected: false, posted: 0, ended: 0 }
    }

    /// Polls the transport once, answers frames, and keeps the posts of the job under way.
    pub fn turn(&mut self, now: Time) {
        let mut events = Vec::new();
        self.side.transport.poll(now, &mut events);
        for event in events {
            match event {
                TransportEvent::Frame { frame, .. } => {
                    self.connect();
                    let _ = self.side.transport.send(PARTNER, frame);
                }
                TransportEvent::Posted { .. } => self.ended += 1,
                TransportEvent::PeerGone { .. } => self.connected = false,
                TransportEvent::Revoked { .. } => {}
            }
        }
        let op = match self.job {
            Job::Serve => return,
            Job::Write => Op::Write,
            Job::Read => Op::Read,
        };
        if !self.connect() {
            return;
        }
        while self.posted < self.ended + BUSY {
            let post = whole(self.posted, op, self.side.lens[0]);
            if self.side.transport.post(PARTNER, post).is_err() {
                return;
            }
            self.posted += 1;
        }
    }

    fn connect(&mut self) -> bool {
        self.connected = self.connected || connect(&mut self.side.transport, PARTNER, &self.partner).is_ok();
        self.connected
    }
}

/// The bytes that the region of a worker elsewhere has at first: the offset of each eight-byte word.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).step_by(8).flat_map(|at| (at as u64).to_le_bytes()).take(len).collect()
}

/// A post of the first `len` bytes of the first region on both sides.
pub(crate) fn whole(id: u64, op: Op, len: usize) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: len as u64 };
    Post { id: PostId(id), op, descriptors: vec![descriptor], notify: None::<Bytes> }
}
