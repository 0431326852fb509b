//! Host memory in the form that `nixl-sys` registers, for benches beside plain code.

use kv_transfer::nixl::HostMemory;
use nixl_sys::{MemType, MemoryRegion, NixlDescriptor};

/// All of a piece of host memory.
#[derive(Debug)]
pub struct Whole(pub HostMemory);

impl MemoryRegion for Whole {
    #[allow(unsafe_code)]
    unsafe fn as_ptr(&self) -> *const u8 {
        self.0.addr() as *const u8
    }

    fn size(&self) -> usize {
        self.0.len()
    }
}

impl NixlDescriptor for Whole {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}
