//! Two nodes, step by step: every frame and post in the test's hand.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod far;
mod groups;
mod layers;
mod left_out;
mod one_way;
mod pair;
mod pull;
mod push;
