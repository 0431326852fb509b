//! [`Device`]: one network card of this transport, with its endpoint.

use kv_host::Memory;

use crate::addresses::Addresses;
use crate::completing::Flight;
use crate::config::{FabricConfig, FabricDevice};
use crate::error::FabricError;
use crate::ffi::{Endpoint, Library, Promises, Settings};
use crate::topology::Location;

/// A network card, or an interface, with an endpoint of its own.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) endpoint: Endpoint<Flight>,
    pub(crate) addresses: Addresses,
    pub(crate) location: Location,
    /// Receive buffers that libfabric has not taken back.
    pub(crate) unreceived: Vec<usize>,
    /// Slices that have ended well, and their bytes.
    pub(crate) slices: u64,
    pub(crate) bytes: u64,
    /// Writes of peers that were counted.
    pub(crate) counted: u64,
}

/// What one device of a transport has done. A transport with several has these counts in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// libfabric's name of the device.
    pub name: String,
    /// The NUMA node of the device, where the kernel tells it.
    pub node: Option<u16>,
    /// Slices of this side's posts that were moved, writes and reads.
    pub slices: u64,
    /// Bytes of these slices.
    pub bytes: u64,
    /// Writes of peers that were counted here, as in [`FabricStats::counted`](crate::FabricStats::counted).
    pub counted: u64,
}

impl Device {
    pub(crate) fn open(library: &'static Library, settings: &Settings) -> Result<Device, FabricError> {
        let endpoint = Endpoint::open(library, settings)?;
        let location = endpoint.location();
        Ok(Device {
            endpoint,
            addresses: Addresses::default(),
            location,
            unreceived: Vec::new(),
            slices: 0,
            bytes: 0,
            counted: 0,
        })
    }

    pub(crate) fn stats(&self) -> DeviceStats {
        let Device { slices, bytes, counted, .. } = *self;
        DeviceStats { name: self.endpoint.device(), node: self.location.node, slices, bytes, counted }
    }
}

/// The devices of a transport: one at least.
#[derive(Debug)]
pub(crate) struct Devices {
    first: Device,
    others: Vec<Device>,
    promises: Promises,
}

impl Devices {
    /// Opens an endpoint on each device. Devices of one provider whose memory is addressed in different ways are refused.
    pub(crate) fn open(library: &'static Library, config: &FabricConfig) -> Result<Devices, FabricError> {
        let mut all = Vec::new();
        for FabricDevice { name, address } in config.devices.clone() {
            let settings = Settings { provider: config.provider.clone(), address, device: name };
            all.push(Device::open(library, &settings)?);
        }
        let mut all = all.into_iter();
        let first = all.next().ok_or(FabricError::Mixed { device: 0 })?;
        let others: Vec<Device> = all.collect();
        let promises =
            others.iter().zip(1..).try_fold(first.endpoint.promises(), |common, (other, device)| {
                common.with(other.endpoint.promises()).ok_or(FabricError::Mixed { device })
            })?;
        Ok(Devices { first, others, promises })
    }

    /// What all devices do.
    pub(crate) fn promises(&self) -> Promises {
        self.promises
    }

    /// The device that carries the messages.
    pub(crate) fn first(&mut self) -> &mut Device {
        &mut self.first
    }

    pub(crate) fn get(&mut self, device: usize) -> Option<&mut Device> {
        match device.checked_sub(1) {
            None => Some(&mut self.first),
            Some(other) => self.others.get_mut(other),
        }
    }

    pub(crate) fn len(&self) -> usize {
        1 + self.others.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Device> {
        std::iter::once(&self.first).chain(&self.others)
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }

    /// Registers memory with all devices, or with none. Its address for peers and its key at each device are returned.
    /// `wanted` is the key where the provider lets this side choose.
    pub(crate) fn register(&mut self, memory: &Memory, wanted: u64) -> Result<(u64, Vec<u64>), FabricError> {
        let (mut base, mut keys) = (0, Vec::new());
        let mut refused = None;
        for device in self.all_mut() {
            match device.endpoint.register(memory, wanted) {
                Ok(far) => (base, _) = (far.addr, keys.push(far.key)),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        let Some(error) = refused else { return Ok((base, keys)) };
        self.all_mut().take(keys.len()).for_each(|device| device.endpoint.unregister_last());
        Err(error)
    }
}
