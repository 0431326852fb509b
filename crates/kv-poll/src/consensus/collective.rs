//! [`CollectiveConsensus`]: agreement through a collective operation of the server, for ranks in lock-step.

use std::collections::BTreeMap;

use kv_core::hash::Fnv1a;
use kv_core::{KvPoll, Room};

use super::agreement::{Agreed, OPENING, RankConsensus, RequestKey, RoomBusy, Standing, advance};

/// An all-reduce that a server already has (gloo, NCCL, MPI …), over the ranks of one group.
pub trait Collective {
    /// Why the collective operation failed.
    type Error: std::error::Error + 'static;

    /// Replaces each byte by the minimum of that byte over all ranks. Blocks until all ranks have called this
    /// method with as many bytes.
    fn all_reduce_min(&mut self, values: &mut [u8]) -> Result<(), Self::Error>;
}

/// The agreement of ranks in lock-step, as SGLang's ranks are: every rank calls
/// [`agree`](RankConsensus::agree) once per step, and between two of these calls every rank enters **the same
/// rooms in the same order**. In a server, the broadcast that gives all ranks the same requests ensures this.
///
/// A step is one small all-reduce of [`HEADER`](CollectiveConsensus::HEADER) bytes, and if any rank has news,
/// a second one with two bytes for each open request. The small one carries a fingerprint of all rooms
/// entered so far. So ranks that have entered different rooms get an error, all of them in the same step,
/// before vectors for different rooms or of different lengths are combined.
#[derive(Debug)]
pub struct CollectiveConsensus<C> {
    collective: C,
    /// Open requests; the order of keys is the order of entry, the same on all ranks.
    requests: BTreeMap<RequestKey, Request>,
    /// Hash of all rooms entered since the beginning, in order.
    entered: Fnv1a,
    /// True if this rank has a proposal that was not exchanged.
    news: bool,
    values: Vec<u8>,
}

impl<C: Collective> CollectiveConsensus<C> {
    /// Bytes of the all-reduce that every step makes.
    pub const HEADER: usize = 25;

    /// A rank that has entered no room yet. All other ranks must begin in the same step.
    pub fn new(collective: C) -> CollectiveConsensus<C> {
        CollectiveConsensus {
            collective,
            requests: BTreeMap::new(),
            entered: Fnv1a::new(),
            news: false,
            values: Vec::new(),
        }
    }

    /// How many requests are open: their last agreement has not come.
    pub fn open_rooms(&self) -> usize {
        self.requests.len()
    }

    /// True if any rank has news. An error if the ranks have entered different rooms.
    fn exchange_header(&mut self) -> Result<bool, CollectiveError<C::Error>> {
        let fingerprint = self.entered.finish();
        let open = self.requests.len();
        let mut own = [0; 12];
        own[..8].copy_from_slice(&fingerprint.to_le_bytes());
        own[8..].copy_from_slice(&u32::try_from(open).unwrap_or(u32::MAX).to_le_bytes());

        // A byte and its complement: their minima are complements exactly if all ranks have the
        // same byte.
        let mut header = [0; 25];
        for (index, byte) in own.iter().enumerate() {
            header[index] = *byte;
            header[12 + index] = !*byte;
        }
        header[24] = u8::from(!self.news);
        self.collective.all_reduce_min(&mut header).map_err(CollectiveError::Collective)?;
        if (0..12).any(|index| header[index] != !header[12 + index]) {
            return Err(CollectiveError::Diverged { open, fingerprint });
        }
        Ok(header[24] == 0)
    }

    fn exchange_standings(&mut self) -> Result<(), CollectiveError<C::Error>> {
        self.values.clear();
        for request in self.requests.values() {
            let Standing { poll, reclaimable } = request.local;
            self.values.extend([poll as u8, u8::from(reclaimable)]);
        }
        self.collective.all_reduce_min(&mut self.values).map_err(CollectiveError::Collective)?;
        match self.values.iter().step_by(2).find(|value| KvPoll::from_u8(**value).is_none()) {
            Some(value) => Err(CollectiveError::BadState { value: *value }),
            None => Ok(()),
        }
    }
}

impl<C: Collective> RankConsensus for CollectiveConsensus<C> {
    type Error = CollectiveError<C::Error>;

    fn join(&mut self, key: RequestKey, room: &Room) -> Result<(), RoomBusy> {
        match room {
            Room::Number(number) => {
                self.entered.write(&[1]);
                self.entered.write(&number.to_le_bytes());
            }
            Room::Request(id) => {
                self.entered.write(&[2]);
                self.entered.write(&(id.as_str().len() as u64).to_le_bytes());
                self.entered.write(id.as_str().as_bytes());
            }
        }
        self.requests.insert(key, Request { local: OPENING, agreed: OPENING });
        Ok(())
    }

    fn propose(&mut self, key: RequestKey, standing: Standing) {
        let Some(request) = self.requests.get_mut(&key) else { return };
        let next = advance(request.local, standing);
        self.news |= next != request.local;
        request.local = next;
    }

    /// An error comes to all ranks in the same step, unless the collective itself fails, and changes nothing:
    /// once the ranks have entered the missing rooms, they agree again.
    fn agree(&mut self, agreed: &mut Vec<Agreed>) -> Result<(), Self::Error> {
        if !self.exchange_header()? {
            return Ok(());
        }
        self.exchange_standings()?;
        self.news = false;
        let mut values = self.values.chunks_exact(2);
        self.requests.retain(|key, request| {
            let Some([poll, reclaimable]) = values.next() else { return true };
            let poll = KvPoll::from_u8(*poll).unwrap_or(KvPoll::Failed);
            let standing = Standing { poll, reclaimable: poll.is_terminal() && *reclaimable != 0 };
            if standing != request.agreed {
                request.agreed = standing;
                agreed.push(Agreed { key: *key, standing });
            }
            !standing.reclaimable
        });
        Ok(())
    }

    fn turn(&mut self, first: Option<RequestKey>) -> Option<RequestKey> {
        first
    }

    fn took_turn(&mut self) {}
}

#[derive(Debug)]
struct Request {
    local: Standing,
    agreed: Standing,
}

/// Why ranks in lock-step did not agree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError<E: std::error::Error + 'static> {
    /// The server's collective operation failed, for the reason in the source.
    #[error("the collective operation failed")]
    Collective(#[source] E),
    /// The ranks have not entered the same rooms in the same order. Compare the ranks' logs: each
    /// gets this error in the same step, with its own numbers.
    #[error("ranks entered different rooms: this one has {open} open, fingerprint {fingerprint:016x}")]
    Diverged {
        /// Requests open on this rank.
        open: usize,
        /// Hash of all rooms that this rank has entered, in order.
        fingerprint: u64,
    },
    /// The collective returned a byte that no rank can have given, so it does not compute the minimum.
    #[error("the collective returned the state {value}; states are 0 to 4")]
    BadState {
        /// The byte that the collective returned.
        value: u8,
    },
}
