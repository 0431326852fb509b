//! What a scheduler says to a session and a full ring may refuse: kept as a value, it can be said again.

use kv_core::{AuxIndex, Backpressure, FinalLayers, Groups, KvReceiver, KvSender, Pages};

/// What is said to a sender.
#[derive(Debug)]
pub(crate) enum ToSender {
    Init(usize, Option<AuxIndex>),
    Send(Pages),
    Begin(Pages),
    Final(FinalLayers),
    Groups(Groups),
}

impl ToSender {
    /// Says it; comes back if there is no room.
    pub(crate) fn tell(self, session: &mut impl KvSender) -> Result<(), ToSender> {
        match self {
            ToSender::Init(pages, aux) => {
                session.init(pages, aux).map_err(|Backpressure(())| ToSender::Init(pages, aux))
            }
            ToSender::Send(chunk) => session.send(chunk).map_err(|refused| ToSender::Send(refused.0)),
            ToSender::Begin(chunk) => {
                session.begin_chunk(chunk).map(drop).map_err(|refused| ToSender::Begin(refused.0))
            }
            ToSender::Final(layers) => {
                session.layers_final(layers).map_err(|refused| ToSender::Final(refused.0))
            }
            ToSender::Groups(groups) => {
                session.give_groups(groups).map_err(|refused| ToSender::Groups(refused.0))
            }
        }
    }
}

/// What is said to a receiver.
#[derive(Debug)]
pub(crate) enum ToReceiver {
    Init(Pages, Option<AuxIndex>),
    Groups(Groups),
}

impl ToReceiver {
    /// Says it; comes back if there is no room.
    pub(crate) fn tell(self, session: &mut impl KvReceiver) -> Result<(), ToReceiver> {
        match self {
            ToReceiver::Init(pages, aux) => {
                session.init(pages, aux).map_err(|refused| ToReceiver::Init(refused.0, aux))
            }
            ToReceiver::Groups(groups) => {
                session.give_groups(groups).map_err(|refused| ToReceiver::Groups(refused.0))
            }
        }
    }
}
