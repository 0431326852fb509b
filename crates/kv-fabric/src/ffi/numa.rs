//! [`node_of`]: the NUMA node of memory.

use std::ffi::{c_int, c_void};
use std::ptr;

use kv_host::Memory;

/// Pages that are asked for.
const SAMPLES: usize = 16;

/// The node on which memory is, if its pages are there, and all of those that are looked at are on one.
pub(crate) fn node_of(memory: &Memory) -> Option<u16> {
    let step = (memory.len() / SAMPLES).max(1) as u64;
    let pages: [*mut c_void; SAMPLES] = std::array::from_fn(|at| {
        (memory.addr() + (at as u64 * step).min(memory.len() as u64 - 1)) as *mut c_void
    });
    let mut nodes = [-1 as c_int; SAMPLES];
    let nowhere: *const c_int = ptr::null();
    // SAFETY: without nodes to move pages to, the call only says where they are, in a list that is as long as theirs.
    let result = unsafe {
        libc::syscall(libc::SYS_move_pages, 0, SAMPLES, pages.as_ptr(), nowhere, nodes.as_mut_ptr(), 0)
    };
    let mut nodes = nodes.into_iter();
    let first = nodes.next().filter(|_| result == 0)?;
    // What is negative is the reason why a page is nowhere.
    nodes.all(|node| node == first).then(|| u16::try_from(first).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use kv_host::HostMemory;

    use super::*;

    #[test]
    fn memory_is_on_a_node_that_the_host_has() {
        let memory = HostMemory::new(1 << 20).unwrap();
        memory.write(0, &vec![1; 1 << 20]).unwrap();
        let Some(node) = node_of(memory.memory()) else {
            println!("SKIPPED: the kernel does not say on which node memory is");
            return;
        };
        assert!(std::path::Path::new(&format!("/sys/devices/system/node/node{node}")).exists(), "{node}");
    }
}
