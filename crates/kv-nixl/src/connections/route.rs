//! The route by which bytes get to a peer, and thus the directions that are worth using.
//!
//! NIXL and UCX do not say which route they have chosen. But UCX chooses by rules: copies between processes
//! of one host if the kernel allows them, an RDMA card that both ends have, copies by a GPU between GPU memory
//! of one host, TCP otherwise; less what UCX's settings forbid. Both ends tell each other the routes that are open to them, and the best route that is
//! open to both is taken to be UCX's choice.

use std::fmt;
use std::time::Duration;

use kv_core::{Directions, MemoryKind, WriteFence};
use serde::{Deserialize, Serialize};

use crate::config::NixlConfig;
use crate::connections::cards::Cards;
use crate::ffi::environment::may_copy_between_processes;
use crate::library::guards::GPU_READS;
use crate::regions::place::Place;

/// The reason with which a post to read is refused over TCP.
pub(crate) const NO_READS: &str = "READ over TCP: UCX ends the process that is read from when the reader dies; let the \
                                   other side write, or set `reads_over_tcp`. GPU memory of one host is read without \
                                   TCP only if all memory of both sides is GPU memory, UCX has its transport \
                                   `cuda_ipc`, and `UCX_CUDA_IPC_ENABLE_GET_ZCOPY` is `on` and not set by a file";
/// The reason with which a post to write is refused over TCP if one of its ends is GPU memory.
pub(crate) const NO_GPU: &str = "WRITE over TCP from or into GPU memory: UCX may end the process that is written to \
                                 when the writer dies; let the pages pass through host memory, or set `gpu_over_tcp`";

/// How bytes get to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// The backend is not UCX, and decides by itself; or the peer is a foreign agent, which does not say where it runs and
    /// what it has. Nothing is refused.
    Unknown,
    /// The kernel copies between processes of this host.
    Memory,
    /// RDMA: both ends have a card.
    Rdma,
    /// Both ends have regions in the memory of a GPU, and the peer is on this host. A WRITE from GPU memory to GPU
    /// memory is a copy by the GPU, through a handle that CUDA makes for other processes. UCX sends over
    /// [TCP](Route::Tcp) what goes between GPU memory and host memory, and everything within one process, where neither end
    /// outlives the other.
    Gpu {
        /// True if a READ is such a copy, too: all regions of both ends are in GPU memory, and UCX has been told so
        /// (`UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on`). Otherwise a READ goes over TCP where UCX sees no NVLink.
        reads: bool,
    },
    /// Files of this transport; there is no peer.
    Storage,
    /// TCP sockets. A READ over TCP is a request that the peer answers with bytes: the READ takes three to
    /// seven times as long as a WRITE, and UCX 1.23 aborts the process that is read from when the reader dies
    /// (in 22 of 400 kills, whatever UCX's settings). WRITE from host memory into host memory has neither fault. Any other
    /// WRITE has both: the peer's processor puts the bytes in place and answers, and UCX aborts the process that is written
    /// to when the writer dies (in 23 of 40 kills).
    Tcp,
}

impl Route {
    /// The directions that are worth using on the route.
    pub fn directions(self) -> Directions {
        match self {
            Route::Unknown | Route::Memory | Route::Rdma | Route::Storage | Route::Gpu { reads: true } => {
                Directions::BOTH
            }
            Route::Gpu { reads: false } | Route::Tcp => Directions::WRITE,
        }
    }

    /// True if a WRITE between memory of these kinds, here and there, is put in place by the peer's processor, which
    /// answers: the peer then dies with the writer.
    pub(crate) fn writes_by_software(self, here: MemoryKind, there: MemoryKind) -> bool {
        let gpu = [here, there].map(|kind| kind == MemoryKind::Vram);
        match self {
            Route::Tcp => gpu != [false, false],
            Route::Gpu { .. } => gpu[0] != gpu[1],
            Route::Unknown | Route::Memory | Route::Rdma | Route::Storage => false,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Route::Unknown => "what the backend chooses",
            Route::Memory => "copies between processes",
            Route::Rdma => "RDMA",
            Route::Gpu { reads: true } => "copies by the GPU",
            Route::Gpu { reads: false } => "copies by the GPU, or TCP",
            Route::Storage => "files",
            Route::Tcp => "TCP",
        })
    }
}

/// The routes that are open to one end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reach {
    /// The backend is UCX, which chooses by the rules above.
    ucx: bool,
    memory: bool,
    rdma: bool,
    /// The GPU copies between processes.
    gpu: bool,
    /// Peers reach this end by cards that copy on their own, or not at all. Only this end needs to know.
    #[serde(skip)]
    cards_only: bool,
    /// The GPU copies what this end reads, too. Only this end needs to know.
    #[serde(skip)]
    gpu_reads: bool,
}

/// How much of a transport's memory is that of a GPU. Its files do not count: peers cannot reach them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuShare {
    Nothing,
    Part,
    Everything,
}

impl GpuShare {
    pub(crate) fn of(places: &[Place]) -> GpuShare {
        let has = |kind| places.iter().any(|place| place.kind == kind);
        match (has(MemoryKind::Vram), has(MemoryKind::Dram)) {
            (false, _) => GpuShare::Nothing,
            (true, true) => GpuShare::Part,
            (true, false) => GpuShare::Everything,
        }
    }
}

impl Reach {
    /// All routes are open.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) const EVERYWHERE: Reach =
        Reach { ucx: true, memory: true, rdma: true, gpu: true, cards_only: false, gpu_reads: true };

    /// The routes that are open to this process. UCX's settings are lines `NAME=value`, as UCX prints them; they come from
    /// the environment and from files. UCX does not print whether a GPU copies what is read: `made` says whether this library
    /// has made that setting, and is `None` if the operator has.
    pub(crate) fn here(config: &NixlConfig, settings: &str, made: Option<bool>) -> Reach {
        Reach::of(config, settings, made, |name| std::env::var(name).ok())
    }

    /// The same in an environment with these variables. NIXL leaves out a setting of the agent's `engine_config` if the
    /// environment has the variable, and its `device_list` goes before the variable.
    fn of(
        config: &NixlConfig,
        settings: &str,
        made: Option<bool>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Reach {
        let printed = |name: &str| {
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
            settings.lines().find_map(value)
        };
        let params = config.params().unwrap_or_default();
        let in_environment = variable("UCX_NET_DEVICES");
        let tls = variable("UCX_TLS").or_else(|| setting(&params, "TLS")).or_else(|| printed("UCX_TLS"));
        let modules = variable("UCX_MODULES").or_else(|| printed("UCX_MODULES"));
        let own = setting(&params, "NET_DEVICES").filter(|_| in_environment.is_none());
        let devices = own.or_else(|| device_list(&params)).or(in_environment);
        let devices = devices.or_else(|| printed("UCX_NET_DEVICES"));
        let gpu = allows_gpu_copies(tls.as_deref());
        let own = setting(&params, GPU_READS.trim_start_matches("UCX_"));
        // The variable may be this library's own.
        let gpu_reads = match variable(GPU_READS) {
            Some(value) => is_on(&value) && made.unwrap_or(true),
            None => own.map_or(made.unwrap_or(false), |value| is_on(&value)),
        };
        let allows = |names: &[&str]| allows(tls.as_deref(), names);
        let module = |name| allows_module(modules.as_deref(), name);
        let card = Cards::of_this_host().has_one_of(devices.as_deref());
        Reach {
            ucx: config.backend == "UCX",
            memory: allows(&["cma", "sm", "shm"]) && module("cma") && may_copy_between_processes(),
            rdma: allows_cards(tls.as_deref()) && module("ib") && card,
            gpu: gpu && module("cuda"),
            cards_only: config.backend == "UCX" && is_cards_only(tls.as_deref()),
            gpu_reads,
        }
    }

    /// The route to a peer; `near` if the peer is on this host, `gpu` for the memory of this end and of the other one.
    pub(crate) fn to(self, peer: Reach, near: bool, gpu: [GpuShare; 2]) -> Route {
        if !self.ucx || !peer.ucx {
            Route::Unknown
        } else if near && gpu == [GpuShare::Nothing; 2] && self.memory && peer.memory {
            Route::Memory
        } else if self.rdma && peer.rdma {
            Route::Rdma
        } else if near && !gpu.contains(&GpuShare::Nothing) && self.gpu && peer.gpu {
            Route::Gpu { reads: self.gpu_reads && gpu == [GpuShare::Everything; 2] }
        } else {
            Route::Tcp
        }
    }

    /// Whether UCX sends notifications to a peer on this host over TCP: where no card is open to both ends. Then the
    /// bytes of a request are in place when UCX calls the request over, whichever way the word of it takes. A card may
    /// call bytes written that are on their way from the card to memory, where only what comes by the card is behind
    /// them.
    pub(crate) fn speaks_over_tcp(self, peer: Reach) -> bool {
        self.ucx && peer.ucx && !(self.rdma && peer.rdma)
    }

    /// What ends the danger of a peer's last writes on this route. Over cards alone the danger lasts as long
    /// as the owner has said.
    pub(crate) fn write_fence(self, way: Route, bound: Option<Duration>) -> WriteFence {
        match (way, bound) {
            (Route::Rdma, Some(bound)) if self.cards_only => WriteFence::Within(bound),
            _ => WriteFence::AtDeath,
        }
    }

    /// The route to a peer of which nothing is known, and which may be on another host.
    pub(crate) fn to_anybody(self) -> Route {
        self.to(self, false, [GpuShare::Nothing; 2])
    }
}

/// The cards of the parameter `device_list`, of which NIXL uses the first ports, as UCX writes lists.
fn device_list(params: &[(String, String)]) -> Option<String> {
    let (_, list) = params.iter().find(|(param, list)| param == "device_list" && !list.is_empty())?;
    let ports: Vec<String> = list.split(',').map(|card| format!("{}:1", card.trim())).collect();
    Some(ports.join(","))
}

/// The value of a setting that is given to UCX for this agent only: `engine_config` is `K=V,K=V`. NIXL splits the text at
/// every comma and leaves out what has no `=`, and the last value of a setting wins.
fn setting(params: &[(String, String)], name: &str) -> Option<String> {
    let (_, all) = params.iter().find(|(param, _)| param == "engine_config")?;
    let settings = all.split(',').filter_map(|setting| setting.split_once('='));
    settings.rev().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
}

/// A list as UCX writes lists: its names, and whether these are left out (`^`); `None` of a list that leaves nothing out.
pub(super) fn names(list: Option<&str>) -> Option<(Vec<&str>, bool)> {
    let list = list.map(str::trim).filter(|list| !list.is_empty())?;
    let (names, forbids) = list.strip_prefix('^').map_or((list, false), |names| (names, true));
    Some((names.split(',').map(str::trim).collect(), forbids))
}

/// Whether a list of transports has one of these names. A name stands for all that begin with the name and `_`, and
/// `all` for every name.
fn allows(list: Option<&str>, wanted: &[&str]) -> bool {
    let Some((names, forbids)) = names(list) else { return true };
    let has = |wanted: &&str| {
        names.iter().any(|name| {
            name == wanted || (!forbids && (*name == "all" || name.starts_with(&format!("{wanted}_"))))
        })
    };
    wanted.iter().any(has) != forbids
}

/// Whether a list of transports has one for RDMA cards. Where transports are left out, the others stay.
fn allows_cards(list: Option<&str>) -> bool {
    match names(list) {
        Some((names, true)) => {
            !(names.contains(&"ib") || ["rc", "dc", "srd"].iter().all(|card| names.contains(card)))
        }
        _ => allows(list, &["ib", "rc", "dc", "ud", "srd"]),
    }
}

/// Whether a list of transports has UCX's copies by a GPU: by name, or as one of all transports for CUDA. `cuda_copy` is
/// another one of these, which reaches no other process.
fn allows_gpu_copies(list: Option<&str>) -> bool {
    match names(list) {
        Some((names, forbids)) if names.contains(&"cuda") => !forbids,
        _ => allows(list, &["cuda_ipc"]),
    }
}

/// Whether a value that is on, off or automatic is on, as UCX reads it.
fn is_on(value: &str) -> bool {
    ["on", "yes", "y", "1"].iter().any(|on| value.eq_ignore_ascii_case(on))
}

/// Whether a list of transports has only transports in which a card writes into memory without a processor at
/// either end.
fn is_cards_only(list: Option<&str>) -> bool {
    let Some(list) = list.map(str::trim).filter(|list| !list.is_empty()) else { return false };
    list.split(',')
        .map(str::trim)
        .all(|name| ["rc", "dc"].iter().any(|card| name == *card || name.starts_with(&format!("{card}_"))))
}

fn allows_module(list: Option<&str>, name: &str) -> bool {
    allows(list, &[name])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_transports_are_read_as_ucx_reads_them() {
        let memory = ["cma", "sm", "shm"];
        for (list, wanted) in [
            (None, true),
            (Some(""), true),
            (Some("all"), true),
            (Some("tcp"), false),
            (Some("tcp,cma"), true),
            (Some("rc_x,shm"), true),
            (Some("^cma"), false),
            (Some("^tcp"), true),
            (Some("^ib,shm"), false),
        ] {
            assert_eq!(allows(list, &memory), wanted, "{list:?}");
        }
        assert!(allows(Some("rc_mlx5"), &["ib", "rc"]));
        assert!(!allows(Some("rcx"), &["ib", "rc"]));
        assert!(!allows_module(Some("^ib"), "ib") && allows_module(Some("^ib"), "cma"));
    }

    #[test]
    fn copies_by_a_gpu_go_by_ucxs_name_for_them_or_for_all_of_cuda() {
        for (list, wanted) in [
            (None, true),
            (Some("all"), true),
            (Some("tcp,cuda_copy,cuda_ipc"), true),
            (Some("tcp, cuda"), true),
            (Some("cuda,tcp"), true),
            (Some("^tcp"), true),
            (Some("^cuda_copy"), true),
            (Some("tcp"), false),
            (Some("tcp,cuda_copy"), false),
            (Some("^cuda_ipc"), false),
            (Some("^cuda"), false),
            (Some("^tcp, cuda"), false),
        ] {
            assert_eq!(allows_gpu_copies(list), wanted, "{list:?}");
        }
    }

    #[test]
    fn only_cards_with_a_bound_that_the_owner_knows_have_another_fence_than_death() {
        for list in [None, Some(""), Some("all"), Some("rc,tcp"), Some("rc,ud"), Some("^tcp"), Some("rcx")] {
            assert!(!is_cards_only(list), "{list:?}");
        }
        assert!(is_cards_only(Some("rc")) && is_cards_only(Some("rc_mlx5, dc_x")));
        let mixed = Reach::EVERYWHERE;
        let cards = Reach { cards_only: true, ..mixed };
        let bound = Duration::from_secs(40);
        assert_eq!(cards.write_fence(Route::Rdma, Some(bound)), WriteFence::Within(bound));
        assert_eq!(cards.write_fence(Route::Rdma, None), WriteFence::AtDeath);
        assert_eq!(mixed.write_fence(Route::Rdma, Some(bound)), WriteFence::AtDeath);
        for way in [Route::Memory, Route::Gpu { reads: true }, Route::Tcp, Route::Unknown, Route::Storage] {
            assert_eq!(cards.write_fence(way, Some(bound)), WriteFence::AtDeath, "{way}");
        }
    }

    fn params(params: &[(&str, &str)]) -> NixlConfig {
        let backend_params = params.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        NixlConfig { backend_params, ..NixlConfig::default() }
    }

    #[test]
    fn settings_of_one_agent_are_read_as_nixl_reads_its_parameters() {
        let of = |value: &str| setting(&params(&[("engine_config", value)]).backend_params, "TLS");
        assert_eq!(of("RCACHE_ENABLE=n,TLS=tcp,cma,MAX_RMA_RAILS=1").unwrap(), "tcp", "a comma ends a value");
        assert_eq!(of("TLS=tcp,TLS=^cuda_ipc").unwrap(), "^cuda_ipc", "the last one wins");
        assert_eq!(of("RCACHE_ENABLE=n"), None);
        let list = |value: &str| device_list(&params(&[("device_list", value)]).backend_params);
        assert_eq!(list("mlx5_0, mlx5_1").unwrap(), "mlx5_0:1,mlx5_1:1");
        assert_eq!(list(""), None);
    }

    /// UCX's files say the same as its environment; the agent's own parameters go before both, unless NIXL finds the
    /// variable in the environment.
    #[test]
    fn the_settings_that_ucx_has_in_the_end_decide_which_routes_are_open() {
        let all = "UCX_NET_DEVICES=all\nUCX_TLS=all\nUCX_MODULES=all\n";
        let tcp = "UCX_TLS=tcp\nUCX_MODULES=all\n";
        let open = |config: &NixlConfig, printed: &str, variable: Option<(&str, &str)>| {
            let found =
                |name: &str| variable.filter(|(of, _)| *of == name).map(|(_, value)| value.to_owned());
            let reach = Reach::of(config, printed, None, found);
            (reach.memory, reach.gpu)
        };
        let (none, copies) = (params(&[]), may_copy_between_processes());
        let own = |value| params(&[("engine_config", value)]);
        assert_eq!(open(&none, all, None), (copies, true));
        assert_eq!(open(&none, tcp, None), (false, false));
        assert_eq!(open(&none, "UCX_TLS=all\nUCX_MODULES=^cuda,cma\n", None), (false, false));
        assert_eq!(open(&none, "", Some(("UCX_TLS", "tcp"))), (false, false));
        assert_eq!(open(&own("TLS=tcp"), all, None), (false, false));
        assert_eq!(open(&own("TLS=cuda_ipc"), tcp, None), (false, true));
        assert_eq!(open(&own("TLS=cuda_ipc"), tcp, Some(("UCX_TLS", "tcp"))), (false, false));
    }

    #[test]
    fn cards_are_out_where_all_of_their_transports_are() {
        for list in
            [None, Some("all"), Some("rc_x,tcp"), Some("srd"), Some("^ud"), Some("^dc,tcp"), Some("^rc")]
        {
            assert!(allows_cards(list), "{list:?}");
        }
        for list in [Some("tcp"), Some("tcp,cma"), Some("^ib"), Some("^rc, dc,srd")] {
            assert!(!allows_cards(list), "{list:?}");
        }
    }

    #[test]
    fn both_ends_must_have_what_is_taken() {
        const NONE: [GpuShare; 2] = [GpuShare::Nothing; 2];
        const ALL: [GpuShare; 2] = [GpuShare::Everything; 2];
        let all = Reach::EVERYWHERE;
        let (no_memory, no_rdma) = (Reach { memory: false, ..all }, Reach { rdma: false, ..all });
        assert_eq!(all.to(all, true, NONE), Route::Memory);
        assert_eq!(all.to(all, false, NONE), Route::Rdma);
        assert_eq!(all.to(no_memory, true, NONE), Route::Rdma);
        assert_eq!(no_memory.to(no_rdma, true, NONE), Route::Tcp);
        assert_eq!(no_rdma.to_anybody(), Route::Tcp);
        assert_eq!(all.to(Reach { ucx: false, ..all }, true, NONE), Route::Unknown);
        // The kernel does not copy GPU memory between processes.
        assert_eq!(all.to(all, true, ALL), Route::Rdma);
        assert_eq!(all.to(no_rdma, true, ALL), Route::Gpu { reads: true });
        let no_copies = Reach { gpu: false, ..no_rdma };
        assert_eq!(no_copies.to(no_rdma, true, ALL), Route::Tcp);
        assert_eq!(no_rdma.to(no_copies, true, ALL), Route::Tcp);
        assert_eq!(all.to(no_rdma, true, [GpuShare::Everything, GpuShare::Nothing]), Route::Tcp);
        assert_eq!(all.to(no_rdma, true, [GpuShare::Nothing, GpuShare::Everything]), Route::Tcp);
        assert_eq!(all.to(no_rdma, false, ALL), Route::Tcp);
        assert!(all.speaks_over_tcp(no_rdma) && no_rdma.speaks_over_tcp(all));
        assert!(!all.speaks_over_tcp(all) && !no_rdma.speaks_over_tcp(Reach { ucx: false, ..all }));
        assert_eq!(Route::Tcp.directions(), Directions::WRITE);
        assert_eq!(Route::Memory.directions(), Directions::BOTH);
    }

    #[test]
    fn a_gpu_copies_what_is_read_where_its_reader_has_told_ucx_so_and_all_memory_is_a_gpus() {
        let peer = Reach { rdma: false, gpu_reads: false, ..Reach::EVERYWHERE };
        let reader = Reach { gpu_reads: true, ..peer };
        let [some, all] = [GpuShare::Part, GpuShare::Everything];
        assert_eq!(reader.to(peer, true, [all, all]).directions(), Directions::BOTH);
        for (here, there, gpu) in
            [(peer, reader, [all, all]), (reader, reader, [some, all]), (reader, reader, [all, some])]
        {
            assert_eq!(here.to(there, true, gpu), Route::Gpu { reads: false });
            assert_eq!(here.to(there, true, gpu).directions(), Directions::WRITE);
        }
        let place = |kind| Place { kind, addr: 0, len: 1, device: 0, item_len: 1 };
        let (gpu, host) = (place(MemoryKind::Vram), place(MemoryKind::Dram));
        assert_eq!(GpuShare::of(&[host]), GpuShare::Nothing);
        assert_eq!(GpuShare::of(&[]), GpuShare::Nothing);
        assert_eq!(GpuShare::of(&[gpu, host]), some);
        assert_eq!(GpuShare::of(&[gpu, gpu]), all);
        assert_eq!(GpuShare::of(&[gpu, place(MemoryKind::File)]), all);
    }

    #[test]
    fn what_the_operator_says_of_reads_by_a_gpu_goes_before_what_ucx_has_been_given() {
        let own = |value: &str| params(&[("engine_config", value)]);
        let reads = |config: &NixlConfig, made: Option<bool>, variable: Option<&str>| {
            let found =
                |name: &str| variable.filter(|_| name == "UCX_CUDA_IPC_ENABLE_GET_ZCOPY").map(str::to_owned);
            Reach::of(config, "", made, found).gpu_reads
        };
        let (off, on) = (own("CUDA_IPC_ENABLE_GET_ZCOPY=off"), own("CUDA_IPC_ENABLE_GET_ZCOPY=on"));
        let [none, yes, no] = [None, Some(true), Some(false)];
        assert!(reads(&params(&[]), yes, None) && !reads(&params(&[]), no, None));
        assert!(!reads(&params(&[]), none, None), "a file may say anything");
        assert!(!reads(&off, yes, None) && reads(&on, no, None) && reads(&on, none, None));
        for (value, wanted) in [
            ("on", true),
            ("Yes", true),
            ("y", true),
            ("1", true),
            ("auto", false),
            ("off", false),
            ("", false),
        ] {
            assert_eq!(reads(&params(&[]), none, Some(value)), wanted, "{value}");
            assert_eq!(reads(&params(&[]), yes, Some(value)), wanted, "{value}");
            assert!(!reads(&params(&[]), no, Some(value)), "UCX was there before this library's variable");
        }
        assert!(!reads(&on, none, Some("auto")), "NIXL leaves out what the environment has");
    }

    #[test]
    fn the_peers_processor_takes_part_in_writes_of_gpu_memory_over_tcp_only() {
        use MemoryKind::{Dram, Vram};
        let by_software = |route: Route| {
            [(Dram, Dram), (Dram, Vram), (Vram, Dram), (Vram, Vram)]
                .map(|(here, there)| route.writes_by_software(here, there))
        };
        assert_eq!(by_software(Route::Tcp), [false, true, true, true]);
        assert_eq!(by_software(Route::Gpu { reads: true }), [false, true, true, false]);
        for route in [Route::Memory, Route::Rdma, Route::Unknown, Route::Storage] {
            assert_eq!(by_software(route), [false; 4], "{route}");
        }
    }
}
