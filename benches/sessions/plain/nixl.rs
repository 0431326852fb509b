//! Plain calls of NIXL.

use kv_benches::nixl::Whole;
use kv_benches::{bytes, hex};
use kv_transfer::nixl::HostMemory;
use nixl_sys::{
    Agent, AgentConfig, Backend, MemType, NotificationMap, OptArgs, RegistrationHandle, XferDescList, XferOp,
    XferStatus,
};

use super::End;
use crate::Error;
use crate::side::{PATIENCE, now};

/// An agent with one registered cache.
pub(super) struct Plain {
    name: String,
    addr: usize,
    /// The name of the other agent, and the address of its cache.
    other: String,
    there: usize,
    args: OptArgs,
    _registered: RegistrationHandle,
    backend: Backend,
    agent: Agent,
}

impl Plain {
    pub(super) fn new(name: &str, memory: &HostMemory) -> Result<Plain, Error> {
        let config = AgentConfig { enable_prog_thread: false, ..AgentConfig::default() };
        let agent = Agent::new_configured(name, &config)?;
        let (_, params) = agent.get_plugin_params("UCX")?;
        let backend = agent.create_backend("UCX", &params)?;
        let mut args = OptArgs::new()?;
        args.add_backend(&backend)?;
        let registered = agent.register_memory(&Whole(memory.clone()), Some(&args))?;
        let (name, addr) = (name.to_owned(), memory.addr() as usize);
        Ok(Plain {
            name,
            addr,
            other: String::new(),
            there: 0,
            args,
            _registered: registered,
            backend,
            agent,
        })
    }
}

impl End for Plain {
    fn describe(&self) -> Result<String, Error> {
        Ok(format!("{} {} {}", self.name, self.addr, hex(&self.agent.get_local_md()?)))
    }

    fn meet(&mut self, described: &str) -> Result<(), Error> {
        let [name, addr, metadata] = described.split(' ').collect::<Vec<_>>()[..] else {
            return Err("the other end has told too little".into());
        };
        if !self.other.is_empty() {
            // Its process has ended.
            let _ = self.agent.invalidate_remote_md(&self.other);
        }
        (self.other, self.there) = (name.to_owned(), addr.parse()?);
        self.agent.load_remote_md(&bytes(metadata)?)?;
        Ok(())
    }

    fn say(&mut self) -> Result<(), Error> {
        Ok(self.agent.send_notification(&self.other, &[0; 64], Some(&self.backend))?)
    }

    fn hear(&mut self) -> Result<(), Error> {
        let (mut come, begun) = (NotificationMap::new()?, now());
        while come.is_empty()? {
            self.agent.get_notifications(&mut come, Some(&self.args))?;
            // The other end may have been woken on this core.
            std::thread::yield_now();
            if now() - begun > PATIENCE.as_secs_f64() {
                return Err("no message has come in a minute".into());
            }
        }
        Ok(())
    }

    fn copy(&mut self, place: usize, len: usize) -> Result<(), Error> {
        let (mut from, mut to) = (XferDescList::new(MemType::Dram)?, XferDescList::new(MemType::Dram)?);
        from.add_desc(self.addr + place, len, 0);
        to.add_desc(self.there + place, len, 0);
        let write = self.agent.create_xfer_req(XferOp::Write, &from, &to, &self.other, Some(&self.args))?;
        if self.agent.post_xfer_req(&write, Some(&self.args))? {
            while self.agent.get_xfer_status(&write)? == XferStatus::InProgress {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}
