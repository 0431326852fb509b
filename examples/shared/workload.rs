//! The workload: the prompts of users, and the rooms of their requests.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::model::Rng;

/// The prompts of one chat.
#[derive(Debug, Clone)]
pub struct Chat {
    /// The tokens of the first prompt.
    pub prompt: Vec<u32>,
    /// The tokens that are added to each answer to make the next prompt.
    pub follow_ups: Vec<Vec<u32>>,
}

/// The size of a workload.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// The number of chats.
    pub count: usize,
    /// Tokens of the first prompts, about.
    pub tokens: usize,
    /// The number of turns of each chat.
    pub turns: usize,
    /// Tokens added in each turn after the first.
    pub follow_up: usize,
}

/// Prompts of random tokens: lengths differ by up to a tenth, so that last pages are full in some and
/// not in others.
pub fn random(seed: u64, workload: Workload, vocab: usize) -> Vec<Chat> {
    let longest = longest(workload.tokens) as u64;
    let shortest = 2 * workload.tokens as u64 - longest;
    let tokens = |rng: &mut Rng, len: u64| (0..len).map(|_| rng.below(vocab as u64) as u32).collect();
    let chat = |i: usize| {
        let mut rng = Rng::named(seed, &format!("prompt {i}"));
        let len = shortest + rng.below(longest - shortest + 1);
        let prompt = tokens(&mut rng, len.max(1));
        let follow_ups = (1..workload.turns).map(|_| tokens(&mut rng, workload.follow_up as u64)).collect();
        Chat { prompt, follow_ups }
    };
    (0..workload.count).map(chat).collect()
}

/// Prompts cut from a tokenized text, each from a different place in the text.
#[cfg(feature = "checkpoint")]
pub fn from_text(seed: u64, workload: Workload, text: &[u32]) -> Vec<Chat> {
    let chat = |i: usize| {
        let start = Rng::named(seed, &format!("prompt {i}")).below(text.len().max(1) as u64) as usize;
        let mut words = text.iter().cycle().skip(start).copied();
        let prompt = words.by_ref().take(workload.tokens).collect();
        let mut follow_up = |_| words.by_ref().take(workload.follow_up).collect();
        let follow_ups = (1..workload.turns).map(&mut follow_up).collect();
        Chat { prompt, follow_ups }
    };
    (0..workload.count).map(chat).collect()
}

/// The longest prompt that [`random`] makes.
pub fn longest(tokens: usize) -> usize {
    tokens + tokens / 10
}

/// A new room. Rooms are never used again, not even by the next run, because peers remember failed rooms for
/// a while.
pub fn new_room() -> u64 {
    // The standard library's only source of random bits; a signed 63-bit number is what SGLang's
    // routers draw.
    RandomState::new().build_hasher().finish() >> 1
}

/// The text from which prompts for a checkpoint are cut.
#[cfg(feature = "checkpoint")]
pub const TEXT: &str = "A prompt is read once and answered word by word. Reading it is heavy work that can \
be done for all of its words together; answering is light work that must be done one word after the \
other. A machine that does both is always doing one of them badly. So one group of machines reads, \
another group answers, and what the readers have learned about the prompt must travel: for every word, \
in every layer, a key and a value. They lie in pages. The reader says which of its pages are final, the \
one who answers says which of its own are free, and somebody carries the bytes from here to there, page \
by page, while the next part of the prompt is still being read. When the last page has arrived, the \
first word of the answer is already known. The pages of the reader are free again, but not a moment \
before the last byte has left them; the pages of the other side are good, but not a moment before the \
last byte is in them. Most of the trouble in such systems comes from these two moments. ";
