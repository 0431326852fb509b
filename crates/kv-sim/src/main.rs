//! The command line of the simulator: runs seeds, replays one seed, or goes through all histories of the
//! small worlds.
//!
//! `cargo run --release -p kv-sim -- --seeds 100000`
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Parser;
use comfy_table::{Table, presets};
use kv_sim::exhaust::{EntryScope, Outcome, Scope, explore, explore_entries, hunt};
use kv_sim::{
    Campaign, Dialect, DialectParams, EcParams, Options, Params, Planted, Report, Worlds, run_campaign,
    run_seed,
};

/// Runs the transfer protocol under simulated faults, and looks for broken promises.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// How many seeds to run; each seed is one simulated world.
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    seeds: u64,
    /// The first seed to run.
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    start: u64,
    /// The worlds to run: kv (of the KV cache), ec (of the encoder cache), vllm-pull, vllm-push or sglang (of
    /// that foreign protocol), interop (of all three), or all: as many worlds of the KV cache as there are
    /// seeds, then a quarter as many of the encoder cache, and a fortieth of each foreign protocol.
    #[arg(long, value_name = "WORLDS", default_value = "all",
        value_parser = ["kv", "ec", "vllm-pull", "vllm-push", "sglang", "interop", "all"])]
    worlds: String,
    /// How many threads to use [default: one for each core].
    #[arg(long, value_name = "THREADS")]
    jobs: Option<usize>,
    /// Run only this seed, and print its parameters.
    #[arg(long)]
    seed: Option<u64>,
    /// With --seed: print every event of the world.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Stop each world after this many events.
    #[arg(long, value_name = "EVENTS")]
    steps: Option<u64>,
    /// Plant this bug in the simulated workers, to see it caught; a wrong name lists all names. With
    /// --exhaust, the shortest history that shows the bug is printed.
    #[arg(long, value_name = "BUG", value_parser = planted)]
    plant: Option<Planted>,
    /// Instead of running seeds, go through all histories of the small worlds of the lease protocol.
    #[arg(long)]
    exhaust: bool,
    /// With --exhaust: only this small world; a wrong name lists all names.
    #[arg(long, requires = "exhaust", value_name = "WORLD", value_parser = scope)]
    scope: Option<Scope>,
    /// With --exhaust: the number of steps of the longest histories, instead of the default of each world.
    #[arg(long, requires = "exhaust", value_name = "STEPS")]
    depth: Option<u8>,
}

fn scope(name: &str) -> Result<Scope, String> {
    let names = || Scope::ALL.iter().map(|scope| scope.name).collect::<Vec<_>>().join(", ");
    Scope::named(name).ok_or_else(|| format!("there is no such world; the worlds are {}", names()))
}

fn planted(name: &str) -> Result<Planted, String> {
    let names = || Planted::ALL.iter().map(|planted| planted.name()).collect::<Vec<_>>().join(", ");
    let found = Planted::ALL.iter().copied().find(|planted| planted.name() == name);
    found.ok_or_else(|| format!("there is no such bug; the bugs are {}", names()))
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.exhaust {
        return exhaust(&args);
    }
    // Panics of nodes are violations, and are reported as such.
    std::panic::set_hook(Box::new(|_| {}));
    let options = Options { planted: args.plant, max_events: args.steps, ..Options::default() };
    let all = worlds(&args);
    if let Some(seed) = args.seed {
        return replay(seed, &args, Options { worlds: all[0], ..options });
    }
    for worlds in all {
        let seeds = match worlds {
            Worlds::Ec if args.worlds == "all" => args.seeds.div_ceil(4),
            Worlds::Dialect(_) if args.worlds == "all" => args.seeds.div_ceil(40),
            _ => args.seeds,
        };
        let found = campaign(&args, seeds, Options { worlds, ..options });
        if found != ExitCode::SUCCESS {
            return found;
        }
    }
    ExitCode::SUCCESS
}

/// The kinds of worlds that are run. A planted bug is looked for in one kind.
fn worlds(args: &Args) -> Vec<Worlds> {
    let dialects = || Dialect::ALL.into_iter().map(Worlds::Dialect);
    let named = dialects().find(|worlds| name(*worlds) == args.worlds);
    match (args.worlds.as_str(), args.plant) {
        (_, Some(planted)) if planted.is_of_entries() => vec![Worlds::Ec],
        (_, Some(planted)) if planted.dialect().is_some() => {
            named.or(planted.dialect().map(Worlds::Dialect)).into_iter().collect()
        }
        ("ec", _) => vec![Worlds::Ec],
        ("interop", _) => dialects().collect(),
        ("all", None) => [Worlds::Kv, Worlds::Ec].into_iter().chain(dialects()).collect(),
        _ => vec![named.unwrap_or(Worlds::Kv)],
    }
}

fn name(worlds: Worlds) -> &'static str {
    match worlds {
        Worlds::Kv => "kv",
        Worlds::Ec => "ec",
        Worlds::Dialect(dialect) => dialect.name(),
    }
}

fn exhaust(args: &Args) -> ExitCode {
    let scopes: Vec<Scope> = match (args.scope, args.plant) {
        (Some(scope), _) => vec![scope],
        (None, Some(planted)) => planted.scope().and_then(Scope::named).into_iter().collect(),
        (None, None) => Scope::ALL.to_vec(),
    };
    for scope in scopes {
        let scope = Scope { depth: args.depth.unwrap_or(scope.depth), ..scope };
        println!("{}: {}", scope.name, scope.about);
        let started = std::time::Instant::now();
        let outcome: Outcome = match args.plant {
            None => explore(scope, None),
            planted => hunt(scope, planted),
        };
        let Outcome { states, steps, ends, rests, found } = outcome;
        let seconds = started.elapsed().as_secs_f64();
        let depth = scope.depth;
        println!(
            "  up to {depth} steps: {states} states, {steps} steps, {ends} histories, {rests} run to rest, {seconds:.1} s"
        );
        if let Some(found) = found {
            for line in found.history {
                println!("  {line}");
            }
            println!("VIOLATION of {}\n  {}", found.violation.invariant, found.violation.what);
            return ExitCode::FAILURE;
        }
    }
    for &scope in EntryScope::ALL.iter().filter(|_| args.scope.is_none() && args.plant.is_none()) {
        let outcome = explore_entries(scope, None);
        let (states, steps, depth) = (outcome.states, outcome.steps, scope.depth);
        println!("an entry, {}: up to {depth} steps: {states} states, {steps} steps", scope.name);
        if let Some(found) = outcome.found {
            found.history.iter().for_each(|line| println!("  {line}"));
            println!("VIOLATION of {}\n  {}", found.violation.invariant, found.violation.what);
            return ExitCode::FAILURE;
        }
    }
    println!("no promise is broken");
    ExitCode::SUCCESS
}

fn replay(seed: u64, args: &Args, options: Options) -> ExitCode {
    let keep = if args.trace { usize::MAX } else { 0 };
    match options.worlds {
        Worlds::Kv => println!("{:#?}", Params::draw(seed)),
        Worlds::Ec => println!("{:#?}", EcParams::draw(seed)),
        Worlds::Dialect(dialect) => println!("{:#?}", DialectParams::draw(seed, dialect)),
    }
    let report = run_seed(seed, Options { keep, ..options });
    for line in report.trace.lines() {
        println!("{line}");
    }
    println!("hash of the trace {:016x}, {} events", report.trace.hash(), report.counters.net.events);
    match &report.violation {
        None => {
            println!("seed {seed} breaks no promise");
            ExitCode::SUCCESS
        }
        Some(violation) => {
            println!("seed {seed} violates {violation}");
            ExitCode::FAILURE
        }
    }
}

fn campaign(args: &Args, seeds: u64, options: Options) -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or(cores);
    let shown = AtomicU64::new(0);
    let live = std::io::stderr().is_terminal();
    let progress = |done: u64| {
        let tenth = done * 10 / seeds.max(1);
        if live {
            eprint!("\r{done} of {} seeds", seeds);
        } else if shown.fetch_max(tenth, Ordering::Relaxed) < tenth {
            eprintln!("{done} of {} seeds", seeds);
        }
    };
    let campaign = run_campaign(args.start, seeds, jobs, options, progress);
    if live {
        eprintln!();
    }
    print_summary(&campaign);
    let Some((seed, violation)) = &campaign.failed else {
        println!("no promise is broken");
        return ExitCode::SUCCESS;
    };
    let report: Report = run_seed(*seed, Options { keep: 80, ..options });
    println!("the last events of seed {seed}:");
    for line in report.trace.lines() {
        println!("{line}");
    }
    println!("VIOLATION of {} in seed {seed}\n  {}", violation.invariant, violation.what);
    let plant = args.plant.map(|planted| format!(" --plant {}", planted.name())).unwrap_or_default();
    let worlds = name(options.worlds);
    println!("to replay: cargo run --release -p kv-sim -- --worlds {worlds} --seed {seed} --trace{plant}");
    ExitCode::FAILURE
}

fn print_summary(campaign: &Campaign) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let counters = &campaign.counters;
    let mut row = |name: &str, count: u64| {
        table.add_row([name.to_owned(), count.to_string()]);
    };
    for (name, count) in counters.rows() {
        row(name, count);
    }
    for (kind, count) in counters.frames() {
        row(&format!("frame: {kind}"), count);
    }
    for (cause, count) in counters.failures() {
        row(&format!("failure: {cause}"), count);
    }
    row("virtual hours", (campaign.virtual_time / 3_600_000_000_000) as u64);
    println!("{table}");
}
