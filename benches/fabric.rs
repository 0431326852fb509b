//! Plain calls of libfabric, for benches beside them: an endpoint, its address table and completion queue, registered
//! memory, and the address of the endpoint of the other process.
#![allow(unsafe_code)]
// A flag of libfabric has the type that its value needs, and is used as 64 bits.
#![allow(clippy::unnecessary_cast)]

use std::ffi::{CString, c_void};
use std::mem;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use kv_fabric::raw::*;
use kv_transfer::fabric::HostMemory;
use kv_transfer::unstable::{Descriptor, Op};

use crate::{bytes, hex};

type Error = Box<dyn std::error::Error>;

/// Completions that are read at once.
const TAKEN: usize = 32;
/// The key of the memory, where the provider lets this side choose.
const KEY: u64 = 77;
/// There is no room now, or no completion: `-FI_EAGAIN`.
const AGAIN: isize = -(rustix::io::Errno::AGAIN.raw_os_error() as isize);
/// `FI_ADDR_UNSPEC`: a message may come from every peer.
const ANYBODY: u64 = u64::MAX;
/// Bytes of a message: as many as a frame of a session has.
const MESSAGE: usize = 64;
/// After so many looks in a row without a completion, an end that yields leaves its core to other processes.
const IDLE: u32 = 64;
/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// An endpoint of one process, with one piece of registered memory.
#[derive(Debug)]
pub struct Raw {
    functions: Functions,
    info: *mut fi_info,
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    av: *mut fid_av,
    cq: *mut fid_cq,
    ep: *mut fid_ep,
    memory: *mut fid_mr,
    /// The address of the memory here.
    here: u64,
    /// The place of the other process's memory, and its key.
    there: u64,
    key: u64,
    peer: u64,
    /// Lent to libfabric, one for each operation.
    contexts: Vec<fi_context2>,
    message: Box<[u8; MESSAGE]>,
    yields: bool,
}

/// Calls a function of an object's table: what libfabric's inline functions do.
macro_rules! call {
    ($object:expr => $($table:ident).+, $function:ident($($argument:expr),*)) => {
        match (*(*$object).$($table).+).$function {
            Some(function) => function($($argument),*),
            None => return Err(concat!("libfabric has no ", stringify!($function)).into()),
        }
    };
}

fn check(call: &str, result: i32) -> Result<(), Error> {
    if result == 0 { Ok(()) } else { Err(format!("{call} failed with {result}").into()) }
}

impl Raw {
    /// An endpoint of this provider and address, which has registered the pool.
    ///
    /// # Errors
    ///
    /// If libfabric is not found, or a call of it fails.
    pub fn new(provider: &str, address: &str, pool: &HostMemory) -> Result<Raw, Error> {
        let mut raw = Raw {
            functions: functions()?,
            info: ptr::null_mut(),
            fabric: ptr::null_mut(),
            domain: ptr::null_mut(),
            av: ptr::null_mut(),
            cq: ptr::null_mut(),
            ep: ptr::null_mut(),
            memory: ptr::null_mut(),
            here: pool.addr(),
            there: 0,
            key: 0,
            peer: 0,
            contexts: Vec::new(),
            message: Box::new([0; MESSAGE]),
            yields: false,
        };
        let (provider, address) = (CString::new(provider)?, CString::new(address)?);
        // SAFETY: libfabric's functions are called as its manual says, in the order of the objects; the pool is mapped as
        // long as this value, which the caller drops first. libfabric copies the strings that it is given, but for the
        // provider's name, which is taken out of the hints before they are freed.
        unsafe {
            let Functions { getinfo, freeinfo, dupinfo, fabric, interface } = raw.functions;
            let hints = dupinfo(ptr::null());
            (*hints).caps = FI_MSG as u64 | FI_RMA as u64;
            (*(*hints).ep_attr).type_ = FI_EP_RDM;
            (*(*hints).fabric_attr).prov_name = provider.as_ptr().cast_mut();
            (*(*hints).tx_attr).op_flags = FI_DELIVERY_COMPLETE as u64;
            let attributes = (*hints).domain_attr;
            let modes = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
            (*attributes).mr_mode = modes as i32;
            (*attributes).threading = FI_THREAD_DOMAIN;
            (*attributes).control_progress = FI_PROGRESS_MANUAL;
            (*attributes).data_progress = FI_PROGRESS_MANUAL;
            let found =
                getinfo(interface, address.as_ptr(), ptr::null(), FI_SOURCE as u64, hints, &raw mut raw.info);
            (*(*hints).fabric_attr).prov_name = ptr::null_mut();
            freeinfo(hints);
            check("fi_getinfo", found)?;
            let nothing = ptr::null_mut();
            check("fi_fabric", fabric((*raw.info).fabric_attr, &raw mut raw.fabric, nothing))?;
            let made = call!(raw.fabric => ops, domain(raw.fabric, raw.info, &raw mut raw.domain, nothing));
            check("fi_domain", made)?;
            let mut table: fi_av_attr = mem::zeroed();
            let made =
                call!(raw.domain => ops, av_open(raw.domain, &raw mut table, &raw mut raw.av, nothing));
            check("fi_av_open", made)?;
            let mut queue: fi_cq_attr = mem::zeroed();
            queue.format = FI_CQ_FORMAT_DATA;
            let made =
                call!(raw.domain => ops, cq_open(raw.domain, &raw mut queue, &raw mut raw.cq, nothing));
            check("fi_cq_open", made)?;
            let made = call!(raw.domain => ops, endpoint(raw.domain, raw.info, &raw mut raw.ep, nothing));
            check("fi_endpoint", made)?;
            let ep = &raw mut (*raw.ep).fid;
            check("fi_ep_bind", call!(ep => ops, bind(ep, &raw mut (*raw.av).fid, 0)))?;
            let both = FI_TRANSMIT as u64 | FI_RECV as u64;
            check("fi_ep_bind", call!(ep => ops, bind(ep, &raw mut (*raw.cq).fid, both)))?;
            check("fi_enable", call!(ep => ops, control(ep, FI_ENABLE as i32, nothing)))?;
            let access = FI_READ as u64 | FI_WRITE as u64 | FI_REMOTE_READ as u64 | FI_REMOTE_WRITE as u64;
            let (start, len) = (pool.addr() as *const c_void, pool.len());
            let domain = &raw mut (*raw.domain).fid;
            let made = call!(raw.domain => mr, reg(domain, start, len, access, 0, KEY, 0, &raw mut raw.memory, nothing));
            check("fi_mr_reg", made)?;
        }
        Ok(raw)
    }

    /// Has this end leave its core to other processes while it waits for long: the other end may be on the same core, and
    /// its libfabric must work, too. It costs an end with a core of its own some speed.
    pub fn yielding(mut self) -> Raw {
        self.yields = true;
        self
    }

    /// What the other process must know: the endpoint's name, and the place and the key of the memory.
    ///
    /// # Errors
    ///
    /// If libfabric does not tell the name.
    pub fn describe(&self) -> Result<String, Error> {
        let mut name = [0_u8; 256];
        let mut len = name.len();
        // SAFETY: the endpoint is enabled, and the buffer is as long as is said.
        let (place, key) = unsafe {
            let ep = &raw mut (*self.ep).fid;
            check("fi_getname", call!(self.ep => cm, getname(ep, name.as_mut_ptr().cast(), &raw mut len)))?;
            let modes = (*(*self.info).domain_attr).mr_mode as u32;
            (if modes & FI_MR_VIRT_ADDR as u32 == 0 { 0 } else { self.here }, (*self.memory).key)
        };
        Ok(format!("{} {place} {key}", hex(name.get(..len).unwrap_or_default())))
    }

    /// Connects the endpoint that has described itself so.
    ///
    /// # Errors
    ///
    /// If it is not such a description, or libfabric refuses it.
    pub fn connect(&mut self, described: &str) -> Result<(), Error> {
        let [name, place, key] = described.split(' ').collect::<Vec<_>>()[..] else {
            return Err("the child has told too little".into());
        };
        (self.there, self.key) = (place.parse()?, key.parse()?);
        let name = bytes(name)?;
        // SAFETY: the name is that of an endpoint of the same provider.
        let inserted = unsafe {
            call!(self.av => ops, insert(self.av, name.as_ptr().cast(), 1, &raw mut self.peer, 0, ptr::null_mut()))
        };
        if inserted == 1 { Ok(()) } else { Err(format!("fi_av_insert returned {inserted}").into()) }
    }

    /// Lets libfabric work. Returns how many operations have ended.
    ///
    /// # Errors
    ///
    /// If libfabric reports an error.
    pub fn progress(&self) -> Result<usize, Error> {
        // SAFETY: there is room for as many entries as are asked for, in the format of the queue.
        let count = unsafe {
            let mut entries: [fi_cq_data_entry; TAKEN] = mem::zeroed();
            call!(self.cq => ops, read(self.cq, entries.as_mut_ptr().cast(), TAKEN))
        };
        match count {
            0.. => Ok(count as usize),
            AGAIN => Ok(0),
            count => Err(format!("fi_cq_read failed with {count}").into()),
        }
    }

    /// Writes or reads the blocks, and returns when all are in place.
    ///
    /// # Errors
    ///
    /// If libfabric reports an error.
    pub fn run(&mut self, op: Op, descriptors: &[Descriptor]) -> Result<(), Error> {
        let missing = descriptors.len().saturating_sub(self.contexts.len());
        // SAFETY: a `fi_context2` is a few pointers, which may be null. Nothing is under way that has lent one.
        self.contexts.extend((0..missing).map(|_| unsafe { mem::zeroed::<fi_context2>() }));
        let mut ended = 0;
        let mut flags = FI_COMPLETION as u64;
        if op == Op::Write {
            flags |= FI_DELIVERY_COMPLETE as u64;
        }
        let contexts = self.contexts.as_mut_ptr();
        for (index, descriptor) in descriptors.iter().enumerate() {
            loop {
                // SAFETY: the blocks are inside the memory of both sides, which is registered; libfabric copies the
                // lists before it returns. The context is used by this operation alone, until all have ended.
                let code = unsafe {
                    let iov_base = (self.here + descriptor.local_offset) as *mut c_void;
                    let near = iovec { iov_base, iov_len: descriptor.len as usize };
                    let addr = self.there + descriptor.remote_offset;
                    let far = fi_rma_iov { addr, len: descriptor.len as usize, key: self.key };
                    let mut registered = (*self.memory).mem_desc;
                    let message = fi_msg_rma {
                        msg_iov: &raw const near,
                        desc: &raw mut registered,
                        iov_count: 1,
                        addr: self.peer,
                        rma_iov: &raw const far,
                        rma_iov_count: 1,
                        context: contexts.add(index).cast(),
                        data: 0,
                    };
                    match op {
                        Op::Write => call!(self.ep => rma, writemsg(self.ep, &raw const message, flags)),
                        Op::Read => call!(self.ep => rma, readmsg(self.ep, &raw const message, flags)),
                    }
                };
                match code {
                    0 => break,
                    AGAIN => ended += self.progress()?,
                    code => return Err(format!("fi_writemsg or fi_readmsg failed with {code}").into()),
                }
            }
        }
        let mut idle = 0;
        while ended < descriptors.len() {
            let more = self.progress()?;
            ended += more;
            idle = if more == 0 { idle + 1 } else { 0 };
            if self.yields && idle >= IDLE {
                thread::yield_now();
            }
        }
        Ok(())
    }

    /// Sends a message, for which the first one opens the connection.
    ///
    /// # Errors
    ///
    /// If libfabric reports an error, or the connection takes longer than a minute.
    pub fn say(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            let (from, len) = (self.message.as_ptr().cast(), self.message.len());
            // SAFETY: libfabric copies the message before it returns. The address was inserted.
            match unsafe { call!(self.ep => msg, inject(self.ep, from, len, self.peer)) } {
                0 => return Ok(()),
                AGAIN if begun.elapsed() < PATIENCE => self.progress()?,
                code => return Err(format!("fi_inject failed with {code}").into()),
            };
            thread::yield_now();
        }
    }

    /// Waits for a message, while no write or read is under way.
    ///
    /// # Errors
    ///
    /// If libfabric reports an error, or none has come within a minute.
    pub fn hear(&mut self) -> Result<(), Error> {
        let (begun, nothing) = (Instant::now(), ptr::null_mut());
        let (to, len) = (self.message.as_mut_ptr().cast(), self.message.len());
        // SAFETY: the buffer lives as long as this value, which closes the endpoint before it goes.
        let code = unsafe { call!(self.ep => msg, recv(self.ep, to, len, nothing, ANYBODY, nothing)) };
        if code != 0 {
            return Err(format!("fi_recv failed with {code}").into());
        }
        while self.progress()? == 0 {
            // The other process may have been woken on this core.
            thread::yield_now();
            if begun.elapsed() > PATIENCE {
                return Err("no message has come in a minute".into());
            }
        }
        Ok(())
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let objects: [*mut fid; 6] = [
            self.ep.cast(),
            self.memory.cast(),
            self.av.cast(),
            self.cq.cast(),
            self.domain.cast(),
            self.fabric.cast(),
        ];
        for object in objects {
            // SAFETY: every object begins with its `fid`; each is closed once, users before what they use.
            unsafe {
                if !object.is_null()
                    && let Some(close) = (*(*object).ops).close
                {
                    close(object);
                }
            }
        }
        if !self.info.is_null() {
            // SAFETY: libfabric has made it, and nothing uses it any more.
            unsafe { (self.functions.freeinfo)(self.info) };
        }
    }
}
