//! What an aux row holds, in each dialect: which request the pages belong to, and its first token.

use kv_transfer::Room;
use kv_transfer::queue::aux_tag;

use super::model::Sample;

/// The form of the aux rows of a rank. A row is spread over the buffers of the form: each buffer is a region of
/// its own, with as many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuxForm {
    /// One buffer, whose rows are a cache line: the tag of the request, the digest and the token of the first
    /// sample.
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
}

impl AuxForm {
    /// Bytes of a row in each buffer.
    pub fn item_lens(self) -> &'static [u64] {
        match self {
            AuxForm::Native => &[64],
            AuxForm::Nothing => &[],
            #[cfg(feature = "interop")]
            AuxForm::Sglang => &kv_transfer::interop::sglang::AUX_ITEM_LENS,
        }
    }

    /// Bytes of a row, over all buffers.
    pub fn row_len(self) -> usize {
        self.item_lens().iter().sum::<u64>() as usize
    }

    /// The row of a request with this first sample: the rows of all buffers, one after the other.
    pub fn row(self, room: &Room, first: Sample) -> Vec<u8> {
        let mut row = vec![0; self.row_len()];
        match self {
            AuxForm::Native => {
                row[0..8].copy_from_slice(&aux_tag(room).to_le_bytes());
                row[8..16].copy_from_slice(&first.digest.to_le_bytes());
                row[16..20].copy_from_slice(&first.token.to_le_bytes());
            }
            AuxForm::Nothing => {}
            #[cfg(feature = "interop")]
            AuxForm::Sglang => {
                row[..4].copy_from_slice(&first.token.to_le_bytes());
                // SGLang's rooms are numbers.
                if let Room::Number(room) = room {
                    let room_at = sglang_room_at();
                    kv_transfer::interop::sglang::write_room(&mut row[room_at..], *room);
                }
            }
        }
        row
    }

    /// The tag of the request whose row this is; 0 if nobody has written the row.
    pub fn tag(self, row: &[u8]) -> u64 {
        match self {
            AuxForm::Native => row.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)),
            AuxForm::Nothing => 0,
            #[cfg(feature = "interop")]
            AuxForm::Sglang => match sglang_room(row) {
                0 => 0,
                room => aux_tag(&Room::Number(room)),
            },
        }
    }

    /// The first token in a row.
    pub fn first(self, row: &[u8]) -> Option<FirstToken> {
        let token_at = |at: usize| row.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        match self {
            AuxForm::Native => {
                let digest = row.get(8..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
                Some(FirstToken { token: token_at(16)?, digest })
            }
            AuxForm::Nothing => None,
            #[cfg(feature = "interop")]
            AuxForm::Sglang => Some(FirstToken { token: token_at(0)?, digest: None }),
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
        let first = Sample { token: 70_001, digest: 99 };
        let tag = aux_tag(&Room::Number(12));
        let row = AuxForm::Native.row(&Room::Number(12), first);
        assert_eq!((row.len(), AuxForm::Native.tag(&row)), (64, tag));
        assert_eq!(AuxForm::Native.first(&row), Some(FirstToken { token: 70_001, digest: Some(99) }));
        assert!(AuxForm::Nothing.row(&Room::Number(12), first).is_empty());
        assert_eq!((AuxForm::Nothing.tag(&[]), AuxForm::Nothing.first(&[])), (0, None));
        #[cfg(feature = "interop")]
        {
            let row = AuxForm::Sglang.row(&Room::Number(12), first);
            assert_eq!((row.len(), AuxForm::Sglang.tag(&row), sglang_room(&row)), (1600, tag, 12));
            assert_eq!(AuxForm::Sglang.first(&row), Some(FirstToken { token: 70_001, digest: None }));
            assert_eq!(AuxForm::Sglang.tag(&[0; 1600]), 0);
        }
    }
}
