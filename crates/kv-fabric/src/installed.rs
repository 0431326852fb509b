//! [`installed`]: the libfabric of this host, and what it offers.

use std::path::PathBuf;

use crate::config::FabricConfig;
use crate::error::FabricError;
use crate::ffi::{Library, usable};

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
    /// ([`FabricConfig::device`]), in the order of libfabric's preference.
    pub fn providers(&self) -> Result<Vec<(String, Vec<String>)>, FabricError> {
        let library = Library::get(Some(&self.library))?;
        let mut providers: Vec<(String, Vec<String>)> = Vec::new();
        for (provider, device) in usable(library) {
            match providers.iter_mut().find(|(known, _)| *known == provider) {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FabricTransport;

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
            let config = FabricConfig::default().with(|config| config.device = Some(device.clone()));
            let made = FabricTransport::new(config);
            assert!(made.is_ok(), "{device}: {made:?}");
        }
        let nowhere = FabricConfig::default().with(|config| config.device = Some("nowhere".to_owned()));
        let made = FabricTransport::new(nowhere);
        assert!(matches!(made, Err(FabricError::Provider { .. })), "{made:?}");
    }
}
