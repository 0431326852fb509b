//! The life of connections: dialing, accepting, greeting, reading, and the end.
//!
//! Each file of this module uses only files before it in this list: `listening` (which events of a socket the
//! kernel is asked to report), `removing`, `flushing` (writing), `ending`, `greeting`, `opening`, `reading`,
//! `timers`.
//!
//! # When a peer is reported gone
//!
//! `PeerGone` with `WayEnd::Dead` says that the peer copies nothing into this process' memory any more. This
//! is reported
//!
//! - when the peer's goodbye arrives: a transport queues it after its last copy, and the stream keeps order;
//! - when the peer's process descriptor (pidfd) becomes readable: every thread of the process has ended, in
//!   the kernel as well;
//! - when no socket listens under the peer's address any more: the peer's transport has ended.
//!
//! The end of the stream alone is no proof. Posts end then, because this side can stop its own copies, and
//! `PeerGone` comes with `WayEnd::Lost`. The peer's right to write through the connection is revoked. The
//! peer's death is reported as well, once it is proven, unless the peer was disconnected before.

mod ending;
mod flushing;
mod greeting;
mod listening;
mod opening;
mod reading;
mod removing;
#[cfg(test)]
mod tests;
mod timers;
