//! The part of OpenAI's HTTP interface that the server speaks: requests, answers, errors.

mod answer;
mod error;
mod request;
mod text;
mod vocabulary;

pub use answer::{Answer, DONE, Usage, event};
pub use error::ApiError;
pub use request::{Kind, Limits, Request};
pub use text::Text;
pub use vocabulary::Vocabulary;
