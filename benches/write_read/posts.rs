//! Posts of a transport, from the first until all have ended.

use std::time::Duration;

use kv_conformance::{boottime, rest};
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent};
use kv_transfer::{PeerId, PostId};

use crate::Error;

/// Descriptors of one post, at most; and posts in flight, at most: those of a session, unless it is told others.
const MAX_SGE: usize = 1024;
const MAX_INFLIGHT: usize = 64;
/// How long an end waits at most, where its transport says no less.
pub(crate) const REST: Duration = Duration::from_secs(1);

/// Moves the blocks by posts like those of a session, and waits as a worker does: for as long as the transport says.
/// `next` numbers the posts.
pub(crate) fn in_posts<T: Transport + ?Sized>(
    transport: &mut T,
    peer: PeerId,
    next: &mut u64,
    op: Op,
    descriptors: &[Descriptor],
) -> Result<(), Error> {
    let mut posts = descriptors.chunks(MAX_SGE);
    let (mut in_flight, mut events) = (0, Vec::new());
    loop {
        while in_flight < MAX_INFLIGHT
            && let Some(descriptors) = posts.next()
        {
            *next += 1;
            let (id, descriptors) = (PostId(*next), descriptors.to_vec());
            transport.post(peer, Post { id, op, descriptors, notify: None })?;
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(());
        }
        transport.poll(boottime(), &mut events);
        in_flight -= ended(&mut events)?;
        if in_flight > 0 {
            rest(transport, REST);
        }
    }
}

/// Polls without a pause until the transport's only post has ended.
#[cfg(any(feature = "fabric", feature = "nixl", feature = "ucx"))]
pub(crate) fn posted<T: Transport + ?Sized>(transport: &mut T) -> Result<(), Error> {
    let mut events = Vec::new();
    loop {
        transport.poll(boottime(), &mut events);
        if ended(&mut events)? > 0 {
            return Ok(());
        }
    }
}

/// How many posts have ended well.
fn ended(events: &mut Vec<TransportEvent>) -> Result<usize, Error> {
    let mut ended = 0;
    for event in events.drain(..) {
        match event {
            TransportEvent::Posted { result, .. } => {
                result?;
                ended += 1;
            }
            TransportEvent::PeerGone { end, .. } => {
                return Err(format!("the way to the peer has ended: {end:?}").into());
            }
            TransportEvent::Frame { .. } | TransportEvent::Revoked { .. } => {}
        }
    }
    Ok(ended)
}
