//! libfabric's functions and types as bindgen has made them, for the bench that compares the transport with plain calls.
//! Not a public API.

use crate::FabricError;
pub use crate::ffi::sys::*;
use crate::ffi::{DupInfo, Fabric, FreeInfo, GetInfo, Library};

/// The functions of the loaded library that are symbols.
#[derive(Debug, Clone, Copy)]
pub struct Functions {
    pub getinfo: GetInfo,
    pub freeinfo: FreeInfo,
    pub dupinfo: DupInfo,
    pub fabric: Fabric,
    /// The version of the interface to ask for.
    pub interface: u32,
}

/// The functions of the library that a transport would load.
pub fn functions() -> Result<Functions, FabricError> {
    let library = Library::get(None)?;
    let Library { getinfo, freeinfo, dupinfo, fabric, .. } = *library;
    Ok(Functions { getinfo, freeinfo, dupinfo, fabric, interface: library.interface() })
}
