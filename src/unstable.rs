//! What transports, bootstrap clients, further services and test benches are written with. **Unstable**: a
//! release of any kind, a patch included, may change what is here, and the version says nothing about it.
//!
//! A server needs none of these names: it hands transports and clients of this library to a
//! [`Worker`](crate::Worker), and talks to sessions. (The names [`Transport`], [`BootstrapClient`] and the
//! types that errors and events mention are at the root, too; implementing the traits is unstable.) A crate
//! that does use this module depends on one exact version of this one (`kv-transfer = "=0.1.0"`).
//!
//! | to write | what for |
//! |---|---|
//! | a transport | [`Transport`] and the types in its methods; the crate kv-conformance checks it |
//! | a bootstrap client | [`BootstrapClient`], [`RankQuery`], [`RankRecord`] |
//! | a service of its own | [`machine::Machine`], run by [`worker::Worker`] |
//! | a peer in another language, a test bench | [`wire`], [`plan`], [`proto::Node`] |

pub use kv_core::{
    BootstrapClient, BootstrapEvent, CacheGroupList, CacheGroupLists, CacheGroupSpan, Chosen, Descriptor,
    Directions, KV_SERVICE, KV_VERSIONS, KvDataError, MAX_FRAME, MAX_NAME, MAX_OFFER_BYTES, MAX_OFFERS,
    OfferError, Op, Origin, Post, RankQuery, RankRecord, RecordError, Replica, ServiceOffer,
    TRANSPORT_VERSION, Transport, TransportEvent, TransportOffer, TransportWait, Wanted, WayEnd, WriteFence,
};
#[doc(hidden)]
pub use kv_core::{hash, random};
pub use kv_core::{machine, plan, proto, wire};
pub use kv_poll::worker;
