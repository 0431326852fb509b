//! When a transport wakes a peer on the same host before it copies, and how long a woken worker stays awake: a processor
//! takes as long to wake as some hundred KiB take to be copied, and both can take place at the same time. So can the
//! planning of a write, where the transport is told in time ([`rouse`](kv_core::Transport::rouse)).
//!
//! A side wakes the other one again, and is woken again by the other one, only after it has heard something of it: who only
//! wakes others wakes each once.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Bytes of a write that wakes its peer before it is copied, if the write is all that there is to do and a frame follows it.
/// Fewer bytes are copied before a message is written; beside the copy of more, the time to wake does not matter.
pub const LENGTHS: RangeInclusive<u64> = 64 << 10..=1 << 20;
/// For so long a woken worker does not sleep, unless the frame comes: the frame would wake it once more.
const AWAKE: Duration = Duration::from_micros(80);

/// The frame that a peer has announced, by the connection on which it will come. Of several, only the last one is awaited.
#[derive(Debug)]
pub struct Announced<K>(Option<(K, Instant)>);

impl<K: PartialEq> Announced<K> {
    /// No frame is announced.
    pub const NONE: Announced<K> = Announced(None);

    /// A peer has announced a frame.
    pub fn announce(&mut self, on: K) {
        self.0 = Some((on, Instant::now() + AWAKE));
    }

    /// Something has come on this connection.
    pub fn came(&mut self, on: &K) {
        self.0.take_if(|(announced, _)| announced == on);
    }

    /// True while a frame is awaited, for 80 us at most. The owner does not sleep meanwhile. Nor does it yield: on a busy
    /// processor that would cost it a slice of some milliseconds.
    pub fn is_awaited(&self) -> bool {
        self.0.as_ref().is_some_and(|(_, until)| Instant::now() < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_awaited_on_its_connection_and_for_a_moment_only() {
        let mut announced = Announced::NONE;
        assert!(!announced.is_awaited());
        // A busy host may take the processor away for the whole moment.
        let mut awaited = |came: u32| {
            (0..10_000).any(|_| {
                announced.announce(1);
                announced.came(&came);
                announced.is_awaited()
            })
        };
        assert!(awaited(2), "it comes on another connection");
        assert!(!awaited(1), "it has come");
        announced.announce(1);
        std::thread::sleep(AWAKE);
        assert!(!announced.is_awaited(), "it does not come");
    }
}
