//! Slices of guests: pages that they write land in this side's regions, and pages that they read are sent.

use kv_core::{Origin, TransportEvent};
use kv_host::clock;

use crate::connection::{Connection, Owner, Writing};
use crate::guest::GuestId;
use crate::inbound::{Landing, Received};
use crate::message::{Asked, Reply, Request, Verdict};
use crate::sockets::{EVENTS, Over};
use crate::transport::TcpTransport;

/// A guest's connection on which so many segments wait to be written is not read until some are: the guest
/// reads more slowly than it asks.
const QUEUED: usize = 4096;

/// True if a connection is not read for now.
pub(crate) fn is_full(connection: &Connection) -> bool {
    matches!(connection.owner, Owner::Guest(_)) && connection.outbound.len() >= QUEUED
}

impl TcpTransport {
    /// Reads a share of what a guest has sent.
    pub(crate) fn read_guest(&mut self, connection: &mut Connection, id: GuestId) -> Result<(), Over> {
        let mut left = TcpTransport::share();
        let mut more = true;
        loop {
            self.take_requests(connection, id)?;
            if !more || left == 0 || is_full(connection) || self.posts.events() >= EVENTS {
                return Ok(());
            }
            self.judge(connection, id);
            match self.receive(connection, left)? {
                Received::Bytes(count) => left = left.saturating_sub(count),
                Received::Last(_) => more = false,
                Received::Nothing => return Ok(()),
                Received::End => return Err(Over::Closed),
            }
        }
    }

    /// Takes the requests out of what has come, until the connection is full.
    pub(crate) fn take_requests(&mut self, connection: &mut Connection, id: GuestId) -> Result<(), Over> {
        while !is_full(connection) {
            if let Some(writing) = connection.writing {
                self.judge(connection, id);
                if !connection.inbound.settle(self.given.regions())?
                    || connection.inbound.bytes.len() < writing.notify
                {
                    return Ok(());
                }
                self.landed(connection, id);
                continue;
            }
            let given = &self.given;
            match Request::next(&mut connection.inbound.bytes, |region| given.len_of(region))? {
                None => return Ok(()),
                Some(Request::Frame(frame)) => {
                    self.posts.tell(TransportEvent::Frame { from: Origin(id), frame });
                }
                Some(Request::Write(asked, notify)) => {
                    let Asked { number, until, ranges, bytes } = asked;
                    connection.inbound.landing = Some(Landing::new(ranges, bytes));
                    connection.writing = Some(Writing { number, until, notify, verdict: Verdict::Done });
                }
                Some(Request::Read(asked)) => give(connection, asked),
            }
        }
        Ok(())
    }

    /// Throws pages away that may not land any more. No page lands without this having been asked before.
    fn judge(&self, connection: &mut Connection, id: GuestId) {
        let (Some(writing), Some(landing)) = (&mut connection.writing, &mut connection.inbound.landing)
        else {
            return;
        };
        if writing.verdict != Verdict::Done || landing.is_complete() {
            return;
        }
        if self.guests.get(id).is_none_or(|guest| guest.revoked) {
            writing.verdict = Verdict::Revoked;
            landing.discard();
        } else if writing.until <= clock::now() {
            writing.verdict = Verdict::Late;
            landing.discard();
        }
    }

    /// All pages of a write have come, and the frame that follows them.
    fn landed(&mut self, connection: &mut Connection, id: GuestId) {
        connection.inbound.landing = None;
        let Some(writing) = connection.writing.take() else { return };
        let frame = connection.inbound.bytes.split_to(writing.notify);
        if writing.verdict == Verdict::Done && !frame.is_empty() {
            let frame = bytes::Bytes::copy_from_slice(&frame);
            self.posts.tell(TransportEvent::Frame { from: Origin(id), frame });
        }
        let (number, verdict) = (writing.number, writing.verdict);
        connection.outbound.push(Reply::Answer { number, verdict, clock: clock::now() }.encode());
    }
}

/// Queues the pages of a read, and the answer after them.
fn give(connection: &mut Connection, asked: Asked) {
    let Asked { number, until, ranges, bytes } = asked;
    let now = clock::now();
    if until <= now {
        let answer = Reply::Answer { number, verdict: Verdict::Late, clock: now };
        connection.outbound.push(answer.encode());
        return;
    }
    connection.outbound.push(Reply::Bytes { number, bytes }.encode());
    connection.outbound.push_pages(ranges, until);
    connection.outbound.push_read_done(number);
}
