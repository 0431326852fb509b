//! Pages in GPU memory: moved between the host, a GPU and another process, where there is a GPU; a
//! reason why not elsewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::{Duration, Instant};

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Other, Random, pattern, rest};
use kv_core::{
    Descriptor, MemoryKind, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportEvent,
};
use kv_nixl::{MemoryError, NixlConfig, NixlError, NixlTransport};
use workers::{Workers, nixl};

const PEER: PeerId = PeerId(1);
const LEN: usize = Workers::FAR_LEN;

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    workers::child(nixl);
}

type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;
type Upload = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
type Download = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;

/// The few calls of CUDA's driver that are needed, looked up at run time.
struct Cuda {
    alloc: Alloc,
    free: Free,
    upload: Upload,
    download: Download,
}

impl Cuda {
    /// The first GPU, made current; or why there is none.
    fn start() -> Result<Cuda, String> {
        // SAFETY: loading the driver's library runs its initializers, nothing else; the symbols have
        // the types that CUDA's header gives them, and the calls get valid pointers.
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            if library.is_null() {
                return Err("no CUDA driver (libcuda.so.1) on this host".to_owned());
            }
            let symbol = |name: &CStr| {
                let found = libc::dlsym(library, name.as_ptr().cast::<c_char>());
                if found.is_null() { Err(format!("libcuda.so.1 has no {name:?}")) } else { Ok(found) }
            };
            let init: unsafe extern "C" fn(u32) -> c_int = std::mem::transmute(symbol(c"cuInit")?);
            let status = init(0);
            if status != 0 {
                return Err(format!("cuInit failed with {status}: no GPU"));
            }
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                std::mem::transmute(symbol(c"cuDevicePrimaryCtxRetain")?);
            let make_current: unsafe extern "C" fn(*mut c_void) -> c_int =
                std::mem::transmute(symbol(c"cuCtxSetCurrent")?);
            let mut context = std::ptr::null_mut();
            let (retained, current) = (retain(&raw mut context, 0), make_current(context));
            if (retained, current) != (0, 0) {
                return Err(format!("no context on GPU 0: {retained}, {current}"));
            }
            Ok(Cuda {
                alloc: std::mem::transmute::<*mut c_void, Alloc>(symbol(c"cuMemAlloc_v2")?),
                free: std::mem::transmute::<*mut c_void, Free>(symbol(c"cuMemFree_v2")?),
                upload: std::mem::transmute::<*mut c_void, Upload>(symbol(c"cuMemcpyHtoD_v2")?),
                download: std::mem::transmute::<*mut c_void, Download>(symbol(c"cuMemcpyDtoH_v2")?),
            })
        }
    }
}

#[test]
fn pages_of_a_gpu_go_to_another_process_and_come_back() {
    let Some(nixl) = nixl() else { return };
    let cuda = match Cuda::start() {
        Ok(cuda) => cuda,
        Err(reason) => {
            println!("SKIPPED: pages in GPU memory: {reason}");
            return;
        }
    };
    let mut random = Random::new("pages_of_a_gpu_go_to_another_process_and_come_back");
    let mut addr = 0;
    // SAFETY: a pointer to a variable for the address.
    assert_eq!(unsafe { (cuda.alloc)(&raw mut addr, LEN) }, 0, "cuMemAlloc");
    let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
    // SAFETY: the memory is allocated on GPU 0, and freed after the transport.
    unsafe { transport.adopt_device(0, addr, LEN as u64) }.unwrap();
    let region = Region::dram(RegionRole::Kv, addr, LEN as u64, 1);
    transport.register(&region.memory(MemoryKind::Vram, 0)).unwrap();
    let other = Process::start("default", Job::Serve, &transport.metadata().unwrap());
    transport.connect(PEER, other.metadata()).unwrap();
    transport.permit(PEER, Time::MAX);

    let whole = |id, op| {
        let descriptor = Descriptor {
            local_region: 0,
            remote_region: 0,
            local_offset: 0,
            remote_offset: 0,
            len: LEN as u64,
        };
        Post { id: PostId(id), op, descriptors: vec![descriptor], notify: None }
    };
    let mut run = |post: Post| {
        let id = post.id;
        transport.post(PEER, post).unwrap();
        let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while events.is_empty() {
            assert!(Instant::now() < deadline, "no end of {id}");
            transport.poll(Time::ZERO, &mut events);
            rest(&transport, Duration::from_millis(1));
        }
        assert_eq!(events, [TransportEvent::Posted { post: id, result: Ok(()) }]);
    };
    let content = random.bytes(LEN);
    let mut got = vec![0; LEN];
    let download = |got: &mut [u8]| {
        // SAFETY: both ranges are of this length, and no transfer runs.
        assert_eq!(unsafe { (cuda.download)(got.as_mut_ptr().cast(), addr, LEN) }, 0, "download");
    };
    run(whole(1, Op::Read));
    download(&mut got);
    assert!(got == pattern(LEN), "READ into the GPU");
    // SAFETY: as above.
    assert_eq!(unsafe { (cuda.upload)(addr, content.as_ptr().cast(), LEN) }, 0, "upload");
    run(whole(2, Op::Write));
    // SAFETY: as above.
    assert_eq!(unsafe { (cuda.upload)(addr, vec![0_u8; LEN].as_ptr().cast(), LEN) }, 0, "upload");
    run(whole(3, Op::Read));
    download(&mut got);
    assert!(got == content, "WRITE out of the GPU, and back");
    drop(transport);
    // SAFETY: nothing refers to it any more.
    assert_eq!(unsafe { (cuda.free)(addr) }, 0, "cuMemFree");
}

#[test]
fn device_memory_is_refused_where_it_cannot_be() {
    let Some(nixl) = nixl() else { return };
    let mut transport = NixlTransport::new(nixl, NixlConfig::default()).unwrap();
    // SAFETY: none of these is taken.
    let refused = unsafe { [transport.adopt_device(0, 0, 10), transport.adopt_device(0, 4096, u64::MAX)] };
    assert!(
        refused.iter().all(|result| matches!(result, Err(NixlError::Memory(MemoryError::Range { .. })))),
        "{refused:?}"
    );
}
