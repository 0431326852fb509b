//! The messages that end a request: `KV_STATUS`, `ABORT` and `ABORT_ACK`.

use bytes::Bytes;

use super::fields::{Frames, MAX_HOST, Malformed, decimal};

pub(super) const KV_STATUS: &[u8] = b"KV_STATUS";
pub(super) const ABORT: &[u8] = b"ABORT";
pub(super) const ABORT_ACK: &[u8] = b"ABORT_ACK";
/// The longest reason that is kept, in bytes.
pub(crate) const MAX_REASON: usize = 512;

/// SGLang's numbers for the states of a request.
pub(crate) const FAILED: u32 = 0;
pub(crate) const SUCCESS: u32 = 4;

/// What has become of a request, as a prefill rank tells the decode ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KvStatus {
    pub(crate) room: u64,
    /// SGLang's number of the state: 4 for success, 0 for failure.
    pub(crate) status: u32,
    /// The number of the prefill rank within its replica.
    pub(crate) rank: u32,
    /// The cause of a failure; empty if none is told.
    pub(crate) reason: String,
}

/// A decode rank gives a request up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Abort {
    pub(crate) room: u64,
    /// The decode rank's PULL socket, if an acknowledgement is wanted.
    pub(crate) reply_to: Option<(String, u16)>,
    /// The number that the acknowledgement repeats; `None` if no acknowledgement is waited for.
    pub(crate) generation: Option<u64>,
}

/// A prefill rank writes nothing more for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AbortAck {
    pub(crate) room: u64,
    pub(crate) rank: u32,
    pub(crate) generation: Option<u64>,
}

impl KvStatus {
    pub(crate) fn encode(&self) -> Vec<Bytes> {
        vec![
            Bytes::from_static(KV_STATUS),
            decimal(self.room),
            decimal(self.status),
            decimal(self.rank),
            Bytes::from(self.reason.clone()),
        ]
    }

    pub(super) fn decode(frames: &[Bytes]) -> Result<KvStatus, Malformed> {
        let frames = Frames::new("KV_STATUS", frames, 4)?;
        let reason = frames.bytes(4);
        let reason = String::from_utf8_lossy(reason.get(..MAX_REASON).unwrap_or(reason));
        let printable = |letter: char| if letter.is_control() { ' ' } else { letter };
        Ok(KvStatus {
            room: frames.number(1, "bootstrap_room", u64::MAX)?,
            status: frames.number(2, "status", u32::MAX.into())? as u32,
            rank: frames.number(3, "prefill_rank", u32::MAX.into())? as u32,
            reason: reason.chars().map(printable).collect(),
        })
    }
}

impl Abort {
    pub(crate) fn encode(&self) -> Vec<Bytes> {
        let mut frames = vec![Bytes::from_static(ABORT), decimal(self.room)];
        if let Some((ip, port)) = &self.reply_to {
            frames.extend([Bytes::from(ip.clone()), decimal(port)]);
            frames.extend(self.generation.map(decimal));
        }
        frames
    }

    pub(super) fn decode(frames: &[Bytes]) -> Result<Abort, Malformed> {
        let count = frames.len();
        let frames = Frames::new("ABORT", frames, 2)?;
        let reply_to = if count < 4 {
            None
        } else {
            let port = frames.number(3, "decode port", u16::MAX.into())? as u16;
            Some((frames.text(2, "decode ip", MAX_HOST)?, port))
        };
        let generation = (count > 4).then(|| frames.number(4, "generation", u64::MAX)).transpose()?;
        Ok(Abort { room: frames.number(1, "bootstrap_room", u64::MAX)?, reply_to, generation })
    }
}

impl AbortAck {
    pub(crate) fn encode(&self) -> Vec<Bytes> {
        let mut frames = vec![Bytes::from_static(ABORT_ACK), decimal(self.room), decimal(self.rank)];
        frames.extend(self.generation.map(decimal));
        frames
    }

    pub(super) fn decode(frames: &[Bytes]) -> Result<AbortAck, Malformed> {
        let count = frames.len();
        let frames = Frames::new("ABORT_ACK", frames, 3)?;
        let generation = (count > 3).then(|| frames.number(3, "generation", u64::MAX)).transpose()?;
        Ok(AbortAck {
            room: frames.number(1, "bootstrap_room", u64::MAX)?,
            rank: frames.number(2, "prefill_rank", u32::MAX.into())? as u32,
            generation,
        })
    }
}
