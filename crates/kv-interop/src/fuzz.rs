//! Entrances for fuzzing: the readers that a stranger's bytes pass first. Each returns true if all of the bytes are
//! accepted. Not a public API.

mod dialects;

use bytes::Bytes;

use crate::vllm::{self, side_channel};
use crate::zmtp::{Heard, MAX_MESSAGE, Session, SocketType, ZmtpError, write_message};

pub use dialects::{
    Said, heard_by_sglang, heard_by_vllm, parts, said_by_sglang, said_by_vllm, sglang_message, vllm_answer,
    vllm_notification, vllm_registration,
};

/// Reads the stream of a connection. The first byte gives the type of this side's socket, and the length of the
/// pieces in which the stream comes. Asserts that pieces mean the same as the whole stream, that what is held has
/// come, and that messages, written again, are read as the same.
pub fn zmtp(bytes: &[u8]) -> bool {
    let Some((&how, stream)) = bytes.split_first() else { return false };
    let ours =
        [SocketType::Req, SocketType::Push, SocketType::Pull, SocketType::Router][usize::from(how % 4)];
    let whole = read(ours, [stream]);
    assert_eq!(read(ours, stream.chunks(1 + usize::from(how / 4))), whole);
    for heard in &whole.0 {
        let Heard::Message(parts) = heard else { continue };
        let again = write_message(parts).concat();
        assert!(again.len() <= stream.len() + 64);
        let mut session = Session::ready(ours);
        let message = Heard::Message(parts.clone());
        assert_eq!(session.take(&mut &again[..]), Ok(Some(message)));
    }
    whole.1.is_ok() && !whole.0.is_empty()
}

/// Everything that is heard of a stream, and the end.
fn read<'a>(
    ours: SocketType,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<Heard>, Result<(), ZmtpError>) {
    let (mut session, mut all, mut came) = (Session::new(ours, MAX_MESSAGE), Vec::new(), 0);
    for mut piece in pieces {
        came += piece.len();
        loop {
            match session.take(&mut piece) {
                Ok(Some(heard)) => all.push(heard),
                Ok(None) => break,
                Err(error) => return (all, Err(error)),
            }
        }
        assert!(piece.is_empty() && session.held() <= came);
    }
    (all, Ok(()))
}

/// Reads a request for a rank's metadata. Asserts that an accepted request, written again, is the same.
pub fn side_channel(bytes: &[u8]) -> bool {
    let parts = [Bytes::new(), Bytes::copy_from_slice(bytes)];
    let Some(ranks) = side_channel::parse(&parts) else { return false };
    let again = vllm::question(ranks.0, ranks.1);
    assert_eq!(side_channel::parse(&[Bytes::new(), again]), Some(ranks));
    true
}
