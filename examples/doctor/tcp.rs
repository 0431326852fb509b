//! What the TCP transport finds on this host: addresses, limits of socket buffers, its speed between two threads, and
//! whether the settings of the examples can be used.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use kv_examples::cli::Pace;
use kv_examples::error::ExampleError;
use kv_examples::transport;
use kv_transfer::Time;
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpError, TcpTransport};
use kv_transfer::unstable::{Op, Transport};

use super::Error;
use super::speed::{self, PEER, REGION};

/// How many addresses are tried: a host of containers has an address in the network of each.
const TRIED: usize = 4;

/// Prints what was found. An error is why the examples cannot use TCP here.
pub fn report() -> Result<(), Error> {
    println!("kv-tcp (needs nothing installed)");
    let loopback = IpAddr::from([127, 0, 0, 1]);
    let routed = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];
    let mut addresses: Vec<IpAddr> = routed.iter().filter_map(|(from, to)| source(from, to)).collect();
    for address in &addresses {
        println!(
            "  address     {address} leads to other hosts: give it as TcpConfig::bind, or to the examples in KV_TCP_ADDRESS"
        );
    }
    for address in own() {
        if !addresses.contains(&address) {
            println!(
                "  address     {address} leads to hosts of its network (or only to containers of this host), and is given in the same way"
            );
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        println!("  address     none but those of loopback: only workers of this host can be peers");
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
    let mut works = false;
    for address in addresses.into_iter().take(TRIED) {
        let rates = trial(address);
        works |= rates.is_ok();
        match rates {
            Ok([write, read]) => println!(
                "  speed       WRITE {write:.2} GB/s, READ {read:.2} GB/s on {address} within this host, {} MiB in \
                 blocks of 64 KiB",
                REGION >> 20
            ),
            Err(error) if address == loopback => {
                println!("  speed       on {address}: {error}; `ip link set lo up` if the interface is down")
            }
            Err(error) => println!("  speed       on {address}: {error}"),
        }
    }
    // With the variables of the examples.
    let settings = match transport::tcp(Pace::Normal) {
        Err(ExampleError::Tcp(error)) if is_taken(&error) => {
            println!("  settings    KV_TCP_ADDRESS is taken, perhaps by a worker that runs: {error}");
            Ok(())
        }
        Err(error) => {
            println!("  settings    cannot be used: {error}");
            Err(format!("kv-tcp: {error}").into())
        }
        Ok(_) => {
            println!(
                "  settings    KV_TCP_ADDRESS, KV_TCP_ADVERTISE and KV_TCP_TLS_* can be used as they are"
            );
            Ok(())
        }
    };
    match works {
        true => settings,
        false => Err("kv-tcp: no address of this host leads to this host".into()),
    }
}

fn is_taken(error: &TcpError) -> bool {
    matches!(error, TcpError::Bind { cause, .. } if cause.kind == std::io::ErrorKind::AddrInUse)
}

/// The addresses of this host's interfaces, as the kernel lists them, without those of loopback and of links.
fn own() -> Vec<IpAddr> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (fourth, sixth) = (read("/proc/net/fib_trie"), read("/proc/net/if_inet6"));
    let mut own = Vec::new();
    let lines: Vec<&str> = fourth.lines().map(str::trim).collect();
    for pair in lines.windows(2) {
        if let [address, "/32 host LOCAL"] = pair
            && let Some(Ok(address)) = address.strip_prefix("|-- ").map(str::parse::<Ipv4Addr>)
            && !(address.is_loopback() || address.is_link_local())
        {
            own.push(IpAddr::V4(address));
        }
    }
    for line in sixth.lines() {
        let digits = line.split_whitespace().next().unwrap_or_default();
        if let Ok(bits) = u128::from_str_radix(digits, 16)
            && let address = Ipv6Addr::from_bits(bits)
            && !(address.is_loopback() || address.is_unicast_link_local())
        {
            own.push(IpAddr::V6(address));
        }
    }
    own.sort_unstable();
    own.dedup();
    own
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
