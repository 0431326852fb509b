//! The workload: prompts and the rooms of their requests.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::model::Rng;

/// One request to the service.
#[derive(Debug, Clone)]
pub struct Request {
    /// Its rendezvous key, drawn by the router.
    pub room: u64,
    /// Its prompt.
    pub prompt: Vec<u32>,
}

/// `count` prompts of random tokens, around `tokens` long: lengths differ by up to a tenth, so that
/// last pages are full in some and not in others.
pub fn random(seed: u64, count: usize, tokens: usize, vocab: usize) -> Vec<Request> {
    let longest = longest(tokens) as u64;
    let shortest = 2 * tokens as u64 - longest;
    let prompt = |i: usize| {
        let mut rng = Rng::named(seed, &format!("prompt {i}"));
        let len = shortest + rng.below(longest - shortest + 1);
        (0..len.max(1)).map(|_| rng.below(vocab as u64) as u32).collect()
    };
    (0..count).map(prompt).map(with_room).collect()
}

/// Prompts cut from a tokenized text, each starting somewhere else in it.
#[cfg(feature = "checkpoint")]
pub fn from_text(seed: u64, count: usize, tokens: usize, text: &[u32]) -> Vec<Request> {
    let prompt = |i: usize| {
        let start = Rng::named(seed, &format!("prompt {i}")).below(text.len().max(1) as u64) as usize;
        text.iter().cycle().skip(start).take(tokens).copied().collect()
    };
    (0..count).map(prompt).map(with_room).collect()
}

/// The longest prompt that [`random`] makes.
pub fn longest(tokens: usize) -> usize {
    tokens + tokens / 10
}

/// Rooms are never reused, not even by the next run: peers remember failed ones for a while.
fn with_room(prompt: Vec<u32>) -> Request {
    // The standard library's only source of random bits; a signed 63-bit number is what SGLang's
    // routers draw.
    let room = RandomState::new().build_hasher().finish() >> 1;
    Request { room, prompt }
}

/// What prompts for a checkpoint are cut from.
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
