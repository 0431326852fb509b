//! SGLang's table of prefill ranks, behind the route `/route`.
//!
//! SGLang's own server counts registrations. This table counts distinct ranks, so that a repeated
//! registration never hides a missing rank.

mod admission;
mod claim;
mod engine;
mod error;
mod leaving;
mod ports;
mod rank;
mod rooms;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use self::admission::Admitted;
pub(crate) use self::claim::{InfoJson, Int, RankInfoJson, RouteJson};
pub(crate) use self::error::RouteMiss;
pub use self::error::SglangRankError;
pub(crate) use self::ports::{Verdict, WatchOrder};
pub use self::rank::{SGLANG_SERVICE, SglangRank};
pub(crate) use self::rooms::{ROOM_BYTES, Rooms};
pub(crate) use self::table::{RouteLimits, RouteTable};
