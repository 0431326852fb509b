//! Posts, from their acceptance to their end.
//!
//! ```text
//! transfer      one post, cut into requests            request   one request on its way
//! line          posts and peers that wait              enqueue   a post gets into the line, or is held
//! permission    until when a peer permits writes       held      writes wait for the permission
//! slices        the content of the next request        speed     the size of the next request
//! turns         requests start, and are watched        lead      how far they run ahead of the peer's thread
//! settle        posts end when their requests have ended
//! ```

pub(crate) mod enqueue;
pub(crate) mod held;
pub(crate) mod lead;
pub(crate) mod line;
pub(crate) mod permission;
pub(crate) mod request;
pub(crate) mod settle;
pub(crate) mod slices;
pub(crate) mod speed;
pub(crate) mod transfer;
pub(crate) mod turns;
