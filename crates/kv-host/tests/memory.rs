//! Memory to register, whichever kind it is: its bounds, its clones, and lengths that cannot be.
#![allow(clippy::unwrap_used)]

use std::ops::Deref;

use kv_host::{Arena, HostMemory, Memory, MemoryError};

/// What all kinds of memory promise.
fn keeps_the_contract<M>(new: fn(usize) -> Result<M, MemoryError>)
where
    M: Clone + Deref<Target = Memory>,
{
    copies_are_bounded_by_the_length_asked_for(&new(5000).unwrap());
    clones_are_the_same_memory_and_outlive_each_other(new(4096).unwrap());
    assert!(matches!(new(0), Err(MemoryError::Length { got: 0, .. })));
    assert!(matches!(new(usize::MAX), Err(MemoryError::Length { .. })));
    assert!(matches!(new(1 << 60), Err(MemoryError::Os { .. })));
}

fn copies_are_bounded_by_the_length_asked_for(memory: &Memory) {
    memory.write(4990, &[7; 10]).unwrap();
    let mut out = [0; 10];
    memory.read(4990, &mut out).unwrap();
    assert_eq!(out, [7; 10]);
    let error = MemoryError::OutOfBounds { len: 5000, offset: 4991, size: 10 };
    assert_eq!(memory.write(4991, &out), Err(error));
    assert_eq!(memory.read(4991, &mut out), Err(error));
    assert!(memory.read(usize::MAX, &mut out).is_err());
}

fn clones_are_the_same_memory_and_outlive_each_other(first: impl Clone + Deref<Target = Memory>) {
    let second = first.clone();
    first.write(0, b"kept").unwrap();
    drop(first);
    let mut out = [0; 4];
    second.read(0, &mut out).unwrap();
    assert_eq!(&out, b"kept");
}

#[test]
fn an_arena_is_bounded_memory_that_its_clones_share() {
    keeps_the_contract(Arena::new);
}

#[test]
fn host_memory_is_bounded_memory_that_its_clones_share() {
    keeps_the_contract(HostMemory::new);
}
