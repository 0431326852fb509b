//! [`installed`]: the libfabric of this host, and what it offers.

use std::path::{Path, PathBuf};

use crate::config::{FabricConfig, FabricDevice, MAX_DEVICES};
use crate::error::FabricError;
use crate::ffi::{Library, Usable, usable};
use crate::topology::{Location, SYS};

/// A libfabric that is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Installed {
    /// The library's file, or the name by which the dynamic loader has found it.
    pub library: PathBuf,
    /// Major and minor number of its version.
    pub version: (u32, u32),
}

/// Loads the libfabric that a transport would load. It stays loaded.
///
/// # Errors
///
/// [`FabricError::Library`], [`FabricError::Symbol`] and [`FabricError::Version`], as
/// [`FabricTransport::new`](crate::FabricTransport::new).
pub fn installed() -> Result<Installed, FabricError> {
    let library = Library::get(None)?;
    Ok(Installed { library: library.path().to_owned(), version: library.version() })
}

impl Installed {
    /// The providers that a transport can use here ([`FabricConfig::provider`]), each with the names of its devices
    /// ([`FabricDevice::name`](crate::FabricDevice::name)), in the order of libfabric's preference.
    pub fn providers(&self) -> Result<Vec<(String, Vec<String>)>, FabricError> {
        let library = Library::get(Some(&self.library))?;
        let mut providers: Vec<(String, Vec<String>)> = Vec::new();
        for Usable { provider, device, .. } in usable(library) {
            match providers.iter_mut().find(|(known, _)| *known == provider) {
                Some((_, devices)) if devices.contains(&device) => {}
                Some((_, devices)) => devices.push(device),
                None => providers.push((provider, vec![device])),
            }
        }
        let is_taken = |name: &str| {
            FabricConfig::default().with(|config| config.provider = name.to_owned()).check().is_ok()
        };
        providers.retain(|(name, _)| is_taken(name));
        Ok(providers)
    }

    /// The devices of a provider that are nearest to a GPU, for a worker whose pages this GPU fills or reads: those behind
    /// the same PCIe switch if there are some, else those of the same socket, else all; [`MAX_DEVICES`] at most. The GPU is
    /// named by its PCI address, which `nvidia-smi --query-gpu=pci.bus_id --format=csv` prints.
    ///
    /// # Errors
    ///
    /// [`FabricError::Gpu`] if there is no such device; otherwise as [`installed`].
    pub fn nearest(&self, provider: &str, gpu: &str) -> Result<Vec<FabricDevice>, FabricError> {
        let library = Library::get(Some(&self.library))?;
        let sys = Path::new(SYS);
        let gpu = Location::of_pci(sys, gpu).ok_or_else(|| FabricError::Gpu { address: gpu.to_owned() })?;
        let mut nearest: (usize, Vec<FabricDevice>) = (0, Vec::new());
        for Usable { device, pci, .. } in
            usable(library).into_iter().filter(|usable| usable.provider == provider)
        {
            let nearness = Location::of(sys, &device, pci.as_deref()).nearness(&gpu);
            let device = FabricDevice::named(device);
            if nearness > nearest.0 {
                nearest = (nearness, vec![device]);
            } else if nearness == nearest.0 && !nearest.1.contains(&device) {
                nearest.1.push(device);
            }
        }
        nearest.1.truncate(MAX_DEVICES);
        Ok(nearest.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FabricDevice, FabricTransport};

    #[test]
    fn every_device_that_is_named_makes_an_endpoint_of_its_provider() {
        let installed = installed().unwrap();
        assert!(installed.version >= (1, 14), "{installed:?}");
        let providers = installed.providers().unwrap();
        assert!(
            providers.iter().all(|(name, devices)| name != "shm" && !devices.is_empty()),
            "{providers:?}"
        );
        // The others need hardware that the host may only seem to have.
        let usual = FabricConfig::default().provider;
        let (_, devices) = providers.iter().find(|(name, _)| *name == usual).unwrap();
        for device in devices {
            let named = FabricDevice::named(device);
            let config = FabricConfig::default().with(|config| config.devices = vec![named]);
            let made = FabricTransport::new(config);
            let used: Vec<_> = made.iter().flat_map(FabricTransport::devices).map(|used| used.name).collect();
            assert_eq!(used, std::slice::from_ref(device), "{made:?}");
        }
        let nowhere = FabricDevice::named("nowhere");
        let nowhere = FabricConfig::default().with(|config| config.devices.push(nowhere));
        let made = FabricTransport::new(nowhere);
        assert!(matches!(made, Err(FabricError::Provider { .. })), "{made:?}");
    }
}
