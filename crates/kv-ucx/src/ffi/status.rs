//! UCX's status codes.

use std::ffi::{CStr, c_void};

use kv_core::TransportError;

use super::api::Api;
use super::bindings::ucs_status_t;

/// The status of a call that has succeeded.
const OK: ucs_status_t = 0;
/// The smallest status of UCX (`UCS_ERR_LAST`). Smaller numbers are addresses of requests.
const LAST: isize = -100;

/// A status that says why a call of UCX has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(ucs_status_t);

impl Status {
    /// The status for a request to an endpoint that is closed already (`UCS_ERR_CANCELED`).
    pub(crate) const CLOSED: Status = Status(-16);
    /// The status of a peer that cannot be reached (`UCS_ERR_UNREACHABLE`).
    pub(crate) const UNREACHABLE: Status = Status(-6);
    /// The status of a call that is not over (`UCS_INPROGRESS`).
    pub(crate) const IN_PROGRESS: ucs_status_t = 1;

    /// `Err` if the status is one of failure.
    pub(crate) fn check(status: ucs_status_t) -> Result<(), Status> {
        if status == OK { Ok(()) } else { Err(Status(status)) }
    }

    /// The number of the status, as UCX defines it.
    pub(crate) fn code(self) -> i32 {
        i32::from(self.0)
    }

    /// What UCX says of the status.
    pub(crate) fn words(self, api: &Api) -> &'static str {
        // SAFETY: UCX returns a C string for every number; it lies in the library, which is never unloaded.
        let words: &'static CStr = unsafe { CStr::from_ptr(api.ucp.ucs_status_string(self.0)) };
        words.to_str().unwrap_or("a status without a name")
    }

    /// The error of a call.
    pub(crate) fn of(self, api: &Api, call: &'static str) -> TransportError {
        TransportError::Backend { call, status: self.words(api), code: Some(self.code()) }
    }
}

/// What a call has returned that may go on in the background.
pub(crate) enum Started {
    /// The operation is over.
    Done,
    /// The operation goes on; its callback will be called.
    Pending(*mut c_void),
    /// The operation has failed; no callback will be called.
    Failed(Status),
}

impl Started {
    /// Reads UCX's encoding: nothing, the address of a request, or a negative status.
    pub(crate) fn of(pointer: *mut c_void) -> Started {
        match pointer as isize {
            0 => Started::Done,
            status @ LAST..0 => Started::Failed(Status(status as ucs_status_t)),
            _ => Started::Pending(pointer),
        }
    }
}
