//! What NIXL itself takes: the messages and the copy of a request, by plain calls of NIXL's API in two processes that
//! poll without a pause. There are no sessions, no other threads, and no wake-ups.

use kv_benches::nixl::Whole;
use kv_benches::{bytes, hex};
use kv_transfer::nixl::{HostMemory, Nixl};
use nixl_sys::{
    Agent, AgentConfig, Backend, MemType, NotificationMap, OptArgs, RegistrationHandle, XferDescList, XferOp,
    XferStatus,
};

use crate::Error;
use crate::far::{Told, answer};
use crate::side::{PATIENCE, Shape, now, order};

/// The variable that makes a process the sending end: the shape, and the receiving end's address and metadata.
pub(crate) const PLAIN: &str = "KV_BENCH_SESSIONS_PLAIN";

/// The receiving end, and the process that is told to send.
pub(crate) struct Plain {
    told: Told,
    here: End,
    requests: usize,
}

impl Plain {
    pub(crate) fn start(shape: &Shape) -> Result<Plain, Error> {
        let here = End::new("plain-receiver", shape)?;
        let Shape { pages, regions, item } = shape;
        let (addr, metadata) = (here.memory.addr(), hex(&here.agent.get_local_md()?));
        let mut told = Told::start(PLAIN, &format!("{pages} {regions} {item} {addr} {metadata}"))?;
        here.agent.load_remote_md(&bytes(&told.answer()?)?)?;
        Ok(Plain { told, here, requests: 0 })
    }

    /// A message there, and there a copy and a message. Returns the seconds.
    pub(crate) fn asked(&mut self) -> Result<f64, Error> {
        self.told.tell("when asked")?;
        self.told.answer()?;
        let begun = now();
        self.here.say("plain-sender")?;
        self.here.hear()?;
        let ended = now();
        self.check()?;
        Ok(ended - begun)
    }

    /// A copy and a message from there. Returns the seconds.
    pub(crate) fn sent(&mut self) -> Result<f64, Error> {
        self.told.tell("now")?;
        self.here.hear()?;
        let ended = now();
        let begun = self.told.answer()?.parse::<f64>()?;
        self.check()?;
        Ok(ended - begun)
    }

    /// Checks that the page of the last request has its number.
    fn check(&mut self) -> Result<(), Error> {
        let mut got = [0; 8];
        self.here.memory.read(self.here.place(self.requests), &mut got)?;
        if usize::from_le_bytes(got) != self.requests {
            return Err(format!("request {} has the bytes of {got:?}", self.requests).into());
        }
        self.requests += 1;
        Ok(())
    }
}

/// Runs the sending end until its standard input ends.
pub(crate) fn serve(_: &Nixl, told: &str) -> Result<(), Error> {
    let words: Vec<&str> = told.split(' ').collect();
    let [pages, regions, item, addr, metadata] = words[..] else {
        return Err("the parent has told too little".into());
    };
    let shape = Shape { pages: pages.parse()?, regions: regions.parse()?, item: item.parse()? };
    let here = End::new("plain-sender", &shape)?;
    here.agent.load_remote_md(&bytes(metadata)?)?;
    let there: usize = addr.parse()?;
    answer("ready")?;
    answer(&hex(&here.agent.get_local_md()?))?;
    for (request, line) in std::io::stdin().lines().enumerate() {
        let asked = line? == "when asked";
        here.memory.write(here.place(request), &request.to_le_bytes())?;
        if asked {
            answer("ready")?;
            here.hear()?;
        }
        let begun = now();
        here.copy(request, there)?;
        here.say("plain-receiver")?;
        if !asked {
            answer(&format!("{begun:.9}"))?;
        }
    }
    Ok(())
}

/// An agent with one registered cache.
struct End {
    memory: HostMemory,
    item: usize,
    order: Vec<u32>,
    args: OptArgs,
    _registered: RegistrationHandle,
    backend: Backend,
    agent: Agent,
}

impl End {
    fn new(name: &str, shape: &Shape) -> Result<End, Error> {
        let config = AgentConfig { enable_prog_thread: false, ..AgentConfig::default() };
        let agent = Agent::new_configured(name, &config)?;
        let (_, params) = agent.get_plugin_params("UCX")?;
        let backend = agent.create_backend("UCX", &params)?;
        let mut args = OptArgs::new()?;
        args.add_backend(&backend)?;
        let memory = HostMemory::new(shape.len())?;
        let registered = agent.register_memory(&Whole(memory.clone()), Some(&args))?;
        let order = order(shape, 13);
        Ok(End { memory, item: shape.item, order, args, _registered: registered, backend, agent })
    }

    /// Where the page of a request begins, in both memories.
    fn place(&self, request: usize) -> usize {
        self.order[request % self.order.len()] as usize * self.item
    }

    fn say(&self, to: &str) -> Result<(), Error> {
        // As long as a frame of a session.
        Ok(self.agent.send_notification(to, &[0; 64], Some(&self.backend))?)
    }

    /// Polls until a message has come.
    fn hear(&self) -> Result<(), Error> {
        let (mut come, begun) = (NotificationMap::new()?, now());
        while come.is_empty()? {
            self.agent.get_notifications(&mut come, Some(&self.args))?;
            if now() - begun > PATIENCE.as_secs_f64() {
                return Err("no message has come in a minute".into());
            }
        }
        Ok(())
    }

    /// Writes the page of a request to the same place of the other memory.
    fn copy(&self, request: usize, there: usize) -> Result<(), Error> {
        let place = self.place(request);
        let (mut from, mut to) = (XferDescList::new(MemType::Dram)?, XferDescList::new(MemType::Dram)?);
        from.add_desc(self.memory.addr() as usize + place, self.item, 0);
        to.add_desc(there + place, self.item, 0);
        let write =
            self.agent.create_xfer_req(XferOp::Write, &from, &to, "plain-receiver", Some(&self.args))?;
        if self.agent.post_xfer_req(&write, Some(&self.args))? {
            while self.agent.get_xfer_status(&write)? == XferStatus::InProgress {}
        }
        Ok(())
    }
}
