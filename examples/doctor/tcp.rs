//! What the TCP transport finds on this host: addresses, limits of socket buffers, and its speed between two threads.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};

const REGION: usize = 64 << 20;
const BLOCK: usize = 64 << 10;
const PEER: PeerId = PeerId(1);
const ROUNDS: u64 = 5;
const PATIENCE: Duration = Duration::from_secs(60);

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Prints what was found.
pub fn report() -> Result<(), Error> {
    println!("TCP (needs nothing installed)");
    let loopback = IpAddr::from([127, 0, 0, 1]);
    let routed = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];
    let mut addresses: Vec<IpAddr> = routed.iter().filter_map(|(from, to)| source(from, to)).collect();
    for address in &addresses {
        println!(
            "  address     {address} leads to other hosts: give it as TcpConfig::bind, or to KV_TCP_ADDRESS"
        );
    }
    if addresses.is_empty() {
        println!("  address     no route leads to other hosts: only workers of this host can be peers");
    }
    for (name, what) in [
        ("core/rmem_max", "the largest TcpConfig::receive_buffer"),
        ("core/wmem_max", "the largest TcpConfig::send_buffer"),
        ("ipv4/tcp_rmem", "least, first and largest receive buffer where the configuration says nothing"),
        ("ipv4/tcp_wmem", "least, first and largest send buffer"),
    ] {
        let value = std::fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap_or_default();
        let value: Vec<&str> = value.split_whitespace().collect();
        println!("  {name:<14}  {}  ({what})", value.join(" "));
    }
    addresses.insert(0, loopback);
    for address in addresses {
        match trial(address) {
            Ok([write, read]) => println!(
                "  speed       WRITE {write:.2} GB/s, READ {read:.2} GB/s on {address} within this host, {} MiB in \
                 blocks of 64 KiB",
                REGION >> 20
            ),
            Err(error) => println!("  speed       on {address}: {error}"),
        }
    }
    Ok(())
}

/// The address of this host from which packets to another host would be sent. Nothing is sent.
fn source(from: &str, to: &str) -> Option<IpAddr> {
    let socket = UdpSocket::bind(from).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|addr| addr.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

fn side(address: IpAddr) -> Result<(TcpTransport, HostMemory), Error> {
    let memory = HostMemory::new(REGION)?;
    let mut transport = TcpTransport::new(TcpConfig::new(SocketAddr::new(address, 0)))?;
    transport.add_memory(&memory)?;
    transport.register(&Region::dram(RegionRole::Kv, memory.addr(), REGION as u64, BLOCK as u64))?;
    Ok((transport, memory))
}

/// Medians of both directions in GB/s, between this thread and another.
fn trial(address: IpAddr) -> Result<[f64; 2], Error> {
    let (mut here, _ours) = side(address)?;
    let (mut there, _theirs) = side(address)?;
    here.connect(PEER, &there.metadata()?)?;
    here.permit(PEER, Time::MAX);
    let over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&over);
    let server = std::thread::spawn(move || {
        let mut events = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            there.poll(Time::ZERO, &mut events);
            events.clear();
            std::thread::yield_now();
        }
    });
    let mut measured = Ok([0.0; 2]);
    for (at, op) in [Op::Write, Op::Read].into_iter().enumerate() {
        let mut seconds = Vec::new();
        for round in 0..=ROUNDS {
            match post(&mut here, at as u64 * 100 + round, op) {
                Ok(took) if round > 0 => seconds.push(took),
                Ok(_) => {}
                Err(error) => measured = Err(error),
            }
        }
        seconds.sort_by(f64::total_cmp);
        if let (Ok(rates), Some(median)) = (&mut measured, seconds.get(seconds.len() / 2)) {
            rates[at] = REGION as f64 / median / 1e9;
        }
    }
    over.store(true, Ordering::Relaxed);
    server.join().map_err(|_| "the other thread has ended early")?;
    measured
}

/// Runs one post to its end. Returns its duration in seconds.
fn post(transport: &mut TcpTransport, id: u64, op: Op) -> Result<f64, Error> {
    let blocks = REGION / BLOCK;
    // Every block from another place than it goes to.
    let descriptors = (0..blocks).map(|at| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset: (at * BLOCK) as u64,
        remote_offset: ((at * 389 + 7) % blocks * BLOCK) as u64,
        len: BLOCK as u64,
    });
    let begun = Instant::now();
    transport.post(PEER, Post { id: PostId(id), op, descriptors: descriptors.collect(), notify: None })?;
    let mut events = Vec::new();
    while begun.elapsed() < PATIENCE {
        transport.poll(Time::ZERO, &mut events);
        for event in events.drain(..) {
            match event {
                TransportEvent::Posted { result, .. } => {
                    result?;
                    return Ok(begun.elapsed().as_secs_f64());
                }
                TransportEvent::PeerGone { end, .. } => {
                    return Err(format!("the way has ended: {end:?}").into());
                }
                TransportEvent::Frame { .. } | TransportEvent::Revoked { .. } => {}
            }
        }
        std::thread::yield_now();
    }
    Err(format!("a post has not ended within {PATIENCE:?}").into())
}
