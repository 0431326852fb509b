//! Plain `nixl-sys` code, with which the transport is compared.

use kv_benches::nixl::Whole;
use kv_transfer::nixl::HostMemory;
use kv_transfer::unstable::{Descriptor, Op};
use nixl_sys::{
    Agent, AgentConfig, MemType, NotificationMap, OptArgs, RegistrationHandle, XferDescList, XferOp,
    XferStatus,
};

use super::Route;
use crate::Error;

/// A NIXL agent with one registered pool.
pub(super) struct Raw {
    agent: Agent,
    args: OptArgs,
    _registered: RegistrationHandle,
}

impl Raw {
    pub(super) fn new(name: &str, pool: &HostMemory, route: Route) -> Result<Raw, Error> {
        let config = AgentConfig { enable_prog_thread: false, ..AgentConfig::default() };
        let agent = Agent::new_configured(name, &config)?;
        let (_, mut params) = agent.get_plugin_params("UCX")?;
        for (name, value) in route.params() {
            params.set(&name, &value)?;
        }
        let backend = agent.create_backend("UCX", &params)?;
        let mut args = OptArgs::new()?;
        args.add_backend(&backend)?;
        let registered = agent.register_memory(&Whole(pool.clone()), Some(&args))?;
        Ok(Raw { agent, args, _registered: registered })
    }

    pub(super) fn metadata(&self) -> Result<Vec<u8>, Error> {
        Ok(self.agent.get_local_md()?)
    }

    pub(super) fn connect(&self, metadata: &[u8]) -> Result<(), Error> {
        self.agent.load_remote_md(metadata)?;
        Ok(())
    }

    /// Lets NIXL make progress, and receives notifications.
    pub(super) fn receive(&self, notifications: &mut NotificationMap) -> Result<(), Error> {
        Ok(self.agent.get_notifications(notifications, None)?)
    }

    /// Runs one transfer of all descriptors, from its creation to its end.
    pub(super) fn run(&self, op: Op, descriptors: &[Descriptor], here: u64, there: u64) -> Result<(), Error> {
        let mut local = XferDescList::new(MemType::Dram)?;
        let mut remote = XferDescList::new(MemType::Dram)?;
        for descriptor in descriptors {
            local.add_desc((here + descriptor.local_offset) as usize, descriptor.len as usize, 0);
            remote.add_desc((there + descriptor.remote_offset) as usize, descriptor.len as usize, 0);
        }
        let op = match op {
            Op::Write => XferOp::Write,
            Op::Read => XferOp::Read,
        };
        let request = self.agent.create_xfer_req(op, &local, &remote, "raw-child", Some(&self.args))?;
        if self.agent.post_xfer_req(&request, Some(&self.args))? {
            while self.agent.get_xfer_status(&request)? == XferStatus::InProgress {}
        }
        Ok(())
    }
}
