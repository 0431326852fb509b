//! The table of planted bugs: what each bug gets wrong, which invariant must catch it, and in which worlds it
//! shows.

use crate::interop::Dialect;

macro_rules! planted {
    ($($(#[$doc:meta])* $name:ident: $invariant:ident in $($place:expr),+;)*) => {
        /// A bug that can be planted in a simulated world.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Planted {
            $($(#[$doc])* $name,)*
        }

        impl Planted {
            /// All planted bugs, in the order of the table.
            pub const ALL: &[Planted] = &[$(Planted::$name),*];

            /// The name of the bug, as on the command line.
            pub const fn name(self) -> &'static str {
                match self { $(Planted::$name => stringify!($name)),* }
            }

            /// The name of the invariant that must catch the bug.
            pub const fn caught_by(self) -> &'static str {
                match self { $(Planted::$name => stringify!($invariant)),* }
            }

            /// The worlds in which the bug shows: [`SEEDS`], or the names of small worlds.
            pub const fn places(self) -> &'static [&'static str] {
                match self { $(Planted::$name => &[$($place),+]),* }
            }
        }
    };
}

/// Stands for the worlds of the KV cache that seeds draw.
pub const SEEDS: &str = "seeds";
/// Stands for the worlds of the encoder cache that seeds draw.
pub const ENTRIES: &str = "entries";
/// Stands for the worlds of vLLM's pull mode that seeds draw.
pub const VLLM_PULL: &str = "vllm-pull";
/// Stands for the worlds of vLLM's push mode that seeds draw.
pub const VLLM_PUSH: &str = "vllm-push";
/// Stands for the worlds of SGLang's protocol that seeds draw.
pub const SGLANG: &str = "sglang";

impl Planted {
    /// The small world, if any, in which the exhaustive check must find the bug.
    pub fn scope(self) -> Option<&'static str> {
        let drawn = |place: &&str| {
            [SEEDS, ENTRIES].contains(place) || Dialect::ALL.iter().any(|dialect| dialect.name() == *place)
        };
        self.places().iter().copied().find(|place| !drawn(place))
    }

    /// The dialect in whose worlds the bug shows, if the bug shows in no world of this library's own protocol.
    pub fn dialect(self) -> Option<Dialect> {
        let name = self.places().first()?;
        Dialect::ALL.iter().copied().find(|dialect| dialect.name() == *name)
    }

    /// True if the bug shows in worlds of the encoder cache only.
    pub fn is_of_entries(self) -> bool {
        self.places().contains(&ENTRIES) && !self.places().contains(&SEEDS)
    }
}

planted! {
    /// The completion notice of a post arrives before its bytes.
    NotifyEarly: success_means_right_bytes in SEEDS;
    /// Some pieces of a post are never written.
    LostPiece: success_means_right_bytes in SEEDS;
    /// Items of cache groups are never written.
    LostState: success_means_right_bytes in SEEDS;
    /// A receiver is told that a group was left out which was not.
    SkippedInWord: success_means_right_bytes in SEEDS;
    /// A chunk is taken to be final when it is begun, and is written.
    WrittenEarly: only_final_bytes_move in SEEDS;
    /// A chunk is taken to be final when it is begun, and is granted to a reader.
    GrantedEarly: only_final_bytes_move in SEEDS;
    /// The aux row comes from the first pipeline stage, not from the last.
    AuxOfFirstStage: success_means_right_bytes in SEEDS;
    /// The later stages of the decode engine count their layers from one too low.
    StageOffByOne: success_means_right_bytes in SEEDS;
    /// A rank is sent its neighbour's share of the heads of cache groups.
    NeighboursShare: success_means_right_bytes in SEEDS;
    /// When one source has sent its pages, the others are taken to have done so, too.
    OneSourceEnough: success_means_right_bytes in SEEDS;
    /// The second of the ranks that hold the same pages is asked for a page too few.
    RangeOneShort: success_means_right_bytes in SEEDS;
    /// A source takes the first page that it is asked for to be the first page of the request.
    FirstNotShifted: success_means_right_bytes in SEEDS;
    /// The aux row comes from the last of the ranks that hold the same pages.
    AuxOfLastSibling: success_means_right_bytes in SEEDS;
    /// Each of the ranks that hold the same pages is asked for all pages.
    SiblingsSendAll: each_sends_its_share in SEEDS;
    /// When one of the ranks that hold the same pages has sent its range, the others are taken to have done
    /// so, too.
    OneSiblingEnough: success_means_right_bytes in SEEDS;
    /// Pages that are distributed over ranks are all counted as those of the first rank.
    PlaceForgotten: success_means_right_bytes in SEEDS;
    /// A request is taken for another whose id differs only in its suffix.
    RoomsConfused: success_means_right_bytes in SEEDS;
    /// Grants name four times the time for which the lease lasts.
    LeaseInflated: success_means_right_bytes in SEEDS;
    /// Heartbeats are acknowledged although the pages were not checked.
    HeartbeatForged: success_means_right_bytes in SEEDS;
    /// Clocks differ in rate by far more than leases allow for.
    ClocksBeyondMargin: success_means_right_bytes in SEEDS;
    /// A post is reported as ended while its pieces still move.
    EndBeforeQuiet: pages_quiet_when_released in SEEDS;
    /// Pages come back with the failure, not with the quiet.
    ReleaseAtFailure: pages_quiet_when_released in SEEDS;
    /// An abort is acknowledged while writes are in flight.
    AckBeforeQuiet: pages_quiet_when_released in SEEDS;
    /// A failure is called quiet while writes are in flight.
    QuietLie: pages_quiet_when_released in SEEDS;
    /// Sessions do not report their final state.
    EndSwallowed: ends_once_in_time in SEEDS;
    /// Sessions report their final state twice.
    EndTwice: ends_once_in_time in SEEDS, "one-reader";
    /// Sessions fail without a reason.
    NamelessFailure: ends_once_in_time in SEEDS;
    /// Sessions leave out a state on their way.
    SkippedState: ends_once_in_time in SEEDS;
    /// Machines are not told that their host drains.
    DrainUnheard: drains_lose_nothing in SEEDS;
    /// A drain aborts the sessions that are open.
    DrainAborts: drains_lose_nothing in SEEDS;
    /// A host that drains leaves its bootstrap server while open sessions await their peers.
    LeavesAwaited: drains_lose_nothing in SEEDS;
    /// The bootstrap server goes on naming hosts that have left.
    NamedAfterLeaving: drains_lose_nothing in SEEDS;
    /// A host is called empty while peers have not heard that their sessions were served.
    StopsInDebt: drains_lose_nothing in SEEDS;
    /// A host is called empty while a way of its own to a peer is lost over which the peer has yet to hear.
    NotOwedWhileLost: drains_lose_nothing in SEEDS;
    /// Machines are not told of pages that a receiver is given a second time.
    SecondInitUnheard: success_means_right_bytes in SEEDS;
    /// Machines do not hear that their timers ring.
    DeafToTime: ends_once_in_time in SEEDS;
    /// Some pages never come back.
    ReleaseSwallowed: pages_come_back in SEEDS;
    /// Items of cache groups never come back.
    StateSwallowed: pages_come_back in SEEDS;
    /// Items of cache groups come back with the failure, not with the quiet.
    StateAtFailure: pages_quiet_when_released in SEEDS;
    /// Some pages come back twice.
    ReleaseTwice: pages_come_back in SEEDS, "one-reader";
    /// Some `Pages` come back without all of their pages.
    ReleaseCut: pages_come_back in SEEDS;
    /// Pages come back before the final state.
    ReleaseFirst: pages_come_back in SEEDS;
    /// Transports declare that hardware ends its writes in an eighth of the time that it takes.
    BoundTooShort: pages_quiet_when_released in SEEDS;
    /// A revocation is called complete while a slice is under way.
    RevokedInTheSlice: pages_quiet_when_released in SEEDS;
    /// A lost connection is taken for the death of the peer.
    LivingCalledDead: pages_quiet_when_released in SEEDS;
    /// A lost connection is taken for the death of the peer, after the time that hardware takes for its last
    /// writes.
    LostCalledDead: pages_quiet_when_released in SEEDS;
    /// Of two ways to a peer the first is lost, and the peer is called dead.
    FirstWayIsAll: pages_quiet_when_released in SEEDS;
    /// A lost connection is opened again over another transport, in the middle of a conversation.
    WayChanged: pages_quiet_when_released in SEEDS;
    /// Slices begin without a look at the permission.
    PermissionUnchecked: pages_quiet_when_released in SEEDS;
    /// Writers look at their permission, are stopped, and hand the slice to hardware when they go on.
    StoppedAfterTheLook: pages_quiet_when_released in SEEDS;
    /// A permission is counted from the arrival of the answer, not from the question.
    PermissionFromAnswer: pages_quiet_when_released in SEEDS;
    /// A worker gives its machine a time that it read before it polled its transport.
    EventsAsOfBefore: success_means_right_bytes in SEEDS;
    /// The time for which a writer was stopped is added to its permission.
    PermissionExcused: pages_quiet_when_released in SEEDS;
    /// Posts to a dead life write into its successor.
    WriteIntoSuccessor: incarnation_fence in SEEDS;
    /// Frames for a dead life are changed so that its successor accepts them.
    FenceDropped: incarnation_fence in SEEDS;
    /// The tables of machines have no bounds.
    Boundless: bounded in SEEDS;
    /// Machines start more posts than their window allows.
    Overposted: bounded in SEEDS;
    /// Each byte of a frame is answered with an output.
    Amplifies: bounded in SEEDS;
    /// A machine panics while it handles an input.
    Panics: bounded in SEEDS;
    /// A timer is due again at the moment at which it rang.
    SpinningTimer: bounded in SEEDS;
    /// Failures and aborts are not told to the other side.
    Hushed: ends_are_told in SEEDS;
    /// An abort that is said again in the next conversation is for no sender.
    SaidInVain: ends_are_told in SEEDS;
    /// A timer rings again and again, for ever.
    RestlessTimer: idle_is_quiet in SEEDS;
    /// A session stays in a table for ever.
    LeakedSession: idle_is_quiet in SEEDS;
    /// A failure is reported with another reason.
    WrongReason: reason_is_true in SEEDS;
    /// A bootstrap server that does not answer is taken for one that says that the engine drains.
    DrainInvented: reason_is_true in SEEDS;
    /// The network stays as bad as it was when faults should have stopped.
    HealedInName: requests_are_served in SEEDS, ENTRIES;
    /// No registration and no question is sent twice.
    NothingRepeated: requests_are_served in SEEDS;
    /// The end of a session is missing from the trace.
    EndUntold: events_tell_the_story in SEEDS;
    /// The start of a post is twice in the trace.
    PostToldTwice: events_tell_the_story in SEEDS;
    /// The reader takes any lease or answer as a proof that never runs out.
    NoProof: success_means_right_bytes in "plain";
    /// The reader counts a lease from the arrival of the answer, not from the question.
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
    /// A read of a dead host's pages reads the pages of its successor.
    ReadsSuccessor: success_means_right_bytes in "restart";
    /// The leases of readers never end.
    NeverExpires: pages_come_back_with_the_lease in "one-reader";
    /// Leases last twice as long as they should.
    LongLease: pages_come_back_with_the_lease in "one-reader";
    /// Tokens of pages never come back.
    NeverReleased: pages_come_back_with_the_lease in "one-reader";
    /// Machines do not report failures.
    SecretFailure: pages_come_back in "one-reader";
    /// The reader releases pages whose reads have not ended.
    EagerRelease: success_means_right_bytes in "one-reader";
    /// Releases are never acknowledged.
    DeafToReleased: idle_is_quiet in "one-reader";
    /// A producer's entry is pinned until it is granted, not until it is released.
    UnpinnedAtGrant: entries_have_their_bytes in ENTRIES;
    /// An entry is taken to be ready while its transfer still fills the blocks.
    CommittedEarly: entries_have_their_bytes in ENTRIES;
    /// The blocks of a transfer that is given up are free at once.
    FreedWhenGivenUp: no_wire_touches_a_free_block in ENTRIES;
    /// A late answer is taken for the answer to the latest request.
    LateAnswerTaken: entries_have_their_bytes in ENTRIES;
    /// The reader of an entry counts its lease from the answer, not from the question.
    LeaseFromTheAnswer: entries_have_their_bytes in ENTRIES;
    /// Entries make room although somebody uses them.
    EvictedInUse: entries_have_their_bytes in ENTRIES;
    /// A refusal that lasts is taken for one that passes.
    RefusalRetried: a_lasting_refusal_ends_it in ENTRIES;
    /// Of the sessions of a failed fetch only the first is told.
    WaitersForgotten: sessions_end_once_by_their_budget in ENTRIES;
    /// An entry that has come is not pinned for the session that waited.
    NoPinForWaiter: entries_have_their_bytes in ENTRIES;
    /// Some entries stay pinned when their user is done.
    PinsKept: idle_is_quiet in ENTRIES;
    /// An entry that is being written is called missing.
    RefusedFalsely: refusals_are_true in ENTRIES;
    /// Machines of the encoder cache are not told that their host drains.
    DrainUnheardByEntries: drains_lose_nothing in ENTRIES;
    /// A host is called empty while peers write or read its entries.
    EmptyWhileItServes: drains_lose_nothing in ENTRIES;
    /// A sign of life of a reader is taken for the word that the entry is wanted no longer.
    AliveTakenForDone: drains_lose_nothing in ENTRIES;
    /// Each of the sessions that want an entry makes a request of its own.
    EachSessionAsks: one_transfer_for_an_entry in ENTRIES;
    /// A descriptor of a post is not moved.
    DescriptorSkipped: dialect_bytes_are_right in VLLM_PULL, VLLM_PUSH, SGLANG;
    /// A part of an aux row is not written.
    AuxRowSkipped: dialect_bytes_are_right in SGLANG;
    /// A post is reported as ended while its bytes move.
    EndedWhileItMoves: dialect_pages_are_quiet in VLLM_PULL, VLLM_PUSH, SGLANG;
    /// Pages are used again when their session ends, not when they come back.
    PagesBackAtTheEnd: dialect_pages_are_quiet in VLLM_PUSH, VLLM_PULL, SGLANG;
    /// Some sessions do not tell their end.
    EndsUntold: dialect_sessions_end_once in VLLM_PULL, VLLM_PUSH, SGLANG;
    /// Some pages do not come back.
    PagesKept: dialect_pages_come_back in VLLM_PULL, VLLM_PUSH, SGLANG;
    /// A read of a dead process' pages reads those of the process that has taken its place.
    ReadsSuccessorsPages: dialect_lives_are_apart in VLLM_PULL;
    /// A timer is due again at the moment at which it rang, in a world of a dialect.
    TimersSpin: dialect_machines_are_bounded in VLLM_PULL, VLLM_PUSH, SGLANG;
    /// The engines stay parted when faults should have stopped.
    WaysStayParted: dialect_requests_are_served in VLLM_PULL, VLLM_PUSH, SGLANG;
}
