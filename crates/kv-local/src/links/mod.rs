//! The life of connections: dialing, accepting, greeting, reading, and the end.
//!
//! Each file of this module uses those above it in this list, and none below: `listening` (what the kernel
//! is asked to tell of a socket), `removing`, `flushing` (writing), `ending`, `greeting`, `opening`,
//! `reading`, `timers`.
//!
//! # When a peer is reported gone
//!
//! `PeerGone` with `WayEnd::Dead` says that the peer copies nothing into our memory any more. It is
//! reported
//!
//! - when its goodbye arrives: a transport queues it after its last copy, and the stream keeps order;
//! - when its pidfd becomes readable: every thread of it has ended, in the kernel as well;
//! - when nobody listens under its address any more: its transport has ended.
//!
//! The end of the stream alone is no proof. Posts end then, because our own copies are ours to stop, and
//! `PeerGone` comes with `WayEnd::Lost`. The peer's right to write through the connection is revoked; its
//! death is reported as well, once it is proven, unless the peer was disconnected before.

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
