//! [`Engine`]: one context and one worker of UCX, with its registered memory and its endpoints. All calls of UCX are
//! made through an engine, by one thread at a time.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::mem;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;
use std::slice;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{MemoryKind, Op};

use super::api::{Api, BUILT_FOR};
use super::bindings::*;
use super::endpoint::{Closing, Endpoint};
use super::flight::{Flight, Sending};
pub(crate) use super::shared::Arrived;
use super::shared::{Shared, on_message};
use super::status::{Started, Status};
use crate::given::Range;
use crate::message::HEADER;

/// The number of this crate's active messages.
const MESSAGE: u32 = 0;
/// How long a dropped engine waits until its endpoints are closed.
const CLOSING: Duration = Duration::from_millis(500);

/// A call of UCX that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) call: &'static str,
    pub(crate) status: Status,
}

fn check(call: &'static str, status: ucs_status_t) -> Result<(), Failure> {
    Status::check(status).map_err(|status| Failure { call, status })
}

/// One contiguous range to be moved: of registered memory here, and of a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Number of the registered memory, and the offset in it.
    pub(crate) memory: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// The peer's address, and the number of the key of its memory.
    pub(crate) remote: u64,
    pub(crate) key: u32,
}

/// Memory that UCX knows. The range is kept for as long as the engine.
struct Registered {
    range: Range,
    handle: ucp_mem_h,
}

/// One context and one worker.
pub(crate) struct Engine {
    api: &'static Api,
    context: ucp_context_h,
    worker: ucp_worker_h,
    shared: Rc<Shared>,
    registered: Vec<Registered>,
    endpoints: HashMap<u64, Endpoint>,
    closing: Vec<Closing>,
    last: u64,
}

// SAFETY: the worker was made for calls of several threads, one at a time, and `&mut self` or `!Sync` sees to that.
// All clones of the engine's `Rc`s are in the engine, or with requests of its worker, which are only looked at inside
// calls of the engine.
unsafe impl Send for Engine {}

impl Engine {
    /// A context with these settings of UCX, and a worker. UCX may refuse those of `if_known`; one of `settings` that UCX
    /// refuses is named in the error.
    pub(crate) fn new(
        api: &'static Api,
        if_known: &[(String, String)],
        settings: &[(String, String)],
    ) -> Result<Engine, (Failure, Option<usize>)> {
        let plain = |failure| (failure, None);
        let mut config: *mut ucp_config_t = ptr::null_mut();
        // SAFETY: UCX makes a configuration at the given place.
        let status = unsafe { api.ucp.ucp_config_read(ptr::null(), ptr::null(), &raw mut config) };
        check("ucp_config_read", status).map_err(plain)?;
        for (name, value) in if_known {
            let _ = modify(api, config, name, value);
        }
        let context = configured(api, config, settings);
        // SAFETY: the configuration was made above, and is not used any more.
        unsafe { api.ucp.ucp_config_release(config) };
        let context = context?;
        let mut engine = Engine {
            api,
            context,
            worker: ptr::null_mut(),
            shared: Rc::default(),
            registered: Vec::new(),
            endpoints: HashMap::new(),
            closing: Vec::new(),
            last: 0,
        };
        engine.make_worker().map_err(plain)?;
        Ok(engine)
    }

    fn make_worker(&mut self) -> Result<(), Failure> {
        // SAFETY: structures of zeros are valid: no field is looked at whose bit is not in the mask.
        let (mut params, mut handler): (ucp_worker_params_t, ucp_am_handler_param_t) =
            unsafe { (mem::zeroed(), mem::zeroed()) };
        params.field_mask = u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
        // SAFETY: the context is there.
        let status =
            unsafe { self.api.ucp.ucp_worker_create(self.context, &raw const params, &raw mut self.worker) };
        check("ucp_worker_create", status)?;
        let mask = UCP_AM_HANDLER_PARAM_FIELD_ID
            | UCP_AM_HANDLER_PARAM_FIELD_FLAGS
            | UCP_AM_HANDLER_PARAM_FIELD_CB
            | UCP_AM_HANDLER_PARAM_FIELD_ARG;
        handler.field_mask = u64::from(mask);
        handler.id = MESSAGE;
        handler.flags = UCP_AM_FLAG_WHOLE_MSG;
        handler.cb = Some(on_message);
        handler.arg = Rc::as_ptr(&self.shared).cast_mut().cast::<c_void>();
        // SAFETY: the worker is there; the argument outlives it, as the engine drops the worker first.
        let status = unsafe { self.api.ucp.ucp_worker_set_am_recv_handler(self.worker, &raw const handler) };
        check("ucp_worker_set_am_recv_handler", status)
    }

    /// The library.
    pub(crate) fn api(&self) -> &'static Api {
        self.api
    }

    /// The address by which other workers reach this one.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Failure> {
        // SAFETY: a structure of zeros is valid.
        let mut attr: ucp_worker_attr_t = unsafe { mem::zeroed() };
        attr.field_mask = u64::from(UCP_WORKER_ATTR_FIELD_ADDRESS);
        // SAFETY: the worker is there.
        check("ucp_worker_query", unsafe { self.api.ucp.ucp_worker_query(self.worker, &raw mut attr) })?;
        // SAFETY: UCX has made an address of this length, which is released once, after it was copied.
        let address =
            unsafe { slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length) }.to_vec();
        // SAFETY: as above.
        unsafe { self.api.ucp.ucp_worker_release_address(self.worker, attr.address) };
        Ok(address)
    }

    /// A descriptor that is readable when the worker has something to do, once the worker is [armed](Engine::arm).
    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>, Failure> {
        let mut fd: c_int = -1;
        // SAFETY: the worker is there.
        check("ucp_worker_get_efd", unsafe { self.api.ucp.ucp_worker_get_efd(self.worker, &raw mut fd) })?;
        // SAFETY: the descriptor belongs to the worker, and is open as long as the engine lives.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// False if the worker has something to do, or has done something that the transport has not looked at.
    pub(crate) fn arm(&self) -> bool {
        // SAFETY: the worker is there.
        !self.shared.has_news() && Status::check(unsafe { self.api.ucp.ucp_worker_arm(self.worker) }).is_ok()
    }

    /// True if there is something that the transport has not looked at.
    #[cfg(test)]
    pub(crate) fn has_news(&self) -> bool {
        self.shared.has_news()
    }

    /// True if UCX moves memory of this kind.
    pub(crate) fn knows(&self, kind: MemoryKind) -> bool {
        // SAFETY: a structure of zeros is valid.
        let mut attr: ucp_context_attr_t = unsafe { mem::zeroed() };
        attr.field_mask = u64::from(UCP_ATTR_FIELD_MEMORY_TYPES);
        // SAFETY: the context is there.
        let known = unsafe { self.api.ucp.ucp_context_query(self.context, &raw mut attr) };
        let Some(wanted) = kind_of(kind) else { return false };
        Status::check(known).is_ok() && attr.memory_types & (1 << wanted) != 0
    }

    /// Registers memory. The numbers of the memory count from 0.
    pub(crate) fn register(&mut self, range: Range) -> Result<(), Failure> {
        // SAFETY: a structure of zeros is valid.
        let mut params: ucp_mem_map_params_t = unsafe { mem::zeroed() };
        params.field_mask = u64::from(
            UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | UCP_MEM_MAP_PARAM_FIELD_FLAGS
                | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        );
        params.address = range.addr as *mut c_void;
        params.length = range.len as usize;
        params.flags = UCP_MEM_MAP_NONBLOCK;
        params.memory_type = kind_of(range.kind).unwrap_or(UCS_MEMORY_TYPE_HOST);
        let mut handle: ucp_mem_h = ptr::null_mut();
        // SAFETY: the range is mapped as long as the engine keeps it.
        let status = unsafe { self.api.ucp.ucp_mem_map(self.context, &raw const params, &raw mut handle) };
        check("ucp_mem_map", status)?;
        self.registered.push(Registered { range, handle });
        Ok(())
    }

    /// The key that a peer needs to reach registered memory.
    pub(crate) fn key(&self, memory: usize) -> Result<Vec<u8>, Failure> {
        let Some(registered) = self.registered.get(memory) else { return Ok(Vec::new()) };
        let (mut buffer, mut len) = (ptr::null_mut(), 0);
        let (context, handle) = (self.context, registered.handle);
        // SAFETY: the memory is registered with the context.
        let status = unsafe { self.api.ucp.ucp_rkey_pack(context, handle, &raw mut buffer, &raw mut len) };
        check("ucp_rkey_pack", status)?;
        // SAFETY: UCX has made a buffer of this length, which is released once, after it was copied.
        let key = unsafe { slice::from_raw_parts(buffer.cast::<u8>(), len) }.to_vec();
        // SAFETY: as above.
        unsafe { self.api.ucp.ucp_rkey_buffer_release(buffer) };
        Ok(key)
    }

    /// Lets UCX work. True if it has done something.
    pub(crate) fn progress(&mut self) -> bool {
        // SAFETY: the worker is there; callbacks use the queues of `shared` only.
        let busy = unsafe { self.api.ucp.ucp_worker_progress(self.worker) } != 0;
        if !self.closing.is_empty() {
            self.closing = mem::take(&mut self.closing).into_iter().filter_map(Closing::advance).collect();
        }
        busy
    }

    /// The oldest message that has arrived.
    pub(crate) fn take_arrived(&mut self) -> Option<Arrived> {
        self.shared.take_arrived()
    }

    /// A flight that has ended: none of its operations touches memory any more, here.
    pub(crate) fn take_ended(&mut self) -> Option<(u64, Result<(), Status>)> {
        self.shared.take_ended()
    }

    /// An endpoint that has failed.
    pub(crate) fn take_broken(&mut self) -> Option<(u64, Status)> {
        self.shared.take_broken()
    }

    /// Messages of other forms, too long ones, and too many ones, all of which were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.shared.dropped()
    }

    /// Opens an endpoint to the worker with this address.
    pub(crate) fn open(&mut self, address: &[u8]) -> Result<u64, Failure> {
        self.last += 1;
        let opened = Endpoint::open(self.api, self.worker, address, (&self.shared, self.last));
        let endpoint = opened.map_err(|status| Failure { call: "ucp_ep_create", status })?;
        self.endpoints.insert(self.last, endpoint);
        Ok(self.last)
    }

    /// The number of an endpoint that was never opened, and counts as closed: there is nobody to reach any more.
    pub(crate) fn closed(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Closes an endpoint by force. The flights on it end with errors.
    pub(crate) fn close(&mut self, endpoint: u64) {
        if let Some(endpoint) = self.endpoints.remove(&endpoint) {
            self.closing.extend(endpoint.close(true));
        }
    }

    /// True if UCX is done with the endpoint.
    pub(crate) fn is_closed(&self, endpoint: u64) -> bool {
        !self.endpoints.contains_key(&endpoint) && self.closing.iter().all(|closing| closing.id() != endpoint)
    }

    /// Bytes of messages to the endpoint's peer that UCX has not sent.
    pub(crate) fn unsent(&self, endpoint: u64) -> usize {
        self.endpoints.get(&endpoint).map_or(0, |endpoint| endpoint.state.unsent.get())
    }

    /// The transports and devices of UCX that an endpoint uses.
    pub(crate) fn transports(&self, endpoint: u64) -> Vec<(String, String)> {
        self.endpoints.get(&endpoint).map(Endpoint::transports).unwrap_or_default()
    }

    /// Makes a key of the peer's memory usable on an endpoint. Returns its number.
    pub(crate) fn unpack(&mut self, endpoint: u64, key: &[u8]) -> Result<u32, Status> {
        self.endpoints.get_mut(&endpoint).ok_or(Status::CLOSED)?.unpack(key)
    }

    /// Forgets keys that no flight uses.
    pub(crate) fn forget(&mut self, endpoint: u64, keys: impl Iterator<Item = u32>) {
        if let Some(endpoint) = self.endpoints.get_mut(&endpoint) {
            keys.for_each(|key| endpoint.forget(key));
        }
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, endpoint: u64, header: [u8; HEADER], body: Bytes) -> Result<(), Status> {
        let Endpoint { ep, state, .. } = self.endpoints.get(&endpoint).ok_or(Status::CLOSED)?;
        let sending = Sending { api: self.api, header, body, endpoint: Rc::clone(state) }.begin();
        let mut param = Sending::param(sending);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_AM_SEND_FLAG_EAGER;
        // SAFETY: the endpoint is open. Header and body are those of the message, which is freed when UCX is done
        // with it: by the callback, or here if there will be none.
        let started = unsafe {
            let (header, body) = (&(*sending).header, &(*sending).body);
            let (head, bytes) = (header.as_ptr().cast(), body.as_ptr().cast());
            self.api.ucp.ucp_am_send_nbx(*ep, MESSAGE, head, HEADER, bytes, body.len(), &raw const param)
        };
        let result = match Started::of(started) {
            Started::Pending(_) => return Ok(()),
            Started::Done => Ok(()),
            Started::Failed(status) => Err(status),
        };
        // SAFETY: UCX does not use the message any more, and calls nothing back.
        unsafe { Sending::end(sending) };
        result
    }

    /// Starts moving all pieces, and asks to be told when they are in place. The end of the flight is told by
    /// [`take_ended`](Engine::take_ended), once for each call, also of a flight that has failed at once.
    pub(crate) fn begin(&mut self, endpoint: u64, op: Op, pieces: &[Piece], flight: u64) {
        let Some(endpoint) = self.endpoints.get(&endpoint) else {
            self.shared.flight_ended(flight, Err(Status::CLOSED));
            return;
        };
        let flight = Flight::begin(self.api, &self.shared, flight);
        let mut param = Flight::param(flight);
        let mut result = Ok(());
        for piece in pieces {
            let inside =
                |range: &Range| piece.offset.checked_add(piece.len).is_some_and(|end| end <= range.len);
            let local = self.registered.get(piece.memory as usize).filter(|local| inside(&local.range));
            let (Some(local), Some(key)) = (local, endpoint.key(piece.key)) else {
                result = Err(Status::UNREACHABLE);
                break;
            };
            let address = (local.range.addr + piece.offset) as *mut c_void;
            param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
            param.memh = local.handle;
            let (ep, len, remote) = (endpoint.ep, piece.len as usize, piece.remote);
            // SAFETY: the range lies in registered memory, which is kept until the worker is destroyed; UCX does not
            // look at the peer's address here. The flight is there until its last operation has ended.
            let went = unsafe {
                let started = match op {
                    Op::Write => {
                        self.api.ucp.ucp_put_nbx(ep, address.cast_const(), len, remote, key, &raw const param)
                    }
                    Op::Read => self.api.ucp.ucp_get_nbx(ep, address, len, remote, key, &raw const param),
                };
                Flight::started(flight, started)
            };
            if !went {
                break;
            }
        }
        param.op_attr_mask &= !UCP_OP_ATTR_FIELD_MEMH;
        // SAFETY: the endpoint is open; the flight is there until its operation of starting has ended, here.
        unsafe {
            Flight::started(flight, self.api.ucp.ucp_ep_flush_nbx(endpoint.ep, &raw const param));
            Flight::end_one(flight, result);
        }
    }
}

fn modify(api: &Api, config: *mut ucp_config_t, name: &str, value: &str) -> Result<(), Failure> {
    // A name with a NUL is no setting of UCX.
    let (name, value) = (CString::new(name).unwrap_or_default(), CString::new(value).unwrap_or_default());
    // SAFETY: the configuration is there, and both are C strings.
    let status = unsafe { api.ucp.ucp_config_modify(config, name.as_ptr(), value.as_ptr()) };
    check("ucp_config_modify", status)
}

fn configured(
    api: &Api,
    config: *mut ucp_config_t,
    settings: &[(String, String)],
) -> Result<ucp_context_h, (Failure, Option<usize>)> {
    for (index, (name, value)) in settings.iter().enumerate() {
        modify(api, config, name, value).map_err(|failure| (failure, Some(index)))?;
    }
    // SAFETY: a structure of zeros is valid.
    let mut params: ucp_params_t = unsafe { mem::zeroed() };
    params.field_mask = u64::from(UCP_PARAM_FIELD_FEATURES);
    params.features = u64::from(UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP);
    let mut context: ucp_context_h = ptr::null_mut();
    let (major, minor) = BUILT_FOR;
    // SAFETY: parameters and configuration are there.
    let status =
        unsafe { api.ucp.ucp_init_version(major, minor, &raw const params, config, &raw mut context) };
    check("ucp_init", status).map_err(|failure| (failure, None))?;
    Ok(context)
}

fn kind_of(kind: MemoryKind) -> Option<ucs_memory_type_t> {
    match kind {
        MemoryKind::Dram => Some(UCS_MEMORY_TYPE_HOST),
        MemoryKind::Vram => Some(UCS_MEMORY_TYPE_CUDA),
        MemoryKind::File => None,
    }
}

impl Drop for Engine {
    /// Closes the endpoints by force, waits a moment for UCX, and destroys the worker: from then on nothing here
    /// touches memory.
    fn drop(&mut self) {
        if !self.worker.is_null() {
            for (_, endpoint) in mem::take(&mut self.endpoints) {
                self.closing.extend(endpoint.close(true));
            }
            let deadline = Instant::now() + CLOSING;
            while !self.closing.is_empty() && Instant::now() < deadline {
                self.progress();
            }
        }
        // SAFETY: worker, memory and context were made by this engine, and are not used after this. Messages and
        // flights that are left are told to their callbacks, whose `Shared` is dropped after this; no operation uses
        // the memory once the worker is destroyed.
        unsafe {
            if !self.worker.is_null() {
                self.api.ucp.ucp_worker_destroy(self.worker);
            }
            for registered in &self.registered {
                self.api.ucp.ucp_mem_unmap(self.context, registered.handle);
            }
            self.api.ucp.ucp_cleanup(self.context);
        }
        // Endpoints that UCX has not closed in time keep their state: nothing frees it while UCX may look.
        mem::forget(mem::take(&mut self.closing));
    }
}
