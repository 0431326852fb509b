//! Which of the places has a library that can be used: one that loads, and has every function that is called.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

use kv_host::{OwnerError, check_owner};

use crate::error::DiscoveryError;
use crate::ffi::library::Library;
use crate::library::looked::{Looked, Outcome};
use crate::library::places::{By, Candidate, LIBRARY};

/// The functions that this crate calls through `nixl-sys`, which would end the process if one were missing.
const SYMBOLS: &[&CStr] = &[
    c"nixl_capi_create_configured_agent",
    c"nixl_capi_destroy_agent",
    c"nixl_capi_get_plugin_params",
    c"nixl_capi_params_add",
    c"nixl_capi_destroy_params",
    c"nixl_capi_destroy_mem_list",
    c"nixl_capi_create_backend",
    c"nixl_capi_destroy_backend",
    c"nixl_capi_create_opt_args",
    c"nixl_capi_destroy_opt_args",
    c"nixl_capi_opt_args_add_backend",
    c"nixl_capi_create_reg_dlist",
    c"nixl_capi_reg_dlist_clear",
    c"nixl_capi_reg_dlist_add_desc",
    c"nixl_capi_destroy_reg_dlist",
    c"nixl_capi_register_mem",
    c"nixl_capi_deregister_mem",
    c"nixl_capi_get_local_md",
    c"nixl_capi_load_remote_md",
    c"nixl_capi_check_remote_md",
    c"nixl_capi_invalidate_remote_md",
    c"nixl_capi_create_xfer_dlist",
    c"nixl_capi_xfer_dlist_clear",
    c"nixl_capi_xfer_dlist_add_desc",
    c"nixl_capi_destroy_xfer_dlist",
    c"nixl_capi_prep_xfer_dlist",
    c"nixl_capi_release_xfer_dlist_handle",
    c"nixl_capi_make_xfer_req",
    c"nixl_capi_create_xfer_req",
    c"nixl_capi_post_xfer_req",
    c"nixl_capi_get_xfer_status",
    c"nixl_capi_release_xfer_req",
    c"nixl_capi_destroy_xfer_req",
    c"nixl_capi_create_notif_map",
    c"nixl_capi_destroy_notif_map",
    c"nixl_capi_get_notifs",
    c"nixl_capi_notif_map_size",
    c"nixl_capi_notif_map_get_agent_at",
    c"nixl_capi_notif_map_get_notifs_size",
    c"nixl_capi_notif_map_get_notif",
    c"nixl_capi_gen_notif",
    c"nixl_capi_is_stub",
];

/// The folders from a library up to `target/nixl`: the wheel's folder of libraries, the wheel, and that one.
const FOLDERS: usize = 3;

/// The first candidate that passes `check`, unless the user has named one that does not. What another user could have put
/// there is passed over.
pub(crate) fn find(
    candidates: &[Candidate],
    check: impl Fn(&Path) -> Result<(), String>,
) -> Result<PathBuf, DiscoveryError> {
    let mut looked = Vec::new();
    for candidate in candidates {
        let path = &candidate.path;
        let checked = || believed(candidate).map_err(|error| error.to_string()).and_then(|()| check(path));
        let result = path.is_file().then(checked);
        let reason = match result {
            Some(Ok(())) => return Ok(path.clone()),
            Some(Err(reason)) => Some(reason),
            None => None,
        };
        if candidate.by == By::Name {
            let reason = reason.unwrap_or_else(|| "there is no such file".to_owned());
            return Err(DiscoveryError::Named { asked_by: candidate.because, path: path.clone(), reason });
        }
        let outcome = reason.map_or(Outcome::Absent, Outcome::Unusable);
        looked.push(Looked { path: path.clone(), because: candidate.because, outcome });
    }
    Err(DiscoveryError::NotFound { looked })
}

/// Refuses a library that another user could have put where the search has found it.
pub(crate) fn believed(candidate: &Candidate) -> Result<(), OwnerError> {
    match candidate.by {
        By::Script => check_owner(&candidate.path, FOLDERS),
        By::Name | By::Pointer => Ok(()),
    }
}

/// Loads a library, and makes sure that `nixl-sys` will use this library: `nixl-sys` asks the loader for the
/// bare name, which the loader knows once a library of that name is loaded.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let library = Library::load(path)?;
    let missing: Vec<_> = SYMBOLS.iter().filter(|symbol| library.symbol(symbol).is_none()).collect();
    if !missing.is_empty() {
        return Err(format!("the library is of another version of NIXL, and lacks {missing:?}"));
    }
    if nixl_sys::is_stub() {
        return Err(format!("the library is loaded, but the loader does not know the library as {LIBRARY}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;
    use crate::library::installed::{plugins, version};
    use crate::library::places::{Search, Surroundings, candidates};

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Dir {
            let path = std::env::temp_dir().join(format!("kv-nixl-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Dir(path)
        }

        fn put(&self, path: &str) -> PathBuf {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, b"not a library").unwrap();
            path
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn nowhere() -> Surroundings {
        Surroundings { variable: |_| None, current: None, program: None }
    }

    #[test]
    fn a_library_named_by_the_user_is_used_or_refused_but_never_replaced() {
        let dir = Dir::new("named");
        let search = Search { library: Some(dir.0.clone()) };
        let error = find(&candidates(&search, &nowhere()), |_| Ok(())).unwrap_err();
        let reason = "there is no such file".to_owned();
        let path = dir.0.join(LIBRARY);
        assert_eq!(error, DiscoveryError::Named { asked_by: "the configuration", path, reason });
        let path = dir.put(LIBRARY);
        assert_eq!(find(&candidates(&search, &nowhere()), |_| Ok(())), Ok(path.clone()));
        let broken = find(&candidates(&search, &nowhere()), check).unwrap_err();
        assert!(
            matches!(&broken, DiscoveryError::Named { reason, .. } if reason.contains("file too short")),
            "{broken}"
        );
    }

    #[test]
    fn what_the_setup_script_installs_is_found_from_below_the_workspace_and_from_the_program() {
        let dir = Dir::new("workspace");
        let wheel = "target/nixl/nixl_cu12-1.5.1";
        let library = dir.put(&format!("{wheel}/.nixl_cu12.mesonpy.libs/{LIBRARY}"));
        dir.put(&format!("{wheel}/.nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so"));
        dir.put(&format!("{wheel}/nixl_cu12-1.5.1.dist-info/METADATA"));
        let below = Surroundings { current: Some(dir.0.join("crates/x")), ..nowhere() };
        assert_eq!(find(&candidates(&Search::default(), &below), |_| Ok(())), Ok(library.clone()));
        let program = Surroundings { program: Some(dir.0.join("target/release/examples/pd")), ..nowhere() };
        assert_eq!(find(&candidates(&Search::default(), &program), |_| Ok(())), Ok(library.clone()));
        assert_eq!(version(&library).as_deref(), Some("1.5.1"));
        assert_eq!(plugins(&library), ["UCX"]);
    }

    #[test]
    fn a_library_in_a_folder_that_another_user_can_change_is_refused_with_its_path_and_owner() {
        let dir = Dir::new("owner");
        let library = dir.put(&format!("target/nixl/x/.nixl_cu12.mesonpy.libs/{LIBRARY}"));
        let around = Surroundings { current: Some(dir.0.join("below/it")), ..nowhere() };
        let root = dir.0.join("target/nixl");
        for path in library.ancestors().take_while(|path| path.starts_with(&root)) {
            let find = || find(&candidates(&Search::default(), &around), |_| Ok(()));
            assert_eq!(find(), Ok(library.clone()));
            let before = std::fs::metadata(path).unwrap();
            std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
            let refused = find().unwrap_err();
            let words = refused.to_string();
            let owner = format!("{path:?} belongs to user {}", before.uid());
            assert!(words.contains(&owner) && words.contains("KV_NIXL_LIB"), "{words}");
            std::fs::set_permissions(path, before.permissions()).unwrap();
        }
        // The next place is looked at.
        let program = dir.0.join("elsewhere/target/release/pd");
        let other = dir.put(&format!("elsewhere/target/nixl/x/.nixl_cu12.mesonpy.libs/{LIBRARY}"));
        std::fs::set_permissions(&library, Permissions::from_mode(0o777)).unwrap();
        let both = Surroundings { current: around.current.clone(), program: Some(program), ..nowhere() };
        assert_eq!(find(&candidates(&Search::default(), &both), |_| Ok(())), Ok(other));
        // What the user names is the user's affair.
        let named = Search { library: Some(library.clone()) };
        std::fs::set_permissions(&library, Permissions::from_mode(0o777)).unwrap();
        assert_eq!(find(&candidates(&named, &around), |_| Ok(())), Ok(library));
    }

    /// It is a place of the search, though the folder above it may not be readable.
    #[test]
    fn the_place_that_the_error_shows_to_the_reader_is_not_believed_blindly() {
        let dir = Dir::new("shown");
        let around = Surroundings { current: Some(dir.0.clone()), ..nowhere() };
        let candidates = candidates(&Search::default(), &around);
        let library = dir.put(&format!("target/nixl/nixl_cu12/.nixl_cu12.mesonpy.libs/{LIBRARY}"));
        assert_eq!(find(&candidates, |_| Ok(())), Ok(library.clone()));
        std::fs::set_permissions(library, Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(find(&candidates, |_| Ok(())), Err(DiscoveryError::NotFound { .. })));
    }

    #[test]
    fn unusable_libraries_are_passed_over_and_the_error_tells_all_places_and_the_way_out() {
        let dir = Dir::new("unusable");
        let path = dir.put(&format!("target/nixl/x/.nixl_cu12.mesonpy.libs/{LIBRARY}"));
        let around = Surroundings { current: Some(dir.0.clone()), ..nowhere() };
        let candidates = candidates(&Search::default(), &around);
        let error = find(&candidates, |_| Err("too old".to_owned())).unwrap_err();
        let DiscoveryError::NotFound { looked } = &error else { panic!("{error}") };
        assert_eq!(looked.len(), candidates.len());
        let ours = looked.iter().find(|looked| looked.path == path).unwrap();
        assert_eq!(ours.outcome, Outcome::Unusable("too old".to_owned()));
        let text = error.to_string();
        for word in ["too old", "not there", "/opt/nvidia/nvda_nixl", "scripts/setup-nixl.sh"] {
            assert!(text.contains(word), "{word} is not in:\n{text}");
        }
    }
}
