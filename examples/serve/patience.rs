//! A connection that ends when its client takes nothing more of an answer, or has hung up.
//!
//! The kernel keeps some bytes for a client that does not read, and then takes no more: without an end, such a client
//! would keep its request's place, and its connection's, for as long as it likes. And hyper does not look whether a
//! client has hung up that has sent anything after its request.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;

/// Bytes of an answer that the kernel keeps for a client. So a client that reads, however slowly, makes room in time;
/// and thousands that do not read take little memory.
const KEPT: usize = 128 << 10;
/// How often connections are asked whether their client has hung up.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// The connections of this listener keep [`KEPT`] bytes.
pub fn bound_kept_bytes(listener: &TcpListener) {
    // Connections inherit it. Without it, they keep what the kernel likes.
    let _ = sockopt::set_socket_send_buffer_size(listener, KEPT);
}

/// Ready when the client has hung up.
pub async fn hung_up(stream: Arc<TcpStream>) {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    loop {
        tokio::time::sleep(ASK_EVERY).await;
        let mut asked = [PollFd::new(&stream, PollFlags::RDHUP)];
        let answered = poll(&mut asked, Some(&at_once));
        if answered.is_ok() && asked.iter().any(|asked| asked.revents().intersects(gone)) {
            return;
        }
    }
}

/// A connection to a client. What is written fails if the client makes no room for it in time.
pub struct Patient {
    stream: Arc<TcpStream>,
    within: Duration,
    /// Set while the client makes no room.
    waits: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    /// The client has this long to make room.
    pub fn new(stream: Arc<TcpStream>, within: Duration) -> Patient {
        Patient { stream, within, waits: None }
    }

    fn write(
        &mut self,
        context: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> Result<usize>,
    ) -> Poll<Result<usize>> {
        let written = loop {
            match self.stream.poll_write_ready(context) {
                Poll::Pending => break Poll::Pending,
                Poll::Ready(Err(error)) => break Poll::Ready(Err(error)),
                Poll::Ready(Ok(())) => {}
            }
            match write(&self.stream) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => break Poll::Ready(written),
            }
        };
        if written.is_ready() {
            self.waits = None;
            return written;
        }
        let within = self.within;
        let waits = self.waits.get_or_insert_with(|| Box::pin(tokio::time::sleep(within)));
        ready!(waits.as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not read its answer")))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            match self.stream.try_read(into.initialize_unfilled()) {
                Ok(read) => {
                    into.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        self.write(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        self.write(context, |stream| stream.try_write_vectored(pieces))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(shutdown(&self.stream, Shutdown::Write).map_err(Error::from))
    }
}
