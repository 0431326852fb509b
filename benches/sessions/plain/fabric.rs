//! Plain calls of libfabric.

use kv_benches::fabric::Raw;
use kv_transfer::fabric::{FabricConfig, HostMemory};
use kv_transfer::unstable::{Descriptor, Op};

use super::End;
use crate::Error;
use crate::way::ADDRESS;

/// An endpoint with one registered cache.
pub(super) struct Plain(Raw);

impl Plain {
    pub(super) fn new(memory: &HostMemory) -> Result<Plain, Error> {
        Ok(Plain(Raw::new(&FabricConfig::default().provider, ADDRESS, memory)?.yielding()))
    }
}

impl End for Plain {
    fn describe(&self) -> Result<String, Error> {
        self.0.describe()
    }

    fn meet(&mut self, described: &str) -> Result<(), Error> {
        self.0.connect(described)
    }

    fn say(&mut self) -> Result<(), Error> {
        self.0.say()
    }

    fn hear(&mut self) -> Result<(), Error> {
        self.0.hear()
    }

    fn copy(&mut self, place: usize, len: usize) -> Result<(), Error> {
        let (place, len) = (place as u64, len as u64);
        let same =
            Descriptor { local_region: 0, remote_region: 0, local_offset: place, remote_offset: place, len };
        self.0.run(Op::Write, &[same])
    }
}
