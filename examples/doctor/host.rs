//! What of this host matters to transfers: environment, limits, devices, kernel settings.

use std::path::Path;

use rustix::process::{Resource, getrlimit};

/// How the names of variables begin that libraries, transports and the examples read.
const MATTERS: [&str; 9] = [
    "CUDA_VISIBLE_DEVICES",
    "FI_",
    "KV_FABRIC_",
    "KV_NIXL_",
    "KV_TCP_",
    "KV_UCX_",
    "LD_LIBRARY_PATH",
    "NIXL_",
    "UCX_",
];

/// Prints limits, devices, kernel settings that slow transfers down, and environment variables.
pub fn report() {
    println!("Host");
    facts();
    println!("\nEnvironment variables that transports and their libraries read");
    let mut set: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, _)| MATTERS.iter().any(|start| name.starts_with(start)))
        .collect();
    set.sort();
    for (name, value) in &set {
        println!("  {name}={value}");
    }
    if set.is_empty() {
        println!("  none is set");
    }
}

/// The network devices and the ports of cards, as UCX names them.
#[cfg(feature = "ucx")]
pub fn devices() -> Vec<String> {
    let ports = |card: String| {
        let ports = names(&format!("/sys/class/infiniband/{card}/ports"));
        ports.into_iter().map(move |port| format!("{card}:{port}"))
    };
    names("/sys/class/infiniband").into_iter().flat_map(ports).chain(names("/sys/class/net")).collect()
}

fn facts() {
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
    line(
        "locked memory",
        &limit,
        "the limit must not be below the size of the cache: RDMA locks registered memory",
    );
    let cards = names("/sys/class/infiniband");
    line("InfiniBand", &or(&cards, "no card found"), "");
    let links: Vec<String> = names("/sys/class/net")
        .into_iter()
        .map(|name| {
            let state = read(&format!("/sys/class/net/{name}/operstate"));
            format!("{name} ({})", if state.is_empty() { "?" } else { &state })
        })
        .collect();
    line("network", &or(&links, "none"), "");
    let gpus: Vec<String> = names("/dev")
        .into_iter()
        .filter(|name| {
            name.strip_prefix("nvidia")
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        })
        .collect();
    let driver = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
        .iter()
        .any(|dir| Path::new(dir).join("libcuda.so.1").exists());
    let driver = if driver { "driver library found" } else { "no driver library" };
    line("CUDA", &format!("{}; {driver}", or(&gpus, "no device")), "");
    let huge = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let why = "memory pools ask for huge pages, on which copies were twice as fast";
    line("huge pages", if huge.is_empty() { "unknown" } else { &huge }, why);
    let scope = read("/proc/sys/kernel/yama/ptrace_scope");
    let (value, why) = match scope.as_str() {
        "" | "0" => ("free", ""),
        _ => (
            "restricted",
            "UCX uses TCP between processes; kv-local needs LocalConfig::permit_tracing for adopted memory",
        ),
    };
    line("process access", value, why);
}

fn line(what: &str, value: &str, why: &str) {
    let why = if why.is_empty() { String::new() } else { format!("  ({why})") };
    println!("  {what:<14}  {value}{why}");
}

fn names(dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn or(names: &[String], nothing: &str) -> String {
    if names.is_empty() { nothing.to_owned() } else { names.join(", ") }
}
