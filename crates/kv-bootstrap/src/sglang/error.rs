//! Why the description of a rank is not valid, why SGLang's route table refuses a registration, and why the table has no
//! answer.

use crate::place::Place;

/// Why a registration was refused. The texts of the first two variants are part of SGLang's protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RouteError {
    #[error("DeepSeek-V4.1 DSpark PD layout differs across prefill ranks")]
    SpecLayout,
    #[error("Inconsistent prefill allocation policies")]
    AllocationPolicy,
    #[error("{field} is {claimed}, but the ranks already registered have {registered}")]
    Topology { field: &'static str, registered: u32, claimed: u32 },
    #[error(transparent)]
    Rank(#[from] SglangRankError),
    /// Another process serves at this place. SGLang's own server would let the later one win.
    #[error(
        "{place} of the engine at this bootstrap address lives at {addr}: give this engine a bootstrap address of \
         its own, or stop the other one first"
    )]
    Occupied { place: Place, addr: String },
    #[error("lease_ttl_s must be a positive number of seconds")]
    Lease,
    #[error("the ranks registered by this client would be {would_be}, the limit is {max}")]
    ClientFull { would_be: usize, max: usize },
    #[error("the table is full: bytes would be {would_be}, the limit is {max}")]
    Full { would_be: usize, max: usize },
}

impl RouteError {
    pub(crate) fn status(&self) -> u16 {
        match self {
            RouteError::ClientFull { .. } => 429,
            RouteError::Full { .. } => 507,
            RouteError::Occupied { .. } => 409,
            _ => 400,
        }
    }
}

/// Why a lookup has no answer yet, or has none at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RouteMiss {
    NotReady {
        registered: usize,
    },
    /// A rank of the engine is gone or does not answer; the text says which.
    Unwell(String),
    Unknown,
}

/// Why the description of a rank is not valid. The rank must be corrected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SglangRankError {
    /// The bytes are not the JSON of `PUT /route`.
    #[error("the body is not valid: {0}")]
    Json(String),
    /// A number is outside its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The name of the JSON field.
        field: &'static str,
        /// The number that was given.
        got: i128,
        /// The smallest number allowed.
        min: i128,
        /// The largest number allowed.
        max: i128,
    },
    /// A text is too long.
    #[error("{field} has {got} bytes; at most {max} are allowed")]
    Length {
        /// The name of the JSON field.
        field: &'static str,
        /// The length of the text in bytes.
        got: usize,
        /// The longest text allowed, in bytes.
        max: usize,
    },
    /// The offer describes another place than the record that holds the offer.
    #[error("the sglang offer has {field} {offered}, but the record has {recorded}")]
    Place {
        /// The name of the field of `parallel`.
        field: &'static str,
        /// The number in the offer.
        offered: u32,
        /// The number in the record.
        recorded: u32,
    },
}
