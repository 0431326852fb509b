//! What a large transfer does to other traffic: how long a frame and a transfer of 64 KiB take while a
//! gigabyte is in flight on the same worker, and while nothing is.
//!
//! Probes are due at fixed moments and are timed from these moments, so that a probe that waits for the end
//! of the worker's turn counts in full. The loop never sleeps. In a round without a large transfer, probes
//! are therefore delayed only by the machine, which has given the processor to others: such rounds are the
//! control.

use std::time::Duration;

use bytes::Bytes;
use kv_transfer::unstable::{Descriptor, Op, Transport, TransportEvent};
use kv_transfer::{PostId, Time};
use rustix::time::{ClockId, clock_gettime};

use super::{OTHER, Pair};
use crate::{Error, Moves};

/// Rounds without and with a transfer, in turn, and how long each is.
const ROUNDS: usize = 6;
const ROUND: Duration = Duration::from_secs(2);
/// Between two probes: no multiple of a slice.
const EVERY: Duration = Duration::from_micros(4700);
/// Posts in flight, together a gigabyte.
const LARGE: u64 = 1 << 30;

/// The delays of the rounds of one kind, in seconds.
#[derive(Default)]
struct Delays {
    small: Vec<f64>,
    frames_out: Vec<f64>,
    frames_in: Vec<f64>,
    turns: Vec<f64>,
    moved: u64,
    seconds: f64,
}

/// Measures the delays, and prints them as a table.
pub(super) fn delays(pair: &mut Pair, region: usize) -> Result<(), Error> {
    let round = if region < 64 << 20 { ROUND / 20 } else { ROUND };
    let mut all = [Delays::default(), Delays::default()];
    for op in [Op::Write, Op::Read] {
        for number in 0..ROUNDS {
            if let Some(delays) = all.get_mut(number % 2) {
                probe(pair, region, round, (number % 2 == 1).then_some(op), delays)?;
            }
        }
    }
    let [idle, busy] = &mut all;
    println!(
        "\nDelays in ms beside 1 GiB in flight ({:.2} GB/s), of {} probes",
        busy.moved as f64 / busy.seconds / 1e9,
        busy.small.len()
    );
    println!("{:>22} {:>26} {:>26}", "", "nothing in flight", "1 GiB in flight");
    println!("{:>22} {:>26} {:>26}", "", "p50 / p99 / max", "p50 / p99 / max");
    for (name, idle, busy) in [
        ("transfer of 64 KiB", &mut idle.small, &mut busy.small),
        ("frame to the peer", &mut idle.frames_out, &mut busy.frames_out),
        ("frame from the peer", &mut idle.frames_in, &mut busy.frames_in),
        ("turn of the loop", &mut idle.turns, &mut busy.turns),
    ] {
        println!("{name:>22} {:>26} {:>26}", cell(idle), cell(busy));
    }
    Ok(())
}

fn cell(values: &mut [f64]) -> String {
    values.sort_by(f64::total_cmp);
    let at =
        |part: f64| values.get(((values.len() as f64 - 1.0) * part) as usize).map_or(f64::NAN, |s| s * 1e3);
    format!("{:.3} / {:.3} / {:.3}", at(0.5), at(0.99), at(1.0))
}

/// One round of probes, with or without large posts in flight.
fn probe(
    pair: &mut Pair,
    region: usize,
    round: Duration,
    large: Option<Op>,
    delays: &mut Delays,
) -> Result<(), Error> {
    let large_post = Moves::random(256 << 10, region / (256 << 10), region);
    let in_flight = if large.is_some() { (LARGE / region as u64).min(8) } else { 0 };
    let mut small: Option<(PostId, f64)> = None;
    let mut frame_out = false;
    let mut large_posts = 0;
    let mut events = Vec::new();
    let (begun, mut due) = (now(), now());
    let mut last = begun;
    loop {
        let ending = now() - begun > round.as_secs_f64();
        if ending && small.is_none() && !frame_out && large_posts == 0 {
            break;
        }
        while let (Some(op), false) = (large, ending || large_posts >= in_flight) {
            pair.post(op, large_post.descriptors().to_vec())?;
            large_posts += 1;
        }
        if !ending && now() >= due && small.is_none() && !frame_out {
            let at = (pair.next * (64 << 10)) % (region as u64 - (64 << 10));
            let descriptor = Descriptor {
                local_region: 0,
                remote_region: 0,
                local_offset: at,
                remote_offset: at,
                len: 64 << 10,
            };
            small = Some((pair.post(Op::Write, vec![descriptor])?, due));
            pair.ends.transport.send(OTHER, question(due))?;
            frame_out = true;
            while due <= now() {
                due += EVERY.as_secs_f64();
            }
        }
        pair.ends.transport.poll(Time::ZERO, &mut events);
        let turn = now();
        if !ending {
            delays.turns.push(turn - last);
        }
        last = turn;
        for event in events.drain(..) {
            match event {
                TransportEvent::Posted { post, result } => {
                    result?;
                    match small {
                        Some((id, wanted)) if id == post => {
                            delays.small.push(now() - wanted);
                            small = None;
                        }
                        _ => {
                            large_posts -= 1;
                            delays.moved += region as u64;
                        }
                    }
                }
                TransportEvent::Frame { frame, .. } => {
                    let (out, sent) = read(&frame).ok_or("a frame that is no answer")?;
                    delays.frames_out.push(out);
                    delays.frames_in.push(now() - sent);
                    frame_out = false;
                }
                TransportEvent::PeerGone { end, .. } => {
                    return Err(format!("the way to the peer has ended: {end:?}").into());
                }
                TransportEvent::Revoked { .. } => {}
            }
        }
    }
    delays.seconds += now() - begun;
    Ok(())
}

/// A frame with the time at which it was wanted.
fn question(wanted: f64) -> Bytes {
    Bytes::copy_from_slice(&wanted.to_le_bytes())
}

/// The child's answer to a question: how long the question took, and when the answer was sent.
pub(super) fn answer(question: &[u8]) -> Bytes {
    let wanted = question.first_chunk().map_or(f64::NAN, |bytes| f64::from_le_bytes(*bytes));
    let now = now();
    Bytes::from([(now - wanted).to_le_bytes(), now.to_le_bytes()].concat())
}

fn read(answer: &[u8]) -> Option<(f64, f64)> {
    let (out, sent) = (answer.first_chunk()?, answer.last_chunk()?);
    Some((f64::from_le_bytes(*out), f64::from_le_bytes(*sent)))
}

/// A clock that is the same in both processes, in seconds.
fn now() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
