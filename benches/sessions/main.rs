//! Requests through whole sessions: managers, senders and receivers of two processes, a bootstrap server, and
//! schedulers that sleep on the descriptor of the poll set.
//!
//! `cargo bench --bench sessions`; with `--features nixl,fabric`, also over NIXL and libfabric; with `--features ucx` over UCX
//! (without NIXL, which brings a UCX of its own, or with `-- ucx`). With `-- local`, `-- tcp` and so on after it, only over
//! these transports; with `-- small`, `-- single` or `-- large`, only these requests.
//!
//! One table is printed: how long the requests take over each transport, beside what limits them, measured in the same
//! rounds: memcpy of the same pieces, and a relay of as many wake-ups between the same number of threads and processes, with
//! a memcpy on the way. Single requests over NIXL and libfabric also stand beside the library itself: as many messages and
//! the same copy, by plain calls of processes that do not sleep. The plain messages of NIXL are its notifications, which go
//! over TCP here; those of sessions go beside NIXL. The first request to a new peer, a row of `large`, stands beside plain
//! calls, too, for which the library opens connections. "Receiver first": the receiver waits for its sender, and the time
//! runs from `send` on; "sender first": the time runs from the opening of the receiver on. Where this process may use two CPUs,
//! the prefill worker and the decode worker have one each.
//!
//! A ratio is the median over the rounds: `1.20 x` is a time of 1.2 times the limit's, `83 %` is a part of the limit's speed,
//! and `+0.80 ms` is what the first request takes beyond its limit. A row says `missed` where it does not reach the goal beside
//! it; the exit status does not depend on that.

#![allow(clippy::print_stdout)]

mod cpus;
mod far;
mod limits;
mod plain;
mod relay;
mod rows;
mod side;
mod table;
mod way;

use far::Order;
use rows::Extent;
use way::Way;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    if let Some(told) = std::env::var_os(relay::RELAY) {
        return relay::serve(&told.to_string_lossy());
    }
    let named: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    // Of each kind all, unless some are named.
    let is_wanted = |name: &str, kind: &[&str]| {
        let mut of_kind = named.iter().filter(|named| kind.contains(&named.as_str())).peekable();
        of_kind.peek().is_none() || of_kind.any(|named| named == name)
    };
    if let Some(told) = std::env::var_os(plain::PLAIN) {
        let told = told.to_string_lossy();
        return match &Way::all(|name| name == plain::way_of(&told))[..] {
            [way] => plain::serve(way, &told),
            _ => Err("the library is not found any more".into()),
        };
    }
    let order = Order::of_this_process()?;
    // First: NIXL sets the environment, while there is one thread.
    let ways = Way::all(|name| match &order {
        Some(order) => order.way == name,
        None => is_wanted(name, &Way::NAMES),
    });
    if let Some(order) = order {
        return far::serve(&order, &ways);
    }
    let extent = if kv_benches::is_trial() { Extent::TRIAL } else { Extent::FULL };
    cpus::here()?;
    table::heading();
    for (name, measure) in rows::GROUPS {
        if is_wanted(name, &rows::GROUPS.map(|(name, _)| name)) {
            measure(&ways, &extent)?;
        }
    }
    Ok(())
}
