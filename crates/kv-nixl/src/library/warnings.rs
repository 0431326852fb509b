//! Settings of UCX that could not be made, as values.

use std::fmt;

use kv_host::OsError;

/// A setting of UCX that this process should have and does not have, or may not have. NIXL works without the
/// setting; the warning says what follows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SettingWarning {
    /// The environment variable that makes the setting, if it is in the environment when the process starts.
    pub name: &'static str,
    /// The value that the variable should have.
    pub wanted: String,
    /// Why the setting could not be made.
    pub reason: NotSet,
    /// What follows for the process.
    pub consequence: &'static str,
}

/// Why a setting of UCX could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotSet {
    /// Another part of the process had loaded this copy of UCX before: UCX has read its settings already.
    LoadedBefore,
    /// Other threads run, so the environment cannot be changed, and the operating system refused what UCX's
    /// configuration file needs: a directory for temporary files, and a thread with a working directory of
    /// its own.
    Refused {
        /// Threads of the process, the calling thread included.
        threads: usize,
        /// The call that was refused.
        error: OsError,
    },
    /// Other threads run, so the environment cannot be changed, and the loader refused NIXL's plugin for UCX
    /// while the configuration file could be read: UCX may come later, and without the setting.
    NotLoaded {
        /// What the loader says of the plugin, or of NIXL's library.
        reason: String,
    },
    /// UCX was told the setting, and has another value.
    Other {
        /// The value that UCX has, as UCX writes it; `None` if only the effect is seen.
        value: Option<String>,
    },
    /// UCX was told the setting through its configuration file, and nothing shows that it has read the file.
    Unconfirmed,
}

impl fmt::Display for SettingWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SettingWarning { name, wanted, reason, consequence } = self;
        write!(f, "the setting {name}={wanted} is not made: {reason}; without the setting, {consequence}")
    }
}

impl fmt::Display for NotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotSet::LoadedBefore => f.write_str("UCX was loaded before by another part of the process"),
            NotSet::Refused { threads, error } => write!(
                f,
                "{threads} threads run, so the environment cannot be changed, and UCX's configuration file \
                 cannot be used: {error}"
            ),
            NotSet::NotLoaded { reason } => {
                write!(f, "the loader refused UCX while its configuration file could be read: {reason}")
            }
            NotSet::Other { value: Some(value) } => write!(f, "UCX has the value {value}"),
            NotSet::Other { value: None } => f.write_str("UCX acts as if the setting had another value"),
            NotSet::Unconfirmed => f.write_str("nothing shows that UCX has read its configuration file"),
        }
    }
}
