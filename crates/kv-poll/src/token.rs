//! What a session gives away in a command, and gets back at its end.

use kv_core::proto::Command;
use kv_core::{Groups, Pages};

/// Pages, or items of state groups. Each is lent to the worker once, and comes back once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// Pages.
    Pages(Pages),
    /// Items of state groups, and the groups among them that the sender did not have.
    Groups(Groups, Vec<u16>),
}

impl Token {
    /// What a command gives away.
    pub(crate) fn size_in(command: &Command) -> Option<Size> {
        match command {
            Command::Send { chunk: pages, .. }
            | Command::BeginChunk { chunk: pages, .. }
            | Command::InitReceiver { pages, .. } => Some(Size { pages: pages.len(), items: 0 }),
            Command::Groups { groups, .. } => Some(Size { pages: 0, items: groups.len() }),
            _ => None,
        }
    }

    /// What a command gave away.
    pub(crate) fn from_command(command: Command) -> Option<Token> {
        match command {
            Command::Send { chunk: pages, .. }
            | Command::BeginChunk { chunk: pages, .. }
            | Command::InitReceiver { pages, .. } => Some(Token::Pages(pages)),
            Command::Groups { groups, .. } => Some(Token::Groups(groups, Vec::new())),
            _ => None,
        }
    }

    /// How much it is.
    pub(crate) fn size(&self) -> Size {
        match self {
            Token::Pages(pages) => Size { pages: pages.len(), items: 0 },
            Token::Groups(groups, _) => Size { pages: 0, items: groups.len() },
        }
    }
}

impl From<Pages> for Token {
    fn from(pages: Pages) -> Token {
        Token::Pages(pages)
    }
}

/// How many pages, and items of state groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Size {
    pub(crate) pages: usize,
    pub(crate) items: usize,
}
