//! The NIXL agent: what of `nixl-sys` this crate uses, with its statuses as values.

use kv_core::{MemoryKind, Op};
use nixl_sys::{
    Agent, AgentConfig, Backend, NotificationMap, OptArgs, RegistrationHandle, ThreadSync, XferDescList,
    XferOp, XferRequest, XferStatus,
};

use crate::config::NixlConfig;
use crate::discovery::Nixl;
use crate::error::NixlError;
use crate::ffi::{Memory, Owned, mem_type};

/// A call of NIXL that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallError {
    pub(crate) call: &'static str,
    pub(crate) status: &'static str,
}

impl From<CallError> for NixlError {
    fn from(error: CallError) -> NixlError {
        NixlError::Call { call: error.call, status: error.status }
    }
}

/// One piece of a request: addresses and devices of both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) local: (u64, u64),
    pub(crate) remote: (u64, u64),
    pub(crate) len: u64,
}

/// What became of a request that was to be started.
pub(crate) enum Started {
    /// All bytes are in place.
    Done,
    /// On its way.
    InFlight(XferRequest),
    /// It failed while it was started; parts of it may be on their way.
    Failed(XferRequest),
}

/// How a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    InFlight,
    Done,
    Failed,
}

/// An agent with one backend. Fields are dropped in this order: what is NIXL's before the agent.
pub(crate) struct Engine {
    received: Owned<NotificationMap>,
    args: Owned<OptArgs>,
    registered: Vec<RegistrationHandle>,
    backend: Backend,
    agent: Agent,
}

impl Engine {
    /// Starts an agent of this name.
    pub(crate) fn new(nixl: &Nixl, name: &str, config: &NixlConfig) -> Result<Engine, NixlError> {
        // No progress thread: it costs a core or milliseconds of delay, and the owner polls anyway.
        let agent_config = AgentConfig {
            enable_prog_thread: false,
            enable_listen_thread: false,
            thread_sync: ThreadSync::None,
            capture_telemetry: false,
            ..AgentConfig::default()
        };
        let agent = Agent::new_configured(name, &agent_config).map_err(call("create_agent"))?;
        let refused = |error| NixlError::Backend {
            backend: config.backend.clone(),
            status: status(&error),
            installed: nixl.plugins().to_vec(),
        };
        let (_, mut params) = agent.get_plugin_params(&config.backend).map_err(refused)?;
        if !config.devices.is_empty() {
            params.set("device_list", &config.devices.join(",")).map_err(call("params_add"))?;
        }
        for (name, value) in &config.backend_params {
            params.set(name, value).map_err(call("params_add"))?;
        }
        let backend = agent.create_backend(&config.backend, &params).map_err(refused)?;
        let mut args = OptArgs::new().map_err(call("create_opt_args"))?;
        args.add_backend(&backend).map_err(call("opt_args_add_backend"))?;
        let received = NotificationMap::new().map_err(call("create_notif_map"))?;
        Ok(Engine {
            received: Owned::new(received),
            args: Owned::new(args),
            registered: Vec::new(),
            backend,
            agent,
        })
    }

    pub(crate) fn register(&mut self, memory: &Memory) -> Result<(), CallError> {
        let handle = self.agent.register_memory(memory, Some(&self.args)).map_err(call("register_mem"))?;
        self.registered.push(handle);
        Ok(())
    }

    /// Leaves the registrations in place for as long as the process lives: requests are on their way.
    pub(crate) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.registered));
    }

    pub(crate) fn metadata(&self) -> Result<Vec<u8>, CallError> {
        self.agent.get_local_md().map_err(call("get_local_md"))
    }

    /// Loads a peer's metadata; returns the peer's name.
    pub(crate) fn load(&self, metadata: &[u8]) -> Result<String, CallError> {
        self.agent.load_remote_md(metadata).map_err(call("load_remote_md"))
    }

    /// Drops a peer's metadata, and with it the connection.
    pub(crate) fn forget(&self, name: &str) {
        // Fails if NIXL has dropped it on its own, after an error.
        let _ = self.agent.invalidate_remote_md(name);
    }

    pub(crate) fn knows(&self, name: &str) -> bool {
        self.agent.check_remote_metadata(name, None)
    }

    pub(crate) fn notify(&self, name: &str, message: &[u8]) -> Result<(), CallError> {
        self.agent.send_notification(name, message, Some(&self.backend)).map_err(call("gen_notif"))
    }

    /// Makes progress, and hands over the notifications that have come: who sent it, as it says
    /// itself, and what.
    pub(crate) fn receive(&mut self, mut take: impl FnMut(&str, Vec<u8>)) -> Result<(), CallError> {
        self.agent.get_notifications(&mut self.received, Some(&self.args)).map_err(call("get_notifs"))?;
        if self.received.is_empty().unwrap_or(true) {
            return Ok(());
        }
        // Notifications pile up in the map, which nobody can clear: the next ones need a new map.
        let fresh = NotificationMap::new().map_err(call("create_notif_map"))?;
        let received = std::mem::replace(&mut self.received, Owned::new(fresh));
        // A name that is no text is of nobody we know.
        for name in received.agents().flatten() {
            for message in received.get_notifications(name).into_iter().flatten().flatten() {
                take(name, message);
            }
        }
        Ok(())
    }

    /// Creates a request. All pieces are of the same kinds of memory. Nothing is touched yet.
    pub(crate) fn create(
        &self,
        (op, local, remote): (Op, MemoryKind, MemoryKind),
        pieces: &[Piece],
        name: &str,
    ) -> Result<XferRequest, CallError> {
        let op = match op {
            Op::Write => XferOp::Write,
            Op::Read => XferOp::Read,
        };
        let mut here = XferDescList::new(mem_type(local)).map_err(call("create_xfer_dlist"))?;
        let mut there = XferDescList::new(mem_type(remote)).map_err(call("create_xfer_dlist"))?;
        for piece in pieces {
            here.add_desc(piece.local.0 as usize, piece.len as usize, piece.local.1);
            there.add_desc(piece.remote.0 as usize, piece.len as usize, piece.remote.1);
        }
        let created = self.agent.create_xfer_req(op, &here, &there, name, Some(&self.args));
        created.map_err(call("create_xfer_req"))
    }

    /// Starts a request.
    pub(crate) fn start(&self, request: XferRequest) -> Started {
        match self.agent.post_xfer_req(&request, Some(&self.args)) {
            Ok(false) => Started::Done,
            Ok(true) => Started::InFlight(request),
            Err(_) => Started::Failed(request),
        }
    }

    /// Makes progress, and says how a request does.
    pub(crate) fn progress(&self, request: &XferRequest) -> Progress {
        match self.agent.get_xfer_status(request) {
            Ok(XferStatus::InProgress) => Progress::InFlight,
            Ok(XferStatus::Success) => Progress::Done,
            Err(_) => Progress::Failed,
        }
    }
}

fn call(call: &'static str) -> impl Fn(nixl_sys::NixlError) -> CallError {
    move |error| CallError { call, status: status(&error) }
}

fn status(error: &nixl_sys::NixlError) -> &'static str {
    use nixl_sys::NixlError as E;
    match error {
        E::InvalidParam => "invalid parameter",
        E::BackendError => "backend error",
        E::NotFound => "not found",
        E::FailedToCreateXferRequest => "no request could be made",
        E::FailedToCreateXferDlistHandle => "no descriptor list could be made",
        E::FailedToCreateBackend => "no backend could be made",
        E::RegDescListCreationFailed | E::RegDescAddFailed => "no registration list could be made",
        E::StringConversionError(_) => "a NUL in a name",
        E::IndexOutOfBounds => "index out of bounds",
        E::InvalidDataPointer => "invalid pointer",
        E::NoTelemetry => "no telemetry",
    }
}
