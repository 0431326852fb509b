//! [`Addresses`]: which ways and guests use an endpoint of the address table. An endpoint that nobody uses any more is
//! removed, which closes the connection to it.

use std::collections::HashMap;

use crate::error::FabricError;
use crate::ffi::{Address, Endpoint};

/// An endpoint, and how many use it. There is no address once the connection was severed: those that still use it send
/// nothing more.
#[derive(Debug)]
struct Used {
    address: Option<Address>,
    users: usize,
}

/// The peers' endpoints in the address table, by name, with how many ways and guests use each.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    used: HashMap<Vec<u8>, Used>,
}

impl Addresses {
    /// The endpoint of this name, for one more user.
    pub(crate) fn take<T: Copy>(
        &mut self,
        endpoint: &mut Endpoint<T>,
        name: &[u8],
    ) -> Result<Address, FabricError> {
        let users = match self.used.get_mut(name) {
            Some(Used { address: Some(address), users }) => {
                *users += 1;
                return Ok(*address);
            }
            Some(used) => used.users,
            None => 0,
        };
        let address = endpoint.insert(name)?;
        self.used.insert(name.to_vec(), Used { address: Some(address), users: users + 1 });
        Ok(address)
    }

    /// One user less.
    pub(crate) fn give_back<T: Copy>(&mut self, endpoint: &mut Endpoint<T>, name: &[u8]) {
        let Some(used) = self.used.get_mut(name) else { return };
        used.users -= 1;
        if used.users == 0 {
            self.sever(endpoint, name);
            self.used.remove(name);
        }
    }

    /// Removes the endpoint, whoever uses it: nobody may send to it any more.
    pub(crate) fn sever<T: Copy>(&mut self, endpoint: &mut Endpoint<T>, name: &[u8]) {
        if let Some(address) = self.used.get_mut(name).and_then(|used| used.address.take()) {
            endpoint.remove(address);
        }
    }
}
