//! A rank's connection to its router: standard input and output, a TCP connection, or a socket pair.

use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::ExampleError;

/// Longest line accepted: a prompt of more than a hundred thousand tokens.
const MAX_LINE: usize = 1 << 20;

/// A connection that receives and sends lines.
pub struct Link {
    input: OwnedFd,
    output: Box<dyn Write + Send>,
    buffer: Vec<u8>,
}

impl Link {
    /// Commands on stdin, events on stdout. What libraries print on stdout from now on goes to stderr.
    pub fn stdio() -> Result<Link, ExampleError> {
        use rustix::stdio::{dup2_stdout, stderr, stdin, stdout};
        let input = stdin().try_clone_to_owned().map_err(ExampleError::io("stdin"))?;
        let output = stdout().try_clone_to_owned().map_err(ExampleError::io("stdout"))?;
        dup2_stdout(stderr()).map_err(|error| ExampleError::io("stderr")(error.into()))?;
        Ok(Link { input, output: Box::new(File::from(output)), buffer: Vec::new() })
    }

    /// Both over a TCP connection. A client that does not read is given up after a second.
    pub fn tcp(stream: TcpStream) -> Result<Link, ExampleError> {
        let failed = ExampleError::io("set up the control connection");
        stream
            .set_nodelay(true)
            .and(stream.set_write_timeout(Some(Duration::from_secs(1))))
            .map_err(failed)?;
        let input = stream.try_clone().map_err(ExampleError::io("clone the control connection"))?;
        Ok(Link { input: input.into(), output: Box::new(stream), buffer: Vec::new() })
    }

    /// For a process that waits for this link beside others: readable when a message has arrived.
    pub fn readable(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }

    /// A connection over a Unix socket.
    pub fn unix(stream: UnixStream) -> Result<Link, ExampleError> {
        let input = stream.try_clone().map_err(ExampleError::io("clone the control socket"))?;
        Ok(Link { input: input.into(), output: Box::new(stream), buffer: Vec::new() })
    }

    /// Sleeps until a command arrives, one of `others` is readable, or the time is over.
    pub fn wait(&self, others: &[BorrowedFd<'_>], timeout: Duration) -> Result<(), ExampleError> {
        let fds = std::iter::once(self.input.as_fd()).chain(others.iter().copied());
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        poll_for(&mut fds, timeout).map(|_| ())
    }

    /// The commands that have arrived, without waiting. [`ExampleError::LinkClosed`] once the router is gone.
    pub fn receive<C: DeserializeOwned>(&mut self) -> Result<Vec<C>, ExampleError> {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let mut fds = [PollFd::new(&self.input, PollFlags::IN)];
            if !poll_for(&mut fds, Duration::ZERO)? {
                break;
            }
            match rustix::io::read(&self.input, &mut bytes) {
                Ok(0) | Err(Errno::CONNRESET) => return Err(ExampleError::LinkClosed),
                Ok(read) => self.buffer.extend_from_slice(bytes.get(..read).unwrap_or_default()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(ExampleError::io("read commands")(error.into())),
            }
            if self.buffer.len() > MAX_LINE {
                break;
            }
        }
        self.parse()
    }

    fn parse<C: DeserializeOwned>(&mut self) -> Result<Vec<C>, ExampleError> {
        let mut commands = Vec::new();
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            commands.push(serde_json::from_slice(&line).map_err(ExampleError::Command)?);
        }
        if self.buffer.len() > MAX_LINE {
            return Err(ExampleError::LineTooLong { max: MAX_LINE });
        }
        Ok(commands)
    }

    /// Sends the router an event.
    pub fn send(&mut self, event: &impl Serialize) -> Result<(), ExampleError> {
        let mut line = serde_json::to_vec(event).map_err(ExampleError::Command)?;
        line.push(b'\n');
        let sent = self.output.write_all(&line).and_then(|()| self.output.flush());
        sent.map_err(ExampleError::io("send an event"))
    }
}

/// Whether any of `fds` became readable (or closed) within `timeout`.
fn poll_for(fds: &mut [PollFd<'_>], timeout: Duration) -> Result<bool, ExampleError> {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(fds, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(ExampleError::io("poll")(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Command;

    #[test]
    fn commands_split_over_writes_arrive_whole_and_a_closed_line_is_reported() {
        let (mut router, rank) = UnixStream::pair().unwrap();
        let mut link = Link::unix(rank).unwrap();
        assert_eq!(link.receive::<Command>().unwrap(), []);
        router.write_all(b"{\"command\":\"finish\"}\n{\"command\":").unwrap();
        assert_eq!(link.receive::<Command>().unwrap(), [Command::Finish]);
        router.write_all(b"\"finish\"}\n").unwrap();
        assert_eq!(link.receive::<Command>().unwrap(), [Command::Finish]);
        drop(router);
        assert!(matches!(link.receive::<Command>(), Err(ExampleError::LinkClosed)));
    }

    #[test]
    fn an_endless_line_is_refused() {
        let (mut router, rank) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            let chunk = vec![b'x'; 64 << 10];
            while router.write_all(&chunk).is_ok() {}
        });
        let mut link = Link::unix(rank).unwrap();
        let error = loop {
            if let Err(error) = link.receive::<Command>() {
                break error;
            }
        };
        assert!(matches!(error, ExampleError::LineTooLong { .. }), "{error}");
        drop(link);
        writer.join().unwrap();
    }
}
