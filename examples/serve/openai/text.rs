//! The text of an answer, as its tokens come, up to a stop string.

use super::vocabulary::Vocabulary;

/// The text of an answer. Text that may be the beginning of a stop string is told when it is known not to be.
pub struct Text {
    stream: TextStream,
    stop: Vec<String>,
    /// Text that is not told yet.
    held: String,
    stopped: bool,
}

impl Text {
    /// An empty text that ends before the first of these stop strings.
    pub fn new(stop: &[String]) -> Text {
        Text { stream: TextStream::default(), stop: stop.to_vec(), held: String::new(), stopped: false }
    }

    /// The text that can be told with one more token.
    pub fn push(&mut self, vocabulary: &Vocabulary, token: u32) -> String {
        self.held.push_str(&self.stream.push(vocabulary, token));
        if let Some(end) = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            self.held.truncate(end);
            return std::mem::take(&mut self.held);
        }
        let rest = self.held.split_off(self.held.len() - self.maybe_stop());
        std::mem::replace(&mut self.held, rest)
    }

    /// True if there was a stop string. The text is told in full then.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The rest of the text, when there are no more tokens.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// How many bytes at the end of the text that is not told are the beginning of a stop string.
    fn maybe_stop(&self) -> usize {
        let ends = self.held.char_indices().map(|(start, _)| start);
        let begins = |start: &usize| {
            let end = self.held.get(*start..).unwrap_or_default();
            self.stop.iter().any(|stop| stop.starts_with(end))
        };
        ends.into_iter().find(begins).map_or(0, |start| self.held.len() - start)
    }
}

/// The text of tokens, as they come. A token may be a part of a character only; then the character comes
/// with the token that completes it.
#[derive(Debug, Default)]
struct TextStream {
    /// Tokens whose text is not told in full. The first of them give the others their context.
    tokens: Vec<u32>,
    /// The number of characters of these tokens that were told.
    told: usize,
}

/// Tokens that a token is shown with, because tokenizers write the first token of a text in another way.
const CONTEXT: usize = 8;

impl TextStream {
    /// The text that comes with one more token.
    fn push(&mut self, vocabulary: &Vocabulary, token: u32) -> String {
        self.tokens.push(token);
        let text = vocabulary.decode(&self.tokens);
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return String::new();
        }
        let new = text.chars().skip(self.told).collect();
        self.told = text.chars().count();
        if self.tokens.len() > 2 * CONTEXT {
            self.tokens.drain(..self.tokens.len() - CONTEXT);
            self.told = vocabulary.decode(&self.tokens).chars().count();
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is told with each byte of `text`, and in the end; `Err` if a stop string has ended the text.
    fn told(stop: &[&str], text: &str) -> Result<Vec<String>, Vec<String>> {
        let stop: Vec<String> = stop.iter().map(|&stop| stop.to_owned()).collect();
        let (mut answer, mut told) = (Text::new(&stop), Vec::new());
        for byte in text.bytes() {
            told.push(answer.push(&Vocabulary::Demonstration, byte.into()));
            if answer.is_stopped() {
                return Err(told);
            }
        }
        told.push(answer.rest());
        Ok(told)
    }

    #[test]
    fn text_that_may_begin_a_stop_string_is_told_when_it_does_not() {
        assert_eq!(told(&[], "ab").unwrap(), ["a", "b", ""]);
        assert_eq!(told(&["bcd"], "abcx").unwrap(), ["a", "", "", "bcx", ""]);
        assert_eq!(told(&["bcd"], "abc").unwrap(), ["a", "", "", "bc"]);
        assert_eq!(told(&["bcd"], "abbcd").unwrap_err(), ["a", "", "b", "", ""]);
        // The first stop string in the text counts, whichever is first in the request.
        assert_eq!(told(&["cd", "b"], "abcd").unwrap_err(), ["a", ""]);
        assert_eq!(told(&["aab"], "aaab").unwrap_err(), ["", "", "a", ""]);
    }

    #[test]
    fn the_text_of_a_stream_is_that_of_all_its_tokens() {
        let vocabulary = Vocabulary::Demonstration;
        let tokens: Vec<u32> = (0..4000).map(|i| i * 7919 % 1024).collect();
        let mut text = Text::new(&["no such text".to_owned()]);
        let mut told: String = tokens.iter().map(|token| text.push(&vocabulary, *token)).collect();
        told.push_str(&text.rest());
        assert_eq!(told, vocabulary.decode(&tokens));
    }
}
