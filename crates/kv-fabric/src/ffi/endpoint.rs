//! [`Endpoint`]: an endpoint with its message buffers, registered memory and operations under way, as a safe interface.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;
use std::ptr;
use std::time::Duration;

use kv_host::{HostMemory, Memory};

use super::contexts::Contexts;
use super::fabric::{Address, Objects, Promises};
use super::sockets::{self, Keepalive};
use super::{Library, call, sys};
use crate::error::FabricError;
use crate::topology::{Location, SYS};

/// Bytes of a message. Providers send messages of this size at once, without asking the receiver.
pub(crate) const MESSAGE: usize = 8 << 10;
/// Messages that may arrive before the transport has looked.
const RECEIVES: usize = 128;
/// Messages that may be on their way to peers.
pub(crate) const SENDS: usize = 512;
/// Writes and reads that may be under way.
pub(crate) const MOVES: usize = 4096;
/// Completions that are taken at once.
const TAKEN: usize = 32;

/// Which endpoint to open.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) provider: String,
    pub(crate) address: Option<IpAddr>,
    pub(crate) device: Option<String>,
}

/// The end of something.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Completion<T> {
    /// A message of `len` bytes is in this buffer, which is to be given back.
    Message { buffer: usize, len: usize },
    /// A peer's write with these data is in place.
    Arrived(u64),
    /// A message, write or read has ended; on an error with libfabric's number for it.
    Done { what: T, result: Result<(), i32> },
    /// A receive buffer has failed, and is to be given back.
    Unreceived { buffer: usize },
    /// A completion of nothing that is under way.
    Stray,
}

/// What came of beginning an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The operation is under way.
    Begun,
    /// There is no room now, or the connection is being opened.
    Full,
    /// Refused, with libfabric's number for the reason.
    Failed(i32),
}

/// A range of registered memory here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Near {
    pub(crate) region: usize,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// The place of a range in a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Far {
    pub(crate) addr: u64,
    pub(crate) key: u64,
}

#[derive(Debug)]
pub(super) struct Registered {
    pub(super) memory: Memory,
    pub(super) descriptor: *mut c_void,
}

// SAFETY: the descriptor belongs to a registration of the same endpoint, which moves along.
unsafe impl Send for Registered {}

/// An endpoint. `T` says whose an operation under way is; the value comes back with the completion.
#[derive(Debug)]
pub(crate) struct Endpoint<T> {
    // The first field is dropped first: the provider then uses nothing of the others any more.
    pub(super) objects: Objects,
    pub(super) contexts: Contexts,
    /// Receive buffers, then send buffers.
    pub(super) buffers: Memory,
    pub(super) buffers_descriptor: *mut c_void,
    pub(super) regions: Vec<Registered>,
    /// Of each send buffer and of each move: whose operation is under way.
    pub(super) under_way: Vec<Option<T>>,
    pub(super) idle_sends: Vec<usize>,
    pub(super) idle_moves: Vec<usize>,
    name: Vec<u8>,
    promises: Promises,
    /// Connections that have the keepalive, by descriptor and inode.
    kept_alive: BTreeSet<(RawFd, u64)>,
}

// SAFETY: the descriptor of the buffers belongs to the endpoint, which moves along. All else is `Send`.
unsafe impl<T: Send> Send for Endpoint<T> {}

impl<T: Copy> Endpoint<T> {
    /// Opens an endpoint, and gives it its receive buffers.
    pub(crate) fn open(library: &'static Library, settings: &Settings) -> Result<Endpoint<T>, FabricError> {
        let (objects, name, promises) = Objects::open(library, settings)?;
        if promises.message < MESSAGE {
            return Err(FabricError::Messages { max: promises.message, least: MESSAGE });
        }
        let len = (RECEIVES + SENDS) * MESSAGE;
        let mut endpoint = Endpoint {
            objects,
            contexts: Contexts::new(RECEIVES + SENDS + MOVES),
            buffers: HostMemory::new(len)?.memory().clone(),
            buffers_descriptor: ptr::null_mut(),
            regions: Vec::new(),
            under_way: vec![None; SENDS + MOVES],
            idle_sends: (0..SENDS).rev().collect(),
            idle_moves: (SENDS..SENDS + MOVES).rev().collect(),
            name,
            promises,
            kept_alive: BTreeSet::new(),
        };
        if promises.modes & u64::from(sys::FI_MR_LOCAL) != 0 {
            let access = sys::FI_SEND as u64 | sys::FI_RECV as u64;
            endpoint.buffers_descriptor =
                endpoint.register_range(&endpoint.buffers.clone(), access, 0)?.descriptor;
        }
        for buffer in 0..RECEIVES {
            match endpoint.give_back(buffer) {
                Attempt::Begun => {}
                Attempt::Full => return Err(endpoint.failed("fi_recv", libc::EAGAIN)),
                Attempt::Failed(code) => return Err(endpoint.failed("fi_recv", code)),
            }
        }
        Ok(endpoint)
    }

    /// The endpoint's name, by which peers reach it.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(crate) fn promises(&self) -> Promises {
        self.promises
    }

    /// libfabric's name of the device.
    pub(crate) fn device(&self) -> String {
        self.objects.device().0
    }

    /// Where the device is.
    pub(crate) fn location(&self) -> Location {
        let (name, pci) = self.objects.device();
        Location::of(Path::new(SYS), &name, pci.as_deref())
    }

    /// What libfabric's number for an error means.
    pub(crate) fn text(&self, code: i32) -> &'static str {
        self.objects.library.text(code)
    }

    /// Registers memory as the next region. Its address for peers and its key are returned. `wanted` is the key
    /// where the provider lets this side choose.
    pub(crate) fn register(&mut self, memory: &Memory, wanted: u64) -> Result<Far, FabricError> {
        let access = (sys::FI_READ | sys::FI_WRITE | sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE) as u64;
        let registered = self.register_range(memory, access, wanted)?;
        let virtual_addresses = self.promises.modes & u64::from(sys::FI_MR_VIRT_ADDR) != 0;
        let far = Far { addr: if virtual_addresses { memory.addr() } else { 0 }, key: registered.key };
        let descriptor = registered.descriptor;
        self.regions.push(Registered { memory: memory.clone(), descriptor });
        Ok(far)
    }

    /// Takes back the registration of the last region, which no peer knows.
    pub(crate) fn unregister_last(&mut self) {
        if self.regions.pop().is_some() {
            self.objects.close_last();
        }
    }

    fn register_range(&mut self, memory: &Memory, access: u64, wanted: u64) -> Result<Range, FabricError> {
        let has = |mode: u32| self.promises.modes & u64::from(mode) != 0;
        let bits = 8 * self.promises.key.min(8) as u32;
        let wanted = if bits < 64 { wanted & ((1 << bits) - 1) } else { wanted };
        let mut region: *mut sys::fid_mr = ptr::null_mut();
        // SAFETY: the range is mapped while `memory` or a clone lives, and the endpoint keeps one until the region is
        // closed. A region that has to be bound is bound and enabled before it is used.
        unsafe {
            let domain = self.objects.domain;
            let made = call!(domain => mr, reg(&raw mut (*domain).fid, memory.addr() as *const c_void, memory.len(),
                access, 0, wanted, 0, &raw mut region, ptr::null_mut()));
            self.objects.check("fi_mr_reg", made)?;
            let Some(kept) = ptr::NonNull::new(region) else {
                return Err(self.failed("fi_mr_reg", libc::EINVAL));
            };
            self.objects.regions.push(kept);
            let fid = &raw mut (*region).fid;
            let mut bound = Ok(());
            if has(sys::FI_MR_ENDPOINT) {
                let result = call!(fid => ops, bind(fid, &raw mut (*self.objects.ep).fid, 0));
                bound = self.objects.check("fi_mr_bind", result);
            }
            if bound.is_ok() && (has(sys::FI_MR_ENDPOINT) || has(sys::FI_MR_RMA_EVENT)) {
                let result = call!(fid => ops, control(fid, sys::FI_ENABLE as i32, ptr::null_mut()));
                bound = self.objects.check("fi_mr_enable", result);
            }
            if let Err(error) = bound {
                self.objects.close_last();
                return Err(error);
            }
            Ok(Range { descriptor: (*region).mem_desc, key: (*region).key })
        }
    }

    /// Adds a peer's endpoint to the address table. A name of another length or family than this endpoint's is of
    /// another kind of network.
    pub(crate) fn insert(&mut self, name: &[u8]) -> Result<Address, FabricError> {
        let family = if self.promises.sockets { 2 } else { 0 };
        if name.len() != self.name.len() || name.get(..family) != self.name.get(..family) {
            return Err(FabricError::Name { got: name.len(), ours: self.name.len() });
        }
        let mut address = u64::MAX;
        let av = self.objects.av;
        // SAFETY: the name is as long as names of this endpoint's format are.
        let inserted = unsafe {
            call!(av => ops, insert(av, name.as_ptr().cast(), 1, &raw mut address, 0, ptr::null_mut()))
        };
        if inserted == 1 { Ok(Address(address)) } else { Err(self.failed("fi_av_insert", inserted)) }
    }

    /// Removes a peer's endpoint. Nothing is under way to it.
    pub(crate) fn remove(&mut self, address: Address) {
        let (av, mut address) = (self.objects.av, address.0);
        // SAFETY: the address was inserted.
        unsafe { call!(av => ops, remove(av, &raw mut address, 1, 0)) };
    }

    /// Makes progress, and takes some completions. False if there are none.
    pub(crate) fn poll(&mut self, out: &mut Vec<Completion<T>>) -> bool {
        let mut entries = [const { MaybeUninit::<sys::fi_cq_data_entry>::uninit() }; TAKEN];
        let cq = self.objects.cq;
        // SAFETY: there is room for as many entries as are asked for, in the format of the queue.
        let count = unsafe { call!(cq => ops, read(cq, entries.as_mut_ptr().cast(), TAKEN)) };
        if count == -(sys::FI_EAVAIL as isize) {
            return self.take_error(out);
        }
        let count = usize::try_from(count).unwrap_or(0);
        for entry in entries.iter().take(count) {
            // SAFETY: the queue has filled in the first `count` entries.
            let entry = unsafe { entry.assume_init_ref() };
            let (context, flags, len, data) = (entry.op_context, entry.flags, entry.len, entry.data);
            let remote = flags & sys::FI_REMOTE_CQ_DATA as u64 != 0 && flags & sys::FI_RECV as u64 == 0;
            let done = if remote { Completion::Arrived(data) } else { self.completed(context, len, Ok(())) };
            out.push(done);
        }
        count > 0
    }

    fn take_error(&mut self, out: &mut Vec<Completion<T>>) -> bool {
        let cq = self.objects.cq;
        // SAFETY: the entry is zeroed, so that the provider copies no data into a buffer.
        let (taken, entry) = unsafe {
            let mut entry: sys::fi_cq_err_entry = std::mem::zeroed();
            (call!(cq => ops, readerr(cq, &raw mut entry, 0)), entry)
        };
        if taken <= 0 {
            return false;
        }
        let code = if entry.err == 0 { libc::EIO } else { entry.err };
        let done = self.completed(entry.op_context, 0, Err(code));
        out.push(done);
        true
    }

    fn completed(&mut self, context: *mut c_void, len: usize, result: Result<(), i32>) -> Completion<T> {
        let Some(index) = self.contexts.index(context) else { return Completion::Stray };
        let Some(operation) = index.checked_sub(RECEIVES) else {
            let buffer = index;
            return match result {
                Ok(()) => Completion::Message { buffer, len: len.min(MESSAGE) },
                Err(_) => Completion::Unreceived { buffer },
            };
        };
        let Some(what) = self.under_way.get_mut(operation).and_then(Option::take) else {
            return Completion::Stray;
        };
        if operation < SENDS {
            self.idle_sends.push(operation)
        } else {
            self.idle_moves.push(operation)
        }
        Completion::Done { what, result }
    }

    /// Copies a received message out of its buffer.
    pub(crate) fn message<'a>(&self, buffer: usize, into: &'a mut [u8], len: usize) -> &'a [u8] {
        let into = into.get_mut(..len).unwrap_or_default();
        match self.buffers.read(buffer * MESSAGE, into) {
            Ok(()) => into,
            Err(_) => &[],
        }
    }

    /// True if a write or a read can be begun, as far as this side has room and the provider says that it has.
    pub(crate) fn has_room(&self) -> bool {
        let under_way = SENDS + MOVES - self.idle_sends.len() - self.idle_moves.len();
        !self.idle_moves.is_empty() && under_way < self.promises.under_way
    }

    /// True if there is a buffer for one more message.
    pub(crate) fn has_room_to_send(&self) -> bool {
        !self.idle_sends.is_empty()
    }

    /// True while messages are under way.
    pub(crate) fn is_sending(&self) -> bool {
        self.idle_sends.len() < SENDS
    }

    /// The descriptor that is readable when there is something to poll, if the provider has one.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the completion queue keeps the descriptor open, and this value keeps the queue.
        self.objects.fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Gives the keepalive to the connections that have been opened since the last call, where they are sockets.
    pub(crate) fn keep_alive(&mut self, silence: Duration) {
        if let Some(fd) = self.objects.fd.filter(|_| self.promises.copies)
            && let Ok(new) = sockets::new_connections(fd, &mut self.kept_alive)
        {
            // A connection without it ends when the kernel gives it up.
            for fd in new {
                let _ = Keepalive::within(silence).set(fd);
            }
        }
    }

    /// How many connections have the keepalive.
    #[cfg(test)]
    pub(crate) fn kept_alive(&self) -> usize {
        self.kept_alive.len()
    }

    /// True if the owner may sleep on the descriptor: the provider has nothing to do at once, and has been told to
    /// wake the descriptor.
    pub(crate) fn may_sleep(&self) -> bool {
        let fabric = self.objects.fabric;
        // SAFETY: the queue is of the fabric, and was opened with a descriptor.
        unsafe {
            let mut queues = [&raw mut (*self.objects.cq).fid];
            call!(fabric => ops, trywait(fabric, queues.as_mut_ptr(), 1)) == 0
        }
    }

    pub(super) fn failed(&self, call: &'static str, code: i32) -> FabricError {
        FabricError::Call { call, status: self.text(code), code: code.wrapping_abs() }
    }
}

struct Range {
    descriptor: *mut c_void,
    key: u64,
}

/// The place of a receive buffer, and of a send buffer, in the memory of all.
pub(super) fn place_of(send: Option<usize>, receive: usize) -> usize {
    send.map_or(receive, |send| RECEIVES + send) * MESSAGE
}

/// The number of an operation's context.
pub(super) fn context_of(operation: usize) -> usize {
    RECEIVES + operation
}
