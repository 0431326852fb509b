//! The timeline as one HTML page.

use crate::timeline::Timeline;
use crate::view::View;

/// The page, in pieces between which style, data and script stand.
const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str =
    concat!(include_str!("page/data.js"), include_str!("page/draw.js"), include_str!("page/main.js"));

impl Timeline {
    /// The timeline as one self-contained HTML page: it loads nothing, and is read in any browser, from a file or
    /// from a server. Names that peers and clients have chosen stand in the page as text only.
    pub fn html(&self) -> Result<String, serde_json::Error> {
        let data = in_script(&serde_json::to_string(&View::of(self))?);
        let mut page = String::with_capacity(PAGE.len() + STYLE.len() + SCRIPT.len() + data.len());
        // The pieces are put together, not replaced in a text: data may hold the name of a place.
        let mut rest = PAGE;
        for (place, piece) in [("/*STYLE*/", STYLE), ("/*DATA*/", data.as_str()), ("/*SCRIPT*/", SCRIPT)] {
            let (before, after) = rest.split_once(place).unwrap_or((rest, ""));
            page.push_str(before);
            page.push_str(piece);
            rest = after;
        }
        page.push_str(rest);
        Ok(page)
    }
}

/// JSON as the content of a `<script>` element: nothing in it ends the element or begins a comment.
fn in_script(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for letter in json.chars() {
        match letter {
            // In JSON they stand only in texts.
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                escaped.push_str(&format!("\\u{:04x}", u32::from(letter)));
            }
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_in_a_script_element_cannot_end_it_and_means_the_same() {
        let names =
            ["</script><script>alert(1)</script>", "<!--<script>", "a&b\u{2028}c", "/*SCRIPT*/", "\\\"<"];
        let json = serde_json::to_string(&names).unwrap();
        let escaped = in_script(&json);
        assert!(!escaped.contains(['<', '>', '&', '\u{2028}']), "{escaped}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&escaped).unwrap(), names);
    }
}
