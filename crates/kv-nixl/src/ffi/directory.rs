//! A working directory that belongs to one thread only.

use std::os::fd::BorrowedFd;

use kv_host::OsError;
use rustix::process::fchdir;

/// Runs `work` on a new thread whose working directory is `dir`, and waits for the result. The working
/// directory of all other threads stays as it is. `Err` if the system refuses such a thread; `work` has not
/// run then.
pub(crate) fn in_directory<T: Send>(
    dir: BorrowedFd<'_>,
    work: &(impl Fn() -> T + Sync),
) -> Result<T, OsError> {
    let enter_and_work = || {
        // SAFETY: the call takes no pointers, and separates what only this thread's own calls can tell apart.
        if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
            return Err(OsError::new("unshare", std::io::Error::last_os_error()));
        }
        fchdir(dir).map_err(|error| OsError::new("fchdir", error))?;
        Ok(work())
    };
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("kv-nixl-load".to_owned());
        let thread = builder
            .spawn_scoped(scope, enter_and_work)
            .map_err(|error| OsError::new("pthread_create", error))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_the_working_thread_is_in_the_given_directory() {
        let here = std::env::current_dir().unwrap();
        let (dir, file) = (File::open("/proc/self").unwrap(), File::open("/proc/version").unwrap());
        let there = in_directory(dir.as_fd(), &|| std::env::current_dir().unwrap()).unwrap();
        assert!(there.starts_with("/proc"), "{there:?}");
        assert_eq!(std::env::current_dir().unwrap(), here);
        let refused = in_directory(file.as_fd(), &|| panic!("the work must not run"));
        assert_eq!(refused, Err(OsError::new("fchdir", std::io::Error::from_raw_os_error(libc::ENOTDIR))));
    }
}
