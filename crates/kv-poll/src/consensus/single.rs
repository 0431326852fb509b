//! [`SingleRank`]: the agreement of an engine with one rank.

use std::convert::Infallible;

use kv_core::Room;

use super::agreement::{Agreed, RankConsensus, RequestKey, RoomBusy, Standing};

/// The agreement of a single rank: every proposal is agreed unchanged, in the same step.
#[derive(Debug, Default)]
pub struct SingleRank {
    proposed: Vec<Agreed>,
}

impl RankConsensus for SingleRank {
    type Error = Infallible;

    fn join(&mut self, _key: RequestKey, _room: &Room) -> Result<(), RoomBusy> {
        Ok(())
    }

    fn propose(&mut self, key: RequestKey, standing: Standing) {
        self.proposed.push(Agreed { key, standing });
    }

    fn agree(&mut self, agreed: &mut Vec<Agreed>) -> Result<(), Infallible> {
        agreed.append(&mut self.proposed);
        Ok(())
    }

    fn turn(&mut self, first: Option<RequestKey>) -> Option<RequestKey> {
        first
    }

    fn took_turn(&mut self) {}

    fn is_lock_step(&self) -> bool {
        false
    }
}
