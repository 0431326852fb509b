//! What requests want, and what they have of that.

use std::time::Duration;

use kv_ec::{EcError, FetchFailure, Request, RequestPoll, Want};

use super::{BLOCK, Host, Server, content, until};

/// Longer than several of the machine's pauses between two tries.
pub const MANY_TRIES: Duration = Duration::from_millis(300);

/// The entries that will not come, with the machine's reasons.
pub fn missing(request: &Request) -> Vec<(usize, EcError)> {
    let why = |why: Option<&FetchFailure>| match why {
        Some(FetchFailure::Machine(error)) => (**error).clone(),
        other => panic!("{other:?}"),
    };
    request.missing().map(|(index, _, failure)| (index, why(failure))).collect()
}

/// The entries that are pinned, and their bytes.
pub fn pinned(host: &Host, request: &Request) -> Vec<(usize, Vec<u8>)> {
    request.entries().map(|(index, entry)| (index, host.bytes(entry))).collect()
}

/// Waits until all entries are here, and compares their bytes.
pub fn until_ready(host: &Host, request: &mut Request, entries: &[(u64, u64)]) {
    until("all entries", || {
        assert_ne!(request.poll(), RequestPoll::EncodeLocally, "{:?}", missing(request));
        request.poll() == RequestPoll::Ready
    });
    let expected: Vec<_> =
        entries.iter().map(|&(seed, blocks)| content(seed, blocks * BLOCK)).enumerate().collect();
    assert!(pinned(host, request) == expected, "other bytes");
}

/// Wants of entries, each by its seed and its number of blocks.
pub fn wants(server: &Server, entries: &[(u64, u64)]) -> Vec<Want> {
    entries.iter().map(|&(seed, blocks)| server.want(seed, blocks * BLOCK)).collect()
}

/// Wants that do not wait long for room that does not come.
pub fn hurried(server: &Server, entries: &[(u64, u64)]) -> Vec<Want> {
    let hurried = |want: Want| want.with(|want| want.budget = Some(Duration::from_secs(20)));
    wants(server, entries).into_iter().map(hurried).collect()
}
