//! A transfer between two processes, which are this program, started twice more. One process serves; the
//! other moves the bytes, with UCX's report of its choices switched on.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kv_transfer::nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::unstable::{Descriptor, Directions, Op, Post, Transport, TransportEvent};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};

use super::Error;

/// The size of the region of each process, in bytes.
pub const REGION: usize = 64 << 20;

const BLOCK: usize = 64 << 10;
const ROLE: &str = "KV_DOCTOR_ROLE";
const PEER: PeerId = PeerId(1);
const ROUNDS: usize = 5;
/// Below this part of the other direction, a direction is called slow.
const SLOW: f64 = 0.6;
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the role for which this process was started, if it is a part of the trial.
pub fn role() -> Option<Result<(), Error>> {
    match std::env::var(ROLE).ok()?.as_str() {
        "serve" => Some(serve()),
        _ => Some(probe()),
    }
}

/// Starts the process that moves the bytes, and prints what it found.
pub fn run() -> Result<(), Error> {
    let log = std::env::temp_dir().join(format!("kv-doctor-{}.log", std::process::id()));
    let status = Command::new(std::env::current_exe()?)
        .env(ROLE, "probe")
        .env("UCX_PROTO_INFO", "y")
        .env("UCX_LOG_FILE", format!("file:{}", log.display()))
        .status()?;
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let _ = std::fs::remove_file(&log);
    for (what, needle) in
        [("WRITE", "by ucp_put"), ("READ", "by ucp_get"), ("notifications", "active message")]
    {
        match transports(&text, needle) {
            found if found.is_empty() => println!("  {what:<13} over  unknown: UCX has not reported it"),
            found => println!("  {what:<13} over  {}", found.join("; ")),
        }
    }
    if status.success() { Ok(()) } else { Err("the errors are above".into()) }
}

/// The rows of UCX's first table about an operation to another process of this host: range, method and lanes.
fn transports(log: &str, needle: &str) -> Vec<String> {
    let rows = log.lines().filter_map(|line| Some(line.split_once("]   ")?.1.trim()));
    // The row above names the connection: UCX also tells how it copies within this process.
    let mut above = "";
    let mut rows = rows.skip_while(|row| {
        let found = row.contains(needle) && above.contains("intra-node");
        above = row;
        !found
    });
    rows.next();
    // A rule, the heads of the columns, and another rule.
    for _ in 0..3 {
        rows.next();
    }
    rows.take_while(|row| row.starts_with('|'))
        .map(|row| row.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>().join(", "))
        .collect()
}

struct Side {
    transport: NixlTransport,
    pool: HostMemory,
}

impl Side {
    fn new() -> Result<Side, Error> {
        let nixl = Nixl::load(&Search::default())?;
        let pool = HostMemory::new(REGION)?;
        let mut transport =
            NixlTransport::new(&nixl, NixlConfig::default().with(|config| config.reads_over_tcp = true))?;
        transport.add_memory(&pool)?;
        transport.register(&Region::dram(RegionRole::Kv, pool.addr(), REGION as u64, BLOCK as u64))?;
        Ok(Side { transport, pool })
    }

    /// Runs one post to its end. Returns its duration in seconds.
    fn post(&mut self, id: u64, op: Op, descriptors: &[Descriptor]) -> Result<f64, Error> {
        let begun = Instant::now();
        self.transport
            .post(PEER, Post { id: PostId(id), op, descriptors: descriptors.to_vec(), notify: None })?;
        let mut events = Vec::new();
        while begun.elapsed() < PATIENCE {
            self.transport.poll(Time::ZERO, &mut events);
            for event in events.drain(..) {
                match event {
                    TransportEvent::Posted { result, .. } => {
                        result?;
                        return Ok(begun.elapsed().as_secs_f64());
                    }
                    TransportEvent::PeerGone { end, .. } => {
                        return Err(format!("the connection to the other process has ended: {end:?}").into());
                    }
                    TransportEvent::Frame { .. } | TransportEvent::Revoked { .. } => {}
                }
            }
        }
        Err(format!("the transfer has not ended within {PATIENCE:?}").into())
    }
}

/// Prints the metadata, and serves until standard input ends.
fn serve() -> Result<(), Error> {
    let mut side = Side::new()?;
    let hex: String = side.transport.metadata()?.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{hex}");
    std::io::stdout().flush()?;
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    loop {
        side.transport.poll(Time::ZERO, &mut Vec::new());
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn probe() -> Result<(), Error> {
    let mut side = Side::new()?;
    let mut child = Server(
        Command::new(std::env::current_exe()?)
            .env(ROLE, "serve")
            .env_remove("UCX_PROTO_INFO")
            .env("UCX_LOG_FILE", "stderr")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?,
    );
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().ok_or("the other process has no output")?).read_line(&mut line)?;
    let byte = |at| u8::from_str_radix(line.get(at..at + 2).unwrap_or_default(), 16);
    let metadata = (0..line.trim().len()).step_by(2).map(byte).collect::<Result<Vec<u8>, _>>()?;
    side.transport.connect(PEER, &metadata)?;
    side.transport.permit(PEER, Time::MAX);

    let there = scattered();
    let back = there.iter().map(|descriptor| Descriptor {
        // Where it came from, but one block on: what is read is not what was there before.
        local_offset: (descriptor.local_offset + BLOCK as u64) % REGION as u64,
        ..*descriptor
    });
    let back: Vec<Descriptor> = back.collect();
    let pattern: Vec<u8> = (0..REGION).step_by(8).flat_map(|at| (at as u64 * 31).to_le_bytes()).collect();
    let mut speeds = [Vec::new(), Vec::new()];
    let first = side.post(0, Op::Write, &there[..1])?;
    for round in 0..ROUNDS as u64 {
        side.pool.write(0, &pattern)?;
        speeds[0].push(side.post(2 * round + 1, Op::Write, &there)?);
        speeds[1].push(side.post(2 * round + 2, Op::Read, &back)?);
        let mut got = vec![0; REGION];
        side.pool.read(0, &mut got)?;
        let (head, tail) = got.split_at(BLOCK);
        let (most, last) = pattern.split_at(REGION - BLOCK);
        if tail != most || head != last {
            return Err("the bytes that were read back differ from those that were written".into());
        }
    }
    let [write, read] = speeds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        REGION as f64 / seconds[ROUNDS / 2] / 1e9
    });
    println!("  first transfer  {:.1} ms, connection included", first * 1e3);
    println!("  WRITE           {write:.2} GB/s");
    println!("  READ            {read:.2} GB/s, all bytes are right");
    let measured = match read / write {
        ratio if ratio < SLOW => "READ is slow",
        ratio if ratio > 1.0 / SLOW => "WRITE is slow",
        _ => "both directions are about equally fast",
    };
    let way = side.transport.route(PEER).map_or_else(|| "unknown".to_owned(), |way| way.to_string());
    println!("  the transport says  {way}: {}", advice(side.transport.directions(Some(PEER))));
    println!("  measured        {measured}");
    let anybody = advice(side.transport.directions(None));
    println!("  to other hosts  {anybody}, as far as is known before a connection");
    Ok(())
}

fn advice(directions: Directions) -> &'static str {
    match directions {
        Directions::BOTH => "push or pull",
        Directions::READ => "pull",
        // Of nothing that is good, a push is what transports allow.
        _ => "push; the transport refuses READ, which is slow",
    }
}

/// All blocks of a region, each to another place.
fn scattered() -> Vec<Descriptor> {
    let count = REGION / BLOCK;
    // Steps of a number that has no divisor in common with the count reach every block once.
    let descriptor = |index: usize| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset: (index * BLOCK) as u64,
        remote_offset: (index * 389 % count * BLOCK) as u64,
        len: BLOCK as u64,
    };
    (0..count).map(descriptor).collect()
}

/// The serving process, which is killed when the handle is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
