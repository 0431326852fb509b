//! The contract of [`kv_core::Transport`] as checks, which every transport must pass.
//!
//! This crate is a development dependency of the transports. A transport's tests implement [`Harness`], which
//! makes workers in the test's process ("here") and outside of it ("elsewhere"), and run [`all`] checks, or
//! [`some`] of them by name. For real transports, a worker elsewhere is a process that can be killed
//! ([`process`]); for the simulated transport, it is a worker on a virtual host.
//!
//! | file | checks |
//! |---|---|
//! | `moving` | bytes, bounds, one and very many descriptors |
//! | `frames` | notify frames after the bytes, frames whole, who may speak first, what wakes a worker that sleeps |
//! | `ending` | every post ends once; cancelled and disconnected posts; strangers |
//! | `crowd` | many posts among three workers at once |
//! | `far` | pages to and from workers elsewhere, and the origins of frames |
//! | `crash` | workers elsewhere that are killed (before, during and after posts), and that come back |
//! | `rights` | permissions to write that begin and end; rights that are revoked, also after the way was lost |
//!
//! What this crate is not: a test of speed. No check fails because a machine is slow, unless it is slower
//! than [`Harness::patience`], which is long. The tests of the simulated transport show that each check can
//! fail: they plant a bug for each.
//!
//! ```
//! use kv_conformance::{Harness, some};
//!
//! // A transport's test: `harness` makes the test's workers.
//! fn bytes_arrive<H: Harness>(harness: impl Fn() -> H) {
//!     some(harness, |name| name.starts_with("posts_move"));
//! }
//! ```

// Checks report what they have found by panicking, and print their seeds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod crash;
mod crowd;
mod ending;
mod far;
mod frames;
mod here;
mod moving;
mod needed;
mod other;
mod pages;
mod pair;
pub mod process;
mod random;
mod rights;
mod sys;
mod vram;

use std::time::{Duration, Instant};

use kv_core::{Time, Transport};

pub use ending::cancel_many;
pub use needed::needed;
pub use other::{Job, Other, Puppet, pattern};
pub use pages::Pages;
pub use pair::{A_KNOWS_B, B_KNOWS_A, LENS, Pair, Regions, Side, boottime, connect, heard, snapshot};
pub use random::Random;
pub use sys::rest;
pub use vram::{Gpu, Vram};

/// Makes the workers of checks, with the transport under test.
pub trait Harness {
    /// The transport under test.
    type Transport: Transport;
    /// A worker elsewhere, which can be killed.
    type Other: Other;

    /// Length in bytes of the one region of a worker elsewhere, and of its partner's region here: large
    /// enough that bytes are still on their way when the worker is killed.
    const FAR_LEN: usize;

    /// A worker here, with one region of zero bytes for each length in `lens`. The other workers of this
    /// harness can reach it.
    fn worker(&self, lens: &[usize]) -> Side<Self::Transport>;

    /// The second worker of a pair here: by default a worker like the first.
    fn partner(&self, lens: &[usize]) -> Side<Self::Transport> {
        self.worker(lens)
    }

    /// Starts a worker elsewhere, which does `job` with the worker whose metadata is `peer`. The region of
    /// the new worker holds [`pattern`].
    fn other(&self, job: Job, peer: &[u8]) -> Self::Other;

    /// The time in which transports are polled, permissions end, and checks wait: the host's CLOCK_BOOTTIME,
    /// except in a simulation.
    fn now(&self) -> Time {
        boottime()
    }

    /// How long a check waits for something that must happen.
    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// The descriptors of the largest post: fewer where each costs much, as between GPU memory and host memory, or where
    /// other workers of the same transport post so many already.
    fn most_descriptors(&self) -> usize {
        1_000_000
    }

    /// Cuts the connections by which the second worker of a pair reaches the first one, as a failing network does. Both
    /// workers live on, and can be connected anew. False (the default) if the harness cannot do that: checks then revoke a
    /// right over a way that stands.
    fn cut(&self, pair: &mut Pair<Self::Transport>) -> bool {
        let _ = pair;
        false
    }

    /// False for a transport that refuses reads: checks then use writes only.
    fn reads(&self) -> bool {
        true
    }
}

/// The checks that kill a worker elsewhere while it may be writing to a worker here. Tests leave them out for a route on
/// which the target may die with its writer.
pub const KILLED_WRITERS: [&str; 3] = [
    "a_killed_writer_is_quiet_once_that_was_promised",
    "a_peer_that_died_before_the_connect_is_told_dead_and_quiet",
    "death_is_told_of_the_dead_only",
];

/// A check, with its name before it.
pub type Check<H> = (&'static str, fn(&H));

macro_rules! checks {
    ($($file:ident { $($check:ident,)* })*) => {
        /// All checks with their names. Each check makes its own workers, so checks may run in any order.
        pub fn checks<H: Harness>() -> Vec<Check<H>> {
            vec![$($((stringify!($check), $file::$check::<H> as fn(&H)),)*)*]
        }

        /// The file of the check of this name; `None` if there is no such check.
        fn file_of(name: &str) -> Option<&'static str> {
            match name {
                $($(stringify!($check) => Some(stringify!($file)),)*)*
                _ => None,
            }
        }
    };
}

checks! {
    moving {
        posts_move_exactly_the_described_bytes,
        descriptors_out_of_bounds_are_refused_and_touch_nothing,
        one_and_very_many_descriptors_move_their_bytes,
    }
    frames {
        the_notify_frame_comes_after_the_bytes,
        the_notify_frame_of_a_large_post_comes_after_all_its_bytes,
        frames_arrive_whole_in_both_directions,
        the_first_frame_arrives_before_the_receiver_connects,
        both_sides_may_connect_at_once,
        workers_that_sleep_wake_for_frames_and_for_the_ends_of_posts,
    }
    ending {
        every_post_ends_exactly_once_also_when_cancelled,
        a_cancelled_post_is_quiet_once_it_has_ended,
        disconnect_ends_the_posts,
        disconnected_posts_are_quiet_once_they_have_ended,
        strangers_are_refused,
    }
    crowd {
        three_workers_exchange_pages_at_once,
    }
    far {
        pages_move_to_and_from_a_worker_elsewhere,
        frames_of_a_peer_have_its_origin_and_no_others,
    }
    crash {
        a_peer_killed_during_our_posts_ends_them_and_is_reported,
        an_idle_peer_that_is_killed_is_reported,
        a_killed_writer_is_quiet_once_that_was_promised,
        a_killed_reader_leaves_its_source_in_service,
        a_peer_that_died_before_the_connect_is_told_dead_and_quiet,
        a_peer_that_comes_back_under_its_id_serves_its_new_bytes,
        death_is_told_of_the_dead_only,
    }
    rights {
        a_write_waits_for_its_permission_and_moves_nothing_before,
        no_byte_of_a_write_moves_after_its_permission_has_ended,
        after_a_right_is_revoked_no_byte_arrives,
        a_right_revoked_after_the_way_was_lost_is_gone_for_good_and_a_new_way_has_a_new_one,
    }
}

/// Runs all checks, each on a harness of its own. Panics at the first check that fails.
pub fn all<H: Harness>(make: impl Fn() -> H) {
    some(make, |_| true);
}

/// Runs all checks but those about the ends of processes (`crash`), and these too where the variable `KV_CONTRACT` is set: for
/// workers that move their bytes in another way than those of the same transport that pass [`all`] checks, and end in the same
/// way. What a killed writer leaves behind depends on how bytes move, and is checked in any case.
pub fn alive<H: Harness>(make: impl Fn() -> H) {
    let is_thorough = std::env::var_os("KV_CONTRACT").is_some();
    let is_of_writers = |name: &str| name == "a_killed_writer_is_quiet_once_that_was_promised";
    some(make, |name| is_thorough || file_of(name) != Some("crash") || is_of_writers(name));
}

/// Runs the checks for whose names `wanted` returns true. Panics at the first check that fails, or if no
/// check is wanted.
pub fn some<H: Harness>(make: impl Fn() -> H, wanted: impl Fn(&str) -> bool) {
    let checks: Vec<Check<H>> = checks().into_iter().filter(|(name, _)| wanted(name)).collect();
    assert!(!checks.is_empty(), "no such check");
    for (name, check) in checks {
        let begun = Instant::now();
        println!("check: {name}");
        check(&make());
        println!("       held, {:.2} s", begun.elapsed().as_secs_f64());
    }
}
