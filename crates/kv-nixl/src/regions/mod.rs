//! Memory: where regions are, the lists of their items that NIXL prepares, and files.

pub(crate) mod place;
pub(crate) mod prepared;
pub(crate) mod storage;
