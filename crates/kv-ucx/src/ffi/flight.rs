//! Operations on their way: the puts or gets of one slice and the flush after them, and messages.

use std::cell::Cell;
use std::ffi::c_void;
use std::mem;
use std::rc::Rc;

use bytes::Bytes;

use super::api::Api;
use super::bindings::{
    UCP_OP_ATTR_FIELD_CALLBACK, UCP_OP_ATTR_FIELD_USER_DATA, ucp_request_param_t, ucs_status_t,
};
use super::endpoint::EndpointState;
use super::shared::Shared;
use super::status::{Started, Status};
use crate::message::HEADER;

/// The operations of one slice. The last of them that ends tells [`Shared`], and frees this.
pub(super) struct Flight {
    api: &'static Api,
    shared: Rc<Shared>,
    id: u64,
    pending: Cell<u32>,
    failed: Cell<Option<Status>>,
}

impl Flight {
    /// A flight with one operation: that of starting the others.
    pub(super) fn begin(api: &'static Api, shared: &Rc<Shared>, id: u64) -> *mut Flight {
        let shared = Rc::clone(shared);
        Box::into_raw(Box::new(Flight { api, shared, id, pending: Cell::new(1), failed: Cell::new(None) }))
    }

    /// The parameters of an operation of this flight.
    pub(super) fn param(flight: *mut Flight) -> ucp_request_param_t {
        let mut param = request_param(on_operation);
        param.user_data = flight.cast();
        param
    }

    /// Takes note of an operation that was started. False if it could not be.
    ///
    /// # Safety
    ///
    /// The flight is begun and not [over](Flight::end_one).
    pub(super) unsafe fn started(flight: *mut Flight, started: *mut c_void) -> bool {
        // SAFETY: the caller promises that the flight is there.
        let flight = unsafe { &*flight };
        match Started::of(started) {
            Started::Done => {}
            Started::Pending(_) => flight.pending.set(flight.pending.get() + 1),
            Started::Failed(status) => {
                flight.failed.set(flight.failed.get().or(Some(status)));
                return false;
            }
        }
        true
    }

    /// One operation has ended. The flight is freed with the last.
    ///
    /// # Safety
    ///
    /// The flight has an operation that has not been ended.
    pub(super) unsafe fn end_one(flight: *mut Flight, result: Result<(), Status>) {
        // SAFETY: the flight is there, as one of its operations has not ended before this call.
        let this = unsafe { &*flight };
        this.failed.set(this.failed.get().or(result.err()));
        let left = this.pending.get() - 1;
        this.pending.set(left);
        if left == 0 {
            // SAFETY: no operation is left whose callback could use the flight.
            let flight = unsafe { Box::from_raw(flight) };
            flight.shared.flight_ended(flight.id, flight.failed.get().map_or(Ok(()), Err));
        }
    }
}

/// UCX's callback for an operation of a [`Flight`].
unsafe extern "C" fn on_operation(request: *mut c_void, status: ucs_status_t, flight: *mut c_void) {
    let flight = flight.cast::<Flight>();
    // SAFETY: the flight is there until its last callback, and the request is freed once.
    unsafe {
        (*flight).api.ucp.ucp_request_free(request);
        Flight::end_one(flight, Status::check(status));
    }
}

/// A message on its way: its bytes live until UCX has sent them.
pub(super) struct Sending {
    pub(super) api: &'static Api,
    pub(super) header: [u8; HEADER],
    pub(super) body: Bytes,
    pub(super) endpoint: Rc<EndpointState>,
}

impl Sending {
    /// Counts the message at its endpoint. Returns the address under which UCX knows the message.
    pub(super) fn begin(self) -> *mut Sending {
        let unsent = &self.endpoint.unsent;
        unsent.set(unsent.get() + self.body.len() + HEADER);
        Box::into_raw(Box::new(self))
    }

    /// The parameters of the operation.
    pub(super) fn param(sending: *mut Sending) -> ucp_request_param_t {
        let mut param = request_param(on_sent);
        param.user_data = sending.cast();
        param
    }

    /// Frees a message that UCX does not use any more.
    ///
    /// # Safety
    ///
    /// The message is begun, and not ended.
    pub(super) unsafe fn end(sending: *mut Sending) {
        // SAFETY: the caller promises it.
        let sending = unsafe { Box::from_raw(sending) };
        let unsent = &sending.endpoint.unsent;
        unsent.set(unsent.get() - sending.body.len() - HEADER);
    }
}

/// UCX's callback for a message that was sent, or cannot be.
unsafe extern "C" fn on_sent(request: *mut c_void, _: ucs_status_t, sending: *mut c_void) {
    let sending = sending.cast::<Sending>();
    // SAFETY: the message is there until this callback, and the request is freed once.
    unsafe {
        (*sending).api.ucp.ucp_request_free(request);
        Sending::end(sending);
    }
}

fn request_param(
    callback: unsafe extern "C" fn(*mut c_void, ucs_status_t, *mut c_void),
) -> ucp_request_param_t {
    // SAFETY: a structure of zeros is valid: no field is looked at whose bit is not in the mask.
    let mut param: ucp_request_param_t = unsafe { mem::zeroed() };
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = Some(callback);
    param
}
