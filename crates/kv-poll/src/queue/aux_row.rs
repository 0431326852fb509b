//! [`AuxRow`]: the first token of a request and what belongs to it, as a row of bytes that travels beside the KV.

use kv_core::Room;
use kv_core::hash::Fnv1a;

use super::gate::aux_tag;

/// The version of the form.
const VERSION: u16 = 1;
/// Bytes before the first record.
const HEAD: u64 = 40;
/// The part of the head that the checksum covers.
const CHECKED_HEAD: std::ops::Range<u64> = 16..HEAD;
/// A row is a multiple of a cache line, so that no two rows share a line.
const LINE: u64 = 64;
/// The hidden states begin at a multiple of the widest vector load of a GPU.
const SLOT: u64 = 16;

/// How much an aux row has room for. Both sides must use the same layout: peers whose rows differ in length are
/// refused when their ranks meet ([`Mismatch`](kv_core::Mismatch) of the region's `item_len`), and a row of another
/// layout and the same length is refused by [`AuxRow::decode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AuxLayout {
    /// The most tokens with log-probabilities: 1 for the first token alone; more if the prefill side computes
    /// several tokens, or if clients may ask for those of the prompt's tokens.
    pub logprobs: u16,
    /// The most alternatives of each of these tokens (OpenAI: `top_logprobs`).
    pub top_logprobs: u16,
    /// Bytes for hidden states: for example the width of the model, times the size of a number, for a draft model
    /// that goes on from the last hidden state.
    pub hidden_bytes: u32,
}

impl AuxLayout {
    /// The length of a row in bytes, a multiple of 64: the `item_len` of the region that holds the rows.
    pub const fn row_len(self) -> u64 {
        (self.hidden_at() + self.hidden_bytes as u64).next_multiple_of(LINE)
    }

    /// The offset of the hidden states in a row, a multiple of 16.
    pub const fn hidden_at(self) -> u64 {
        self.record_at(self.logprobs).next_multiple_of(SLOT)
    }

    /// The tag of an intact row, whosever the row is. This is what
    /// [`AuxMemory::tag`](super::AuxMemory::tag) returns, with 0 for an error: a damaged row does not pass the gate.
    ///
    /// # Errors
    ///
    /// All of [`AuxRow::decode`] besides [`AuxRowError::Tag`].
    pub fn tag(&self, bytes: &[u8]) -> Result<u64, AuxRowError> {
        self.parse(bytes).map(|(tag, _)| tag)
    }

    /// The offset of a record in a row.
    const fn record_at(self, number: u16) -> u64 {
        HEAD + number as u64 * (12 + 8 * self.top_logprobs as u64)
    }

    fn check_length(&self, bytes: &[u8]) -> Result<(), AuxRowError> {
        let (got, row_len) = (bytes.len() as u64, self.row_len());
        if got == row_len { Ok(()) } else { Err(AuxRowError::Length { got, row_len }) }
    }

    /// The checksum of a row with so many records, and so many bytes of hidden states, in use.
    fn checksum(&self, bytes: &[u8], records: u16, hidden: u32) -> u64 {
        let hidden_at = self.hidden_at();
        let used = [CHECKED_HEAD, HEAD..self.record_at(records), hidden_at..hidden_at + u64::from(hidden)];
        let mut hash = Fnv1a::new();
        used.into_iter().for_each(|range| hash.write(part(bytes, range)));
        hash.finish()
    }

    /// The tag of an intact row, and its content.
    fn parse(&self, bytes: &[u8]) -> Result<(u64, AuxRow), AuxRowError> {
        self.check_length(bytes)?;
        let mut head = Words(bytes);
        let (tag, checksum) = (head.u64(), head.u64());
        let (version, records_room, top_room) = (head.u16(), head.u16(), head.u16());
        let (records, first_token) = (head.u16(), head.u32());
        let (prompt_tokens, cached_tokens, hidden) = (head.u32(), head.u32(), head.u32());
        if version != VERSION {
            return Err(AuxRowError::Version { ours: VERSION, theirs: version });
        }
        for (field, ours, theirs) in
            [("logprobs", self.logprobs, records_room), ("top_logprobs", self.top_logprobs, top_room)]
        {
            if ours != theirs {
                return Err(AuxRowError::Layout { field, ours, theirs });
            }
        }
        check_room("logprobs", records, self.logprobs)?;
        check_room("hidden_bytes", hidden, self.hidden_bytes)?;
        let computed = self.checksum(bytes, records, hidden);
        if checksum != computed {
            return Err(AuxRowError::Checksum { written: checksum, computed });
        }
        if cached_tokens > prompt_tokens {
            return Err(AuxRowError::Cached { cached_tokens, prompt_tokens });
        }
        let record = |number| {
            let mut record = Words(part(bytes, self.record_at(number)..self.record_at(number + 1)));
            let (token, logprob, top) = (record.u32(), record.f32(), record.u32());
            check_room("top_logprobs", top, self.top_logprobs)?;
            let top = (0..top).map(|_| (record.u32(), record.f32())).collect();
            Ok(Logprob { token, logprob, top })
        };
        let logprobs = (0..records).map(record).collect::<Result<_, AuxRowError>>()?;
        let hidden_at = self.hidden_at();
        let hidden = part(bytes, hidden_at..hidden_at + u64::from(hidden)).to_vec();
        Ok((tag, AuxRow { first_token, prompt_tokens, cached_tokens, logprobs, hidden }))
    }
}

/// What a prefill server tells a decode server of one request beside the KV, as a row of bytes with checks.
///
/// The form is for servers whose prefill and decode sides both use this library. It is not the form of a
/// foreign dialect: SGLang's ten metadata buffers have lengths and positions of their own, which the crate
/// kv-interop writes and reads, and vLLM's protocol moves no rows. A server may also fill rows with a form of
/// its own; the queues need nothing but the [tag](aux_tag).
///
/// # The bytes of a row, version 1
///
/// Numbers are little endian. `k` is [`AuxLayout::top_logprobs`]; a row has room for
/// [`AuxLayout::logprobs`] records. Bytes that the row does not use are zero.
///
/// | offset | bytes | what |
/// |---|---|---|
/// | 0 | 8 | [tag](aux_tag) of the room; 0 in a row that nobody has written |
/// | 8 | 8 | checksum: 64-bit FNV-1a of the bytes 16 to 39, of the records in use, and of the hidden states in use |
/// | 16 | 2 | version: 1 |
/// | 18 | 2 | most records of log-probabilities ([`AuxLayout::logprobs`]) |
/// | 20 | 2 | most alternatives of a record (`k`) |
/// | 22 | 2 | records in use |
/// | 24 | 4 | first token |
/// | 28 | 4 | tokens of the prompt |
/// | 32 | 4 | tokens of the prompt whose KV was in a cache |
/// | 36 | 4 | bytes of hidden states in use |
/// | 40 | 12 + 8 `k` each | records: token (4), log-probability (4, IEEE 754), alternatives in use (4), and `k` alternatives: token (4), log-probability (4) |
/// | [`hidden_at`](AuxLayout::hidden_at), a multiple of 16 | [`AuxLayout::hidden_bytes`] | hidden states |
///
/// # A row on both sides
///
/// ```
/// use kv_core::{KvArgsBuilder, Region, RegionRole, Room};
/// use kv_poll::queue::{AuxLayout, AuxRow, AuxRowError, Logprob};
///
/// // Both sides use one layout: the log-probability of the first token, and those of two alternatives.
/// const LAYOUT: AuxLayout = AuxLayout { logprobs: 1, top_logprobs: 2, hidden_bytes: 0 };
///
/// /// Announces 64 rows that begin at an address.
/// fn rows(args: KvArgsBuilder, addr: u64) -> KvArgsBuilder {
///     args.region(Region::dram(RegionRole::Aux, addr, 64 * LAYOUT.row_len(), LAYOUT.row_len()))
/// }
///
/// let room = Room::from(7);
/// let mut memory = vec![0; LAYOUT.row_len() as usize];
/// let row = AuxRow {
///     first_token: 4711,
///     prompt_tokens: 512,
///     cached_tokens: 128,
///     logprobs: vec![Logprob { token: 4711, logprob: -0.25, top: vec![(4711, -0.25), (17, -1.5)] }],
///     hidden: Vec::new(),
/// };
/// row.encode(&LAYOUT, &room, &mut memory)?;
///
/// // The decode side, after the transfer has succeeded.
/// assert_eq!(AuxRow::decode(&LAYOUT, &room, &memory)?, row);
/// let other = AuxRow::decode(&LAYOUT, &Room::from(8), &memory);
/// assert!(matches!(other, Err(AuxRowError::Tag { .. })), "the row of another request");
/// # Ok::<(), AuxRowError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AuxRow {
    /// The first token of the answer, which the prefill side has sampled.
    pub first_token: u32,
    /// The number of tokens of the prompt (OpenAI: `usage.prompt_tokens`).
    pub prompt_tokens: u32,
    /// How many of the prompt's tokens were not computed, because their KV was in a cache (OpenAI:
    /// `usage.prompt_tokens_details.cached_tokens`).
    pub cached_tokens: u32,
    /// The log-probabilities of tokens, in the order of the tokens. Which tokens they are is an agreement of both
    /// sides: the first token, or tokens of the prompt.
    pub logprobs: Vec<Logprob>,
    /// Hidden states, in a form that both sides agree on. Fewer bytes than the layout has room for are allowed.
    pub hidden: Vec<u8>,
}

/// The log-probability of one token, and those of the likeliest tokens at its position.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Logprob {
    /// The number of the token in the vocabulary.
    pub token: u32,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The likeliest tokens at the position, each with its log-probability, in the order in which the prefill server
    /// has given them.
    pub top: Vec<(u32, f32)>,
}

/// Why a row cannot be written, or why the bytes of a row are not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuxRowError {
    /// The slice is not as long as a row: the caller has cut the region with another layout.
    #[error("an aux row has {row_len} bytes, not {got}")]
    Length {
        /// The length of the slice in bytes.
        got: u64,
        /// The length of a row of the layout in bytes.
        row_len: u64,
    },
    /// The layout has no room for a part of the row. Before sending: shorten the part, or use a larger layout.
    #[error("the layout's {field} is {room}, but the row has {got}")]
    Room {
        /// The field of the layout.
        field: &'static str,
        /// How many the row has.
        got: u64,
        /// How many the layout has room for.
        room: u64,
    },
    /// More tokens came from a cache than the prompt has.
    #[error("cached_tokens is {cached_tokens}, but prompt_tokens is {prompt_tokens}")]
    Cached {
        /// Tokens whose KV was in a cache.
        cached_tokens: u32,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
    /// The row is another request's, or nobody has written the row. The KV may be another request's, too: never
    /// decode from it.
    #[error("the aux row has tag {found:#018x}, expected {expected:#018x}")]
    Tag {
        /// The tag of the room, see [`aux_tag`].
        expected: u64,
        /// The tag of the row; 0 if nobody has written the row.
        found: u64,
    },
    /// The prefill side writes another version of the form.
    #[error("the aux row has version {theirs}, this side reads version {ours}")]
    Version {
        /// The version that this side reads and writes.
        ours: u16,
        /// The version of the row.
        theirs: u16,
    },
    /// The prefill side uses another layout, whose rows have the same length.
    #[error("{field} of the aux row's layout is {theirs}, this side's is {ours}")]
    Layout {
        /// The field of the layout.
        field: &'static str,
        /// The value of this side.
        ours: u16,
        /// The value of the row.
        theirs: u16,
    },
    /// Bytes of the row have changed after the prefill side wrote them: a transfer fault, or two writers of one row.
    #[error("the aux row has checksum {written:#018x}, but its content has {computed:#018x}")]
    Checksum {
        /// The checksum in the row.
        written: u64,
        /// The checksum of the row's content.
        computed: u64,
    },
}

impl AuxRow {
    /// Writes the row of a room's request. All bytes of the slice are written; bytes without content become zero, so
    /// that nothing of an earlier request is sent.
    ///
    /// # Errors
    ///
    /// [`AuxRowError::Length`], [`AuxRowError::Room`] and [`AuxRowError::Cached`]. Nothing is written then.
    pub fn encode(&self, layout: &AuxLayout, room: &Room, into: &mut [u8]) -> Result<(), AuxRowError> {
        layout.check_length(into)?;
        let records = check_room("logprobs", self.logprobs.len(), layout.logprobs)? as u16;
        let hidden = check_room("hidden_bytes", self.hidden.len(), layout.hidden_bytes)? as u32;
        for logprob in &self.logprobs {
            check_room("top_logprobs", logprob.top.len(), layout.top_logprobs)?;
        }
        let AuxRow { first_token, prompt_tokens, cached_tokens, .. } = *self;
        if cached_tokens > prompt_tokens {
            return Err(AuxRowError::Cached { cached_tokens, prompt_tokens });
        }
        let mut row = Vec::with_capacity(into.len());
        row.extend(aux_tag(room).to_le_bytes());
        row.extend([0; 8]);
        for number in [VERSION, layout.logprobs, layout.top_logprobs, records] {
            row.extend(number.to_le_bytes());
        }
        for number in [first_token, prompt_tokens, cached_tokens, hidden] {
            row.extend(number.to_le_bytes());
        }
        for (number, Logprob { token, logprob, top }) in (1..=records).zip(&self.logprobs) {
            row.extend([*token, logprob.to_bits(), top.len() as u32].map(u32::to_le_bytes).as_flattened());
            for (token, logprob) in top {
                row.extend([*token, logprob.to_bits()].map(u32::to_le_bytes).as_flattened());
            }
            row.resize(layout.record_at(number) as usize, 0);
        }
        row.resize(layout.hidden_at() as usize, 0);
        row.extend(&self.hidden);
        row.resize(into.len(), 0);
        into.copy_from_slice(&row);
        let checksum = layout.checksum(into, records, hidden);
        if let Some(place) = into.get_mut(8..16) {
            place.copy_from_slice(&checksum.to_le_bytes());
        }
        Ok(())
    }

    /// Reads the row of a room's request, which has arrived in `bytes`.
    ///
    /// # Errors
    ///
    /// [`AuxRowError`]: bytes of any kind are refused or understood. Any error means that the row, and with it
    /// perhaps the KV, is not what the prefill side has computed for the request: compute the request again.
    pub fn decode(layout: &AuxLayout, room: &Room, bytes: &[u8]) -> Result<AuxRow, AuxRowError> {
        layout.check_length(bytes)?;
        let (expected, found) = (aux_tag(room), Words(bytes).u64());
        if expected != found {
            return Err(AuxRowError::Tag { expected, found });
        }
        layout.parse(bytes).map(|(_, row)| row)
    }
}

/// Checks that the layout has room for so many, and returns how many they are.
fn check_room(field: &'static str, got: impl TryInto<u64>, room: impl Into<u64>) -> Result<u64, AuxRowError> {
    let (got, room) = (got.try_into().unwrap_or(u64::MAX), room.into());
    if got <= room { Ok(got) } else { Err(AuxRowError::Room { field, got, room }) }
}

/// A part of a row; empty if the row is shorter.
fn part(bytes: &[u8], range: std::ops::Range<u64>) -> &[u8] {
    bytes.get(range.start as usize..range.end as usize).unwrap_or_default()
}

/// Takes numbers from the beginning of bytes whose length was checked; zeros after the end.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next<const N: usize>(&mut self) -> [u8; N] {
        let Some((word, rest)) = self.0.split_first_chunk() else { return [0; N] };
        self.0 = rest;
        *word
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.next())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.next())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.next())
    }

    fn f32(&mut self) -> f32 {
        f32::from_bits(self.u32())
    }
}
