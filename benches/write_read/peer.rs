//! Two processes with a region each: this process, which moves the bytes, and its child, which only serves.
//! Each connects to the other, because a connection that only one side knows is closed after a while.

use std::io::Write;

use kv_transfer::local::{Arena, LocalConfig, LocalTransport};
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent, TransportWait};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};

use kv_benches::{bytes, hex};

use crate::child::{Served, end_with_the_parent};
use crate::{Error, fill};

/// The variable that tells the child the length of its region, and how to reach its parent.
const PEER: &str = "KV_BENCH_PEER";
/// The peer id that parent and child give to each other.
const OTHER: PeerId = PeerId(1);
/// The number of descriptors in one post.
const MAX_SGE: usize = 1024;
/// The number of posts in flight.
const MAX_INFLIGHT: usize = 16;

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

fn transport(region: usize) -> Result<(LocalTransport, Arena), Error> {
    let arena = Arena::new(region)?;
    let mut transport = LocalTransport::new(LocalConfig::default())?;
    transport.add_arena(&arena)?;
    transport.register(&Region::dram(RegionRole::Kv, arena.addr(), arena.len() as u64, 4096))?;
    Ok((transport, arena))
}

/// Runs the child: prints its metadata, and serves until standard input ends.
pub(crate) fn serve() -> Result<(), Error> {
    let told = std::env::var(PEER)?;
    let (region, parent) = told.split_once(' ').ok_or("the parent has told too little")?;
    let (mut transport, arena) = transport(region.parse()?)?;
    fill(&arena)?;
    println!("{}", hex(&transport.metadata()?));
    std::io::stdout().flush()?;
    transport.connect(OTHER, &bytes(parent)?)?;
    end_with_the_parent();
    let start = std::time::Instant::now();
    let mut events = Vec::new();
    loop {
        transport.poll(Time::from_nanos(start.elapsed().as_nanos() as u64), &mut events);
        for event in events.drain(..) {
            if let TransportEvent::PeerGone { end, .. } = event {
                return Err(format!("the child has lost its way to the parent: {end:?}").into());
            }
        }
        if transport.wait() != TransportWait::Now {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// This process and its child, connected to each other.
pub(crate) struct Pair {
    /// First, so that it ends before what it reaches.
    child: Served,
    transport: LocalTransport,
    _arena: Arena,
    next: u64,
}

impl Pair {
    pub(crate) fn start(region: usize) -> Result<Pair, Error> {
        let (mut transport, arena) = transport(region)?;
        fill(&arena)?;
        let (child, line) = Served::start(PEER, format!("{region} {}", hex(&transport.metadata()?)))?;
        transport.connect(OTHER, &bytes(&line)?)?;
        transport.permit(OTHER, Time::MAX);
        let mut pair = Pair { transport, _arena: arena, child, next: 0 };
        // The first transfer waits for the connection; all pages of the peer are present after it.
        let everything = Descriptor {
            local_region: 0,
            remote_region: 0,
            local_offset: 0,
            remote_offset: 0,
            len: region as u64,
        };
        pair.run(Op::Read, &[everything])?;
        let mut events = Vec::new();
        while pair.transport.wait() == TransportWait::Now {
            pair.transport.poll(Time::ZERO, &mut events);
            pair.ended(&mut events)?;
        }
        Ok(pair)
    }

    /// Moves the blocks, in posts of at most `MAX_SGE`, and returns when all are in place.
    pub(crate) fn run(&mut self, op: Op, descriptors: &[Descriptor]) -> Result<(), Error> {
        let mut posts = descriptors.chunks(MAX_SGE);
        let mut in_flight = 0;
        let mut events = Vec::new();
        loop {
            while in_flight < MAX_INFLIGHT
                && let Some(descriptors) = posts.next()
            {
                let id = PostId(self.next);
                self.next += 1;
                let post = Post { id, op, descriptors: descriptors.to_vec(), notify: None };
                if let Err(error) = self.transport.post(OTHER, post) {
                    return Err(self.cause(format!("{op:?} was refused: {error}")));
                }
                in_flight += 1;
            }
            if in_flight == 0 {
                return Ok(());
            }
            self.transport.poll(Time::ZERO, &mut events);
            in_flight -= self.ended(&mut events)?;
        }
    }

    /// How many posts have ended well.
    fn ended(&mut self, events: &mut Vec<TransportEvent>) -> Result<usize, Error> {
        let mut ended = 0;
        for event in events.drain(..) {
            match event {
                TransportEvent::Posted { result: Ok(()), .. } => ended += 1,
                TransportEvent::Posted { post, result: Err(error) } => {
                    return Err(self.cause(format!("post {} failed: {error}", post.0)));
                }
                TransportEvent::PeerGone { end, .. } => {
                    return Err(self.cause(format!("the way to the child has ended: {end:?}")));
                }
                TransportEvent::Frame { .. } | TransportEvent::Revoked { .. } => {}
            }
        }
        Ok(ended)
    }

    /// An error with what was seen here, and what became of the child.
    fn cause(&mut self, seen: String) -> Error {
        format!("{seen}; {}", self.child.state()).into()
    }
}
