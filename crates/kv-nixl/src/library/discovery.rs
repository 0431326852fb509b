//! NIXL's C library, found and loaded once. `nixl-sys` looks for the library by itself, and ends the process if
//! there is none; so the library is loaded here before.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::DiscoveryError;
use crate::ffi::library::Library;
use crate::ffi::ucx::Ucx;
use crate::library::guards::GPU_READS;
use crate::library::installed::{named_plugin_dir, plugin_file, plugin_name, plugins, version};
use crate::library::looked::{Looked, Outcome};
use crate::library::places::{Search, Surroundings, candidates};
use crate::library::settings;
use crate::library::settings::GuardReport;
use crate::library::usable::{believed, check, find};
use crate::library::warnings::SettingWarning;

/// NIXL's library, loaded. A process has one, which stays loaded until the process ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nixl {
    library: PathBuf,
    version: Option<String>,
    plugins: Vec<String>,
    guards: GuardReport,
}

static LOADED: Mutex<Option<Nixl>> = Mutex::new(None);

impl Nixl {
    /// Finds the library, loads and checks it, and gives UCX the settings of [`guards`](crate::guards) that
    /// the operator has not set. Other threads may run; [`warnings`](Nixl::warnings) names the settings that
    /// could not be made. Later calls return what the first successful call found.
    pub fn load(search: &Search) -> Result<Nixl, DiscoveryError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nixl) = &*loaded {
            return Ok(nixl.clone());
        }
        let (candidates, named) = (candidates(search, &Surroundings::here()), named_plugin_dir());
        let likely = candidates.iter().map(|candidate| &*candidate.path).find(|path| path.is_file());
        let (library, guards) = settings::load_with_guards(
            likely,
            || find(&candidates, check),
            |library| plugin_file(library, named.as_deref(), "UCX"),
        )?;
        let nixl = Nixl { version: version(&library), plugins: plugins(&library), guards, library };
        *loaded = Some(nixl.clone());
        Ok(nixl)
    }

    /// The path of the library.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// NIXL's version, if the library lies in a Python package; the library itself does not know its version.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The backends whose plugins lie beside the library, sorted by name.
    pub fn plugins(&self) -> &[String] {
        &self.plugins
    }

    /// Settings that UCX should have and does not have, or may not have, in this process. Empty as a rule.
    pub fn warnings(&self) -> &[SettingWarning] {
        &self.guards.warnings
    }

    /// Whether this library has made UCX let a GPU copy what is read, too; `None` if the operator has set that.
    pub(crate) fn reads_by_gpu(&self) -> Option<bool> {
        self.guards.missing.contains(&GPU_READS).then(|| self.guards.made.contains(&GPU_READS))
    }

    /// Why the plugin of a backend cannot be loaded, in the loader's words; `None` if the plugin can be
    /// loaded.
    pub fn why_not(&self, backend: &str) -> Option<String> {
        let Some(path) = plugin_file(&self.library, named_plugin_dir().as_deref(), backend) else {
            return Some(format!("there is no {} beside the library", plugin_name(backend)));
        };
        Library::load(&path).err()
    }

    /// The settings that UCX has for agents that are made now, wherever they come from: lines `NAME=value`. Empty without
    /// NIXL's plugin for UCX.
    pub(crate) fn ucx_settings(&self) -> String {
        let plugin = plugin_file(&self.library, named_plugin_dir().as_deref(), "UCX");
        let ucx = plugin.and_then(|plugin| Ucx::load(&plugin).ok());
        ucx.map(Ucx::settings).unwrap_or_default()
    }

    /// Looks for the library as [`load`](Nixl::load) does, without loading or changing anything. Returns the
    /// places in their order, up to the first file that nobody else could have put there.
    pub fn look(search: &Search) -> Vec<Looked> {
        let mut looked = Vec::new();
        for candidate in candidates(search, &Surroundings::here()) {
            let there = candidate.path.is_file();
            let outcome = match there.then(|| believed(&candidate)) {
                Some(Ok(())) => Outcome::Usable,
                Some(Err(error)) => Outcome::Unusable(error.to_string()),
                None => Outcome::Absent,
            };
            let is_found = outcome == Outcome::Usable;
            looked.push(Looked { path: candidate.path, because: candidate.because, outcome });
            if is_found {
                break;
            }
        }
        looked
    }
}
