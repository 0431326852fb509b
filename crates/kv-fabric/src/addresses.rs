//! [`Addresses`]: which ways and guests use an endpoint of the address table. An endpoint that nobody uses any more is
//! removed.

use std::collections::HashMap;

use crate::error::FabricError;
use crate::ffi::{Address, Endpoint};

/// The peers' endpoints in the address table, by name, with how many ways and guests use each.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    used: HashMap<Vec<u8>, (Address, usize)>,
}

impl Addresses {
    /// The endpoint of this name, for one more user.
    pub(crate) fn take<T: Copy>(
        &mut self,
        endpoint: &mut Endpoint<T>,
        name: &[u8],
    ) -> Result<Address, FabricError> {
        if let Some((address, users)) = self.used.get_mut(name) {
            *users += 1;
            return Ok(*address);
        }
        let address = endpoint.insert(name)?;
        self.used.insert(name.to_vec(), (address, 1));
        Ok(address)
    }

    /// How many endpoints are in use.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.used.len()
    }

    /// One user of the address less.
    pub(crate) fn give_back<T: Copy>(&mut self, endpoint: &mut Endpoint<T>, name: &[u8]) {
        let Some((address, users)) = self.used.get_mut(name) else { return };
        *users -= 1;
        if *users == 0 {
            endpoint.remove(*address);
            self.used.remove(name);
        }
    }
}
