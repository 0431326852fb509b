//! Two processes with a region each: this one, which moves the bytes, and one that only serves.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

use kv_transfer::local::{Arena, LocalConfig, LocalPlane};
use kv_transfer::{Desc, Op, PeerId, Plane, PlaneEvent, PlaneWait, Post, PostId, Region, RegionRole, Time};

use crate::{Error, fill};

/// Tells the child what it is, and how large its region.
const PEER: &str = "KV_BENCH_PEER_REGION";
/// Descriptors of one post.
const MAX_SGE: usize = 1024;
/// Posts in flight.
const MAX_INFLIGHT: usize = 16;

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

fn plane(region: usize) -> Result<(LocalPlane, Arena), Error> {
    let arena = Arena::new(region)?;
    let mut plane = LocalPlane::new(LocalConfig::default())?;
    plane.add_arena(&arena)?;
    plane.register(&Region::dram(RegionRole::Kv, arena.addr(), arena.len() as u64, 4096))?;
    Ok((plane, arena))
}

/// The child: prints its metadata, and serves until its standard input ends.
pub(crate) fn serve() -> Result<(), Error> {
    let region = std::env::var(PEER)?.parse()?;
    let (mut plane, arena) = plane(region)?;
    fill(&arena)?;
    let hex: String = plane.metadata()?.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{hex}");
    std::io::stdout().flush()?;
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let start = std::time::Instant::now();
    loop {
        plane.poll(Time::from_nanos(start.elapsed().as_nanos() as u64), &mut Vec::new());
        if plane.wait() != PlaneWait::Now {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// This process and its child, connected.
pub(crate) struct Pair {
    plane: LocalPlane,
    _arena: Arena,
    child: Child,
    _stdin: Option<ChildStdin>,
    next: u64,
}

const CHILD: PeerId = PeerId(1);

impl Pair {
    pub(crate) fn start(region: usize) -> Result<Pair, Error> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(PEER, region.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output of the peer")?).read_line(&mut line)?;
        let byte = |at| u8::from_str_radix(line.get(at..at + 2).unwrap_or_default(), 16);
        let metadata = (0..line.trim().len()).step_by(2).map(byte).collect::<Result<Vec<u8>, _>>()?;
        let (mut plane, arena) = plane(region)?;
        fill(&arena)?;
        plane.connect(CHILD, &metadata)?;
        let stdin = child.stdin.take();
        let mut pair = Pair { plane, _arena: arena, child, _stdin: stdin, next: 0 };
        // The first transfer waits for the connection; all pages of the peer are present after it.
        let everything =
            Desc { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: region as u64 };
        pair.run(Op::Read, &[everything])?;
        while pair.plane.wait() == PlaneWait::Now {
            pair.plane.poll(Time::ZERO, &mut Vec::new());
        }
        Ok(pair)
    }

    /// Moves the blocks, in posts of at most `MAX_SGE`, and returns when all are in place.
    pub(crate) fn run(&mut self, op: Op, descs: &[Desc]) -> Result<(), Error> {
        let mut posts = descs.chunks(MAX_SGE);
        let mut in_flight = 0;
        let mut events = Vec::new();
        loop {
            while in_flight < MAX_INFLIGHT
                && let Some(descs) = posts.next()
            {
                let id = PostId(self.next);
                self.next += 1;
                self.plane.post(CHILD, Post { id, op, descs: descs.to_vec(), notify: None })?;
                in_flight += 1;
            }
            if in_flight == 0 {
                return Ok(());
            }
            self.plane.poll(Time::ZERO, &mut events);
            for event in events.drain(..) {
                match event {
                    PlaneEvent::Posted { result, .. } => {
                        result?;
                        in_flight -= 1;
                    }
                    PlaneEvent::PeerGone { .. } => return Err("the peer is gone".into()),
                    PlaneEvent::Frame(_) => {}
                }
            }
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
