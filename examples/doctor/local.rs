//! What kv-local finds in this process's container: namespaces, user, limits, and whether it works here.

use std::time::Instant;

use kv_transfer::local::{Arena, LocalConfig, LocalTransport};
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};
use rustix::process::{Resource, geteuid, getrlimit};

use super::Error;

const REGION: usize = 64 << 20;
const PEER: PeerId = PeerId(1);

/// The name of the PID namespace that a kernel starts with.
const FIRST_PIDS: &str = "pid:[4026531836]";

/// Prints what was found. What does not work here is left to the next transport, so nothing is an error. True if the trial
/// works.
pub fn report() -> bool {
    println!("kv-local (needs nothing installed)");
    let same = "peers must be in the same one, or are reached by the next transport";
    line("network", &namespace("net"), same);
    let pids = if namespace("pid") == FIRST_PIDS { "the host's" } else { "a container's" };
    let hidden = match sees_hidden_processes() {
        true => "peers in other PID namespaces of this host are reached, but no adopted memory of theirs",
        false => {
            "before Linux 6.5: peers whose PID namespace is not seen here are reached by the next transport"
        }
    };
    line("processes", pids, hidden);
    line(
        "user",
        &geteuid().as_raw().to_string(),
        "peers must run as the same one, or are reached by the next transport",
    );
    let bytes = |resource| {
        getrlimit(resource)
            .current
            .map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} MiB", bytes >> 20))
    };
    line(
        "memory",
        &or_unlimited(&cgroup("memory.max")),
        "of the container: the caches of its workers count against it",
    );
    line(
        "addresses",
        &bytes(Resource::As),
        "must hold this worker's cache and those of its peers, which are mapped",
    );
    let files =
        getrlimit(Resource::Nofile).current.map_or_else(|| "unlimited".to_owned(), |files| files.to_string());
    line("descriptors", &files, "two for each peer, and a few for each worker");
    line("/dev/shm", "not used", "arenas are memory files, which no mount limits");
    let trial = trial();
    match &trial {
        Ok(rate) => {
            line("speed", &format!("WRITE {rate:.2} GB/s"), "between two transports of this process, 64 MiB")
        }
        Err(error) => line("speed", "does not work here", &error.to_string()),
    }
    trial.is_ok()
}

/// True if the kernel names the process behind a socket also where its PID namespace is not seen: Linux 6.5 or newer.
fn sees_hidden_processes() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(5))
}

fn line(what: &str, value: &str, why: &str) {
    println!("  {what:<14}  {value}  ({why})");
}

fn namespace(kind: &str) -> String {
    let link = std::fs::read_link(format!("/proc/self/ns/{kind}"));
    link.map_or_else(|_| "unknown".to_owned(), |name| name.display().to_string())
}

/// The value of a file of this process's control group.
fn cgroup(file: &str) -> String {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let read = |path: &str| std::fs::read_to_string(format!("/sys/fs/cgroup{path}/{file}"));
    read(path).or_else(|_| read("")).unwrap_or_default().trim().to_owned()
}

fn or_unlimited(bytes: &str) -> String {
    bytes.parse::<u64>().map_or_else(|_| "unlimited".to_owned(), |bytes| format!("{} MiB", bytes >> 20))
}

fn side() -> Result<(LocalTransport, Arena), Error> {
    let arena = Arena::new(REGION)?;
    let mut transport = LocalTransport::new(LocalConfig::default())?;
    transport.add_arena(&arena)?;
    transport.register(&Region::dram(RegionRole::Kv, arena.addr(), REGION as u64, 1 << 16))?;
    Ok((transport, arena))
}

/// The better of two writes of a whole region, in GB/s.
fn trial() -> Result<f64, Error> {
    let (mut here, _ours) = side()?;
    let (mut there, _theirs) = side()?;
    here.connect(PEER, &there.metadata()?)?;
    here.permit(PEER, Time::MAX);
    let mut best = 0f64;
    for id in 0..2 {
        let len = REGION as u64;
        let whole = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len };
        let begun = Instant::now();
        here.post(PEER, Post { id: PostId(id), op: Op::Write, descriptors: vec![whole], notify: None })?;
        let mut events = Vec::new();
        while events.is_empty() && begun.elapsed().as_secs() < 10 {
            there.poll(Time::ZERO, &mut Vec::new());
            here.poll(Time::ZERO, &mut events);
        }
        match events.pop() {
            Some(TransportEvent::Posted { result, .. }) => result?,
            other => return Err(format!("a write has not ended: {other:?}").into()),
        }
        best = best.max(REGION as f64 / begun.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}
