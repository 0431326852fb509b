//! Everything unsafe: loading the library, the environment, mappings and raw copies, and what
//! `nixl-sys` leaves to its caller.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;
use std::slice;
use std::sync::Arc;

use kv_core::MemoryKind;
use nixl_sys::{MemType, MemoryRegion, NixlDescriptor};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{NixlError, PoolError};
use crate::guards;
use crate::metadata::Place;
use crate::plane::NixlPlane;
use crate::pool::HostPool;

/// Loads a shared library for good, and looks for these symbols in it. `Err` says what is wrong.
pub(crate) fn load_library(path: &Path, symbols: &[&CStr]) -> Result<(), String> {
    use std::os::unix::ffi::OsStrExt;
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| "its path has a NUL in it".to_owned())?;
    // SAFETY: the name is a C string. Loading runs the library's initializers: the caller was asked
    // for this library by its user.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: `dlerror` returns null or a C string that stays valid until the next call of the
        // family on this thread.
        let reason = unsafe {
            let text = libc::dlerror();
            if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
        };
        return Err(reason.unwrap_or_else(|| "dlopen failed".to_owned()));
    }
    // SAFETY: the library is loaded and never unloaded.
    let missing: Vec<_> =
        symbols.iter().filter(|symbol| unsafe { libc::dlsym(library, symbol.as_ptr()) }.is_null()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("it is another version of NIXL: it lacks {missing:?}"))
}

/// Sets variables if this is the only thread of the process; else says how many there are.
pub(crate) fn set_variables_alone(pairs: &[(&'static str, String)]) -> Result<(), usize> {
    // Without /proc there is no proof.
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    if threads != 1 {
        return Err(threads);
    }
    for (name, value) in pairs {
        // SAFETY: no other thread exists that could read the environment, and none can come into
        // being but through this one.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}

/// Whether the kernel lets processes of this host copy each other's memory, as far as one process can
/// see: a filter of system calls would stop it, and Yama's stricter settings.
pub(crate) fn may_copy_between_processes() -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if !matches!(scope.trim(), "" | "0" | "1") {
        return false;
    }
    let (from, mut into) = (1_u8, 0_u8);
    let local = libc::iovec { iov_base: ptr::from_mut(&mut into).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: ptr::from_ref(&from).cast_mut().cast(), iov_len: 1 };
    // SAFETY: both ranges are one byte of a variable that lives through the call; only `into` is
    // written, through a pointer made from an exclusive borrow.
    let copied =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    copied == 1
}

/// Puts the missing [`guards`](crate::guards::guards) into the environment although other threads
/// run: for test harnesses and the like, which start threads before anything else can happen.
///
/// # Safety
///
/// During the call no other thread reads or changes the environment other than through
/// `std::env`: no C library looks up a time zone, a host name or a locale.
pub unsafe fn apply_among_threads() {
    for guard in guards::missing() {
        // SAFETY: the caller excludes readers that do not take the lock of `std::env`.
        unsafe { std::env::set_var(guard.name, guard.value) };
    }
}

/// Private anonymous memory.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: usize,
    len: usize,
}

impl Mapping {
    /// `len` bytes at a multiple of `align`, both multiples of the page size.
    pub(crate) fn anonymous(len: usize, align: usize) -> io::Result<Mapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let whole = len.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel chooses the address, so no memory of ours is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), whole, prot, MapFlags::PRIVATE) }? as usize;
        let addr = start.next_multiple_of(align);
        for (at, size) in [(start, addr - start), (addr + len, start + whole - addr - len)] {
            if size > 0 {
                // SAFETY: the margins are part of the mapping just made, and nothing knows them.
                let _ = unsafe { munmap(at as *mut c_void, size) };
            }
        }
        Ok(Mapping { addr, len })
    }

    /// Asks for huge pages. A hint: failure costs speed only.
    pub(crate) fn prefer_huge_pages(&self) {
        let _ = self.advise(Advice::LinuxHugepage);
    }

    /// Makes all pages present, and keeps them out of forked children: a card may write to them.
    pub(crate) fn populate(&self) -> io::Result<()> {
        self.advise(Advice::LinuxDontFork)?;
        match self.advise(Advice::LinuxPopulateWrite) {
            // Older than Linux 5.14: the first transfer will be slower.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            result => result,
        }
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is our mapping, and none of the advices used here changes its bytes.
        unsafe { madvise(self.addr as *mut c_void, self.len, advice) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours; whoever uses it holds an `Arc` of this mapping.
        let _ = unsafe { munmap(self.addr as *mut c_void, self.len) };
    }
}

/// A range of memory that may be registered: part of a pool, which it keeps mapped, or adopted by a
/// promise of the owner.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    kind: MemoryKind,
    device: u64,
    addr: u64,
    len: u64,
    mapping: Option<Arc<Mapping>>,
    file: Option<Arc<File>>,
}

impl Memory {
    /// The first `len` bytes of a mapping.
    pub(crate) fn of(mapping: &Arc<Mapping>, len: usize) -> Memory {
        Memory {
            kind: MemoryKind::Dram,
            device: 0,
            addr: mapping.addr as u64,
            len: len.min(mapping.len) as u64,
            mapping: Some(Arc::clone(mapping)),
            file: None,
        }
    }

    /// The first `len` bytes of a file, which stays open.
    pub(crate) fn of_file(file: &Arc<File>, len: u64) -> Memory {
        let device = u64::from(file.as_raw_fd().unsigned_abs());
        let file = Some(Arc::clone(file));
        Memory { kind: MemoryKind::File, device, addr: 0, len, mapping: None, file }
    }

    /// How long its file is now, if it is one.
    pub(crate) fn file_len(&self) -> Option<u64> {
        self.file.as_ref()?.metadata().ok().map(|about| about.len())
    }

    /// The part of this memory that is this range of this kind; `None` if it is not inside.
    pub(crate) fn part(&self, kind: MemoryKind, device: u64, addr: u64, len: u64) -> Option<Memory> {
        let offset = addr.checked_sub(self.addr)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // NUMA nodes are a remark about host memory; device numbers are part of an address.
        let same = kind == self.kind && (kind == MemoryKind::Dram || device == self.device);
        (inside && same && len > 0).then(|| Memory { device, addr, len, ..self.clone() })
    }

    /// As a region with items of this length.
    pub(crate) fn place(&self, item_len: u64) -> Place {
        Place { addr: self.addr, len: self.len, item_len, kind: self.kind, device: self.device() }
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        self.kind
    }

    pub(crate) fn device(&self) -> u64 {
        // NIXL matches registrations by device; ours are not told apart by NUMA node.
        if self.kind == MemoryKind::Dram { 0 } else { self.device }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Copies from here into `out`; false if out of bounds, or not memory of the host's pools.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) -> bool {
        let Some(from) = self.checked(at, out.len()) else { return false };
        // SAFETY: the source is inside a mapping that `self` keeps; the target is borrowed
        // exclusively and thus distinct. No reference to the source is made.
        unsafe { ptr::copy(from as *const u8, out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies `bytes` to here; false as for `read`.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> bool {
        let Some(to) = self.checked(at, bytes.len()) else { return false };
        // SAFETY: the target is inside a mapping that `self` keeps, the source is borrowed; `copy`
        // allows them to overlap.
        unsafe { ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        true
    }

    fn checked(&self, at: usize, size: usize) -> Option<usize> {
        let end = at.checked_add(size)?;
        (self.mapping.is_some() && end as u64 <= self.len).then_some(self.addr as usize + at)
    }
}

impl MemoryRegion for Memory {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.addr as *const u8
    }

    fn size(&self) -> usize {
        self.len as usize
    }
}

impl NixlDescriptor for Memory {
    fn mem_type(&self) -> MemType {
        mem_type(self.kind)
    }

    fn device_id(&self) -> u64 {
        self.device()
    }
}

/// NIXL's name of a kind of memory.
pub(crate) fn mem_type(kind: MemoryKind) -> MemType {
    match kind {
        MemoryKind::Dram => MemType::Dram,
        MemoryKind::Vram => MemType::Vram,
        MemoryKind::File => MemType::File,
    }
}

impl HostPool {
    /// The bytes of a range.
    ///
    /// # Safety
    ///
    /// While the slice lives, nobody writes to the range: not this process, and no peer that has
    /// been given these pages.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> Result<&[u8], PoolError> {
        let addr = self.checked_addr(offset, len)?;
        // SAFETY: the range is mapped while `self` lives; the caller excludes writers.
        Ok(unsafe { slice::from_raw_parts(addr as *const u8, len) })
    }

    /// The bytes of a range, to be changed.
    ///
    /// # Safety
    ///
    /// While the slice lives, nobody else reads or writes the range: not this process, and no peer
    /// that has been given these pages.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> Result<&mut [u8], PoolError> {
        let addr = self.checked_addr(offset, len)?;
        // SAFETY: the range is mapped while `self` lives; the caller excludes everyone else.
        Ok(unsafe { slice::from_raw_parts_mut(addr as *mut u8, len) })
    }

    fn checked_addr(&self, offset: usize, size: usize) -> Result<usize, PoolError> {
        let bounds = PoolError::OutOfBounds { len: self.len(), offset, size };
        self.memory().checked(offset, size).ok_or(bounds)
    }
}

impl NixlPlane {
    /// Takes host memory that the server already owns.
    ///
    /// # Safety
    ///
    /// The whole range stays mapped, readable and writable, until the plane has been
    /// [shut down](NixlPlane::shutdown) or dropped, and beyond that for as long as the process lives
    /// if posts were unfinished then: NIXL cannot stop them. And no Rust reference to a page of it
    /// exists while that page is given to a transfer, here or by a peer.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), NixlError> {
        self.adopt_memory(adopted(MemoryKind::Dram, 0, addr, len)?)
    }

    /// Takes memory of a device, say of a GPU: `device` is its index as the backend counts them.
    ///
    /// # Safety
    ///
    /// As for [`adopt`](NixlPlane::adopt), of memory that is allocated on that device.
    pub unsafe fn adopt_device(&mut self, device: u64, addr: u64, len: u64) -> Result<(), NixlError> {
        self.adopt_memory(adopted(MemoryKind::Vram, device, addr, len)?)
    }
}

fn adopted(kind: MemoryKind, device: u64, addr: u64, len: u64) -> Result<Memory, NixlError> {
    let fits =
        usize::try_from(addr).is_ok() && addr.checked_add(len).is_some_and(|end| end <= i64::MAX as u64);
    if addr == 0 || len == 0 || !fits {
        return Err(NixlError::Range { addr, len });
    }
    Ok(Memory { kind, device, addr, len, mapping: None, file: None })
}

/// A value of `nixl-sys` that may move to another thread with the plane that owns it.
#[derive(Debug)]
pub(crate) struct Owned<T>(T);

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Owned<T> {
        Owned(value)
    }
}

/// Only these, and never shared.
pub(crate) trait HeapObject {}
impl HeapObject for nixl_sys::OptArgs {}
impl HeapObject for nixl_sys::NotificationMap {}
// It refers to its agent, which the same engine has, and drops after it.
impl HeapObject for nixl_sys::XferDlistHandle {}

// SAFETY: these types own one C++ object on the heap, without thread-local state; whoever has the
// `Owned` is the only one with access, and an `Owned` is not `Sync`.
unsafe impl<T: HeapObject> Send for Owned<T> {}

impl<T> Deref for Owned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
