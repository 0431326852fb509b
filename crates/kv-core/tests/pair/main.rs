//! Two nodes, step by step: every frame and post in the test's hand.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alike;
mod both_ways;
mod drain;
mod far;
mod groups;
mod layers;
mod left_out;
mod lost_ways;
mod pair;
mod permission;
mod pull;
mod push;
mod versions;
