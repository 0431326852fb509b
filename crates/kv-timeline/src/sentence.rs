//! Events as sentences without a subject, as in the page's list of a request's events.

use std::fmt;
use std::time::Duration;

use crate::note::{Message, Side, What};

/// A number with its unit: `1 page`, `2 pages`.
struct Of(u64, &'static str);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

/// A time to three digits: `1.33s`.
fn time(nanos: u64) -> Duration {
    let last_digit = 10_u64.pow(nanos.checked_ilog10().unwrap_or(0).saturating_sub(2));
    Duration::from_nanos(nanos.saturating_add(last_digit / 2) / last_digit * last_digit)
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Opened { room, side: Side::Sender } => write!(f, "session opened, to send room {room}"),
            What::Opened { room, side: Side::Receiver } => {
                write!(f, "session opened, to receive room {room}")
            }
            What::Bootstrapping => f.write_str("state: Bootstrapping"),
            What::WaitingForInput => f.write_str("state: WaitingForInput"),
            What::Transferring => f.write_str("state: Transferring"),
            What::Asked { again: false } => f.write_str("asks the bootstrap server"),
            What::Asked { again: true } => f.write_str("asks the bootstrap server again"),
            What::Answered { ranks } => write!(f, "the bootstrap server names {}", Of(*ranks, "rank")),
            What::NotAnswered { why } => write!(f, "the bootstrap server does not answer: {why}"),
            What::ReceiverCame => f.write_str("the receiver has come"),
            What::ChunkGiven { chunk, pages } => {
                write!(f, "the scheduler gives chunk {chunk}: {}", Of(*pages, "page"))
            }
            What::PagesGiven { pages } => write!(f, "the scheduler gives {}", Of(*pages, "page")),
            What::PostStarted { post, write, bytes, descriptors } => {
                let op = if *write { "WRITE" } else { "READ" };
                write!(f, "{op} begins: {bytes} bytes in {}, post {post}", Of(*descriptors, "descriptor"))
            }
            What::PostEnded { post, bytes, took, error: None } => {
                write!(f, "{bytes} bytes moved in {:?}, post {post}", time(*took))
            }
            What::PostEnded { post, took, error: Some(why), .. } => {
                write!(f, "post {post} failed after {:?}: {why}", time(*took))
            }
            What::LeaseExpired => f.write_str("the lease has expired"),
            What::Ended => f.write_str("succeeded"),
            What::Failed(failure) => write!(f, "failed: {}; {}", failure.why, failure.advice),
            What::QuarantineBegan { pages, items: 0, why } => {
                write!(f, "{} in quarantine: {why}", Of(*pages, "page"))
            }
            What::QuarantineBegan { pages, items, why } => {
                write!(f, "{} and {} in quarantine: {why}", Of(*pages, "page"), Of(*items, "item"))
            }
            What::QuarantineEnded { lasted } => write!(f, "end of the quarantine, after {:?}", time(*lasted)),
            What::PagesBack { pages } => write!(f, "{} back at the scheduler", Of(*pages, "page")),
            What::ItemsBack { items } => {
                write!(f, "{} of cache groups back at the scheduler", Of(*items, "item"))
            }
            What::Closed => f.write_str("session closed"),
            What::Said(message) => write!(f, "→ {message}"),
            What::Heard(message) => write!(f, "← {message}"),
            What::Dropped { why } => write!(f, "a frame is ignored: {why}"),
            What::PeerMet { worker, incarnation } => write!(f, "meets {worker}, incarnation {incarnation}"),
            What::WayChosen { transport } => write!(f, "the peer is to be reached by {transport}"),
            What::PeerAnswers => f.write_str("the peer welcomes this worker"),
            What::PeerRefuses { why } => write!(f, "the peer refuses this worker: {why}"),
            What::WayOpened => f.write_str("the way to the peer is open"),
            What::ConnectFailed { why } => write!(f, "the way to the peer cannot be opened: {why}"),
            What::WayFailed { transport, why, pause: Some(pause) } => {
                write!(f, "{transport} is left alone for {:?}: {why}", time(*pause))
            }
            What::WayFailed { transport, why, pause: None } => {
                write!(f, "{transport} does not lead to the peer: {why}")
            }
            What::WayLost => f.write_str("the way to the peer is lost"),
            What::PeerSilent { silent_for } => write!(f, "nothing heard for {:?}", time(*silent_for)),
            What::PeerGivenUp { silent_for } => {
                write!(f, "the peer is given up, after {:?} of silence", time(*silent_for))
            }
            What::PeerBack => f.write_str("the peer speaks again"),
            What::PeerDead => f.write_str("the peer is dead"),
            What::PeerRestarted => f.write_str("the peer was restarted"),
            What::PeerForgotten => f.write_str("the peer is forgotten"),
            What::PermissionBegan { lasts } => write!(f, "the peer permits writes for {:?}", time(*lasts)),
            What::PermissionEnded => f.write_str("permission to write is not asked for any more"),
            What::Revoking => f.write_str("the peer's right to write is being revoked"),
            What::WritesOver => f.write_str("no write of the peer arrives any more"),
            What::Other { name } => write!(f, "{name}"),
        }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Message::Hello => f.write_str("hello"),
            Message::Welcome => f.write_str("welcome"),
            Message::Refused { why } => write!(f, "refused: {why}"),
            Message::Register { room, pages } => write!(f, "register: {} of room {room}", Of(*pages, "page")),
            Message::Acquire { room } => write!(f, "acquire: a lease on room {room}"),
            Message::Registered => f.write_str("registered"),
            Message::InPlace { parts, total: None } => write!(f, "in place: {}", Of(*parts, "part")),
            Message::InPlace { parts, total: Some(total) } => write!(f, "in place: {parts} of {total} parts"),
            Message::Failed { why, .. } => write!(f, "failed: {why}"),
            Message::Abort { why } => write!(f, "abort: {why}"),
            Message::AbortAcknowledged => f.write_str("abort acknowledged"),
            Message::Granted { pages, lease } => {
                write!(f, "granted: {} for {:?}", Of(*pages, "page"), time(*lease))
            }
            Message::Heartbeat { number, leases, .. } => {
                write!(f, "heartbeat {number}, for {}", Of(*leases, "lease"))
            }
            Message::HeartbeatAnswered { number, leases: 0, .. } => write!(f, "heartbeat {number} answered"),
            Message::HeartbeatAnswered { number, leases, lease, .. } => {
                write!(f, "heartbeat {number} answered: {} for {:?}", Of(*leases, "lease"), time(*lease))
            }
            Message::Release { attempts } => write!(f, "release of {}", Of(*attempts, "attempt")),
            Message::Released { attempts } => write!(f, "release of {} heard", Of(*attempts, "attempt")),
            Message::Other { name } => write!(f, "{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_to_three_digits() {
        let shown = |nanos| format!("{:?}", time(nanos));
        assert_eq!([0, 7, 999].map(shown), ["0ns", "7ns", "999ns"]);
        assert_eq!([1_332_602_739, 832_499, 9_996].map(shown), ["1.33s", "832µs", "10µs"]);
        assert!(shown(u64::MAX).ends_with('s'));
    }
}
