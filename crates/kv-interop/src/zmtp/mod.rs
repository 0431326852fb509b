//! ZMTP 3.x, ZeroMQ's protocol between two sockets over TCP, without I/O: bytes of a stream go in, messages come
//! out. The mechanism is NULL, as in vLLM and SGLang: no security, no encryption.
//!
//! # Why there is no ZeroMQ library
//!
//! `zeromq` 0.6 and 0.7 reserve the length that a frame's header announces before a byte of the frame has come
//! (`src.reserve(self.waiting_for)` in `codec/zmq_codec.rs`): nine bytes of anybody who can reach the port
//! announce up to 2⁶³ bytes and end the process. Neither version bounds the number of parts of a message or of
//! connections that never finish their handshake, and both need tokio. `zmq` binds libzmq, a C++ library with
//! threads of its own, whose sockets must be asked again after each wake-up of their descriptor. What vLLM and
//! SGLang need of ZMTP is small.
//!
//! # What a reader can rely on
//!
//! - Memory grows only with bytes that have come, whatever a header announces, and a frame or message that would
//!   pass the bounds is refused at its header.
//! - Reading costs time in proportion to the bytes that came, however they are cut into pieces.
//! - Every violation is a [`ZmtpError`], after which the connection is of no use.
//!
//! | module | holds |
//! |---|---|
//! | `greeting` | the first 64 bytes: version and mechanism |
//! | `frame` | frames: flags, length, bytes |
//! | `command` | READY, ERROR, PING and PONG |
//! | `session` | the order of all these on one connection, and messages of several frames |

mod command;
mod error;
mod frame;
mod greeting;
mod session;

pub use error::ZmtpError;
pub(crate) use frame::write_message;
pub(crate) use session::{Heard, MAX_MESSAGE, Session, SocketType};
