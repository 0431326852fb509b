//! What UCX's callbacks leave for the transport. UCX calls back only inside the calls that this crate makes, on
//! the thread that makes them.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::slice;

use bytes::Bytes;

use super::bindings::{UCP_AM_RECV_ATTR_FLAG_RNDV, ucp_am_recv_param_t, ucp_ep_h, ucs_status_t};
use super::endpoint::EndpointState;
use super::status::Status;
use crate::message::{HEADER, MAX_BODY};

/// Bytes of messages that have arrived and that the transport has not looked at; more are dropped.
const MOST_ARRIVED: usize = 64 << 20;

/// A message that has arrived.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) header: [u8; HEADER],
    pub(crate) body: Bytes,
}

/// Queues between UCX's callbacks and the transport.
#[derive(Debug, Default)]
pub(super) struct Shared {
    arrived: RefCell<VecDeque<Arrived>>,
    arrived_bytes: Cell<usize>,
    dropped: Cell<u64>,
    ended: RefCell<VecDeque<(u64, Result<(), Status>)>>,
    broken: RefCell<VecDeque<(u64, Status)>>,
}

impl Shared {
    pub(super) fn take_arrived(&self) -> Option<Arrived> {
        let arrived = self.arrived.borrow_mut().pop_front()?;
        self.arrived_bytes.set(self.arrived_bytes.get() - arrived.body.len() - HEADER);
        Some(arrived)
    }

    pub(super) fn take_ended(&self) -> Option<(u64, Result<(), Status>)> {
        self.ended.borrow_mut().pop_front()
    }

    pub(super) fn take_broken(&self) -> Option<(u64, Status)> {
        self.broken.borrow_mut().pop_front()
    }

    /// True if the transport has something to look at.
    pub(super) fn has_news(&self) -> bool {
        !self.arrived.borrow().is_empty()
            || !self.ended.borrow().is_empty()
            || !self.broken.borrow().is_empty()
    }

    /// Messages that were dropped: of another form, too long, or too many.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    pub(super) fn flight_ended(&self, flight: u64, result: Result<(), Status>) {
        self.ended.borrow_mut().push_back((flight, result));
    }

    fn arrive(&self, header: &[u8], body: &[u8]) {
        let bytes = self.arrived_bytes.get() + body.len() + HEADER;
        let Ok(header) = header.try_into() else { return self.drop_one() };
        if body.len() > MAX_BODY || bytes > MOST_ARRIVED {
            return self.drop_one();
        }
        self.arrived_bytes.set(bytes);
        self.arrived.borrow_mut().push_back(Arrived { header, body: Bytes::copy_from_slice(body) });
    }

    fn drop_one(&self) {
        self.dropped.set(self.dropped.get() + 1);
    }
}

/// UCX's callback for a message. The argument is a [`Shared`].
pub(super) unsafe extern "C" fn on_message(
    arg: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: the argument is the address of the engine's `Shared`, which outlives the worker; `param` is valid
    // during the call.
    let (shared, attributes) = unsafe { (&*arg.cast::<Shared>(), (*param).recv_attr) };
    // Workers of this crate never send by rendezvous; such a message's bytes are not here.
    if attributes & u64::from(UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 {
        shared.drop_one();
        return 0;
    }
    // SAFETY: UCX gives `len` bytes at `data` and `header_len` bytes at `header`, valid during the call.
    let (header, body) = unsafe { (bytes(header, header_len), bytes(data.cast_const(), len)) };
    shared.arrive(header, body);
    0
}

/// The bytes at an address, which may be nothing if there are none.
///
/// # Safety
///
/// `len` bytes at `address` can be read while the slice lives.
unsafe fn bytes<'a>(address: *const c_void, len: usize) -> &'a [u8] {
    if address.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller promises it.
    unsafe { slice::from_raw_parts(address.cast(), len) }
}

/// UCX's callback for an endpoint that has failed. The argument is an [`EndpointState`].
pub(super) unsafe extern "C" fn on_failure(arg: *mut c_void, _: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the argument is the address of the endpoint's state, which outlives the endpoint.
    let state = unsafe { &*arg.cast::<EndpointState>() };
    let status = Status::check(status).err().unwrap_or(Status::CLOSED);
    state.shared.broken.borrow_mut().push_back((state.id, status));
}
