//! The table of planted bugs: what each gets wrong, which invariant must catch it, and where it shows.

macro_rules! planted {
    ($($(#[$doc:meta])* $name:ident: $invariant:ident in $($place:expr),+;)*) => {
        /// One planted bug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Planted {
            $($(#[$doc])* $name,)*
        }

        impl Planted {
            /// All of them.
            pub const ALL: &[Planted] = &[$(Planted::$name),*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $(Planted::$name => stringify!($name)),* }
            }

            /// The invariant that must catch it.
            pub const fn caught_by(self) -> &'static str {
                match self { $(Planted::$name => stringify!($invariant)),* }
            }

            /// Where it shows: in [`SEEDS`], or in the small world with this name.
            pub const fn places(self) -> &'static [&'static str] {
                match self { $(Planted::$name => &[$($place),+]),* }
            }
        }
    };
}

/// The worlds that seeds draw.
pub const SEEDS: &str = "seeds";

impl Planted {
    /// The small world in which it shows, all of whose histories are gone through.
    pub fn scope(self) -> Option<&'static str> {
        self.places().iter().copied().find(|place| *place != SEEDS)
    }
}

planted! {
    /// The completion notice of a post travels ahead of its bytes.
    NotifyEarly: success_means_right_bytes in SEEDS;
    /// Some pieces of a post are never written.
    LostPiece: success_means_right_bytes in SEEDS;
    /// Items of cache groups are never written.
    LostState: success_means_right_bytes in SEEDS;
    /// A group is said to have been left out that was not.
    SkippedInWord: success_means_right_bytes in SEEDS;
    /// A chunk is taken to be final when it begins, and written.
    WrittenEarly: only_final_bytes_move in SEEDS;
    /// A chunk is taken to be final when it begins, and granted.
    GrantedEarly: only_final_bytes_move in SEEDS;
    /// The aux row comes from the first pipeline stage, not from the last one.
    AuxOfFirstStage: success_means_right_bytes in SEEDS;
    /// The later stages of the decode engine count their layers from one too low.
    StageOffByOne: success_means_right_bytes in SEEDS;
    /// Of items of cache groups a rank is sent its neighbour's share of heads.
    NeighboursShare: success_means_right_bytes in SEEDS;
    /// What one source has done the others are taken to have done, too.
    OneSourceEnough: success_means_right_bytes in SEEDS;
    /// A source is asked for a page too few: the second of those that hold the same pages.
    RangeOneShort: success_means_right_bytes in SEEDS;
    /// A source takes the first page that it is asked for to be the first of all that are asked for.
    FirstNotShifted: success_means_right_bytes in SEEDS;
    /// The aux row comes from the last of the ranks that hold the same pages.
    AuxOfLastSibling: success_means_right_bytes in SEEDS;
    /// Ranks that hold the same pages are each asked for all of them.
    SiblingsSendAll: each_sends_its_share in SEEDS;
    /// What one of the ranks that hold the same pages has done the others are taken to have done, too.
    OneSiblingEnough: success_means_right_bytes in SEEDS;
    /// Dealt pages are all counted as those of the first rank that they are dealt to.
    PlaceForgotten: success_means_right_bytes in SEEDS;
    /// A request is taken for another one whose id differs in nothing but its suffix.
    RoomsConfused: success_means_right_bytes in SEEDS;
    /// Leases are told four times as long as they are.
    LeaseInflated: success_means_right_bytes in SEEDS;
    /// Heartbeats are acknowledged by somebody who does not look.
    HeartbeatForged: success_means_right_bytes in SEEDS;
    /// Clocks differ in rate by far more than leases allow for.
    ClocksBeyondMargin: success_means_right_bytes in SEEDS;
    /// A post is reported over while its pieces still move.
    EndBeforeQuiet: pages_quiet_when_released in SEEDS;
    /// Pages come back with the failure, not with the quiet.
    ReleaseAtFailure: pages_quiet_when_released in SEEDS;
    /// An abort is acknowledged while writes are in flight.
    AckBeforeQuiet: pages_quiet_when_released in SEEDS;
    /// A failure is called quiet while writes are in flight.
    QuietLie: pages_quiet_when_released in SEEDS;
    /// Final states are kept secret.
    EndSwallowed: ends_once_in_time in SEEDS;
    /// Final states are told twice.
    EndTwice: ends_once_in_time in SEEDS, "one-reader";
    /// Failures have no reason.
    NamelessFailure: ends_once_in_time in SEEDS;
    /// A state is left out.
    SkippedState: ends_once_in_time in SEEDS;
    /// Timers never ring.
    DeafToTime: ends_once_in_time in SEEDS;
    /// Some tokens never come back.
    ReleaseSwallowed: tokens_come_back in SEEDS;
    /// Items of cache groups never come back.
    StateSwallowed: tokens_come_back in SEEDS;
    /// Items of cache groups come back with the failure, not with the quiet.
    StateAtFailure: pages_quiet_when_released in SEEDS;
    /// Some tokens come back twice.
    ReleaseTwice: tokens_come_back in SEEDS, "one-reader";
    /// Some tokens come back in part.
    ReleaseCut: tokens_come_back in SEEDS;
    /// Tokens come back before the final state.
    ReleaseFirst: tokens_come_back in SEEDS;
    /// Transports promise that hardware ends its writes in an eighth of the time that it needs.
    BoundTooShort: pages_quiet_when_released in SEEDS;
    /// A revocation is called complete while a slice is under way.
    RevokedInTheSlice: pages_quiet_when_released in SEEDS;
    /// A lost connection is taken for the death of the peer.
    LivingCalledDead: pages_quiet_when_released in SEEDS;
    /// A lost connection is taken for the death of the peer, and its hardware waited for.
    LostCalledDead: pages_quiet_when_released in SEEDS;
    /// Of two ways to a peer the first is lost, and the peer is called dead.
    FirstWayIsAll: pages_quiet_when_released in SEEDS;
    /// A lost way is opened again by the other of two transports, in mid-conversation.
    WayChanged: pages_quiet_when_released in SEEDS;
    /// Slices begin without a look at the permission.
    PermissionUnchecked: pages_quiet_when_released in SEEDS;
    /// Writers look at their permission, are stopped, and hand the slice to hardware when they go on.
    StoppedAfterTheLook: pages_quiet_when_released in SEEDS;
    /// A permission counts from its answer, not from its question.
    PermissionFromAnswer: pages_quiet_when_released in SEEDS;
    /// A worker tells its node the time from before it asked its transport what happened.
    EventsAsOfBefore: success_means_right_bytes in SEEDS;
    /// What a writer was stopped for is added to its permission.
    PermissionExcused: pages_quiet_when_released in SEEDS;
    /// Posts to a dead life write into its successor.
    WriteIntoSuccessor: incarnation_fence in SEEDS;
    /// Frames for a dead life are made to fit its successor.
    FenceDropped: incarnation_fence in SEEDS;
    /// Tables have no bounds.
    Boundless: bounded in SEEDS;
    /// Posts have no bound.
    Overposted: bounded in SEEDS;
    /// Each byte of a frame is answered with an output of its own.
    Amplifies: bounded in SEEDS;
    /// A node panics.
    Panics: bounded in SEEDS;
    /// A timer is due again at the moment at which it rang.
    SpinningTimer: bounded in SEEDS;
    /// Nobody is told of failures and aborts.
    Hushed: failure_is_told in SEEDS;
    /// A timer rings for ever.
    RestlessTimer: idle_is_quiet in SEEDS;
    /// A session stays in a table for ever.
    LeakedSession: idle_is_quiet in SEEDS;
    /// A failure is given another reason.
    WrongReason: reason_is_true in SEEDS;
    /// The network stays as bad as it was.
    HealedInName: requests_are_served in SEEDS;
    /// No registration and no question is sent twice.
    NothingRepeated: requests_are_served in SEEDS;
    /// Nobody who listens is told that a session ends.
    EndUntold: events_tell_the_story in SEEDS;
    /// Whoever listens is told twice that a post is started.
    PostToldTwice: events_tell_the_story in SEEDS;
    /// The reader takes any lease or answer as a proof that never runs out.
    NoProof: success_means_right_bytes in "plain";
    /// The reader counts a lease from the arrival of its answer, not from the question.
    ProofFromReceipt: success_means_right_bytes in "equal-clocks";
    /// The reader leaves no margin for clocks that differ.
    NoMargin: success_means_right_bytes in "plain";
    /// Heartbeats are answered, and the lease runs out nonetheless.
    RenewalsIgnored: success_means_right_bytes in "reading";
    /// A sender that fails frees its pages at once.
    FreedAtFailure: success_means_right_bytes in "one-reader";
    /// A sender that has failed still answers heartbeats.
    AnsweredAfterFailure: success_means_right_bytes in "one-reader";
    /// The first of two readers frees the pages.
    FreedByFirst: success_means_right_bytes in "two-readers";
    /// The first of two reads ends the session.
    FirstReadEnds: success_means_right_bytes in "two-reads";
    /// A read of a dead host's pages reads those of its successor.
    ReadsSuccessor: success_means_right_bytes in "restart";
    /// Leases never run out.
    NeverExpires: pages_come_back_with_the_lease in "one-reader";
    /// Leases last twice as long.
    LongLease: pages_come_back_with_the_lease in "one-reader";
    /// Tokens never come back.
    NeverReleased: pages_come_back_with_the_lease in "one-reader";
    /// Failures are not reported.
    SecretFailure: tokens_come_back in "one-reader";
    /// The reader releases what it was not told it had read.
    EagerRelease: success_means_right_bytes in "one-reader";
    /// Releases are never acknowledged.
    DeafToReleased: idle_is_quiet in "one-reader";
}
