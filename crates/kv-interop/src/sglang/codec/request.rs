//! The metadata of a request: into which pages and which aux row a decode worker wants the request.

use bytes::Bytes;

use super::fields::{Frames, GUARD, MAX_AGENT, MAX_HOST, Malformed, decimal};

/// Most pages that one message may name.
const MAX_PAGES: usize = 1 << 22;

/// What one decode rank wants of one request (SGLang: `TransferInfo`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) room: u64,
    /// The address of the rank's PULL socket.
    pub(crate) ip: String,
    pub(crate) port: u16,
    /// The name of the rank's agent, under which the rank has registered.
    pub(crate) agent: String,
    /// The pages to write, after the prefix that the rank has already; empty for a dummy.
    pub(crate) pages: Vec<u32>,
    pub(crate) aux: u32,
    /// From how many decode ranks the prefill rank gets such a message for this room.
    pub(crate) required: u32,
    /// True if indices of state components came with the request.
    pub(crate) has_state: bool,
    /// How many tokens the rank has already.
    pub(crate) prefix_tokens: u64,
    /// True if the prefill rank writes nothing to this decode rank.
    pub(crate) dummy: bool,
}

impl Request {
    /// The 11 frames of SGLang 0.5.23.
    pub(crate) fn encode(&self) -> Vec<Bytes> {
        let pages = self.pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        vec![
            Bytes::from_static(GUARD),
            decimal(self.room),
            Bytes::from(self.ip.clone()),
            decimal(self.port),
            Bytes::from(self.agent.clone()),
            if self.dummy { Bytes::new() } else { pages },
            decimal(self.aux),
            decimal(self.required),
            Bytes::new(), // state indices
            decimal(self.prefix_tokens),
            decimal(u8::from(self.dummy)),
        ]
    }

    pub(super) fn decode(frames: &[Bytes]) -> Result<Request, Malformed> {
        let frames = Frames::new("the metadata of a request", frames, 8)?;
        let dummy = frames.number_or(10, "is_dummy", 0, 1)? == 1;
        let pages = frames.u32s(5, "dst_kv_indices", MAX_PAGES)?;
        // SGLang's indices are signed.
        if let Some(page) = pages.iter().find(|page| **page > i32::MAX as u32) {
            let (field, max) = ("dst_kv_indices", i32::MAX as u64);
            return Err(Malformed::Number { field, got: (*page as i32).to_string(), max });
        }
        Ok(Request {
            room: frames.number(1, "bootstrap_room", u64::MAX)?,
            ip: frames.text(2, "decode ip", MAX_HOST)?,
            port: frames.number(3, "decode port", u16::MAX.into())? as u16,
            agent: frames.text(4, "agent_name", MAX_AGENT)?,
            pages,
            aux: match frames.bytes(6) {
                // A dummy may have no row.
                b"None" if dummy => 0,
                _ => frames.number(6, "dst_aux_index", i32::MAX as u64)? as u32,
            },
            required: frames.number(7, "required_dst_info_num", u16::MAX.into())? as u32,
            has_state: frames.bytes(8).iter().any(|byte| *byte != 0),
            prefix_tokens: frames.number_or(9, "decode_prefix_len", 0, u32::MAX.into())?,
            dummy,
        })
    }
}
