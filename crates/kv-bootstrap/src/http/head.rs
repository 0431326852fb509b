//! The head of a message: where the head ends, and what its fields say.

use bytes::BytesMut;

use super::error::HttpError;

/// Most header fields of a message.
pub(super) const MAX_FIELDS: usize = 64;

/// The header fields of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a>(pub(super) &'a [httparse::Header<'a>]);

impl<'a> Fields<'a> {
    /// The values of all fields with this name, in order.
    pub(super) fn all(self, name: &'static str) -> impl Iterator<Item = &'a [u8]> {
        let named = move |field: &&httparse::Header<'_>| field.name.eq_ignore_ascii_case(name);
        self.0.iter().filter(named).map(|field| field.value)
    }

    /// The value of `Content-Length`, if the message has that field.
    pub(super) fn content_length(self) -> Result<Option<u64>, HttpError> {
        numbers(self.all("content-length"))
    }

    /// True if the connection stays open after the message.
    pub(super) fn keep_alive(self, http11: bool) -> bool {
        let says = |word| self.all("connection").any(|value| has_word(value, word));
        !says("close") && (http11 || says("keep-alive"))
    }
}

/// Takes a head of at most `max` bytes from `input`, once the whole head has arrived. `scanned` is how far
/// earlier searches for the head's end came.
pub(super) fn take_head(
    input: &mut BytesMut,
    scanned: &mut usize,
    max: usize,
) -> Result<Option<BytesMut>, HttpError> {
    let end = head_end(input, scanned);
    if end.unwrap_or(input.len()) > max {
        return Err(HttpError::HeadTooLarge { max });
    }
    Ok(end.map(|end| {
        *scanned = 0;
        input.split_to(end)
    }))
}

/// Where a message's head ends: the length of everything up to and including the empty line.
/// `from` is how far earlier searches came, and is updated.
fn head_end(input: &[u8], from: &mut usize) -> Option<usize> {
    let mut at = *from;
    while let Some(found) = input.get(at..).and_then(|rest| rest.iter().position(|byte| *byte == b'\n')) {
        let line_end = at + found + 1;
        match input.get(line_end..) {
            Some([b'\n', ..]) => return Some(line_end + 1),
            Some([b'\r', b'\n', ..]) => return Some(line_end + 2),
            // Too early to tell: look at this line end again.
            Some([] | [b'\r']) | None => {
                *from = at + found;
                return None;
            }
            Some(_) => at = line_end,
        }
    }
    *from = input.len();
    None
}

/// The number that all values agree on; `None` without values.
fn numbers<'a>(values: impl Iterator<Item = &'a [u8]>) -> Result<Option<u64>, HttpError> {
    let mut length = None;
    for value in values {
        if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
            return Err(HttpError::Length);
        }
        let text = std::str::from_utf8(value).map_err(|_| HttpError::Length)?;
        let number = text.parse::<u64>().map_err(|_| HttpError::Length)?;
        if length.is_some_and(|known| known != number) {
            return Err(HttpError::Length);
        }
        length = Some(number);
    }
    Ok(length)
}

/// True if a comma-separated header value contains the word.
fn has_word(value: &[u8], word: &str) -> bool {
    value.split(|byte| *byte == b',').any(|part| part.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_end_at_the_first_empty_line_however_they_arrive() {
        for (text, end) in [("a\r\n\r\nrest", 5), ("a\n\nrest", 3), ("a\r\nb\r\n\r\n", 8), ("a\n\r\nx", 4)] {
            let mut from = 0;
            let whole = head_end(text.as_bytes(), &mut from);
            assert_eq!(whole, Some(end), "{text:?}");
            let mut from = 0;
            let found = (0..=text.len()).find_map(|len| head_end(&text.as_bytes()[..len], &mut from));
            assert_eq!(found, Some(end), "{text:?} byte by byte");
        }
        assert_eq!(head_end(b"a\r\nb\r\n", &mut 0), None);
    }

    #[test]
    fn content_lengths_must_agree_and_be_plain_digits() {
        let read = |values: &[&'static str]| numbers(values.iter().map(|value| value.as_bytes()));
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&["5", "5"]), Ok(Some(5)));
        for bad in [&["5", "6"][..], &["+5"], &["-1"], &["5,5"], &[""], &["0x5"], &["99999999999999999999"]] {
            assert_eq!(read(bad), Err(HttpError::Length), "{bad:?}");
        }
    }
}
