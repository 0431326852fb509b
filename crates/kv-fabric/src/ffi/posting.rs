//! Beginning of messages, writes and reads.

use std::ffi::c_void;
use std::ptr;

use libc::iovec;

use super::endpoint::{Attempt, Endpoint, Far, MESSAGE, Near, context_of, place_of};
use super::fabric::Address;
use super::{call, sys};

/// `FI_ADDR_UNSPEC`: a message may come from every peer.
const ANYBODY: u64 = u64::MAX;
/// Most ranges of one operation, whatever the provider allows.
pub(crate) const RANGES: usize = 8;

impl<T: Copy> Endpoint<T> {
    /// Makes a receive buffer ready for the next message.
    pub(crate) fn give_back(&mut self, buffer: usize) -> Attempt {
        let at = self.buffers.addr() + place_of(None, buffer) as u64;
        let (ep, context) = (self.objects.ep, self.contexts.at(buffer));
        // SAFETY: the buffer is inside the memory of buffers, and used by nothing until its completion.
        let code = unsafe {
            call!(ep => msg, recv(ep, at as *mut c_void, MESSAGE, self.buffers_descriptor, ANYBODY, context))
        };
        attempt(code)
    }

    /// Sends a message of these parts, [`MESSAGE`] bytes at most.
    pub(crate) fn send(&mut self, to: Address, parts: [&[u8]; 2], what: T) -> Attempt {
        let [head, body] = parts;
        let Some(&operation) = self.idle_sends.last() else { return Attempt::Full };
        let place = place_of(Some(operation), 0);
        let len = head.len() + body.len();
        let fits = len <= MESSAGE
            && self.buffers.write(place, head).is_ok()
            && self.buffers.write(place + head.len(), body).is_ok();
        if !fits {
            return Attempt::Failed(libc::EMSGSIZE);
        }
        let at = self.buffers.addr() + place as u64;
        let (ep, context) = (self.objects.ep, self.contexts.at(context_of(operation)));
        // SAFETY: the buffer is inside the memory of buffers, and used by nothing until its completion. The address
        // was inserted.
        let code = unsafe {
            call!(ep => msg, send(ep, at as *const c_void, len, self.buffers_descriptor, to.0, context))
        };
        let begun = attempt(code);
        if begun == Attempt::Begun {
            self.idle_sends.pop();
            self.keep(operation, what);
        }
        begun
    }

    /// Writes ranges of this side's memory to places in the peer's. The write ends when the bytes are in place there.
    /// `data` is given to the peer then.
    pub(crate) fn write(
        &mut self,
        to: Address,
        ranges: &[(Near, Far)],
        data: Option<u64>,
        what: T,
    ) -> Attempt {
        let flags = sys::FI_COMPLETION as u64 | sys::FI_DELIVERY_COMPLETE as u64;
        let data_flag = if data.is_some() { sys::FI_REMOTE_CQ_DATA as u64 } else { 0 };
        self.move_ranges(to, ranges, (flags | data_flag, data.unwrap_or(0)), true, what)
    }

    /// Reads ranges of the peer's memory into this side's.
    pub(crate) fn read(&mut self, to: Address, ranges: &[(Near, Far)], what: T) -> Attempt {
        self.move_ranges(to, ranges, (sys::FI_COMPLETION as u64, 0), false, what)
    }

    /// Begins a write of one byte to no memory of the peer, to learn what becomes of it.
    pub(crate) fn probe(&mut self, to: Address, what: T) -> Attempt {
        let near = libc::iovec { iov_base: self.buffers.addr() as *mut c_void, iov_len: 1 };
        let flags = sys::FI_COMPLETION as u64 | sys::FI_DELIVERY_COMPLETE as u64;
        self.move_iovecs(
            to,
            &[(near, Far { addr: 0, key: 0 }, self.buffers_descriptor)],
            (flags, 0),
            true,
            what,
        )
    }

    fn move_ranges(
        &mut self,
        to: Address,
        ranges: &[(Near, Far)],
        (flags, data): (u64, u64),
        is_write: bool,
        what: T,
    ) -> Attempt {
        if ranges.is_empty() || ranges.len() > RANGES {
            return Attempt::Failed(libc::EINVAL);
        }
        let nothing = iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let mut all = [(nothing, Far { addr: 0, key: 0 }, ptr::null_mut()); RANGES];
        for ((near, far), place) in ranges.iter().zip(&mut all) {
            let region = self.regions.get(near.region);
            let inside = |len: usize| near.offset.checked_add(near.len).is_some_and(|end| end <= len);
            let Some(region) = region.filter(|region| inside(region.memory.len())) else {
                return Attempt::Failed(libc::EFAULT);
            };
            let iov_base = (region.memory.addr() + near.offset as u64) as *mut c_void;
            *place = (iovec { iov_base, iov_len: near.len }, *far, region.descriptor);
        }
        let all = all.get(..ranges.len()).unwrap_or_default();
        self.move_iovecs(to, all, (flags, data), is_write, what)
    }

    /// The ranges here lie in memory that is registered under the descriptors beside them.
    fn move_iovecs(
        &mut self,
        to: Address,
        ranges: &[(iovec, Far, *mut c_void)],
        (flags, data): (u64, u64),
        is_write: bool,
        what: T,
    ) -> Attempt {
        let Some(&operation) = self.idle_moves.last() else { return Attempt::Full };
        let mut here = [iovec { iov_base: ptr::null_mut(), iov_len: 0 }; RANGES];
        let mut there = [sys::fi_rma_iov { addr: 0, len: 0, key: 0 }; RANGES];
        let mut descriptors = [ptr::null_mut::<c_void>(); RANGES];
        let slots = here.iter_mut().zip(&mut there).zip(&mut descriptors);
        for ((near, far, from), ((here, there), descriptor)) in ranges.iter().zip(slots) {
            *here = *near;
            *there = sys::fi_rma_iov { addr: far.addr, len: near.iov_len, key: far.key };
            *descriptor = *from;
        }
        let context = self.contexts.at(context_of(operation));
        let message = sys::fi_msg_rma {
            msg_iov: here.as_ptr().cast(),
            desc: descriptors.as_mut_ptr(),
            iov_count: ranges.len(),
            addr: to.0,
            rma_iov: there.as_ptr(),
            rma_iov_count: ranges.len(),
            context,
            data,
        };
        let ep = self.objects.ep;
        // SAFETY: the ranges are inside registered memory, which the endpoint keeps; libfabric copies the lists before
        // it returns. Bytes of these ranges are only moved, never referenced. The address was inserted.
        let code = unsafe {
            if is_write {
                call!(ep => rma, writemsg(ep, &raw const message, flags))
            } else {
                call!(ep => rma, readmsg(ep, &raw const message, flags))
            }
        };
        let begun = attempt(code);
        if begun == Attempt::Begun {
            self.idle_moves.pop();
            self.keep(operation, what);
        }
        begun
    }

    fn keep(&mut self, operation: usize, what: T) {
        if let Some(place) = self.under_way.get_mut(operation) {
            *place = Some(what);
        }
    }
}

fn attempt(code: isize) -> Attempt {
    match i32::try_from(code).unwrap_or(i32::MIN).wrapping_neg() {
        0 => Attempt::Begun,
        libc::EAGAIN => Attempt::Full,
        code => Attempt::Failed(code),
    }
}
