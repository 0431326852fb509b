//! What an aux row holds, in each dialect: which request the pages belong to, its first token, and how much of its
//! prompt was computed.

use kv_transfer::Room;
use kv_transfer::queue::{AuxLayout, AuxRow, AuxRowError};

use super::model::Sample;

/// The form of the aux rows of a rank. A row is spread over the buffers of the form: each buffer is a region of
/// its own, with as many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuxForm {
    /// One buffer of rows as this library writes them, each a cache line. The digest of the first sample is in the
    /// slot for hidden states.
    Native,
    /// No rows. vLLM's protocol moves none.
    Nothing,
    /// SGLang's ten metadata buffers: the first token in the first buffer, the room in the last one.
    #[cfg(feature = "interop")]
    Sglang,
}

/// The first token of an answer, as an aux row says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstToken {
    /// The token.
    pub token: u32,
    /// The digest of the token's logits; `None` in a form that has no place for the digest.
    pub digest: Option<u64>,
    /// How many tokens of the prompt the prefill rank did not compute; 0 in a form that does not tell.
    pub cached_tokens: u32,
}

/// The layout of rows in the form [`AuxForm::Native`].
const LAYOUT: AuxLayout = AuxLayout { logprobs: 0, top_logprobs: 0, hidden_bytes: 8 };

/// The row of a prompt of so many tokens, of which so many were in a cache, with this first sample.
pub fn row_of(first: Sample, prompt_tokens: usize, cached_tokens: usize) -> AuxRow {
    AuxRow {
        first_token: first.token,
        prompt_tokens: prompt_tokens as u32,
        cached_tokens: cached_tokens as u32,
        logprobs: Vec::new(),
        hidden: first.digest.to_le_bytes().to_vec(),
    }
}

impl AuxForm {
    /// Bytes of a row in each buffer.
    pub fn item_lens(self) -> &'static [u64] {
        match self {
            AuxForm::Native => const { &[LAYOUT.row_len()] },
            AuxForm::Nothing => &[],
            #[cfg(feature = "interop")]
            AuxForm::Sglang => &kv_transfer::interop::sglang::AUX_ITEM_LENS,
        }
    }

    /// Bytes of a row, over all buffers.
    pub fn row_len(self) -> usize {
        self.item_lens().iter().sum::<u64>() as usize
    }

    /// The bytes of the row of a request: the rows of all buffers, one after the other.
    pub fn row(self, room: &Room, row: &AuxRow) -> Result<Vec<u8>, AuxRowError> {
        let mut bytes = vec![0; self.row_len()];
        match self {
            AuxForm::Native => row.encode(&LAYOUT, room, &mut bytes)?,
            AuxForm::Nothing => {}
            #[cfg(feature = "interop")]
            AuxForm::Sglang => {
                bytes[..4].copy_from_slice(&row.first_token.to_le_bytes());
                // SGLang's rooms are numbers.
                if let Room::Number(room) = room {
                    let room_at = sglang_room_at();
                    kv_transfer::interop::sglang::write_room(&mut bytes[room_at..], *room);
                }
            }
        }
        Ok(bytes)
    }

    /// The tag of the request whose row this is; 0 if nobody has written the row, or if the row is damaged.
    pub fn tag(self, row: &[u8]) -> u64 {
        match self {
            AuxForm::Native => LAYOUT.tag(row).unwrap_or(0),
            AuxForm::Nothing => 0,
            #[cfg(feature = "interop")]
            AuxForm::Sglang => match sglang_room(row) {
                0 => 0,
                room => kv_transfer::queue::aux_tag(&Room::Number(room)),
            },
        }
    }

    /// The first token in the row of a request.
    pub fn first(self, room: &Room, row: &[u8]) -> Option<FirstToken> {
        match self {
            AuxForm::Native => {
                let row = AuxRow::decode(&LAYOUT, room, row).ok()?;
                let digest = row.hidden.first_chunk().map(|digest| u64::from_le_bytes(*digest));
                Some(FirstToken { token: row.first_token, digest, cached_tokens: row.cached_tokens })
            }
            AuxForm::Nothing => None,
            #[cfg(feature = "interop")]
            AuxForm::Sglang => {
                let token = row.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))?;
                Some(FirstToken { token, digest: None, cached_tokens: 0 })
            }
        }
    }
}

/// The room in a row of SGLang's buffers; 0 if nobody has written the row.
#[cfg(feature = "interop")]
pub fn sglang_room(row: &[u8]) -> u64 {
    let bytes = row.get(sglang_room_at()..).unwrap_or_default();
    kv_transfer::interop::sglang::room_of_row(bytes).unwrap_or(0)
}

/// The position of the last buffer's row in a row.
#[cfg(feature = "interop")]
fn sglang_room_at() -> usize {
    let lens = AuxForm::Sglang.item_lens();
    AuxForm::Sglang.row_len() - lens.last().map_or(0, |len| *len as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_names_its_request_and_the_first_token() {
        let told = row_of(Sample { token: 70_001, digest: 99 }, 40, 32);
        let tag = kv_transfer::queue::aux_tag(&Room::Number(12));
        let row = AuxForm::Native.row(&Room::Number(12), &told).unwrap();
        assert_eq!((row.len(), AuxForm::Native.tag(&row)), (64, tag));
        let first = FirstToken { token: 70_001, digest: Some(99), cached_tokens: 32 };
        assert_eq!(AuxForm::Native.first(&Room::Number(12), &row), Some(first));
        assert_eq!(AuxForm::Native.first(&Room::Number(13), &row), None, "another request's row");
        assert_eq!(AuxForm::Native.tag(&[0; 64]), 0);
        assert!(AuxForm::Nothing.row(&Room::Number(12), &told).unwrap().is_empty());
        assert_eq!((AuxForm::Nothing.tag(&[]), AuxForm::Nothing.first(&Room::Number(12), &[])), (0, None));
        #[cfg(feature = "interop")]
        {
            let row = AuxForm::Sglang.row(&Room::Number(12), &told).unwrap();
            assert_eq!((row.len(), AuxForm::Sglang.tag(&row), sglang_room(&row)), (1600, tag, 12));
            let first = FirstToken { digest: None, cached_tokens: 0, ..first };
            assert_eq!(AuxForm::Sglang.first(&Room::Number(12), &row), Some(first));
            assert_eq!(AuxForm::Sglang.tag(&[0; 1600]), 0);
        }
    }
}
