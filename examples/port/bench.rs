//! One prompt of Qwen3-8B from P's blocks to D's, by the adapter and by the way of comparison, in turn.
use super::cache::Shape;
use super::engine::{Command, Event};
use super::fleet::Fleet;
use super::{Options, Outcome};

pub fn run(options: &Options) -> Outcome<bool> {
    let shape = Shape::QWEN3_8B;
    let bytes = options.tokens * shape.token_bytes();
    let mut fleet = Fleet::new(options, shape, u32::try_from(options.tokens / shape.block + 2)?);
    let prefill = fleet.prefill(1)?;
    let decode = fleet.decode("decode-0", 1, shape)?;
    println!(
        "{} tokens of Qwen3-8B (36 layers, 8 KV heads of 128, bf16): {:.1} MB in blocks of 64; every byte is compared",
        options.tokens,
        bytes as f64 / 1e6
    );
    println!(
        "{:>5}  {:>12}  {:>10}  {:>12}  {:>10}  {:>6}",
        "round", "adapter ms", "GB/s", "TCP ms", "GB/s", "ratio"
    );
    let (mut ours, mut theirs) = (f64::MAX, f64::MAX);
    for round in 0..options.rounds {
        let prompt: Vec<u32> =
            (0..options.tokens as u32).map(|token| token.wrapping_mul(31) % 50_000).collect();
        let prompt: Vec<u32> = prompt.iter().map(|token| token + round as u32).collect();
        fleet.send(decode, &Command::Request { id: round, prompt: prompt.clone(), answer: 1 })?;
        let adapter = one(&mut fleet, (prefill, decode))?;
        fleet.settled(prefill)?;
        fleet.send(prefill, &Command::PlainSend { prompt: prompt.clone() })?;
        let Event::Plain { addr } = fleet.next_of(prefill)? else { return Err("no address".into()) };
        fleet.send(decode, &Command::PlainReceive { addr, prompt })?;
        let plain = one(&mut fleet, (prefill, decode))?;
        let rate = |ms: f64| bytes as f64 / ms / 1e6;
        println!(
            "{round:>5}  {adapter:>12.1}  {:>10.2}  {plain:>12.1}  {:>10.2}  {:>5.1}×",
            rate(adapter),
            rate(plain),
            plain / adapter
        );
        (ours, theirs) = (ours.min(adapter), theirs.min(plain));
    }
    println!("best of each: {ours:.1} ms and {theirs:.1} ms, {:.1}×", theirs / ours);
    if bytes > 1_000_000_000 {
        println!(
            "(vllm.rs itself refuses a message of more than 1 GB, and its 4-byte length wraps at 4 GiB.)"
        );
    }
    for (side, number) in [("P", prefill), ("D", decode)] {
        let state = fleet.settled(number)?;
        println!("{side}: {}", state.calls);
        if state.free_blocks != state.blocks {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Milliseconds from the hand-over at P until the KV is in D's blocks.
fn one(fleet: &mut Fleet, (prefill, decode): (usize, usize)) -> Outcome<f64> {
    let (mut from, mut to) = (None, None);
    loop {
        match fleet.next()? {
            (number, Some(Event::Handed { at })) if number == prefill => from = Some(at),
            (number, Some(Event::Done { remote: true, received_at, .. })) if number == decode => {
                to = Some(received_at)
            }
            (_, Some(Event::Done { lost, .. })) => {
                return Err(format!("D had to compute the prompt: {lost:?}").into());
            }
            (_, None) => return Err("a process has ended".into()),
            _ => {}
        }
        if let (Some(from), Some(to)) = (from, to) {
            return Ok((to - from) as f64 / 1e6);
        }
    }
}
