//! The protocol machine of the KV cache as a [`Machine`], which a worker drives.

use super::Node;
use crate::command::{Command, Resource};
use crate::error::TransferError;
use crate::id::PeerId;
use crate::machine::Machine;
use crate::poll::KvPoll;
use crate::proto::io::{Input, Output};
use crate::quarantine::Quarantine;
use crate::record::TransportOffer;
use crate::time::Time;
use crate::trace::{Event, KvWhat};
use crate::wire::hello_transport;

impl Machine for Node {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;
    type Trace = KvWhat;

    fn handle(&mut self, now: Time, input: Input) {
        Node::handle(self, now, input);
    }

    fn poll_output(&mut self) -> Option<Output> {
        Node::poll_output(self)
    }

    fn next_timeout(&self) -> Option<Time> {
        Node::next_timeout(self)
    }

    fn leased(&self) -> usize {
        self.pages_leased()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        Node::quarantine(self)
    }

    fn awaits_peers(&self) -> bool {
        Node::awaits_peers(self)
    }

    fn owes_answers(&self) -> bool {
        Node::owes_answers(self)
    }

    fn listen(&mut self, on: bool) {
        Node::listen(self, on);
    }

    fn poll_trace(&mut self) -> Option<Event<KvWhat>> {
        Node::poll_trace(self)
    }

    fn addressee(&self, now: Time, command: &Command) -> Option<(PeerId, u64)> {
        Node::addressee(self, now, command)
    }

    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        hello_transport(frame)
    }
}
