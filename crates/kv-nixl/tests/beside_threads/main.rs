//! NIXL in processes that have other threads when NIXL is loaded, and in processes that have none: UCX has
//! its settings, bytes move, and the process ends well.
//!
//! A test harness has threads of its own, so this is a program without one. The program starts itself again,
//! once for each process that is to be seen.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod operator;

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use kv_core::{Descriptor, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportEvent};
use kv_nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, NotSet, Route, Search, guards};

const ROLE: &str = "KV_NIXL_TEST_PROCESS";
/// A part of the name of the checks to be made; all are made without the variable.
const ONLY: &str = "KV_NIXL_TEST_ONLY";
/// A plugin that cannot be loaded at first, and can be loaded when an agent is made.
const BROKEN: &str = "KV_NIXL_TEST_BROKEN";
const TIMES: usize = 20;
const LEN: usize = 1 << 20;
const PEER: PeerId = PeerId(1);
const HOOKS: &str = "UCX_MEM_MMAP_HOOK_MODE";
const MODULES: &str = "UCX_MODULES";
const LOG_FILE: &str = "UCX_LOG_FILE";
const RELEASED: &str = "UCX_RCACHE_MAX_UNRELEASED";

fn main() {
    match std::env::var(ROLE).as_deref() {
        Ok("alone") => use_nixl(1),
        Ok("tokio") => under_tokio(),
        Ok("refused") => without_a_private_directory(),
        Ok("before") => after_another_part_of_the_process(),
        Ok(other) => panic!("{other} is no process of this test"),
        Err(_) => check_all(),
    }
}

/// A server as most are: threads of a runtime, and one that is still there when the process ends.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn under_tokio() {
    std::thread::spawn(|| {
        loop {
            std::thread::park();
        }
    });
    tokio::task::spawn_blocking(|| use_nixl(2)).await.unwrap();
}

/// As in a container whose filter of system calls refuses `unshare`.
fn without_a_private_directory() {
    refuse_unshare();
    std::thread::spawn(|| {
        loop {
            std::thread::park();
        }
    });
    use_nixl(2);
}

fn after_another_part_of_the_process() {
    let plugin = std::env::var("KV_NIXL_TEST_PLUGIN").unwrap();
    let plugin = std::ffi::CString::new(plugin).unwrap();
    // SAFETY: the path is a C string, and names NIXL's plugin.
    assert!(!unsafe { libc::dlopen(plugin.as_ptr(), libc::RTLD_NOW) }.is_null());
    std::thread::spawn(|| {
        loop {
            std::thread::park();
        }
    });
    use_nixl(2);
}

/// Loads NIXL in a process of at least so many threads, moves bytes, and prints what is seen of UCX.
fn use_nixl(least_threads: usize) {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    assert!(threads >= least_threads && (least_threads > 1 || threads == 1), "{threads} threads");
    let (directory, code) = (std::env::current_dir().unwrap(), code_of_munmap());
    let missing = guards::missing();
    let variables = std::env::vars_os().count();
    let nixl = Nixl::load(&Search::default()).unwrap();
    assert_eq!(std::env::current_dir().unwrap(), directory);
    let set = std::env::vars_os().count() > variables;
    assert_eq!(set, threads == 1 && !missing.is_empty(), "variables are set alone only");
    if let Some(plugin) = std::env::var_os(BROKEN) {
        std::fs::remove_file(&plugin).unwrap();
        std::os::unix::fs::symlink(nixl.library().with_file_name("plugins/libplugin_UCX.so"), plugin)
            .unwrap();
    }
    let route = move_bytes(&nixl);
    for warning in nixl.warnings() {
        let reason = match &warning.reason {
            NotSet::LoadedBefore => "loaded before".to_owned(),
            NotSet::Refused { error, .. } => format!("refused {} {}", error.call, error.errno.unwrap_or(0)),
            NotSet::Other { value } => format!("other {value:?}"),
            NotSet::Unconfirmed => "unconfirmed".to_owned(),
            NotSet::NotLoaded { .. } => "not loaded".to_owned(),
            other => panic!("{other:?}"),
        };
        println!("warning {} {reason}", warning.name);
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // The transport has learnt of the same settings as UCX: a module that is left out is no route.
    let copies = maps.contains("/libuct_cma");
    assert_eq!(route, Some(if copies { Route::Memory } else { Route::Tcp }));
    println!("module cma {copies}");
    println!("module ib {}", maps.contains("/libuct_ib"));
    println!("intercepts {}", code_of_munmap() != code);
}

/// One agent writes a region of another one, over loopback, and the bytes are the same. Returns the route between them.
fn move_bytes(nixl: &Nixl) -> Option<Route> {
    let (mut from, source) = agent(nixl);
    let (mut to, sink) = agent(nixl);
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 251) as u8).collect();
    source.write(0, &bytes).unwrap();
    from.connect(PEER, &to.metadata().unwrap()).unwrap();
    to.connect(PEER, &from.metadata().unwrap()).unwrap();
    from.permit(PEER, Time::MAX);
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: LEN as u64 };
    from.post(PEER, Post { id: PostId(7), op: Op::Write, descriptors: vec![descriptor], notify: None })
        .unwrap();
    let (mut events, mut others) = (Vec::new(), Vec::new());
    let deadline = Instant::now() + Duration::from_secs(60);
    while events.is_empty() {
        assert!(Instant::now() < deadline, "nothing has moved");
        from.poll(Time::ZERO, &mut events);
        to.poll(Time::ZERO, &mut others);
    }
    assert_eq!(events, [TransportEvent::Posted { post: PostId(7), result: Ok(()) }]);
    let mut arrived = vec![0; LEN];
    sink.read(0, &mut arrived).unwrap();
    assert!(arrived == bytes, "other bytes arrived");
    from.route(PEER)
}

fn agent(nixl: &Nixl) -> (NixlTransport, HostMemory) {
    let pool = HostMemory::new(LEN).unwrap();
    let config = NixlConfig::default().with(|config| config.devices = vec!["lo".to_owned()]);
    let mut transport = NixlTransport::new(nixl, config).unwrap();
    transport.add_memory(&pool).unwrap();
    transport.register(&Region::dram(RegionRole::Kv, pool.addr(), LEN as u64, 4096)).unwrap();
    (transport, pool)
}

/// UCX begins the function with a jump where it intercepts the function.
fn code_of_munmap() -> [u8; 8] {
    // SAFETY: the name is a C string.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"munmap".as_ptr()) };
    assert!(!symbol.is_null());
    // SAFETY: the function has that many bytes of code, which can be read.
    unsafe { symbol.cast::<[u8; 8]>().read_unaligned() }
}

/// From now on `unshare` fails with `EPERM` in this thread and in threads that it starts.
fn refuse_unshare() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_unshare as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the first call takes numbers only, the second a program that lives through the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// A check, which is told where NIXL's library is.
type Check = fn(&Path);

fn check_all() {
    let looked = Nixl::look(&Search::default()).into_iter().find(|looked| looked.path.is_file());
    let looked = looked.ok_or("NIXL is not installed: scripts/setup-nixl.sh");
    let Some(nixl) = kv_conformance::needed("NIXL", looked).map(|looked| looked.path) else { return };
    let checks: [(&str, Check); 9] = [
        ("a process without other threads has all settings and ends well", |_| all_settings("alone")),
        ("a process with a tokio runtime has all settings and ends well", |_| all_settings("tokio")),
        ("where a private directory is refused only the hooks are missing", |_| hooks_are_missing()),
        ("what the user has set stays as it is", |_| users_settings_stay()),
        ("a setting in any of UCX's files wins in every way of setting", operator::every_file_wins),
        ("a log with a relative path is in the working directory", |_| {
            operator::a_relative_log_is_in_the_working_directory();
        }),
        ("a relative path of the loader holds for NIXL", operator::a_relative_loader_path_finds_nixl),
        ("a plugin that cannot be loaded is told and the worker runs", operator::a_broken_plugin_is_told),
        ("a UCX that was loaded before is left alone and told", a_loaded_ucx_is_told),
    ];
    let only = std::env::var(ONLY).unwrap_or_default();
    for (name, check) in checks.into_iter().filter(|(name, _)| name.contains(&only)) {
        check(&nixl);
        println!("{name} ... ok");
    }
}

/// A process of this program in this role, without this process's settings of UCX.
fn process(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("UCX_")) {
        command.env_remove(name);
    }
    command.env(ROLE, role);
    command
}

/// What a process has printed, which has ended with status 0.
fn printed(mut command: Command) -> Vec<String> {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    assert!(status.success(), "{status}\n{stdout}\n{}", String::from_utf8_lossy(&stderr));
    stdout.lines().map(str::to_owned).collect()
}

/// What is seen of a process whose UCX has every setting; hosts with cards load the module for them.
fn as_it_should_be() -> Vec<String> {
    let card = Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut cards| cards.next().is_some());
    vec!["module cma true".to_owned(), format!("module ib {card}"), "intercepts false".to_owned()]
}

fn all_settings(role: &str) {
    for time in 0..TIMES {
        assert_eq!(printed(process(role)), as_it_should_be(), "{role}, process {time}");
    }
}

fn hooks_are_missing() {
    let mut expected = as_it_should_be();
    expected[2] = "intercepts true".to_owned();
    expected.insert(0, format!("warning {HOOKS} refused unshare {}", libc::EPERM));
    assert_eq!(printed(process("refused")), expected);
}

fn users_settings_stay() {
    let directory = std::env::temp_dir().join(format!("kv-nixl-users-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("ucx.conf"), format!("{LOG_FILE} = stdout\n")).unwrap();
    let mut command = process("tokio");
    command.current_dir(&directory).env(MODULES, "^ib,cma").env(RELEASED, "7");
    let printed = printed(command);
    std::fs::remove_dir_all(&directory).unwrap();
    assert_eq!(printed, ["module cma false", "module ib false", "intercepts false"]);
}

fn a_loaded_ucx_is_told(nixl: &Path) {
    let plugin = nixl.with_file_name("plugins/libplugin_UCX.so");
    let mut command = process("before");
    // A variable of the user, without which the process would crash at its end on a host without cards.
    command.env(MODULES, "^ib").env("KV_NIXL_TEST_PLUGIN", plugin);
    let printed = printed(command);
    let told = [HOOKS, RELEASED, LOG_FILE].map(|name| format!("warning {name} loaded before"));
    assert_eq!(printed[..3], told);
}
