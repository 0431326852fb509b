//! Aux rows as SGLang has them: ten buffers, in each of which a request has a row.
//!
//! The first token, log-probabilities and, in the last buffer, the room of the request travel in the row. A
//! decode worker knows by the room that the row belongs to the request.

use kv_core::AuxIndex;

/// The buffers of SGLang 0.5.23 without speculative decoding, in order: bytes of a row in each.
///
/// `output_ids`, `cached_tokens`, the values and indices of token log-probabilities (16 numbers each), those of
/// top log-probabilities (128 each), `topk_p`, `topk_index`, `hidden_states`, and `bootstrap_room`.
pub const AUX_ITEM_LENS: [u64; 10] = [64, 64, 64, 64, 512, 512, 64, 128, 64, 64];

/// The aux buffers that a peer of SGLang must have. SGLang tells nobody the lengths of its rows, so that both
/// sides must be configured alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuxBuffers {
    /// Bytes of a row in each buffer, in SGLang's order; the default is [`AUX_ITEM_LENS`]. A model with
    /// speculative decoding has longer `hidden_states`, and an engine that keeps sampling masks or checksums has
    /// more buffers.
    pub item_lens: Vec<u64>,
    /// The position of `bootstrap_room` among the buffers (default 9).
    pub room_buffer: usize,
}

impl Default for AuxBuffers {
    fn default() -> AuxBuffers {
        AuxBuffers { item_lens: AUX_ITEM_LENS.to_vec(), room_buffer: 9 }
    }
}

/// Reads the aux rows of this worker's own memory for a machine, which sees no memory itself.
///
/// A receiver succeeds only if the row holds the request's own room: the first eight bytes, little-endian, of
/// the row in the buffer [`room_buffer`](AuxBuffers::room_buffer). A row that holds the room already when the
/// receiver is given the row proves nothing, and is refused: a server that uses a room number again clears the
/// row first.
pub trait AuxRooms: Send {
    /// The room that the aux row holds now; 0 for a row that nobody has written.
    fn room_in(&self, row: AuxIndex) -> u64;
}

impl<F: Fn(AuxIndex) -> u64 + Send> AuxRooms for F {
    fn room_in(&self, row: AuxIndex) -> u64 {
        self(row)
    }
}

/// The room in a row of `bootstrap_room`; `None` if the row is shorter than eight bytes.
pub fn room_of_row(row: &[u8]) -> Option<u64> {
    row.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Writes the room into a row of `bootstrap_room`, as a prefill worker must before it gives the last chunk of
/// the request. False if the row is shorter than eight bytes.
pub fn write_room(row: &mut [u8], room: u64) -> bool {
    let Some(place) = row.first_chunk_mut() else { return false };
    *place = room.to_le_bytes();
    true
}
