//! [`Wire`]: a network between two workers that a test can slow, hold, cut, or lead to another worker.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_tcp::TcpConfig;

/// Most bytes that a wire carries at once.
const PIECE: usize = 16 << 10;

/// A listener that passes on what comes, in both directions. Its threads end with the test's process.
pub struct Wire {
    addr: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Bytes per second in each direction of each connection; 0 for no bound.
    rate: AtomicU64,
    held: AtomicBool,
    /// True until one byte was changed.
    damage: AtomicBool,
    /// What was carried, if that is kept.
    kept: Mutex<Option<Vec<u8>>>,
    /// Where the connections lead, in their order; the last one is that of all further ones.
    ends: Mutex<Vec<SocketAddr>>,
    /// Both sockets of each connection, the dialer's first.
    open: Mutex<Vec<(TcpStream, TcpStream)>>,
}

impl Wire {
    /// A wire on a port of its own, which leads to the worker of [`Wire::config`].
    pub fn new() -> Wire {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        state.ends.lock().unwrap().push(behind(addr));
        let carried = state.clone();
        std::thread::spawn(move || {
            for (number, dialer) in listener.incoming().enumerate() {
                carry(number, dialer.unwrap(), &carried);
            }
        });
        Wire { addr, state }
    }

    /// The address that peers are told.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A worker that is reached by this wire.
    pub fn config(&self) -> TcpConfig {
        config_behind(self.addr)
    }

    /// Leads connections to these addresses, in the order in which they are dialed.
    pub fn lead(&self, ends: &[SocketAddr]) {
        *self.state.ends.lock().unwrap() = ends.to_vec();
    }

    /// Carries so many bytes per second from now on.
    pub fn slow(&self, rate: u64) {
        self.state.rate.store(rate, Ordering::Relaxed);
    }

    /// Carries nothing while `held` is true. The kernels of both sides go on answering each other.
    pub fn hold(&self, held: bool) {
        self.state.held.store(held, Ordering::Relaxed);
    }

    /// Changes one byte of what is carried next.
    pub fn damage(&self) {
        self.state.damage.store(true, Ordering::Relaxed);
    }

    /// Keeps what is carried from now on. Returns what was kept before.
    pub fn keep(&self) -> Vec<u8> {
        self.state.kept.lock().unwrap().replace(Vec::new()).unwrap_or_default()
    }

    /// The number of connections so far.
    pub fn connections(&self) -> usize {
        self.state.open.lock().unwrap().len()
    }

    /// Ends what a connection carries to the dialer, to the other side, or both.
    pub fn cut(&self, connection: usize, to_dialer: bool, to_other: bool) {
        let (dialer, other) = &self.state.open.lock().unwrap()[connection];
        for (socket, cut) in [(dialer, to_dialer), (other, to_other)] {
            if cut {
                let _ = socket.shutdown(Shutdown::Write);
            }
        }
    }
}

/// The address of the worker behind the wire with this one: the same port of another address of the loopback.
fn behind(wire: SocketAddr) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(127, 0, 0, 2).into(), wire.port())
}

/// The configuration of a worker behind the wire with this address.
pub fn config_behind(wire: SocketAddr) -> TcpConfig {
    TcpConfig::new(behind(wire)).with(|config| config.advertise = vec![wire])
}

fn carry(number: usize, dialer: TcpStream, state: &Arc<State>) {
    let end = {
        let ends = state.ends.lock().unwrap();
        ends[number.min(ends.len() - 1)]
    };
    // Nobody is there: the dialer sees its connection end.
    let Ok(other) = TcpStream::connect(end) else { return };
    for socket in [&dialer, &other] {
        socket.set_nodelay(true).unwrap();
    }
    let clone = |socket: &TcpStream| socket.try_clone().unwrap();
    state.open.lock().unwrap().push((clone(&dialer), clone(&other)));
    for (from, to) in [(clone(&dialer), clone(&other)), (other, dialer)] {
        let state = state.clone();
        std::thread::spawn(move || pump(from, to, &state));
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut piece = [0; PIECE];
    while let Ok(count) = from.read(&mut piece)
        && count > 0
    {
        while state.held.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let rate = state.rate.load(Ordering::Relaxed);
        if rate > 0 {
            std::thread::sleep(Duration::from_secs_f64(count as f64 / rate as f64));
        }
        if state.damage.swap(false, Ordering::Relaxed) {
            piece[count / 2] ^= 1;
        }
        if let Some(kept) = &mut *state.kept.lock().unwrap() {
            kept.extend_from_slice(&piece[..count]);
        }
        if to.write_all(&piece[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
