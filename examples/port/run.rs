//! A run: requests to every decode process, and what came of them.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use kv_transfer::unstable::random::{SplitMix64, mix};
use serde::Serialize;

use super::cache::{Shape, answer};
use super::engine::{Calls, Command, Event, State};
use super::fleet::Fleet;
use super::{Options, Outcome, Side};

/// What came of a run.
#[derive(Debug, Default, Serialize)]
struct Result {
    requests: u64,
    /// Answers that are not those of the model.
    wrong: u64,
    /// Prompts that P computed, and that D computed.
    remote: u64,
    local: u64,
    /// Tokens of prompts that P had in its prefix cache.
    cached_tokens: u64,
    swapped: u64,
    /// Why D computed prompts that were P's: each cause once.
    causes: BTreeSet<String>,
    /// From the kill to the last answer.
    after_kill_ms: Option<u64>,
    /// Blocks that were not free at the end, or whose owner was lost.
    blocks_missing: u64,
    /// The schedulers' calls of the adapter.
    calls: Calls,
    /// How much more memory the processes had at the end than after a third of the requests.
    resident_growth_kib: i64,
}

/// A decode process and its requests.
struct Decode {
    number: usize,
    next: u64,
    open: BTreeMap<u64, Vec<u32>>,
    /// Which life of the process this is.
    life: u64,
}

pub fn run(options: &Options) -> Outcome<bool> {
    let shape = Shape::SMALL;
    let enough = (options.tokens + options.answer).div_ceil(shape.block) as u64 * options.at_once;
    let of_prefill = 2 * enough * options.decode as u64;
    let blocks = options.blocks.unwrap_or(u32::try_from(of_prefill)?);
    let mut fleet = Fleet::new(options, shape, blocks);
    let prefills: Vec<usize> =
        (0..options.prefill).map(|_| fleet.prefill(options.prefill_tp)).collect::<Outcome<_>>()?;
    let other = Shape { head_dim: 2 * shape.head_dim, ..shape };
    let of_decode = if options.other_head_dim { other } else { shape };
    let start = |fleet: &mut Fleet, index: usize, life| {
        let number = fleet.decode(&format!("decode-{index}"), options.decode_tp, of_decode)?;
        Outcome::Ok(Decode { number, next: 0, open: BTreeMap::new(), life })
    };
    let mut decodes: Vec<Decode> =
        (0..options.decode).map(|index| start(&mut fleet, index, 0)).collect::<Outcome<_>>()?;

    let (mut result, mut killed, mut dead) = (Result::default(), None, BTreeSet::new());
    let (all, mut done) = (options.requests * options.decode as u64, 0);
    let mut early: Option<Vec<State>> = None;
    while done < all {
        for (index, decode) in decodes.iter_mut().enumerate() {
            while decode.next < options.requests && (decode.open.len() as u64) < options.at_once {
                let (id, answer) = (decode.next, options.answer);
                let prompt = prompt(options, index, decode.life, id);
                fleet.send(decode.number, &Command::Request { id, prompt: prompt.clone(), answer })?;
                decode.open.insert(id, prompt);
                decode.next += 1;
            }
        }
        let (from, event) = fleet.next()?;
        let Some(event) = event else {
            if dead.contains(&from) {
                continue;
            }
            return Err(format!("process {from} has ended").into());
        };
        let Some(decode) = decodes.iter_mut().find(|decode| decode.number == from) else { continue };
        let Event::Done { id, answer: tokens, remote, cached, lost, .. } = event else { continue };
        let prompt = decode.open.remove(&id).ok_or("an answer that nobody has asked for")?;
        done += 1;
        result.requests += 1;
        result.wrong += u64::from(tokens != answer(of_decode, &prompt, options.answer));
        *(if remote { &mut result.remote } else { &mut result.local }) += 1;
        result.cached_tokens += u64::from(cached);
        result.causes.extend(lost);
        if done == all / 3 && killed.is_none() {
            early = Some(states(&mut fleet, &prefills, &decodes)?);
        }
        if let (Some(side), None) = (options.kill, killed)
            && done >= all / 4
        {
            killed = Some(Instant::now());
            match side {
                Side::Prefill => {
                    dead.insert(prefills[0]);
                    fleet.kill(prefills[0]);
                }
                Side::Decode => {
                    dead.insert(from);
                    fleet.kill(from);
                    let index = decodes.iter().position(|decode| decode.number == from).unwrap_or_default();
                    // What the process had answered counts; the new one begins with the ids from 0 again.
                    done -= decodes[index].next - decodes[index].open.len() as u64;
                    decodes[index] = start(&mut fleet, index, 1)?;
                }
            }
        }
    }
    result.after_kill_ms = killed.map(|at| at.elapsed().as_millis() as u64);

    if options.kill.is_some() {
        eprintln!(
            "waiting for the blocks of the killed process's requests, which P keeps until their leases end"
        );
    }
    let living = prefills.iter().copied().chain(decodes.iter().map(|decode| decode.number));
    let living: Vec<usize> = living.filter(|number| !dead.contains(number)).collect();
    for number in living {
        let state = fleet.settled(number)?;
        result.blocks_missing += (state.blocks - state.free_blocks + state.lost_blocks) as u64;
        result.swapped += state.swapped;
        result.calls.add(&state.calls);
    }
    if let (Some(early), None) = (early, killed) {
        let late = states(&mut fleet, &prefills, &decodes)?;
        let growth = |(early, late): (&State, &State)| late.resident_kib as i64 - early.resident_kib as i64;
        result.resident_growth_kib = early.iter().zip(&late).map(growth).max().unwrap_or_default();
    }
    report(options, &result)?;
    Ok(result.wrong == 0 && result.blocks_missing == 0)
}

/// How things are in all processes.
fn states(fleet: &mut Fleet, prefills: &[usize], decodes: &[Decode]) -> Outcome<Vec<State>> {
    let decodes = decodes.iter().map(|decode| decode.number);
    prefills.iter().copied().chain(decodes).map(|number| fleet.state(number)).collect()
}

/// The prompt of a request. The first half of the prompt is the same in requests 0 and 1, 2 and 3, and so on.
fn prompt(options: &Options, index: usize, life: u64, id: u64) -> Vec<u32> {
    let draw = |id: u64, half: u64, count: usize| {
        let seed =
            [index as u64, life, id, half].iter().fold(options.seed, |seed, part| mix(mix(seed) ^ part));
        let mut random = SplitMix64::new(seed);
        (0..count).map(move |_| random.below(50_000) as u32)
    };
    let half = options.tokens / 2;
    draw(id / 2, 0, half).chain(draw(id, 1, options.tokens - half)).collect()
}

fn report(options: &Options, result: &Result) -> Outcome<()> {
    if options.json {
        println!("{}", serde_json::to_string(result)?);
        return Ok(());
    }
    println!("seed {}: {} answers, {} of them wrong", options.seed, result.requests, result.wrong);
    println!("prompts computed by P: {}, by D: {}", result.remote, result.local);
    println!("tokens of prompts from P's prefix cache: {}", result.cached_tokens);
    println!("sequences swapped out: {}", result.swapped);
    for cause in &result.causes {
        println!("lost: {cause}");
    }
    if let Some(after) = result.after_kill_ms {
        println!("from the kill to the last answer: {after} ms");
    }
    println!("blocks missing at the end: {}", result.blocks_missing);
    println!("{}", result.calls);
    println!("resident memory since the first third: {:+} KiB", result.resident_growth_kib);
    Ok(())
}
