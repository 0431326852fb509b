//! The NIXL agent: the calls of `nixl-sys` that this crate makes, with statuses as values.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use kv_core::{MemoryKind, Op, TransportError};
use nixl_sys::{
    Agent, AgentConfig, Backend, NotificationMap, OptArgs, RegistrationHandle, ThreadSync, XferDescList,
    XferDlistHandle, XferOp, XferRequest, XferStatus,
};

use crate::config::NixlConfig;
use crate::error::NixlError;
use crate::ffi::memory::{Memory, mem_type};
use crate::ffi::owned::Owned;
use crate::library::discovery::Nixl;

/// NIXL's backend for files.
const FILES: &str = "POSIX";
/// NIXL's backend over libfabric.
const LIBFABRIC: &str = "LIBFABRIC";
/// How long the progress thread of libfabric's backend sleeps between two looks.
const LIBFABRIC_PAUSE: Duration = Duration::from_millis(1);

/// A call of NIXL that failed, and NIXL's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallError {
    pub(crate) call: &'static str,
    pub(crate) status: &'static str,
    /// The number of the status in NIXL's header; `None` where the binding gives several statuses as one.
    pub(crate) code: Option<i32>,
}

impl From<CallError> for TransportError {
    fn from(error: CallError) -> TransportError {
        TransportError::Backend { call: error.call, status: error.status, code: error.code }
    }
}

impl From<CallError> for NixlError {
    fn from(error: CallError) -> NixlError {
        NixlError::Call { call: error.call, status: error.status, code: error.code }
    }
}

/// One descriptor of a request: address and device on both sides, and a length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) local: (u64, u64),
    pub(crate) remote: (u64, u64),
    pub(crate) len: u64,
}

/// The result of starting a request.
pub(crate) enum Started {
    /// All bytes are in place already.
    Done,
    /// The request was started and has not ended.
    InFlight(XferRequest),
    /// The start failed; parts of the request may be on their way.
    Failed(XferRequest),
}

/// The state of a request that was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    InFlight,
    Done,
    Failed,
}

/// An agent with one backend for peers, and one for files. The order of the fields is the order in which they
/// are dropped: the agent comes last, because all others belong to the agent.
pub(crate) struct Engine {
    /// Descriptor lists that NIXL has prepared: of this agent's items, and of peers' items by the name of
    /// their agent.
    items_here: Option<Owned<XferDlistHandle>>,
    items_there: HashMap<String, Owned<XferDlistHandle>>,
    received: Owned<NotificationMap>,
    args: Owned<OptArgs>,
    /// The backend for files; `None` until a file is given to the transport.
    storage: Option<Storage>,
    registered: Vec<RegistrationHandle>,
    backend: Backend,
    agent: Agent,
}

/// Arguments of calls that name the backend for files alone, and together with the backend for peers.
struct Storage {
    files: Owned<OptArgs>,
    memory: Owned<OptArgs>,
}

impl Engine {
    /// Starts an agent under this name.
    pub(crate) fn new(nixl: &Nixl, name: &str, config: &NixlConfig) -> Result<Engine, NixlError> {
        // No progress thread: it costs a core or milliseconds of delay, and the owner polls anyway.
        // LIBFABRIC does nothing without one.
        let agent_config = AgentConfig {
            enable_prog_thread: config.backend == LIBFABRIC,
            pthr_delay_us: LIBFABRIC_PAUSE.as_micros() as u64,
            enable_listen_thread: false,
            thread_sync: ThreadSync::None,
            capture_telemetry: false,
            ..AgentConfig::default()
        };
        let agent = Agent::new_configured(name, &agent_config).map_err(call("create_agent"))?;
        let refused = refused(nixl, &config.backend);
        let (_, mut params) = agent.get_plugin_params(&config.backend).map_err(&refused)?;
        for (name, value) in config.params()? {
            params.set(&name, &value).map_err(call("params_add"))?;
        }
        let backend = agent.create_backend(&config.backend, &params).map_err(refused)?;
        let mut args = OptArgs::new().map_err(call("create_opt_args"))?;
        args.add_backend(&backend).map_err(call("opt_args_add_backend"))?;
        let received = NotificationMap::new().map_err(call("create_notif_map"))?;
        Ok(Engine {
            items_here: None,
            items_there: HashMap::new(),
            received: Owned::new(received),
            args: Owned::new(args),
            storage: None,
            registered: Vec::new(),
            backend,
            agent,
        })
    }

    /// Starts the backend for files, unless the backend runs already. The call comes before any memory is
    /// registered: NIXL takes a registration back from all backends at once, so each registration must be
    /// made with all of them.
    pub(crate) fn start_storage(&mut self, nixl: &Nixl) -> Result<(), NixlError> {
        if self.storage.is_some() {
            return Ok(());
        }
        let refused = refused(nixl, FILES);
        let (_, params) = self.agent.get_plugin_params(FILES).map_err(&refused)?;
        let backend = self.agent.create_backend(FILES, &params).map_err(&refused)?;
        let args = |backends: &[&Backend]| {
            let mut args = OptArgs::new().map_err(call("create_opt_args"))?;
            for backend in backends {
                args.add_backend(backend).map_err(call("opt_args_add_backend"))?;
            }
            Ok::<_, CallError>(Owned::new(args))
        };
        self.storage = Some(Storage { files: args(&[&backend])?, memory: args(&[&self.backend, &backend])? });
        Ok(())
    }

    /// Registers memory with the backends that move it.
    pub(crate) fn register(&mut self, memory: &Memory) -> Result<(), CallError> {
        let args = match (&self.storage, memory.kind()) {
            (Some(storage), MemoryKind::Dram) => &storage.memory,
            (Some(storage), MemoryKind::File) => &storage.files,
            _ => &self.args,
        };
        let handle = self.agent.register_memory(memory, Some(args)).map_err(call("register_mem"))?;
        self.registered.push(handle);
        Ok(())
    }

    /// The arguments that name the backend for transfers between these kinds of memory.
    fn args(&self, kinds: (MemoryKind, MemoryKind)) -> &OptArgs {
        match &self.storage {
            Some(storage) if kinds.1 == MemoryKind::File => &storage.files,
            _ => &self.args,
        }
    }

    /// Leaves the registrations in place for as long as the process lives, because requests are on their way.
    pub(crate) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.registered));
    }

    pub(crate) fn metadata(&self) -> Result<Vec<u8>, CallError> {
        self.agent.get_local_md().map_err(call("get_local_md"))
    }

    /// Loads a peer's metadata, and returns the name of the peer's agent.
    pub(crate) fn load(&self, metadata: &[u8]) -> Result<String, CallError> {
        self.agent.load_remote_md(metadata).map_err(call("load_remote_md"))
    }

    /// Drops a peer's metadata, and with the metadata the connection.
    pub(crate) fn forget(&mut self, name: &str) {
        self.items_there.remove(name);
        // Fails if NIXL has dropped it on its own, after an error.
        let _ = self.agent.invalidate_remote_md(name);
    }

    pub(crate) fn knows(&self, name: &str) -> bool {
        self.agent.check_remote_metadata(name, None)
    }

    pub(crate) fn notify(&self, name: &str, message: &[u8]) -> Result<(), CallError> {
        self.agent.send_notification(name, message, Some(&self.backend)).map_err(call("gen_notif"))
    }

    /// Makes progress, and hands over the notifications that have come: the name that the sender's agent
    /// gives itself, and the bytes.
    pub(crate) fn receive(&mut self, mut take: impl FnMut(&str, Bytes)) -> Result<(), CallError> {
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
                take(name, message.into());
            }
        }
        Ok(())
    }

    /// Creates a request whose descriptors are all of the same kinds of memory. No memory is touched yet.
    pub(crate) fn create(
        &self,
        (op, local, remote): (Op, MemoryKind, MemoryKind),
        pieces: &[Piece],
        name: &str,
    ) -> Result<XferRequest, CallError> {
        let mut here = XferDescList::new(mem_type(local)).map_err(call("create_xfer_dlist"))?;
        let mut there = XferDescList::new(mem_type(remote)).map_err(call("create_xfer_dlist"))?;
        for piece in pieces {
            here.add_desc(piece.local.0 as usize, piece.len as usize, piece.local.1);
            there.add_desc(piece.remote.0 as usize, piece.len as usize, piece.remote.1);
        }
        let created =
            self.agent.create_xfer_req(xfer_op(op), &here, &there, name, Some(self.args((local, remote))));
        created.map_err(call("create_xfer_req"))
    }

    /// Prepares the descriptor list of this agent's items, or of a peer's items once the peer's metadata is
    /// loaded.
    pub(crate) fn prepare(
        &mut self,
        peer: Option<&str>,
        kind: MemoryKind,
        items: impl Iterator<Item = (u64, u64, u64)>,
    ) -> Result<(), CallError> {
        let mut list = XferDescList::new(mem_type(kind)).map_err(call("create_xfer_dlist"))?;
        for (addr, len, device) in items {
            list.add_desc(addr as usize, len as usize, device);
        }
        // Nobody's name is ours.
        let prepared = self.agent.prepare_xfer_dlist(peer.unwrap_or(""), &list, Some(&self.args));
        let prepared = Owned::new(prepared.map_err(call("prep_xfer_dlist"))?);
        match peer {
            Some(name) => drop(self.items_there.insert(name.to_owned(), prepared)),
            None => self.items_here = Some(prepared),
        }
        Ok(())
    }

    /// Creates a request of prepared items, by their numbers here and there. No memory is touched yet.
    pub(crate) fn create_of_items(
        &self,
        (op, ..): (Op, MemoryKind, MemoryKind),
        [here, there]: &[Vec<i32>; 2],
        name: &str,
    ) -> Result<XferRequest, CallError> {
        let lists = self.items_here.as_ref().zip(self.items_there.get(name));
        // NIXL drops what it knows of a peer when its connection has failed, and a list of it then
        // leads nowhere.
        let Some((ours, theirs)) = lists.filter(|_| self.knows(name)) else {
            return Err(call("make_xfer_req")(nixl_sys::NixlError::NotFound));
        };
        let made = self.agent.make_xfer_req(xfer_op(op), ours, here, theirs, there, Some(&self.args));
        made.map_err(call("make_xfer_req"))
    }

    /// Starts a request that was created.
    pub(crate) fn start(&self, request: XferRequest) -> Started {
        match self.agent.post_xfer_req(&request, Some(&self.args)) {
            Ok(false) => Started::Done,
            Ok(true) => Started::InFlight(request),
            Err(_) => Started::Failed(request),
        }
    }

    /// Starts a read of no bytes, which the backend refuses if it has given up the connection to the agent. The
    /// agent's owner hears nothing of the attempt, and no memory is touched. Kinds and addresses are those of
    /// registered memory on both sides. `None` if no such read can be made.
    pub(crate) fn try_out(
        &self,
        kinds: (MemoryKind, MemoryKind),
        local: (u64, u64),
        remote: (u64, u64),
        name: &str,
    ) -> Option<Started> {
        let nothing = Piece { local, remote, len: 0 };
        let read = self.create((Op::Read, kinds.0, kinds.1), &[nothing], name);
        read.ok().map(|read| self.start(read))
    }

    /// Makes progress, and returns the state of a request.
    pub(crate) fn progress(&self, request: &XferRequest) -> Progress {
        match self.agent.get_xfer_status(request) {
            Ok(XferStatus::InProgress) => Progress::InFlight,
            Ok(XferStatus::Success) => Progress::Done,
            Err(_) => Progress::Failed,
        }
    }
}

fn xfer_op(op: Op) -> XferOp {
    match op {
        Op::Write => XferOp::Write,
        Op::Read => XferOp::Read,
    }
}

/// The error of a backend that does not start.
fn refused(nixl: &Nixl, backend: &str) -> impl Fn(nixl_sys::NixlError) -> NixlError {
    move |error| NixlError::Backend {
        backend: backend.to_owned(),
        status: status(&error),
        reason: nixl.why_not(backend),
        installed: nixl.plugins().to_vec(),
    }
}

fn call(call: &'static str) -> impl Fn(nixl_sys::NixlError) -> CallError {
    move |error| CallError { call, status: status(&error), code: code(&error) }
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

/// The number in `nixl_capi_status_t`. The binding calls every other status a backend error, and makes some
/// errors itself.
fn code(error: &nixl_sys::NixlError) -> Option<i32> {
    match error {
        nixl_sys::NixlError::InvalidParam => Some(nixl_sys::NIXL_CAPI_ERROR_INVALID_PARAM),
        nixl_sys::NixlError::NoTelemetry => Some(nixl_sys::NIXL_CAPI_ERROR_NO_TELEMETRY),
        nixl_sys::NixlError::NotFound => Some(nixl_sys::NIXL_CAPI_ERROR_NOT_FOUND),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{nixl, worker};

    #[test]
    fn a_status_of_nixl_reaches_the_owner_with_nixls_number() {
        let Some(nixl) = nixl() else { return };
        let (here, _) = worker(nixl);
        let error = here.engine.notify("nobody", b"").unwrap_err();
        let (call, status) = ("gen_notif", "not found");
        let expected = TransportError::Backend { call, status, code: Some(-6) };
        assert_eq!(TransportError::from(error), expected);
    }
}
