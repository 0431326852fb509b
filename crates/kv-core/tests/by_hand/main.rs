//! One node, step by step, against a peer that says what no well-behaved peer says, or says it at
//! the worst moment.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod asking;
mod bounds;
mod faults;
mod granting;
mod groups;
mod hostility;
mod meeting;
mod memory;
mod reading;
mod receiving;
mod reopened;
mod serving;
mod solo;
mod tracing;
mod ways;
