//! Why an HTTP message cannot be read. The connection cannot be used afterwards.

/// Why a request or an answer cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("the head is not HTTP/1.1")]
    Head,
    #[error("the head has more than {max} bytes or more than 64 fields")]
    HeadTooLarge { max: usize },
    #[error("the HTTP version is not 1.0 or 1.1")]
    Version,
    #[error("Content-Length is not one number")]
    Length,
    #[error("both Content-Length and Transfer-Encoding are given")]
    Framing,
    #[error("the transfer coding is not supported; only chunked is")]
    TransferEncoding,
    #[error("the expectation is not supported; only 100-continue is")]
    Expectation,
    #[error("the body has {got} bytes; at most {max} are allowed")]
    BodyTooLarge { got: u64, max: usize },
    #[error("the chunked body has more than {max} bytes, or its trailer more than 8192")]
    ChunksTooLarge { max: usize },
    #[error("the chunked body is malformed")]
    Chunk,
    #[error("more than {max} interim answers")]
    Interim { max: u32 },
    #[error("the answer ended early")]
    Truncated,
}

impl HttpError {
    /// The HTTP status with which the server answers such a request.
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

    /// The text by which the client reports such an answer of a server.
    pub(crate) fn text(self) -> &'static str {
        match self {
            HttpError::Head | HttpError::Version => "the head is not HTTP/1.1",
            HttpError::HeadTooLarge { .. } => "the head is too large",
            HttpError::Length => "Content-Length is not one number",
            HttpError::Framing | HttpError::TransferEncoding => "the body's framing is not supported",
            HttpError::Expectation | HttpError::Interim { .. } => "too many interim answers came first",
            HttpError::BodyTooLarge { .. } | HttpError::ChunksTooLarge { .. } => "the body is too large",
            HttpError::Chunk => "the chunked body is malformed",
            HttpError::Truncated => "the connection ended in the middle of the answer",
        }
    }
}
