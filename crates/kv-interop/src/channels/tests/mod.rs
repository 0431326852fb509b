//! A worker's sockets on the loopback device.

mod abuse;
mod ends;
mod hostile;
mod others;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};

use super::*;

const PEER: PeerId = PeerId(7);
const SOON: Duration = Duration::from_secs(30);

/// The sockets of a worker, which sleeps on their descriptor and nothing else.
struct Worker {
    channels: Channels,
    poll: Poll,
    events: VecDeque<Event>,
}

impl Worker {
    fn new(config: ChannelConfig) -> Worker {
        let channels = Channels::new(config).unwrap();
        let poll = Poll::new().unwrap();
        poll.registry().register(&mut SourceFd(&channels.as_raw_fd()), Token(0), Interest::READABLE).unwrap();
        Worker { channels, poll, events: VecDeque::new() }
    }

    fn quiet() -> Worker {
        Worker::new(ChannelConfig::default())
    }

    /// One that tries a port whose connection has ended until a test would have failed.
    fn probing() -> Worker {
        Worker::new(ChannelConfig::default().with(|config| config.probing = 2 * SOON))
    }

    fn listening(change: impl FnOnce(&mut ChannelConfig)) -> Worker {
        let config = ChannelConfig { listen: Some("127.0.0.1:0".to_owned()), ..ChannelConfig::default() };
        Worker::new(config.with(change))
    }

    fn turn(&mut self) {
        let mut came = Vec::new();
        self.channels.poll(&mut came);
        self.events.extend(came);
    }

    fn sleep(&mut self, most: Duration) {
        let sleep = self.channels.sleep().unwrap_or(most).min(most);
        // A process that is stopped and continued is interrupted.
        let _ = self.poll.poll(&mut Events::with_capacity(4), Some(sleep));
    }

    /// The next event.
    fn next(&mut self) -> Event {
        let deadline = Instant::now() + SOON;
        loop {
            self.turn();
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            assert!(Instant::now() < deadline, "nothing comes: {:?}", self.channels);
            self.sleep(SOON);
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&Worker) -> bool) {
        let deadline = Instant::now() + SOON;
        while !done(self) {
            assert!(Instant::now() < deadline, "{what}");
            self.sleep(Duration::from_millis(1));
            self.turn();
        }
    }

    fn addr(&self) -> String {
        self.channels.local_addr().unwrap().to_string()
    }
}

/// A message whose length and bytes follow from its number: up to 100 KB in one to five parts.
fn message(number: usize) -> Vec<Bytes> {
    let len = |part: usize| match (number + part) % 4 {
        0 => part,
        1 => 255 + part % 2,
        2 => 4000 + number,
        _ => (number * 7919 + part) % 100_001,
    };
    let parts = 1 + number % 5;
    (0..parts).map(|part| Bytes::from(vec![(number + part) as u8; len(part) / parts])).collect()
}
