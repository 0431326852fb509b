//! Text to tokens and back: a checkpoint's tokenizer, or words for the tokens of the demonstration model.

use kv_examples::error::ExampleError;
use kv_examples::loading::ModelOptions;

/// The vocabulary of the model that is served.
pub enum Vocabulary {
    /// The demonstration model has no text: its tokens below 256 stand for bytes, the others for made-up words. A text
    /// of such words becomes the same tokens again, so that chats share their prefixes.
    Demonstration,
    /// The tokenizer of a checkpoint.
    #[cfg(feature = "checkpoint")]
    Checkpoint(Box<kv_examples::checkpoint::Tokenizer>),
}

/// Tokens below this stand for bytes.
const BYTES: u32 = 256;
/// The syllables of the made-up words; a word is a space and two syllables.
const CONSONANTS: &[u8; 8] = b"bdklmnrt";
const VOWELS: &[u8; 4] = b"aeio";
const SYLLABLES: u32 = (CONSONANTS.len() * VOWELS.len()) as u32;
/// Bytes that are no printable character are shown as one of the 256 Braille patterns.
const BRAILLE: u32 = 0x2800;

impl Vocabulary {
    /// The vocabulary of the model that the options choose.
    pub fn load(options: &ModelOptions) -> Result<Vocabulary, ExampleError> {
        #[cfg(feature = "checkpoint")]
        if let Some(dir) = &options.model {
            let tokenizer = kv_examples::checkpoint::Tokenizer::load(dir)?;
            return Ok(Vocabulary::Checkpoint(Box::new(tokenizer)));
        }
        let _ = options;
        Ok(Vocabulary::Demonstration)
    }

    /// The tokens of a text; `None` if the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Option<Vec<u32>> {
        match self {
            Vocabulary::Demonstration => Some(encode_words(text)),
            #[cfg(feature = "checkpoint")]
            Vocabulary::Checkpoint(tokenizer) => tokenizer.encode(text).ok(),
        }
    }

    /// The text of these tokens.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match self {
            Vocabulary::Demonstration => tokens.iter().flat_map(|token| word(*token)).collect(),
            #[cfg(feature = "checkpoint")]
            Vocabulary::Checkpoint(tokenizer) => tokenizer.decode(tokens).unwrap_or_default(),
        }
    }
}

/// The text of one token of the demonstration model.
fn word(token: u32) -> Vec<char> {
    if let Some(number) = token.checked_sub(BYTES) {
        let syllable = |number: u32| {
            let (consonant, vowel) = (number as usize / VOWELS.len(), number as usize % VOWELS.len());
            let letter = |letters: &[u8], at: usize| char::from(letters[at % letters.len()]);
            [letter(CONSONANTS, consonant), letter(VOWELS, vowel)]
        };
        let [first, second] = [number / SYLLABLES, number % SYLLABLES].map(syllable);
        return [' '].into_iter().chain(first).chain(second).collect();
    }
    let byte = token as u8;
    let printable = byte == b'\n' || (b' '..=b'~').contains(&byte);
    let shown = if printable { Some(char::from(byte)) } else { char::from_u32(BRAILLE + token) };
    shown.into_iter().collect()
}

fn encode_words(text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if let Some(number) = rest.as_bytes().first_chunk().and_then(number_of) {
            tokens.push(BYTES + number);
            rest = rest.get(5..).unwrap_or_default();
            continue;
        }
        match u32::from(first).checked_sub(BRAILLE).filter(|byte| *byte < BYTES) {
            Some(byte) => tokens.push(byte),
            None => tokens.extend(first.encode_utf8(&mut [0; 4]).bytes().map(u32::from)),
        }
        rest = rest.get(first.len_utf8()..).unwrap_or_default();
    }
    tokens
}

/// The number of a made-up word.
fn number_of(word: &[u8; 5]) -> Option<u32> {
    let [b' ', syllables @ ..] = word else { return None };
    let at = |letters: &[u8], letter: u8| letters.iter().position(|other| *other == letter);
    let mut number = 0;
    for syllable in syllables.chunks_exact(2) {
        let [consonant, vowel] = *syllable else { return None };
        let syllable = at(CONSONANTS, consonant)? * VOWELS.len() + at(VOWELS, vowel)?;
        number = number * SYLLABLES + syllable as u32;
    }
    // The model has 1024 tokens.
    (number < 1024 - BYTES).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_all_tokens_becomes_the_same_tokens_again() {
        let vocabulary = Vocabulary::Demonstration;
        for token in 0..1024 {
            let text = vocabulary.decode(&[token]);
            assert_eq!(vocabulary.encode(&text), Some(vec![token]), "{text:?}");
        }
        let tokens: Vec<u32> = (0..4000).map(|i| i * 7919 % 1024).filter(|token| *token != 32).collect();
        assert_eq!(vocabulary.encode(&vocabulary.decode(&tokens)), Some(tokens.clone()));
        assert_eq!(vocabulary.encode("é"), Some(vec![0xc3, 0xa9]));
    }
}
