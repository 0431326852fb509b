//! Why a message cannot be read. The connection is of no use afterwards.

/// Why a request or an answer cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("the head is not HTTP/1.1")]
    Head,
    #[error("the header exceeds {max} bytes or 64 fields")]
    HeadTooLarge { max: usize },
    #[error("the HTTP version is not supported")]
    Version,
    #[error("Content-Length is not one number")]
    Length,
    #[error("both Content-Length and Transfer-Encoding are given")]
    Framing,
    #[error("the transfer coding is not supported")]
    TransferEncoding,
    #[error("the expectation is not supported")]
    Expectation,
    #[error("the body has {got} bytes; at most {max} are allowed")]
    BodyTooLarge { got: u64, max: usize },
    #[error("the chunked body exceeds {max} bytes")]
    ChunksTooLarge { max: usize },
    #[error("the chunked body is malformed")]
    Chunk,
    #[error("more than {max} interim answers")]
    Interim { max: u32 },
    #[error("the answer ended early")]
    Truncated,
}

impl HttpError {
    /// The status by which a server answers such a request.
    pub(crate) fn status(self) -> u16 {
        match self {
            HttpError::BodyTooLarge { .. } | HttpError::ChunksTooLarge { .. } => 413,
            HttpError::Expectation => 417,
            HttpError::HeadTooLarge { .. } => 431,
            HttpError::TransferEncoding => 501,
            HttpError::Version => 505,
            _ => 400,
        }
    }

    /// What a client says of such an answer.
    pub(crate) fn text(self) -> &'static str {
        match self {
            HttpError::Head | HttpError::Version => "not HTTP/1.1",
            HttpError::HeadTooLarge { .. } => "header too large",
            HttpError::Length => "Content-Length is not one number",
            HttpError::Framing | HttpError::TransferEncoding => "framing not supported",
            HttpError::Expectation | HttpError::Interim { .. } => "too many interim answers",
            HttpError::BodyTooLarge { .. } | HttpError::ChunksTooLarge { .. } => "too large",
            HttpError::Chunk => "malformed chunks",
            HttpError::Truncated => "ended early",
        }
    }
}
