//! Workers with a local transport, for tests: in an arena, or in memory that the "server" owns.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr;

use kv_local::{Arena, LocalConfig, LocalTransport, MemoryError};

use kv_conformance::process::Process;
use kv_conformance::{Harness, Job, Pages, Side};

/// Where a worker's pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In an arena.
    Arena,
    /// In adopted memory.
    Adopted,
}

/// All four ways in which two workers can meet.
pub const PLACES: [(Place, Place); 4] = [
    (Place::Arena, Place::Arena),
    (Place::Arena, Place::Adopted),
    (Place::Adopted, Place::Arena),
    (Place::Adopted, Place::Adopted),
];

/// Where two workers that meet have their pages.
pub struct Places(pub Place, pub Place);

impl Harness for Places {
    type Transport = LocalTransport;
    type Other = Process;
    const FAR_LEN: usize = 32 << 20;

    fn worker(&self, lens: &[usize]) -> Side<LocalTransport> {
        worker(self.0, lens)
    }

    fn partner(&self, lens: &[usize]) -> Side<LocalTransport> {
        worker(self.1, lens)
    }

    fn other(&self, job: Job, peer: &[u8]) -> Process {
        Process::start(&format!("{:?}", self.1), job, peer)
    }

    fn most_descriptors(&self) -> usize {
        if (self.0, self.1) == (Place::Arena, Place::Arena) { 1_000_000 } else { 100_000 }
    }
}

/// The place of this name.
pub fn place(name: &str) -> Place {
    if name == "Arena" { Place::Arena } else { Place::Adopted }
}

/// A worker with regions of these lengths, with gaps between them that nothing may touch.
pub fn worker(place: Place, lens: &[usize]) -> Side<LocalTransport> {
    worker_with(place, lens, LocalConfig::default())
}

/// The same with other limits.
pub fn worker_with(place: Place, lens: &[usize], config: LocalConfig) -> Side<LocalTransport> {
    let mut transport = LocalTransport::new(config.with(|config| config.permit_tracing = true)).unwrap();
    let make = |room| {
        let memory = match place {
            Place::Arena => {
                let arena = Arena::new(room).unwrap();
                transport.add_arena(&arena).unwrap();
                Memory::Arena(arena)
            }
            Place::Adopted => {
                let owned = Owned::new(room);
                // SAFETY: the memory is freed with the worker, after its transport, and nobody refers to it.
                unsafe { transport.adopt(owned.addr as u64, room as u64) }.unwrap();
                Memory::Owned(owned)
            }
        };
        (memory.addr(), memory)
    };
    Pages::new(lens, make, Memory::read, Memory::write).side(transport)
}

enum Memory {
    Arena(Arena),
    Owned(Owned),
}

impl Memory {
    fn addr(&self) -> u64 {
        match self {
            Memory::Arena(arena) => arena.addr(),
            Memory::Owned(owned) => owned.addr as u64,
        }
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<(), MemoryError> {
        match self {
            Memory::Arena(arena) => arena.read(at, out),
            Memory::Owned(owned) => {
                owned.read(at, out);
                Ok(())
            }
        }
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        match self {
            Memory::Arena(arena) => arena.write(at, bytes),
            Memory::Owned(owned) => {
                owned.write(at, bytes);
                Ok(())
            }
        }
    }
}

/// Memory of the server's own.
pub struct Owned {
    addr: usize,
    len: usize,
}

impl Owned {
    fn new(len: usize) -> Owned {
        // SAFETY: the size is not zero.
        let addr = unsafe { alloc_zeroed(Owned::layout(len)) } as usize;
        assert_ne!(addr, 0);
        Owned { addr, len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, 4096).unwrap()
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        assert!(at + out.len() <= self.len);
        // SAFETY: in bounds, and distinct from what is borrowed.
        unsafe { ptr::copy_nonoverlapping((self.addr + at) as *const u8, out.as_mut_ptr(), out.len()) }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: in bounds, and distinct from what is borrowed.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), (self.addr + at) as *mut u8, bytes.len()) }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout.
        unsafe { dealloc(self.addr as *mut u8, Owned::layout(self.len)) }
    }
}
