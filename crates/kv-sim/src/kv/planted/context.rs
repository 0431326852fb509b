//! Planted bugs that only context-parallel ranks can show: the wrong rank sends, or a rank sends the wrong
//! pages.

use kv_core::wire::{Delivery, Register};
use kv_core::{Op, PageList, RegionRole};

use crate::kv::ledger::{LegId, Side};
use crate::kv::service::KvWorld;
use crate::net::Memory as _;
use crate::net::flight::Piece;
use crate::net::lives::LifeId;
use crate::planted::Planted;

impl KvWorld {
    /// Changes which pages a receiver asks of a source.
    pub(super) fn ask_wrongly(
        &self,
        planted: Planted,
        (receiver, source): (LifeId, LifeId),
        register: &mut Register,
    ) {
        let (Some(pair), Delivery::Write(wanted)) = (&self.service.params.unequal, &mut register.delivery)
        else {
            return;
        };
        let (from, to) = (self.service.params.rank(self.hosts[source].slot).1, self.hosts[receiver].slot);
        let (cp, of) = pair.sibling(from);
        match planted {
            Planted::RangeOneShort if cp == 1 => {
                let fewer = wanted.pages.len().saturating_sub(1);
                wanted.pages = wanted.pages.slice(0, fewer).unwrap_or_default();
            }
            Planted::FirstNotShifted | Planted::SiblingsSendAll => {
                let asks = self.service.ledger.legs.iter().rfind(|leg| {
                    leg.side == Side::Receiver && leg.life == Some(receiver) && leg.room == register.room
                });
                let Some(leg) = asks else { return };
                wanted.first_page = leg.prefix as u32;
                if planted == Planted::SiblingsSendAll {
                    wanted.pages = PageList::from_pages(leg.pages.iter().copied()).unwrap_or_default();
                }
            }
            Planted::AuxOfLastSibling => {
                let aux = pair.aux_source(self.service.params.rank(to).1);
                wanted.aux_here = pair.are_siblings(aux, from) && cp + 1 == of;
            }
            _ => {}
        }
    }

    /// True if the two sources hold the same pages.
    pub(super) fn are_siblings(&self, one: LifeId, other: LifeId) -> bool {
        let [one, other] = [one, other].map(|life| self.service.params.rank(self.hosts[life].slot).1);
        self.service.params.unequal.as_ref().is_some_and(|pair| pair.are_siblings(one, other))
    }

    /// With the planted bug, pages that the peer distributes over more ranks than this engine does are taken
    /// from the place of the first rank.
    pub(crate) fn forget_places(&self, life: LifeId, target: LifeId, op: Op, pieces: &mut [Piece]) {
        let Some(pair) = &self.service.params.unequal else { return };
        let [here, there] = pair.engines.each_ref().map(|engine| engine.context as usize);
        for piece in pieces {
            let ours = (life, piece.local_region, &mut piece.local_offset, &mut piece.local_hold);
            let theirs = (target, piece.remote_region, &mut piece.remote_offset, &mut piece.remote_hold);
            let (source, dest) = if op == Op::Write { (ours, theirs) } else { (theirs, ours) };
            let Some(from) = self.memories[source.0].regions().get(source.1 as usize) else { continue };
            let Some(to) = self.memories[dest.0].regions().get(dest.1 as usize) else { continue };
            if from.role != RegionRole::Kv || *source.3 == 0 || *dest.3 == 0 {
                continue;
            }
            let leg = |hold: u32| -> LegId { self.service.ledger.holds[hold as usize].leg };
            let (sender, receiver) =
                (&self.service.ledger.legs[leg(*source.3)], &self.service.ledger.legs[leg(*dest.3)]);
            let page = *dest.2 as usize / to.item_len;
            let Some(at) = receiver.pages.iter().position(|known| *known as usize == page) else { continue };
            let wrong = (receiver.prefix + at) * there / here;
            let Some(&page) = sender.pages.get(wrong) else { continue };
            *source.2 = u64::from(page) * from.item_len as u64 + *source.2 % from.item_len as u64;
            *source.3 = self.memories[source.0].holder(source.1, *source.2);
        }
    }
}
