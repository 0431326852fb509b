//! What the TCP transport finds on this host: addresses, limits of socket buffers, and its speed between two threads.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use kv_transfer::Time;
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::unstable::{Op, Transport};

use super::Error;
use super::speed::{self, PEER, REGION};

/// Prints what was found.
pub fn report() {
    println!("kv-tcp (needs nothing installed)");
    let loopback = IpAddr::from([127, 0, 0, 1]);
    let routed = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];
    let mut addresses: Vec<IpAddr> = routed.iter().filter_map(|(from, to)| source(from, to)).collect();
    for address in &addresses {
        println!(
            "  address     {address} leads to other hosts: give it as TcpConfig::bind, or to the examples in KV_TCP_ADDRESS"
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
}

/// The address of this host from which packets to another host would be sent. Nothing is sent.
fn source(from: &str, to: &str) -> Option<IpAddr> {
    let socket = UdpSocket::bind(from).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|addr| addr.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

fn side(address: IpAddr) -> Result<(TcpTransport, HostMemory), Error> {
    let (memory, region) = speed::memory()?;
    let mut transport = TcpTransport::new(TcpConfig::new(SocketAddr::new(address, 0)))?;
    transport.add_memory(&memory)?;
    transport.register(&region)?;
    Ok((transport, memory))
}

/// Medians of both directions in GB/s, between this thread and another.
fn trial(address: IpAddr) -> Result<[f64; 2], Error> {
    let (mut here, _ours) = side(address)?;
    let (there, _theirs) = side(address)?;
    here.connect(PEER, &there.metadata()?)?;
    here.permit(PEER, Time::MAX);
    speed::between(&mut here, there, [Op::Write, Op::Read])
}
