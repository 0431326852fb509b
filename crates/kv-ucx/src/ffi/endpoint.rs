//! One endpoint: UCX's way to one peer, and the keys of the peer's memory that were unpacked for it.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::mem;
use std::ptr;
use std::rc::Rc;

use super::api::Api;
use super::bindings::{
    UCP_EP_ATTR_FIELD_TRANSPORTS, UCP_EP_CLOSE_FLAG_FORCE, UCP_EP_PARAM_FIELD_ERR_HANDLER,
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, UCP_ERR_HANDLING_MODE_PEER,
    UCP_OP_ATTR_FIELD_FLAGS, ucp_ep_attr_t, ucp_ep_h, ucp_ep_params_t, ucp_request_param_t, ucp_rkey_h,
    ucp_transport_entry_t, ucp_worker_h,
};
use super::shared::{Shared, on_failure};
use super::status::{Started, Status};

/// The part of an endpoint that UCX's callbacks see.
#[derive(Debug)]
pub(super) struct EndpointState {
    pub(super) id: u64,
    pub(super) shared: Rc<Shared>,
    /// Bytes of messages that UCX has not sent.
    pub(super) unsent: Cell<usize>,
}

/// An endpoint that is open.
pub(super) struct Endpoint {
    api: &'static Api,
    pub(super) ep: ucp_ep_h,
    pub(super) state: Rc<EndpointState>,
    /// Keys by number, and numbers that are free.
    keys: Vec<ucp_rkey_h>,
    free: Vec<u32>,
}

/// An endpoint that is being closed.
pub(super) struct Closing {
    endpoint: Endpoint,
    request: *mut c_void,
}

impl Endpoint {
    /// Opens the way to the worker of an address. The call does not wait for the worker.
    pub(super) fn open(
        api: &'static Api,
        worker: ucp_worker_h,
        address: &[u8],
        (shared, id): (&Rc<Shared>, u64),
    ) -> Result<Endpoint, Status> {
        let state = Rc::new(EndpointState { id, shared: Rc::clone(shared), unsent: Cell::new(0) });
        // SAFETY: a structure of zeros is valid: no field is looked at whose bit is not in the mask.
        let mut params: ucp_ep_params_t = unsafe { mem::zeroed() };
        params.field_mask = u64::from(
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | UCP_EP_PARAM_FIELD_ERR_HANDLER,
        );
        params.address = address.as_ptr().cast();
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(on_failure);
        params.err_handler.arg = Rc::as_ptr(&state).cast_mut().cast();
        let mut ep: ucp_ep_h = ptr::null_mut();
        // SAFETY: the worker is there; UCX copies the address. The handler's argument outlives the endpoint, which
        // holds the state until it is closed.
        Status::check(unsafe { api.ucp.ucp_ep_create(worker, &raw const params, &raw mut ep) })?;
        Ok(Endpoint { api, ep, state, keys: Vec::new(), free: Vec::new() })
    }

    /// Unpacks a key of the peer's memory. Returns its number.
    pub(super) fn unpack(&mut self, key: &[u8]) -> Result<u32, Status> {
        let mut unpacked: ucp_rkey_h = ptr::null_mut();
        // SAFETY: the endpoint is open, and the key's bytes are there during the call.
        let status =
            unsafe { self.api.ucp.ucp_ep_rkey_unpack(self.ep, key.as_ptr().cast(), &raw mut unpacked) };
        Status::check(status)?;
        if let Some(number) = self.free.pop()
            && let Some(place) = self.keys.get_mut(number as usize)
        {
            *place = unpacked;
            return Ok(number);
        }
        self.keys.push(unpacked);
        Ok(u32::try_from(self.keys.len() - 1).unwrap_or(u32::MAX))
    }

    /// A key by its number.
    pub(super) fn key(&self, number: u32) -> Option<ucp_rkey_h> {
        self.keys.get(number as usize).copied().filter(|key| !key.is_null())
    }

    /// Forgets a key, which no operation uses any more.
    pub(super) fn forget(&mut self, number: u32) {
        let Some(key) = self.keys.get_mut(number as usize).filter(|key| !key.is_null()) else { return };
        // SAFETY: the key was unpacked, is destroyed once, and is in no operation.
        unsafe { self.api.ucp.ucp_rkey_destroy(*key) };
        *key = ptr::null_mut();
        self.free.push(number);
    }

    /// The transports and devices of UCX that the endpoint uses, as far as UCX says.
    pub(super) fn transports(&self) -> Vec<(String, String)> {
        const MOST: usize = 16;
        // SAFETY: structures of zeros are valid.
        let (mut attr, mut entries): (ucp_ep_attr_t, [ucp_transport_entry_t; MOST]) =
            unsafe { (mem::zeroed(), mem::zeroed()) };
        attr.field_mask = u64::from(UCP_EP_ATTR_FIELD_TRANSPORTS);
        attr.transports.entries = entries.as_mut_ptr();
        attr.transports.num_entries = MOST as u32;
        attr.transports.entry_size = size_of::<ucp_transport_entry_t>();
        // SAFETY: the endpoint is open, and UCX writes at most the given number of entries.
        if Status::check(unsafe { self.api.ucp.ucp_ep_query(self.ep, &raw mut attr) }).is_err() {
            return Vec::new();
        }
        // SAFETY: UCX's names are C strings that live as long as the endpoint, or absent.
        let name = |name| unsafe { if_there(name) };
        let named = entries.iter().take(attr.transports.num_entries as usize);
        named.map(|entry| (name(entry.transport_name), name(entry.device_name))).collect()
    }

    /// Closes the endpoint: by force, which ends all its operations with an error, or once all operations have
    /// ended.
    pub(super) fn close(self, force: bool) -> Option<Closing> {
        // SAFETY: a structure of zeros is valid.
        let mut param: ucp_request_param_t = unsafe { mem::zeroed() };
        if force {
            param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
            param.flags = UCP_EP_CLOSE_FLAG_FORCE;
        }
        // SAFETY: the endpoint is open, and is not used after this.
        let started = unsafe { self.api.ucp.ucp_ep_close_nbx(self.ep, &raw const param) };
        match Started::of(started) {
            Started::Pending(request) => Some(Closing { endpoint: self, request }),
            Started::Done | Started::Failed(_) => {
                self.end();
                None
            }
        }
    }

    fn end(mut self) {
        for number in 0..u32::try_from(self.keys.len()).unwrap_or(0) {
            self.forget(number);
        }
    }
}

impl Closing {
    /// The endpoint's id.
    pub(super) fn id(&self) -> u64 {
        self.endpoint.state.id
    }

    /// Frees the endpoint if it is closed; otherwise returns it.
    pub(super) fn advance(self) -> Option<Closing> {
        let api = self.endpoint.api;
        // SAFETY: the request is that of the close, and is freed once.
        if unsafe { api.ucp.ucp_request_check_status(self.request) } == Status::IN_PROGRESS {
            return Some(self);
        }
        // SAFETY: as above.
        unsafe { api.ucp.ucp_request_free(self.request) };
        self.endpoint.end();
        None
    }
}

/// # Safety
///
/// The name is a C string, or null.
unsafe fn if_there(name: *const std::ffi::c_char) -> String {
    if name.is_null() {
        return String::new();
    }
    // SAFETY: the caller promises it.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}
