//! [`Vram`]: memory of an NVIDIA GPU for the workers of checks.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use kv_core::MemoryKind;
use libloading::{Error, Library};

use crate::Pages;

type Status = c_int;
/// The status of memory that a transport's library has pinned before.
const ALREADY: Status = 712;

/// The calls of CUDA's driver that are needed, looked up at run time: `libcuda.so.1` comes with the GPU's driver.
struct Driver {
    init: unsafe extern "C" fn(c_uint) -> Status,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> Status,
    make_current: unsafe extern "C" fn(*mut c_void) -> Status,
    wait: unsafe extern "C" fn() -> Status,
    alloc: unsafe extern "C" fn(*mut u64, usize) -> Status,
    free: unsafe extern "C" fn(u64) -> Status,
    zero: unsafe extern "C" fn(u64, u8, usize) -> Status,
    upload: unsafe extern "C" fn(u64, *const c_void, usize) -> Status,
    download: unsafe extern "C" fn(*mut c_void, u64, usize) -> Status,
    pin: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> Status,
    unpin: unsafe extern "C" fn(*mut c_void) -> Status,
    copy: unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> Status,
}

impl Driver {
    fn load() -> Result<Driver, Error> {
        // SAFETY: loading the driver's library runs its initializers, nothing else; the functions have the types that
        // CUDA's header gives them, and the library is never unloaded.
        unsafe {
            let library = Box::leak(Box::new(Library::new("libcuda.so.1")?));
            Ok(Driver {
                init: *library.get(b"cuInit\0")?,
                retain: *library.get(b"cuDevicePrimaryCtxRetain\0")?,
                make_current: *library.get(b"cuCtxSetCurrent\0")?,
                wait: *library.get(b"cuCtxSynchronize\0")?,
                alloc: *library.get(b"cuMemAlloc_v2\0")?,
                free: *library.get(b"cuMemFree_v2\0")?,
                zero: *library.get(b"cuMemsetD8_v2\0")?,
                upload: *library.get(b"cuMemcpyHtoD_v2\0")?,
                download: *library.get(b"cuMemcpyDtoH_v2\0")?,
                pin: *library.get(b"cuMemHostRegister_v2\0")?,
                unpin: *library.get(b"cuMemHostUnregister\0")?,
                copy: *library.get(b"cuMemcpyAsync\0")?,
            })
        }
    }
}

/// The first GPU of this host, with its primary context, which CUDA's runtime uses, too.
pub struct Gpu {
    driver: Driver,
    context: usize,
}

impl Gpu {
    /// The first GPU, made current in this thread; or why there is none.
    pub fn first() -> Result<&'static Gpu, &'static str> {
        static GPU: OnceLock<Result<Gpu, String>> = OnceLock::new();
        let gpu = GPU.get_or_init(Gpu::start).as_ref().map_err(String::as_str)?;
        gpu.make_current();
        Ok(gpu)
    }

    fn start() -> Result<Gpu, String> {
        let driver = Driver::load().map_err(|error| format!("no driver of CUDA on this host: {error}"))?;
        let mut context = ptr::null_mut();
        // SAFETY: a pointer to a variable for the context.
        let status = unsafe { [(driver.init)(0), (driver.retain)(&raw mut context, 0)] };
        if status != [0, 0] {
            return Err(format!(
                "no GPU on this host: cuInit and cuDevicePrimaryCtxRetain end with {status:?}"
            ));
        }
        Ok(Gpu { driver, context: context as usize })
    }

    /// Pins this memory of the host, as servers pin their buffers for copies, so that the GPU reaches the memory by itself.
    /// `None` if the memory was pinned before.
    pub fn pin(&'static self, addr: u64, len: usize) -> Option<Pinned> {
        self.make_current();
        // SAFETY: the driver refuses memory that is not there.
        let status = unsafe { (self.driver.pin)(addr as *mut c_void, len, 0) };
        assert!([0, ALREADY].contains(&status), "cuMemHostRegister ends with {status}");
        (status == 0).then(|| Pinned { gpu: self, addr })
    }

    /// Copies blocks of `len` bytes from the first address of each pair to the second, and returns when they are there:
    /// what CUDA itself takes, for benches.
    ///
    /// # Safety
    ///
    /// The blocks lie in this GPU's memory or in [pinned](Gpu::pin) memory, and nothing else uses those that are written.
    pub unsafe fn copy(&self, len: usize, blocks: impl IntoIterator<Item = (u64, u64)>) {
        self.make_current();
        for (from, into) in blocks {
            // SAFETY: the caller's.
            let status = unsafe { (self.driver.copy)(into, from, len, ptr::null_mut()) };
            assert_eq!(status, 0, "cuMemcpyAsync");
        }
        // SAFETY: the context is current.
        assert_eq!(unsafe { (self.driver.wait)() }, 0, "cuCtxSynchronize");
    }

    /// CUDA's calls are for the context that is current in their thread.
    fn make_current(&self) {
        // SAFETY: the context is retained for ever.
        assert_eq!(unsafe { (self.driver.make_current)(self.context as *mut c_void) }, 0, "cuCtxSetCurrent");
    }
}

/// Keeps memory of the host pinned, so that a GPU reaches the memory. Drop this value before the memory is freed: CUDA refuses
/// to allocate at the addresses of memory that was freed while it was pinned.
pub struct Pinned {
    gpu: &'static Gpu,
    addr: u64,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.gpu.make_current();
        // SAFETY: the driver refuses memory that is not pinned.
        let status = unsafe { (self.gpu.driver.unpin)(self.addr as *mut c_void) };
        assert_eq!(status, 0, "cuMemHostUnregister");
    }
}

/// Memory of a GPU, of zero bytes at first. Dropping it frees it.
pub struct Vram {
    gpu: &'static Gpu,
    addr: u64,
    len: usize,
}

impl Vram {
    /// Allocates `len` bytes as a server does whose memory other processes may reach (`cuMemAlloc`).
    pub fn new(gpu: &'static Gpu, len: usize) -> Vram {
        gpu.make_current();
        let mut addr = 0;
        // SAFETY: a pointer to a variable for the address, and the allocated range.
        let status = unsafe {
            [(gpu.driver.alloc)(&raw mut addr, len), (gpu.driver.zero)(addr, 0, len), (gpu.driver.wait)()]
        };
        assert_eq!(status, [0; 3], "cuMemAlloc of {len} bytes, cuMemsetD8 and cuCtxSynchronize");
        Vram { gpu, addr, len }
    }

    /// The address on the GPU.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "there is no empty memory")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies bytes from `offset` on to the host.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let addr = self.range(offset, out.len());
        // SAFETY: both ranges are in bounds.
        let status = unsafe { (self.gpu.driver.download)(out.as_mut_ptr().cast(), addr, out.len()) };
        assert_eq!(status, 0, "cuMemcpyDtoH");
    }

    /// Copies bytes from the host to `offset`, and returns when they are there.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let addr = self.range(offset, bytes.len());
        // SAFETY: both ranges are in bounds. The first call may return when the bytes are on their way.
        let status = unsafe {
            [(self.gpu.driver.upload)(addr, bytes.as_ptr().cast(), bytes.len()), (self.gpu.driver.wait)()]
        };
        assert_eq!(status, [0; 2], "cuMemcpyHtoD and cuCtxSynchronize");
    }

    /// Regions of these lengths in memory of the GPU, which `adopt` is given: its address, and its length.
    pub fn pages(gpu: &'static Gpu, lens: &[usize], adopt: impl FnOnce(u64, u64)) -> Pages<Vram> {
        let make = |room| {
            let memory = Vram::new(gpu, room);
            adopt(memory.addr, room as u64);
            (memory.addr, memory)
        };
        let read = |memory: &Vram, at, out: &mut [u8]| {
            memory.read(at, out);
            Ok(())
        };
        let write = |memory: &Vram, at, bytes: &[u8]| {
            memory.write(at, bytes);
            Ok(())
        };
        Pages::new(lens, make, read, write).on(MemoryKind::Vram, 0)
    }

    /// The address of a range, with the context made current.
    fn range(&self, offset: usize, len: usize) -> u64 {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes at {offset} of {}", self.len);
        self.gpu.make_current();
        self.addr + offset as u64
    }
}

impl Drop for Vram {
    fn drop(&mut self) {
        self.gpu.make_current();
        // SAFETY: what uses the memory has been dropped before.
        unsafe { (self.gpu.driver.free)(self.addr) };
    }
}
