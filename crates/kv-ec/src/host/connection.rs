//! One rank's connection: what the rank holds, and the answers to its requests.

use std::collections::BTreeMap;

use kv_core::PageList;

use super::error::Refusal;
use super::message::{Answer, Ask, some_runs};
use crate::cache::{Pin, Reservation};
use crate::store::SharedStore;

/// The reservations and pins of one connection, under numbers that the connection never uses twice.
#[derive(Debug)]
pub(super) struct Holdings {
    store: SharedStore,
    drawn: u64,
    max: u32,
    reservations: BTreeMap<u64, Reservation>,
    pins: BTreeMap<u64, Pin>,
}

impl Holdings {
    pub(super) fn new(store: &SharedStore, max: u32) -> Holdings {
        let (reservations, pins) = (BTreeMap::new(), BTreeMap::new());
        Holdings { store: store.clone(), drawn: 0, max, reservations, pins }
    }

    /// Does what a rank asks for.
    pub(super) fn answer(&mut self, ask: &Ask) -> Result<Answer, Refusal> {
        match ask {
            Ask::Reserve { hash, bytes } => {
                self.check_room()?;
                let reservation = self.store.reserve(hash, *bytes).map_err(Refusal::Reserve)?;
                self.drawn += 1;
                let answer = held(self.drawn, reservation.bytes(), reservation.pages());
                self.reservations.insert(self.drawn, reservation);
                Ok(answer)
            }
            Ask::Pin(hash) => {
                self.check_room()?;
                let pin = self.store.pin(hash).map_err(Refusal::Absent)?;
                self.drawn += 1;
                let answer = held(self.drawn, pin.bytes(), pin.pages());
                self.pins.insert(self.drawn, pin);
                Ok(answer)
            }
            Ask::Commit(handle) => {
                let reservation = self.take_reservation(*handle)?;
                // A rank's reservation always has all of its blocks, so the cache takes it.
                self.store.commit(reservation).map(|()| Answer::Done).map_err(|reservation| {
                    self.reservations.insert(*handle, reservation);
                    Refusal::NotHeld { handle: *handle }
                })
            }
            Ask::Discard(handle) => {
                let reservation = self.take_reservation(*handle)?;
                self.store.discard(reservation);
                Ok(Answer::Done)
            }
            Ask::Unpin(handle) => {
                self.store.unpin(self.pins.remove(handle).ok_or(Refusal::NotHeld { handle: *handle })?);
                Ok(Answer::Done)
            }
            Ask::Runs { handle, from } => {
                let reserved = self.reservations.get(handle).map(Reservation::pages);
                let list = reserved.or_else(|| self.pins.get(handle).map(Pin::pages));
                let list = list.ok_or(Refusal::NotHeld { handle: *handle })?;
                Ok(Answer::Runs(some_runs(list, *from)))
            }
        }
    }

    pub(super) fn num_pins(&self) -> usize {
        self.pins.len()
    }

    pub(super) fn num_reservations(&self) -> usize {
        self.reservations.len()
    }

    /// Gives up all pins: the connection is over.
    pub(super) fn unpin_all(&mut self) {
        while let Some((_, pin)) = self.pins.pop_first() {
            self.store.unpin(pin);
        }
    }

    /// Gives up all reservations: the rank's process has ended.
    pub(super) fn discard_all(&mut self) {
        while let Some((_, reservation)) = self.reservations.pop_first() {
            self.store.discard(reservation);
        }
    }

    fn check_room(&self) -> Result<(), Refusal> {
        let held = self.reservations.len() + self.pins.len();
        if held >= self.max as usize { Err(Refusal::TooManyHeld { max: self.max }) } else { Ok(()) }
    }

    fn take_reservation(&mut self, handle: u64) -> Result<Reservation, Refusal> {
        self.reservations.remove(&handle).ok_or(Refusal::NotHeld { handle })
    }
}

fn held(handle: u64, bytes: u64, list: &PageList) -> Answer {
    let total = u32::try_from(list.runs().len()).unwrap_or(u32::MAX);
    Answer::Held { handle, bytes, total, runs: some_runs(list, 0) }
}
