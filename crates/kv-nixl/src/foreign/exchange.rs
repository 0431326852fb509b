//! NIXL's own exchange of metadata by address, from the side that asks. An agent with a listener
//! (`enable_listen_thread` and `listen_port` of its configuration) is asked for its metadata, or is given the
//! metadata of this transport's agent.
//!
//! A message is its length in eight bytes (little-endian) and its text: `NIXLCOMM:SEND` asks, and
//! `NIXLCOMM:LOAD` comes before metadata.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::foreign::agent_metadata::LONGEST;
use crate::foreign::error::ForeignError;

const ASK: &[u8] = b"NIXLCOMM:SEND";
const TELL: &[u8] = b"NIXLCOMM:LOAD";

/// Asks the agent that listens at this address for its metadata, which
/// [`connect_foreign`](crate::NixlTransport::connect_foreign) takes. NIXL's `fetchRemoteMD` does the same
/// with an address and a port, and then loads the metadata unchecked.
///
/// The call waits for the answer, but no longer than `timeout`, and belongs on a thread that may wait.
pub fn fetch_metadata(listener: SocketAddr, timeout: Duration) -> Result<Bytes, ForeignError> {
    let mut conversation = Conversation::begin(listener, timeout)?;
    conversation.send(&[ASK])?;
    let mut length = [0; 8];
    conversation.receive(&mut length)?;
    let (got, min) = (usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX), TELL.len() + 1);
    let max = TELL.len() + LONGEST;
    if !(min..=max).contains(&got) {
        return Err(ForeignError::Size { field: "answer.len", got, min, max });
    }
    let mut answer = vec![0; got];
    conversation.receive(&mut answer)?;
    if !answer.starts_with(TELL) {
        return Err(ForeignError::Damaged { field: "NIXLCOMM:LOAD", at: 0, len: got });
    }
    Ok(Bytes::from(answer).slice(TELL.len()..))
}

/// Gives the [metadata](crate::NixlTransport::agent_metadata) of a transport's agent to the agent that
/// listens at this address, which loads the metadata. NIXL's `sendLocalMD` does the same with an address and
/// a port.
///
/// The call waits until the listener's host has taken the bytes, but no longer than `timeout`. The agent does
/// not say whether it has loaded the metadata.
pub fn send_metadata(listener: SocketAddr, metadata: &[u8], timeout: Duration) -> Result<(), ForeignError> {
    Conversation::begin(listener, timeout)?.send(&[TELL, metadata])
}

/// A connection to a listener, with a deadline for all that is said on it.
struct Conversation {
    address: SocketAddr,
    stream: TcpStream,
    deadline: Instant,
}

impl Conversation {
    fn begin(address: SocketAddr, timeout: Duration) -> Result<Conversation, ForeignError> {
        let deadline = Instant::now() + timeout;
        let connected = TcpStream::connect_timeout(&address, timeout.max(Duration::from_millis(1)));
        let stream = connected.map_err(|error| failed(address, "connect", &error))?;
        Ok(Conversation { address, stream, deadline })
    }

    fn send(&mut self, parts: &[&[u8]]) -> Result<(), ForeignError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let message = [&(len as u64).to_le_bytes()[..], &parts.concat()].concat();
        let mut rest = &message[..];
        while !rest.is_empty() {
            let left = self.left("send")?;
            let sent = self.stream.set_write_timeout(Some(left)).and_then(|()| self.stream.write(rest));
            rest = rest.get(self.progress("send", sent)?..).unwrap_or_default();
        }
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<(), ForeignError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let left = self.left("receive")?;
            let rest = buffer.get_mut(filled..).unwrap_or_default();
            let received = self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(rest));
            filled += self.progress("receive", received)?;
        }
        Ok(())
    }

    /// The bytes that a call has moved; none at the end of the stream is an error.
    fn progress(&self, call: &'static str, moved: io::Result<usize>) -> Result<usize, ForeignError> {
        match moved {
            Ok(0) => Err(failed(self.address, call, &ErrorKind::UnexpectedEof.into())),
            Ok(count) => Ok(count),
            // Also what a timeout looks like: the deadline is looked at next.
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => Ok(0),
            Err(error) => Err(failed(self.address, call, &error)),
        }
    }

    fn left(&self, call: &'static str) -> Result<Duration, ForeignError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let late = || failed(self.address, call, &ErrorKind::TimedOut.into());
        if left.is_zero() { Err(late()) } else { Ok(left) }
    }
}

fn failed(address: SocketAddr, call: &'static str, error: &io::Error) -> ForeignError {
    ForeignError::Listener { address, call, kind: error.kind() }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use kv_core::{MemoryKind, Op, PostId, Time, Transport, TransportEvent};
    use kv_host::HostMemory;
    use nixl_sys::{Agent, AgentConfig, ThreadSync};

    use super::*;
    use crate::ffi::memory::Memory;
    use crate::foreign::agent_metadata::AgentMetadata;
    use crate::foreign::region::ForeignRegion;
    use crate::testing::{LEN, PEER, config, nixl, others, whole, worker_with};

    const SOON: Duration = Duration::from_secs(20);

    /// A listener that answers a request with these bytes, and then is silent for a while, or ends.
    fn answering(answer: Vec<u8>, then: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 8 + ASK.len()];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request[8..], *ASK);
            stream.write_all(&answer).unwrap();
            thread::sleep(then);
        });
        address
    }

    fn message(text: &[u8]) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text].concat()
    }

    #[test]
    fn an_agent_that_listens_is_asked_told_and_then_read_from() {
        let Some(nixl) = nixl() else { return };
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let listening = AgentConfig {
            enable_prog_thread: true,
            enable_listen_thread: true,
            listen_port: i32::from(address.port()),
            thread_sync: ThreadSync::Strict,
            lthr_delay_us: 1000,
            ..AgentConfig::default()
        };
        let there = Agent::new_configured("a listening agent", &listening).unwrap();
        let (_, mut params) = there.get_plugin_params("UCX").unwrap();
        for (name, value) in config().params().unwrap() {
            params.set(&name, &value).unwrap();
        }
        let _backend = there.create_backend("UCX", &params).unwrap();
        let theirs = HostMemory::new(LEN).unwrap();
        theirs.write(0, &vec![7; LEN]).unwrap();
        let _registered = there.register_memory(&Memory::whole(&theirs), None).unwrap();

        let metadata = fetch_metadata(address, SOON).unwrap();
        assert_eq!(AgentMetadata::parse(&metadata).unwrap().name, "a listening agent");
        let (mut here, ours) = worker_with(nixl, config());
        let (addr, len) = (theirs.addr(), LEN as u64);
        let region = ForeignRegion { addr, len, item_len: 0, memory: MemoryKind::Dram, device: 0 };
        here.connect_foreign(PEER, &metadata, &[region]).unwrap();
        here.post(PEER, whole(1, Op::Read)).unwrap();
        let (deadline, mut events) = (Instant::now() + SOON, Vec::new());
        while events.is_empty() {
            assert!(Instant::now() < deadline, "nothing is read");
            here.poll(Time::ZERO, &mut events);
        }
        assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
        assert_eq!(others(&ours, 7), 0);

        send_metadata(address, &here.agent_metadata().unwrap(), SOON).unwrap();
        while !there.check_remote_metadata(&here.agent_name(), None) {
            assert!(Instant::now() < deadline, "our metadata is not loaded");
            thread::yield_now();
        }
    }

    #[test]
    fn answers_that_are_too_long_too_late_cut_off_or_of_another_kind_are_errors() {
        let tell = |text: &[u8]| message(&[TELL, text].concat());
        let answer = answering(tell(b"metadata"), SOON);
        assert_eq!(fetch_metadata(answer, SOON).unwrap(), b"metadata"[..]);

        let error = |answer: Vec<u8>, then| fetch_metadata(answering(answer, then), SOON).unwrap_err();
        let long = error(u64::MAX.to_le_bytes().to_vec(), SOON);
        assert!(matches!(long, ForeignError::Size { field: "answer.len", got: usize::MAX, .. }), "{long}");
        let other = error(message(b"NIXLCOMM:INVLname"), SOON);
        assert_eq!(other, ForeignError::Damaged { field: "NIXLCOMM:LOAD", at: 0, len: 17 });
        let cut = error(tell(b"metadata")[..15].to_vec(), Duration::ZERO);
        let is =
            |error: &ForeignError, of| matches!(error, ForeignError::Listener { kind, .. } if *kind == of);
        assert!(is(&cut, ErrorKind::UnexpectedEof), "{cut}");

        let begun = Instant::now();
        let silent = answering(tell(b"metadata")[..15].to_vec(), SOON);
        let late = fetch_metadata(silent, Duration::from_millis(100)).unwrap_err();
        assert!(is(&late, ErrorKind::TimedOut) && begun.elapsed() < SOON / 2, "{late}");
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let refused = send_metadata(nobody, b"metadata", SOON).unwrap_err();
        assert!(is(&refused, ErrorKind::ConnectionRefused), "{refused}");
    }
}
