//! Plain calls of UCX: a context, a worker, registered memory, and an endpoint to the worker of the other process.
#![allow(unsafe_code)]

use std::ffi::{CString, c_void};
use std::mem;
use std::ptr;
use std::slice;

use kv_benches::{bytes, hex};
use kv_transfer::ucx::{HostMemory, Ucx};
use kv_transfer::unstable::Descriptor;
use kv_ucx::raw::*;

use crate::Error;

pub(super) struct Raw {
    ucp: &'static Ucp,
    context: ucp_context_h,
    worker: ucp_worker_h,
    memory: ucp_mem_h,
    /// The address of the memory here, and of that of the other process.
    here: u64,
    there: u64,
    ep: ucp_ep_h,
    key: ucp_rkey_h,
}

fn check(call: &str, status: ucs_status_t) -> Result<(), Error> {
    if status == 0 { Ok(()) } else { Err(format!("{call} failed with status {status}").into()) }
}

impl Raw {
    pub(super) fn new(ucx: Ucx, settings: &[(&str, &str)], pool: &HostMemory) -> Result<Raw, Error> {
        let ucp = functions(ucx);
        let mut raw = Raw {
            ucp,
            context: ptr::null_mut(),
            worker: ptr::null_mut(),
            memory: ptr::null_mut(),
            here: pool.addr(),
            there: 0,
            ep: ptr::null_mut(),
            key: ptr::null_mut(),
        };
        // SAFETY: UCX's functions are called as its manual says, with structures of zeros whose masks name the fields
        // that are set; the pool is mapped as long as this value, which the caller drops first.
        unsafe {
            let mut config = ptr::null_mut();
            check("ucp_config_read", ucp.ucp_config_read(ptr::null(), ptr::null(), &raw mut config))?;
            for (name, value) in settings {
                let (name, value) = (CString::new(*name)?, CString::new(*value)?);
                let status = ucp.ucp_config_modify(config, name.as_ptr(), value.as_ptr());
                check("ucp_config_modify", status)?;
            }
            let mut params: ucp_params_t = mem::zeroed();
            params.field_mask = u64::from(UCP_PARAM_FIELD_FEATURES);
            params.features = u64::from(UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP);
            let (major, minor) = (UCP_API_MAJOR, UCP_API_MINOR);
            let context = &raw mut raw.context;
            check("ucp_init", ucp.ucp_init_version(major, minor, &raw const params, config, context))?;
            ucp.ucp_config_release(config);
            let mut params: ucp_worker_params_t = mem::zeroed();
            params.field_mask = u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE);
            params.thread_mode = UCS_THREAD_MODE_SINGLE;
            let worker = &raw mut raw.worker;
            check("ucp_worker_create", ucp.ucp_worker_create(raw.context, &raw const params, worker))?;
            let mut params: ucp_mem_map_params_t = mem::zeroed();
            params.field_mask = u64::from(UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH);
            (params.address, params.length) = (pool.addr() as *mut c_void, pool.len());
            check("ucp_mem_map", ucp.ucp_mem_map(raw.context, &raw const params, &raw mut raw.memory))?;
        }
        Ok(raw)
    }

    /// What the other process must know: the worker's address, the key and the address of the memory.
    pub(super) fn describe(&self) -> Result<String, Error> {
        // SAFETY: as above; UCX's buffers are copied, and released once.
        let (address, key) = unsafe {
            let mut attr: ucp_worker_attr_t = mem::zeroed();
            attr.field_mask = u64::from(UCP_WORKER_ATTR_FIELD_ADDRESS);
            check("ucp_worker_query", self.ucp.ucp_worker_query(self.worker, &raw mut attr))?;
            let address = hex(slice::from_raw_parts(attr.address.cast(), attr.address_length));
            self.ucp.ucp_worker_release_address(self.worker, attr.address);
            let (mut buffer, mut len) = (ptr::null_mut(), 0);
            let (context, memory) = (self.context, self.memory);
            check("ucp_rkey_pack", self.ucp.ucp_rkey_pack(context, memory, &raw mut buffer, &raw mut len))?;
            let key = hex(slice::from_raw_parts(buffer.cast(), len));
            self.ucp.ucp_rkey_buffer_release(buffer);
            (address, key)
        };
        Ok(format!("{address} {key} {}", self.here))
    }

    /// Connects the worker that has described itself so.
    pub(super) fn connect(&mut self, described: &str) -> Result<(), Error> {
        let [address, key, there] = described.split(' ').collect::<Vec<_>>()[..] else {
            return Err("the child has told too little".into());
        };
        let (address, key) = (bytes(address)?, bytes(key)?);
        self.there = there.parse()?;
        // SAFETY: as above; address and key are there during the calls.
        unsafe {
            let mut params: ucp_ep_params_t = mem::zeroed();
            params.field_mask =
                u64::from(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
            params.address = address.as_ptr().cast();
            params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
            check("ucp_ep_create", self.ucp.ucp_ep_create(self.worker, &raw const params, &raw mut self.ep))?;
            let key = key.as_ptr().cast();
            check("ucp_ep_rkey_unpack", self.ucp.ucp_ep_rkey_unpack(self.ep, key, &raw mut self.key))
        }
    }

    /// Lets the worker work.
    pub(super) fn progress(&self) {
        // SAFETY: the worker is there.
        unsafe { self.ucp.ucp_worker_progress(self.worker) };
    }

    /// Writes the blocks, and returns when all are in place.
    pub(super) fn write(&mut self, descriptors: &[Descriptor]) -> Result<(), Error> {
        // SAFETY: the blocks are inside the memory of both sides, which is registered; without a callback, a request is
        // freed by `ucp_request_free`, which may be called before it has ended.
        unsafe {
            let mut param: ucp_request_param_t = mem::zeroed();
            param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
            param.memh = self.memory;
            for descriptor in descriptors {
                let from = (self.here + descriptor.local_offset) as *const c_void;
                let (to, len) = (self.there + descriptor.remote_offset, descriptor.len as usize);
                let request = self.ucp.ucp_put_nbx(self.ep, from, len, to, self.key, &raw const param);
                self.free(request)?;
            }
            param.op_attr_mask = 0;
            let flush = self.ucp.ucp_ep_flush_nbx(self.ep, &raw const param);
            if is_request(flush)? {
                let status = loop {
                    match self.ucp.ucp_request_check_status(flush) {
                        1 => self.progress(),
                        status => break status,
                    }
                };
                self.ucp.ucp_request_free(flush);
                check("ucp_ep_flush_nbx", status)?;
            }
        }
        Ok(())
    }

    fn free(&self, request: *mut c_void) -> Result<(), Error> {
        if is_request(request)? {
            // SAFETY: the request is one of this worker, and is freed once.
            unsafe { self.ucp.ucp_request_free(request) };
        }
        Ok(())
    }
}

/// True of a request that goes on, false of one that is done.
fn is_request(pointer: *mut c_void) -> Result<bool, Error> {
    match pointer as isize {
        0 => Ok(false),
        status @ -100..0 => Err(format!("UCX failed with status {status}").into()),
        _ => Ok(true),
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: what was made is given back once; the worker closes its endpoint.
        unsafe {
            if !self.key.is_null() {
                self.ucp.ucp_rkey_destroy(self.key);
            }
            if !self.worker.is_null() {
                self.ucp.ucp_worker_destroy(self.worker);
            }
            if !self.memory.is_null() {
                self.ucp.ucp_mem_unmap(self.context, self.memory);
            }
            if !self.context.is_null() {
                self.ucp.ucp_cleanup(self.context);
            }
        }
    }
}
