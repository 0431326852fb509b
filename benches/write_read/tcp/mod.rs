//! WRITE and READ over the TCP transport, between two processes, beside plain blocking sockets that move the
//! same blocks: one thread on each side, `write_all` of each block, `read_exact` into each place. With the feature
//! `tls` also both of them encrypted, the sockets by rustls as its users do it.

#[cfg(feature = "tls")]
mod tls;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use kv_benches::{bytes, hex};
use kv_conformance::{boottime, rest};
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::unstable::{Descriptor, Op, Transport, TransportEvent};
use kv_transfer::{PeerId, Region, RegionRole, Time};

use crate::child::{Served, end_with_the_parent};
use crate::posts::{REST, in_posts};
use crate::{Error, Moves, median, timed};

/// The variable that tells the child the length of its region and the metadata of its parent.
const PEER: &str = "KV_BENCH_TCP_PEER";
const OTHER: PeerId = PeerId(1);
const ROUNDS: usize = 9;

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

/// A connection as a program without a transport would use it.
trait Plain: Read + Write + Send {}

impl<T: Read + Write + Send> Plain for T {}

/// How a pair is encrypted: not at all, or with certificates, in the form in which the child is told them.
type Told = Option<String>;

/// The settings; `KV_BENCH_TCP` changes them: `lanes=2 slice=1048576 window=4194304 buffer=1048576`.
fn config() -> Result<TcpConfig, Error> {
    let mut config = TcpConfig::new("127.0.0.1:0".parse()?);
    for word in std::env::var("KV_BENCH_TCP").unwrap_or_default().split_whitespace() {
        let (name, value) = word.split_once('=').ok_or("KV_BENCH_TCP has name=value")?;
        let value = value.parse()?;
        match name {
            "lanes" => config.data_connections = value,
            "slice" => config.slice_bytes = value,
            "window" => config.window_bytes = value,
            "buffer" => (config.send_buffer, config.receive_buffer) = (Some(value), Some(value)),
            other => return Err(format!("KV_BENCH_TCP has no {other}").into()),
        }
    }
    Ok(config)
}

fn transport(region: usize, told: &Told) -> Result<(TcpTransport, HostMemory), Error> {
    let memory = HostMemory::new(region)?;
    let config = match told {
        None => config()?,
        #[cfg(feature = "tls")]
        Some(told) => tls::encrypted(config()?, told)?,
        #[cfg(not(feature = "tls"))]
        Some(_) => return Err("this bench was built without the feature tls".into()),
    };
    let mut transport = TcpTransport::new(config)?;
    transport.add_memory(&memory)?;
    transport.register(&Region::dram(RegionRole::Kv, memory.addr(), memory.len() as u64, 4096))?;
    Ok((transport, memory))
}

/// Runs the child: a transport that serves, and a thread with a plain socket, until standard input ends.
pub(crate) fn serve() -> Result<(), Error> {
    let told = std::env::var(PEER)?;
    let (region, parent) = told.split_once(' ').ok_or("the parent has told too little")?;
    let region = region.parse()?;
    let (parent, told) = match parent.split_once(' ') {
        Some((parent, certificates)) => (parent, Some(certificates.to_owned())),
        None => (parent, None),
    };
    let (mut transport, _memory) = transport(region, &told)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{} {}", hex(&transport.metadata()?), listener.local_addr()?);
    std::io::stdout().flush()?;
    std::thread::spawn(move || {
        let accepted = listener.accept().map_err(Error::from);
        let socket = accepted.and_then(|(socket, _)| {
            socket.set_nodelay(true)?;
            match &told {
                None => Ok(Box::new(socket) as Box<dyn Plain>),
                #[cfg(feature = "tls")]
                Some(told) => tls::accepted(socket, told),
                #[cfg(not(feature = "tls"))]
                Some(_) => Err("this bench was built without the feature tls".into()),
            }
        });
        let failed = socket.and_then(|socket| plain_child(socket, region));
        // The parent sees the end of the connection, too.
        drop(failed);
    });
    end_with_the_parent();
    transport.connect(OTHER, &bytes(parent)?)?;
    let mut events = Vec::new();
    loop {
        transport.poll(boottime(), &mut events);
        if let Some(TransportEvent::PeerGone { end, .. }) = events.pop() {
            return Err(format!("the child has lost its way to the parent: {end:?}").into());
        }
        rest(&transport, REST);
    }
}

/// Answers a plain socket: `w` or `r`, then the length of a block and the number of blocks.
fn plain_child(mut socket: Box<dyn Plain>, region: usize) -> Result<(), Error> {
    let mut memory = vec![1; region];
    let mut asked = [0; 17];
    loop {
        socket.read_exact(&mut asked)?;
        let [kind, numbers @ ..] = asked;
        let (block, count) = numbers.split_at(8);
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).map(|number| number as usize);
        let moves = Moves::random(number(block)?, number(count)?, region);
        for descriptor in moves.descriptors() {
            let place = &mut memory[descriptor.remote_offset as usize..][..moves.block];
            if kind == b'w' { socket.read_exact(place)? } else { socket.write_all(place)? }
        }
        if kind == b'w' {
            socket.write_all(b"!")?;
        }
        socket.flush()?;
    }
}

/// This process and its child, with both kinds of connections.
struct Pair {
    /// First, so that it ends before what it reaches.
    _child: Served,
    transport: TcpTransport,
    _memory: HostMemory,
    plain: Box<dyn Plain>,
    buffer: Vec<u8>,
    next: u64,
}

impl Pair {
    fn start(region: usize, told: Told) -> Result<Pair, Error> {
        let (mut transport, memory) = transport(region, &told)?;
        let certificates = told.as_ref().map_or_else(String::new, |told| format!(" {told}"));
        let metadata = hex(&transport.metadata()?);
        let (child, line) = Served::start(PEER, format!("{region} {metadata}{certificates}"))?;
        let (metadata, plain) = line.split_once(' ').ok_or("the child has told too little")?;
        transport.connect(OTHER, &bytes(metadata)?)?;
        transport.permit(OTHER, Time::MAX);
        let plain = TcpStream::connect(plain)?;
        plain.set_nodelay(true)?;
        let plain = match &told {
            None => Box::new(plain) as Box<dyn Plain>,
            #[cfg(feature = "tls")]
            Some(told) => tls::dialed(plain, told)?,
            #[cfg(not(feature = "tls"))]
            Some(_) => return Err("this bench was built without the feature tls".into()),
        };
        let buffer = vec![2; region];
        Ok(Pair { transport, _memory: memory, plain, buffer, _child: child, next: 0 })
    }

    /// Moves the blocks by the plain socket.
    fn plain(&mut self, op: Op, moves: &Moves) -> Result<(), Error> {
        let mut asked = vec![if op == Op::Write { b'w' } else { b'r' }];
        asked.extend((moves.block as u64).to_le_bytes());
        asked.extend((moves.descriptors().len() as u64).to_le_bytes());
        self.plain.write_all(&asked)?;
        for descriptor in moves.descriptors() {
            let place = &mut self.buffer[descriptor.local_offset as usize..][..moves.block];
            if op == Op::Write { self.plain.write_all(place)? } else { self.plain.read_exact(place)? }
        }
        if op == Op::Write {
            self.plain.read_exact(&mut [0])?;
        }
        Ok(())
    }

    /// Moves the blocks by the transport.
    fn run(&mut self, op: Op, descriptors: &[Descriptor]) -> Result<(), Error> {
        in_posts(&mut self.transport, OTHER, &mut self.next, op, descriptors)
    }

    /// The times of the sockets' write and read, and of the transport's.
    fn round(&mut self, moves: &Moves) -> Result<[f64; 4], Error> {
        let plain_write = timed(|| self.plain(Op::Write, moves))?;
        let write = timed(|| self.run(Op::Write, moves.descriptors()))?;
        let plain_read = timed(|| self.plain(Op::Read, moves))?;
        let read = timed(|| self.run(Op::Read, moves.descriptors()))?;
        Ok([plain_write, plain_read, write, read])
    }
}

/// Medians of throughput and of the ratio to plain sockets, measured in turn.
pub(crate) fn table(region: usize) -> Result<(), Error> {
    let mut pairs = vec![("", Pair::start(region, None)?)];
    #[cfg(feature = "tls")]
    pairs.push(("TLS", Pair::start(region, Some(tls::certificates()?))?));
    println!(
        "\nTCP: {} MiB in blocks at random places, medians of {ROUNDS} rounds, in which each row has its turn",
        region >> 20
    );
    println!(
        "{:>13} {:>14} {:>14} {:>11} {:>11} {:>12} {:>12}",
        "block",
        "sockets W GB/s",
        "sockets R GB/s",
        "WRITE GB/s",
        "READ GB/s",
        "WRITE/sockets",
        "READ/sockets"
    );
    for block in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let moves = Moves::random(block, region / block, region);
        let mut rounds = vec![Vec::new(); pairs.len()];
        for round in 0..=ROUNDS {
            for ((_, pair), rounds) in pairs.iter_mut().zip(&mut rounds) {
                let times = pair.round(&moves)?;
                if round > 0 {
                    rounds.push(times);
                }
            }
        }
        for ((name, _), rounds) in pairs.iter().zip(&rounds) {
            let median = |value: &dyn Fn(&[f64; 4]) -> f64| median(rounds.iter().map(value));
            let rate = |at: usize| region as f64 / median(&|round| round[at]) / 1e9;
            println!(
                "{name:>4}{:>5} KiB {:>14.2} {:>14.2} {:>11.2} {:>11.2} {:>12.2} {:>12.2}",
                block >> 10,
                rate(0),
                rate(1),
                rate(2),
                rate(3),
                median(&|round| round[0] / round[2]),
                median(&|round| round[1] / round[3]),
            );
        }
    }
    for (name, pair) in &pairs {
        println!("{name} {:?}", pair.transport.stats());
    }
    Ok(())
}
