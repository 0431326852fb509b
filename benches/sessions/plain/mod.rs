//! What a library itself takes: the messages and the copy of a request, by plain calls of its API in two processes that
//! poll without sleeping, and let other threads of their core run between looks. There are no sessions, no other threads, and
//! no wake-ups.

#[cfg(feature = "fabric")]
mod fabric;
#[cfg(feature = "nixl")]
mod nixl;

use kv_transfer::tcp::HostMemory;

use crate::Error;
use crate::far::{Told, answer};
use crate::side::{Shape, now, order};
use crate::way::Way;

/// The variable that makes a process a sending end: the transport, its number, the shape, and the receiving end.
pub(crate) const PLAIN: &str = "KV_BENCH_SESSIONS_PLAIN";

/// An end of a library, which has registered one cache, and the end that it has met last.
trait End {
    /// What another end must know.
    fn describe(&self) -> Result<String, Error>;
    /// Meets the end that has described itself so.
    fn meet(&mut self, described: &str) -> Result<(), Error>;
    /// Sends a message as long as a frame of a session.
    fn say(&mut self) -> Result<(), Error>;
    /// Polls until a message has come.
    fn hear(&mut self) -> Result<(), Error>;
    /// Writes `len` bytes to the same place of the other memory.
    fn copy(&mut self, place: usize, len: usize) -> Result<(), Error>;
}

/// The end of the library under this transport, if plain calls of that are measured.
fn end(way: &Way, name: &str, memory: &HostMemory) -> Result<Option<Box<dyn End>>, Error> {
    // Without these libraries, neither is used.
    let _ = (name, memory);
    match way {
        #[cfg(feature = "nixl")]
        Way::Nixl(_) => Ok(Some(Box::new(nixl::Plain::new(name, memory)?))),
        #[cfg(feature = "fabric")]
        Way::Fabric => Ok(Some(Box::new(fabric::Plain::new(memory)?))),
        #[cfg(feature = "ucx")]
        Way::Ucx(_) => Ok(None),
        Way::Local | Way::Tcp => Ok(None),
    }
}

/// A cache, and the end that has registered it.
struct Cache {
    memory: HostMemory,
    item: usize,
    order: Vec<u32>,
    end: Box<dyn End>,
}

impl Cache {
    fn new(way: &Way, name: &str, shape: &Shape) -> Result<Option<Cache>, Error> {
        let memory = HostMemory::new(shape.len())?;
        let end = end(way, name, &memory)?;
        Ok(end.map(|end| Cache { memory, item: shape.item, order: order(shape, 13), end }))
    }

    /// Where the page of a request begins, in both memories.
    fn place(&self, request: usize) -> usize {
        self.order[request % self.order.len()] as usize * self.item
    }
}

/// The receiving end, and the process that is told to send.
pub(crate) struct Plain {
    told: Told,
    here: Cache,
    way: &'static str,
    shape: Shape,
    senders: usize,
    requests: usize,
}

impl Plain {
    /// Nothing, if plain calls of the library under this transport are not measured.
    pub(crate) fn start(way: &Way, shape: &Shape) -> Result<Option<Plain>, Error> {
        let Some(here) = Cache::new(way, "plain-receiver", shape)? else { return Ok(None) };
        let told = sender(&here, way.name(), 0, shape)?;
        let mut plain = Plain { told, here, way: way.name(), shape: *shape, senders: 1, requests: 0 };
        plain.meet()?;
        Ok(Some(plain))
    }

    /// The first request of another sending end, which this one has not met. Returns the seconds: from when each is told
    /// of the other, and both exist.
    pub(crate) fn first(&mut self) -> Result<f64, Error> {
        self.told = sender(&self.here, self.way, self.senders, &self.shape)?;
        self.senders += 1;
        self.requests = 0;
        Ok(self.meet()? + self.asked()?)
    }

    fn meet(&mut self) -> Result<f64, Error> {
        let described = self.told.answer()?;
        let begun = now();
        self.here.end.meet(&described)?;
        self.told.tell("meet")?;
        self.told.answer()?;
        Ok(now() - begun)
    }

    /// A message there, and there a copy and a message. Returns the seconds.
    pub(crate) fn asked(&mut self) -> Result<f64, Error> {
        self.told.tell("when asked")?;
        self.told.answer()?;
        let begun = now();
        self.here.end.say()?;
        self.here.end.hear()?;
        let ended = now();
        self.check()?;
        Ok(ended - begun)
    }

    /// A copy and a message from there. Returns the seconds.
    pub(crate) fn sent(&mut self) -> Result<f64, Error> {
        self.told.tell("now")?;
        self.here.end.hear()?;
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

/// Starts a sending end in a process of its own.
fn sender(here: &Cache, way: &str, number: usize, shape: &Shape) -> Result<Told, Error> {
    let Shape { pages, regions, item } = shape;
    let described = here.end.describe()?;
    Told::start(PLAIN, &format!("{way} {number} {pages} {regions} {item} {described}"))
}

/// The transport whose library a sending end that was told so uses.
pub(crate) fn way_of(told: &str) -> &str {
    told.split(' ').next().unwrap_or_default()
}

/// Runs a sending end until its standard input ends.
pub(crate) fn serve(way: &Way, told: &str) -> Result<(), Error> {
    let words: Vec<&str> = told.splitn(6, ' ').collect();
    let [_, number, pages, regions, item, described] = words[..] else {
        return Err("the parent has told too little".into());
    };
    let shape = Shape { pages: pages.parse()?, regions: regions.parse()?, item: item.parse()? };
    let here = Cache::new(way, &format!("plain-sender-{number}"), &shape)?;
    let mut here = here.ok_or("plain calls of this library are not measured")?;
    answer("ready")?;
    answer(&here.end.describe()?)?;
    let mut lines = std::io::stdin().lines();
    if lines.next().is_none() {
        return Ok(());
    }
    here.end.meet(described)?;
    answer("met")?;
    for (request, line) in lines.enumerate() {
        let asked = line? == "when asked";
        let place = here.place(request);
        here.memory.write(place, &request.to_le_bytes())?;
        if asked {
            answer("ready")?;
            here.end.hear()?;
        }
        let begun = now();
        here.end.copy(place, here.item)?;
        here.end.say()?;
        if !asked {
            answer(&format!("{begun:.9}"))?;
        }
    }
    Ok(())
}
