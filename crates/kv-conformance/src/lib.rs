//! What every transport must do, whatever moves its bytes: the contract of [`kv_core::Transport`] as checks.
//!
//! A development dependency of the transports. A transport's tests implement [`Harness`], which makes workers
//! here and elsewhere, and run [`all`] checks, or some of them by name. "Elsewhere" is a process that
//! can be killed for the transports that have processes ([`process`]), and a virtual host for the one that
//! has not.
//!
//! | file | checks |
//! |---|---|
//! | `moving` | bytes, bounds, one and a million descriptors |
//! | `frames` | notify frames after the bytes, frames whole, who may speak first |
//! | `ending` | every post ends once; cancelled and disconnected posts; strangers |
//! | `crowd` | many posts among three workers at once |
//! | `far` | pages to and from workers elsewhere, and the origins of frames |
//! | `crash` | workers elsewhere that are killed, before, during and after, and come back |
//! | `rights` | permissions to write that begin and end; rights that are revoked |
//!
//! What it is not: a test of speed. Nothing here fails because a machine is slow, but for the
//! patience of a harness, which is long. That each check can fail is shown where the transports are
//! cheapest to break: in the simulator's tests, with a planted bug for each.

// Checks say what they found by panicking, and print their seeds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod crash;
mod crowd;
mod ending;
mod far;
mod frames;
mod here;
mod moving;
mod other;
mod pair;
pub mod process;
mod random;
mod rights;
mod sys;

use std::time::{Duration, Instant};

use kv_core::{Time, Transport};

pub use other::{Job, Other, Puppet, pattern};
pub use pair::{A_KNOWS_B, B_KNOWS_A, LENS, Pair, Regions, Side, boottime, connect, heard, snapshot};
pub use random::Random;
pub use sys::rest;

/// Makes workers with the transport under test.
pub trait Harness {
    /// The transport.
    type Transport: Transport;
    /// A worker elsewhere.
    type Other: Other;

    /// Bytes of the one region of a worker elsewhere, and of its partner here: large enough that
    /// something is still on its way when the worker is killed.
    const FAR_LEN: usize;

    /// A worker here that the other workers of this harness can reach. Its regions are zero.
    fn worker(&self, lens: &[usize]) -> Side<Self::Transport>;

    /// The second worker of a pair, if it is not like the first.
    fn partner(&self, lens: &[usize]) -> Side<Self::Transport> {
        self.worker(lens)
    }

    /// Starts a worker elsewhere. Its region holds [`pattern`], and it works with the worker of this
    /// metadata.
    fn other(&self, job: Job, peer: &[u8]) -> Self::Other;

    /// The time that the transports live in, for them and for waiting: CLOCK_BOOTTIME, except in a
    /// simulation.
    fn now(&self) -> Time {
        boottime()
    }

    /// How long a check waits for something that must happen.
    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// False where READ is refused: checks then use WRITE only.
    fn reads(&self) -> bool {
        true
    }
}

/// A check and its name.
pub type Check<H> = (&'static str, fn(&H));

macro_rules! checks {
    ($($file:ident { $($check:ident,)* })*) => {
        /// All checks. Each makes its own workers, so that they may run in any order.
        pub fn checks<H: Harness>() -> Vec<Check<H>> {
            vec![$($((stringify!($check), $file::$check::<H> as fn(&H)),)*)*]
        }
    };
}

checks! {
    moving {
        posts_move_exactly_the_described_bytes,
        descriptors_out_of_bounds_are_refused_and_touch_nothing,
        one_and_a_million_descriptors_move_their_bytes,
    }
    frames {
        the_notify_frame_comes_after_the_bytes,
        frames_arrive_whole_in_both_directions,
        the_first_frame_arrives_before_the_receiver_connects,
        both_sides_may_connect_at_once,
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
        a_peer_that_died_before_the_connect_is_never_connected,
        a_peer_that_comes_back_under_its_id_serves_its_new_bytes,
        death_is_told_of_the_dead_only,
    }
    rights {
        a_write_waits_for_its_permission_and_moves_nothing_before,
        no_byte_of_a_write_moves_after_its_permission_has_ended,
        after_a_right_is_revoked_no_byte_arrives,
    }
}

/// Runs all checks, each on a harness of its own.
pub fn all<H: Harness>(make: impl Fn() -> H) {
    some(make, |_| true);
}

/// Runs the checks whose names are wanted; at least one must be.
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
