//! A prefill host and a decode host that have met.

use kv_transfer::prelude::*;
use kv_transfer::{Receiver, Sender};

use super::host::{Host, Setup};
use super::memory::Shape;
use super::{ended, reclaimed, server};

pub struct Pair {
    pub prefill: Host,
    pub decode: Host,
    pub addr: String,
    pub server: KvBootstrapServer,
}

impl Pair {
    /// Two hosts of this shape, changed by `change`, that have served a request.
    pub fn new(shape: Shape, change: impl Fn(&mut Setup)) -> Pair {
        let mut pair = Pair::strangers(shape, change);
        pair.serve(u64::MAX, 3);
        pair
    }

    /// Two hosts that have not met.
    pub fn strangers(shape: Shape, change: impl Fn(&mut Setup)) -> Pair {
        let (server, addr) = server();
        let start = |mut setup: Setup| {
            change(&mut setup);
            setup.start()
        };
        let prefill = start(Setup::prefill(&addr, shape));
        let decode = start(Setup::decode(&addr, shape));
        Pair { prefill, decode, addr, server }
    }

    /// Opens a sender with the default deadline, far away.
    pub fn sender(&self, room: u64) -> Sender {
        self.prefill.sender(room, SessionOptions::default())
    }

    /// Opens a receiver with the default deadline, far away.
    pub fn receiver(&self, room: u64) -> Receiver {
        self.decode.receiver(&self.addr, room, SessionOptions::default())
    }

    /// Opens a sender that has announced `pages` pages.
    pub fn announced(&self, room: u64, pages: usize) -> Sender {
        let mut sender = self.sender(room);
        sender.init(pages, None).unwrap();
        sender
    }

    /// Opens a receiver that has `pages` pages.
    pub fn registered(&mut self, room: u64, pages: usize) -> Receiver {
        let mut receiver = self.receiver(room);
        receiver.init(self.decode.room_for(pages), None).unwrap();
        receiver
    }

    /// Takes the pages of an ended sender back.
    pub fn end_sender(&mut self, sender: Sender) -> usize {
        let pages = reclaimed(sender);
        let count = pages.len();
        for page in pages.list().iter() {
            self.prefill.memory.check_page(page, &"a sender's page");
        }
        self.prefill.free(pages);
        count
    }

    /// Takes the pages of a failed receiver back, which may have been written in part.
    pub fn end_receiver(&mut self, receiver: Receiver, content: u64) -> usize {
        assert_eq!(receiver.poll(), KvPoll::Failed);
        let pages = reclaimed(receiver);
        let count = pages.len();
        self.decode.missed(pages.list(), content, &"a failed receiver");
        self.decode.free(pages);
        count
    }

    /// Serves one request.
    pub fn serve(&mut self, room: u64, pages: usize) {
        let mut sender = self.announced(room, pages);
        sender.send(self.prefill.prompt(pages, room)).unwrap();
        let receiver = self.registered(room, pages);
        self.complete(sender, receiver, room);
    }

    /// Waits for the success of a request, and checks its bytes.
    pub fn complete(&mut self, sender: Sender, receiver: Receiver, content: u64) {
        assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
        let pages = reclaimed(receiver);
        self.decode.arrived(pages.list(), content, &"a request");
        self.decode.free(pages);
        assert_eq!(ended(&sender), KvPoll::Success, "{:?}", sender.failure());
        self.end_sender(sender);
    }

    /// A last request is served; then nothing is left of all others, and no byte is wrong.
    pub fn close(mut self) {
        self.serve(u64::MAX - 1, 5);
        self.prefill.close("prefill");
        self.decode.close("decode");
        self.server.stop();
    }
}
