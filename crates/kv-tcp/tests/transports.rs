//! The TCP transport keeps the contract of transports, with processes that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use bytes::Bytes;
use kv_conformance::process::{self, Process};
use kv_conformance::{B_KNOWS_A, Harness, Job, Pair, Side, heard};
use kv_core::Transport;
use kv_tcp::TcpTransport;
use workers::wire::Wire;
use workers::{Kind, worker};

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(Kind::named(kind).config(), &[Kind::FAR_LEN]));
}

#[test]
fn the_usual_connections_keep_the_contract() {
    kv_conformance::all(|| Kind::Usual);
}

#[test]
fn one_connection_for_pages_and_frames_keeps_the_contract() {
    kv_conformance::alive(|| Kind::One);
}

#[test]
fn several_narrow_connections_keep_the_contract() {
    kv_conformance::all(|| Kind::Many);
}

#[cfg(feature = "tls")]
#[test]
fn encrypted_connections_keep_the_contract() {
    let kind = Kind::Tls(std::process::id());
    kv_conformance::all(|| kind);
}

#[test]
fn connections_over_ipv6_keep_the_contract() {
    kv_conformance::alive(|| Kind::Six);
}

/// The first worker of a pair is reached over a network that the test cuts; the way back stays.
struct Wired(Wire);

impl Harness for Wired {
    type Transport = TcpTransport;
    type Other = Process;
    const FAR_LEN: usize = Kind::FAR_LEN;

    fn worker(&self, lens: &[usize]) -> Side<TcpTransport> {
        worker(self.0.config(), lens)
    }

    fn partner(&self, lens: &[usize]) -> Side<TcpTransport> {
        Kind::Usual.worker(lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Kind::Usual.other(job, peer)
    }

    fn cut(&self, pair: &mut Pair<TcpTransport>) -> bool {
        // A connection that is cut before the way is open is dialed again.
        pair.b.transport.send(B_KNOWS_A, Bytes::from_static(b"here")).unwrap();
        pair.until("a frame", |pair| heard(&pair.a_events, b"here"));
        (0..self.0.connections()).for_each(|connection| self.0.cut(connection, true, true));
        true
    }
}

#[test]
fn a_right_is_revoked_for_good_also_after_the_network_has_cut_the_way() {
    kv_conformance::some(|| Wired(Wire::new()), |name| name.starts_with("a_right_revoked_after"));
}
