//! Every invariant can fail: each planted bug is caught by the invariant that is meant for it.

#![allow(clippy::print_stdout)]

use kv_sim::{Options, Planted, SEEDS, run_seed};

/// Worlds in which a planted bug must show itself.
const WORLDS: u64 = 10_000;

/// A bug that shows in few worlds is looked for from a seed shortly before one in which it has shown. Where it shows no more
/// in that one, the search takes longer, and says no less.
fn is_caught(planted: Planted, from: u64) {
    let options = Options { planted: Some(planted), ..Options::default() };
    let mut others = Vec::new();
    for seed in from..from + WORLDS {
        let Some(violation) = run_seed(seed, options).violation else { continue };
        if violation.invariant == planted.caught_by() {
            println!("{} is caught at seed {seed}", planted.name());
            return;
        }
        others.push((seed, violation.to_string()));
        if others.len() == 50 {
            break;
        }
    }
    let (bug, invariant) = (planted.name(), planted.caught_by());
    assert!(others.is_empty(), "{bug} is caught, but not by {invariant}: {others:#?}");
    assert!(options.planted.is_none(), "{bug} is not caught in {WORLDS} seeds");
}

macro_rules! each {
    ($($test:ident: $planted:ident $(from $seed:literal)?,)*) => {
        $(
            #[test]
            fn $test() {
                is_caught(Planted::$planted, 0 $(+ $seed)?);
            }
        )*

        #[test]
        fn no_planted_bug_is_without_a_test() {
            let of_seeds = Planted::ALL.iter().copied().filter(|planted| planted.places().contains(&SEEDS));
            assert_eq!(of_seeds.collect::<Vec<_>>(), [$(Planted::$planted),*]);
        }
    };
}

each! {
    early_notices_are_caught: NotifyEarly,
    lost_pieces_are_caught: LostPiece,
    lost_state_is_caught: LostState,
    groups_left_out_in_word_only_are_caught: SkippedInWord,
    chunks_written_before_they_are_final_are_caught: WrittenEarly,
    chunks_granted_before_they_are_final_are_caught: GrantedEarly,
    aux_rows_of_the_first_stage_are_caught: AuxOfFirstStage,
    stages_off_by_one_are_caught: StageOffByOne,
    items_of_a_neighbours_heads_are_caught: NeighboursShare,
    sources_taken_for_one_another_are_caught: OneSourceEnough,
    ranges_of_pages_that_are_too_short_are_caught: RangeOneShort,
    pages_of_a_range_counted_from_its_first_are_caught: FirstNotShifted,
    aux_rows_of_the_last_sibling_are_caught: AuxOfLastSibling,
    pages_that_several_siblings_send_are_caught: SiblingsSendAll,
    siblings_taken_for_one_another_are_caught: OneSiblingEnough,
    dealt_pages_counted_without_their_place_are_caught: PlaceForgotten,
    requests_taken_for_their_twins_are_caught: RoomsConfused,
    leases_told_longer_than_they_are_are_caught: LeaseInflated,
    heartbeats_answered_without_a_look_are_caught: HeartbeatForged,
    clocks_that_leases_do_not_allow_for_are_caught: ClocksBeyondMargin,
    posts_ended_before_they_are_quiet_are_caught: EndBeforeQuiet,
    pages_released_at_failure_are_caught: ReleaseAtFailure,
    aborts_acknowledged_too_early_are_caught: AckBeforeQuiet,
    failures_that_are_not_quiet_are_caught: QuietLie,
    final_states_kept_secret_are_caught: EndSwallowed,
    final_states_told_twice_are_caught: EndTwice,
    failures_without_reason_are_caught: NamelessFailure,
    states_left_out_are_caught: SkippedState,
    drains_that_machines_are_not_told_are_caught: DrainUnheard,
    drains_that_abort_open_sessions_are_caught: DrainAborts,
    hosts_that_leave_while_peers_are_awaited_are_caught: LeavesAwaited,
    hosts_named_after_they_have_left_are_caught: NamedAfterLeaving,
    hosts_stopped_before_peers_know_of_their_ends_are_caught: StopsInDebt,
    hosts_stopped_before_their_lost_ways_are_open_again_are_caught: NotOwedWhileLost from 8_700,
    pages_given_again_that_machines_do_not_hear_of_are_caught: SecondInitUnheard,
    timers_that_never_ring_are_caught: DeafToTime,
    tokens_kept_are_caught: ReleaseSwallowed,
    state_that_is_kept_is_caught: StateSwallowed,
    state_released_at_failure_is_caught: StateAtFailure,
    tokens_doubled_are_caught: ReleaseTwice,
    tokens_cut_are_caught: ReleaseCut,
    tokens_before_the_end_are_caught: ReleaseFirst,
    bounds_declared_too_short_are_caught: BoundTooShort from 600,
    revocations_told_in_the_middle_of_a_slice_are_caught: RevokedInTheSlice,
    the_living_taken_for_dead_are_caught: LivingCalledDead,
    lost_ways_taken_for_quiet_ones_are_caught: LostCalledDead,
    peers_called_dead_when_one_of_two_ways_is_lost_are_caught: FirstWayIsAll,
    conversations_that_change_their_way_are_caught: WayChanged,
    slices_that_look_at_no_permission_are_caught: PermissionUnchecked from 1500,
    looks_at_a_permission_from_before_a_stop_are_caught: StoppedAfterTheLook from 2600,
    permissions_counted_from_their_answers_are_caught: PermissionFromAnswer,
    inputs_with_the_time_from_before_they_came_are_caught: EventsAsOfBefore from 1400,
    permissions_prolonged_by_a_pause_are_caught: PermissionExcused from 1500,
    writes_into_a_successor_are_caught: WriteIntoSuccessor,
    frames_for_a_former_life_are_caught: FenceDropped,
    tables_without_bounds_are_caught: Boundless,
    posts_without_bounds_are_caught: Overposted,
    frames_answered_a_hundredfold_are_caught: Amplifies,
    panics_are_caught: Panics,
    spinning_timers_are_caught: SpinningTimer,
    silence_about_failures_is_caught: Hushed,
    aborts_that_are_said_again_in_vain_are_caught: SaidInVain from 1000,
    restless_timers_are_caught: RestlessTimer,
    leaked_sessions_are_caught: LeakedSession,
    wrong_reasons_are_caught: WrongReason,
    drains_that_nobody_told_are_caught: DrainInvented,
    a_world_that_stays_broken_is_caught: HealedInName,
    frames_never_repeated_are_caught: NothingRepeated,
    ends_that_are_not_told_are_caught: EndUntold,
    posts_that_are_told_twice_are_caught: PostToldTwice,
}
