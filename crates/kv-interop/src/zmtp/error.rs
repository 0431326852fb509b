//! What a peer's bytes are refused for.

/// Why a connection ended: the peer does not speak ZMTP 3, or does not keep to it, or to the bounds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ZmtpError {
    /// The first bytes are not those of ZMTP 2 or later: the peer speaks another protocol.
    #[error("byte {at} of the greeting is {got:#04x}; ZMTP has {want:#04x} there")]
    Signature {
        /// The position of the byte in the greeting, from 0.
        at: usize,
        /// The byte that came.
        got: u8,
        /// The byte that ZMTP prescribes.
        want: u8,
    },
    /// The peer speaks ZMTP 1 or 2, as libzmq before 4.0 did.
    #[error("the peer's ZMTP version is {theirs}; this side speaks version 3")]
    Version {
        /// The major version of the peer.
        theirs: u8,
    },
    /// The peer wants credentials or encryption (`PLAIN`, `CURVE`), which vLLM and SGLang do not set.
    #[error("the peer's security mechanism is {theirs:?}; this side has \"NULL\"")]
    Mechanism {
        /// The name of the peer's mechanism.
        theirs: String,
    },
    /// A frame has flags that do not exist, or a command is said to have another part.
    #[error("the flags of a frame are {0:#04x}; ZMTP has 0x00 to 0x04, and 0x06")]
    Flags(u8),
    /// A frame, or the message to which the frame belongs, would be longer than this side allows.
    #[error("a {what} of at least {got} bytes is announced; at most {max} are allowed")]
    Length {
        /// What is too long: `command` or `message`.
        what: &'static str,
        /// The bytes of the message so far, and of the frame that is announced.
        got: u64,
        /// The most bytes allowed.
        max: usize,
    },
    /// A message has more than [`MAX_PARTS`](crate::message::MAX_PARTS) parts.
    #[error("a message has more than {max} parts")]
    Parts {
        /// The most parts allowed.
        max: usize,
    },
    /// A command does not hold what its name promises.
    #[error("the field {field} of the command {command} is cut off or too long")]
    Command {
        /// The name of the command.
        command: &'static str,
        /// The field that could not be read.
        field: &'static str,
    },
    /// A message, or another command, came before the peer was ready.
    #[error("{got} came where READY must come")]
    NotReady {
        /// `a message` or `another command`.
        got: &'static str,
    },
    /// The peer has refused the connection with ERROR.
    #[error("the peer refuses the connection: {reason:?}")]
    Refused {
        /// The reason that the peer gives.
        reason: String,
    },
    /// The peer's socket is of a type that does not go with this side's socket.
    #[error("the peer's socket is {theirs:?}, which does not go with {ours}")]
    SocketType {
        /// The type of this side's socket.
        ours: &'static str,
        /// The type that the peer names in READY.
        theirs: String,
    },
}
