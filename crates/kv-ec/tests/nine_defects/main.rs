//! Nine defects that a connector for encoder caches is known to have had, and that this one must not have. One
//! file for each way to see them: machines whose every frame is in the test's hand, and workers with threads.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod fleet;
mod peers;
mod stale;
mod threads;
mod words;

#[path = "../support/mod.rs"]
mod support;
