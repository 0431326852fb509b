//! Bytes as decisions: numbers, sizes, texts and lists. Most are small, and some are as large as a frame
//! allows.

/// The bytes that are left of a script. Beyond its end all bytes are zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct Script<'a>(pub(super) &'a [u8]);

impl<'a> Script<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    pub(super) fn below(&mut self, bound: u8) -> u8 {
        self.byte() % bound.max(1)
    }

    pub(super) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True in about one of four cases.
    pub(super) fn rarely(&mut self) -> bool {
        self.byte() >= 192
    }

    pub(super) fn option<T>(&mut self, some: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.flag().then(|| some(self))
    }

    pub(super) fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A number that is interesting more often than not.
    pub(super) fn number(&mut self) -> u64 {
        let kind = self.byte();
        match kind {
            0..=199 => u64::from(kind % 20),
            200..=219 => u64::from(self.byte()) << (kind - 200),
            220..=229 => u64::MAX - u64::from(kind - 220),
            230..=239 => u64::from(u32::MAX) + u64::from(kind) - 235,
            240..=249 => 1 << (6 * (kind - 240)),
            _ => self.word(),
        }
    }

    pub(super) fn small(&mut self) -> u32 {
        self.number() as u32
    }

    /// How many of something, up to `most`: few mostly, and seldom as many as a frame holds.
    pub(super) fn size(&mut self, most: usize) -> usize {
        let kind = usize::from(self.byte());
        let size = match kind {
            0..=199 => kind % 9,
            200..=239 => (kind - 199) * 8,
            240..=251 => (kind - 239) * 350,
            _ if self.byte() % 32 != 7 => (kind - 251) * 1100,
            252 => most / 40,
            253 => most / 7,
            254 => most / 2,
            _ => most,
        };
        size.min(most)
    }

    /// A text of up to `most` bytes.
    pub(super) fn text(&mut self, most: usize) -> String {
        let piece = ["x", "\"", "\\", "0", "-", "\u{e4}", "\u{1f600}", "\n"][usize::from(self.below(8))];
        piece.repeat(self.size(most) / piece.len())
    }

    /// At most `most` runs of numbers below about `end`.
    pub(super) fn runs(&mut self, most: usize, end: u32) -> Vec<(u32, u32)> {
        let (shape, start, len) = (self.below(10), self.small(), self.below(4));
        let count = self.size(most) as u32;
        let run = |at: u32| match shape {
            // As scattered as can be.
            0..=2 => (start.wrapping_add(2 * at), 1),
            3 | 4 => (start.wrapping_add((u32::from(len) + 2).wrapping_mul(at)), u32::from(len)),
            5 => (start, u32::from(len)),
            6 => (end.wrapping_sub(start).wrapping_sub(2 * at), 1),
            7 => (at.wrapping_mul(0x9e37_79b1) % end, 1),
            8 => (start.wrapping_add(at << 12), 1 << 11),
            _ => (u32::MAX - 2 * at, 1),
        };
        (0..count).map(run).collect()
    }

    /// At most `most` runs of attempts.
    pub(super) fn attempts(&mut self, most: usize) -> Vec<(u64, u32)> {
        let (shape, start, len) = (self.below(8), self.number(), self.small());
        let count = self.size(most) as u64;
        let run = |at: u64| match shape {
            0..=2 => (start.wrapping_add(at), 1),
            3 => (start.wrapping_add(2 * at), 1),
            4 => (start, len),
            5 => (start.wrapping_sub(2 * at), 1),
            6 => (start.wrapping_add((u64::from(len) + 1).wrapping_mul(at)), len),
            _ => (at.wrapping_mul(0x9e37_79b9_7f4a_7c15), len),
        };
        (0..count).map(run).collect()
    }
}
