//! Messages of every kind with random fields: what is written is what is read, and nothing that is cut,
//! longer or damaged is taken for something else.

#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use kv_core::wire::{
    Abort, AbortAck, Acquire, Body, ConversationId, Delivery, Destination, Failed, Frame, Granted, Heartbeat,
    HeartbeatAck, Hello, Progress, Refused, Register, Registered, Release, Released, Versions, Welcome,
    XferReq,
};
use kv_core::{
    Attempt, AuxIndex, CacheGroupList, CacheGroupLists, ContentHash, Incarnation, PageList, PageRun,
    PeerCause, Room, SessionId, WorkerId,
};
use proptest::prelude::*;

/// Numbers on both sides of every width that msgpack has.
fn number() -> impl Strategy<Value = u64> {
    (0u32..=64, any::<u64>(), -2i64..=2).prop_map(|(bits, random, near)| match bits {
        64 => random,
        bits if random % 3 == 0 => (1u64 << bits.min(63)).wrapping_add_signed(near),
        bits => random & ((1u64 << bits) - 1),
    })
}

fn small() -> impl Strategy<Value = u32> {
    number().prop_map(|number| number as u32)
}

fn runs() -> impl Strategy<Value = Vec<(u64, u32)>> {
    prop::collection::vec((number(), small()), 0..40)
}

fn pages() -> impl Strategy<Value = PageList> {
    prop::collection::vec((small(), 1u32..300), 0..60).prop_map(|runs| {
        let runs = runs.into_iter().map(|(start, len)| PageRun { start: start.min(u32::MAX - len), len });
        PageList::from_runs(runs).unwrap()
    })
}

fn groups() -> impl Strategy<Value = CacheGroupLists> {
    prop::collection::btree_map(any::<u16>(), (0u32..=1 << 24, pages()), 0..=16).prop_map(|lists| {
        let lists = lists.into_iter().map(|(group, (first, items))| CacheGroupList { group, first, items });
        lists.collect::<Vec<_>>().try_into().unwrap()
    })
}

fn room() -> impl Strategy<Value = Room> {
    prop_oneof![
        number().prop_map(Room::Number),
        "[0-9]{1,20}".prop_map(|id| Room::request(&id).unwrap()),
        "[a-zäß日-]{1,60}".prop_map(|id| Room::request(&id).unwrap()),
    ]
}

fn cause() -> impl Strategy<Value = PeerCause> {
    prop_oneof![
        Just(PeerCause::Aborted),
        Just(PeerCause::Unknown),
        Just(PeerCause::Overloaded),
        number().prop_map(|lease_id| PeerCause::UnknownLease { lease_id }),
        (room(), room()).prop_map(|(room, other)| PeerCause::AmbiguousRoom { room, other }),
        "[a-zA-Z]{1,40}".prop_map(|name| PeerCause::Other { name: format!("X{name}") }),
    ]
}

fn delivery() -> impl Strategy<Value = Delivery> {
    let write = (
        (pages(), small(), small()),
        prop::option::of(small().prop_map(AuxIndex)),
        any::<bool>(),
        groups(),
        number(),
        number(),
    )
        .prop_map(|((pages, first_page, total_pages), aux, aux_here, groups, ask, permit_ms)| {
            Delivery::Write(Destination {
                pages,
                first_page,
                total_pages,
                aux,
                aux_here,
                groups,
                ask,
                permit_ms,
            })
        });
    let read = (prop::option::of(number().prop_map(SessionId)), number())
        .prop_map(|(lease_id, number)| Delivery::Read(Acquire { lease_id, number }));
    prop_oneof![write, read]
}

fn body() -> impl Strategy<Value = Body> {
    let n = number;
    let versions = (any::<u8>(), any::<u8>()).prop_map(|(min, max)| Versions { min, max });
    let hello = (
        (any::<u8>(), any::<u8>()),
        prop::collection::vec(any::<u8>(), 0..300),
        "[a-z]{0,40}",
        [n(), n(), n(), n()],
        small(),
        any::<bool>(),
        "[a-z]{0,40}",
    )
        .prop_map(
            |(
                (min, max),
                metadata,
                transport,
                [to, incarnation, conversation, nonce],
                rank,
                suffixed,
                service,
            )| {
                let [to, incarnation] = [to, incarnation].map(Incarnation::from_random);
                let worker = WorkerId { engine: "e".try_into().unwrap(), rank };
                let (metadata, versions, conversation) =
                    (Bytes::from(metadata), Versions { min, max }, ConversationId(conversation));
                Body::Hello(Hello {
                    versions,
                    metadata,
                    transport,
                    to,
                    incarnation,
                    conversation,
                    nonce,
                    worker,
                    geometry: None,
                    suffixed,
                    service,
                })
            },
        );
    let a = || number().prop_map(Attempt);
    prop_oneof![
        hello,
        (versions.clone(), n(), n(), n()).prop_map(|(versions, nonce, conversation, ask)| Body::Welcome(
            Welcome { versions, nonce, conversation: ConversationId(conversation), ask }
        )),
        (versions, n(), n(), cause()).prop_map(|(versions, nonce, conversation, cause)| Body::Refused(
            Refused { versions, nonce, conversation: ConversationId(conversation), cause }
        )),
        (a(), a(), room(), small(), n(), delivery()).prop_map(
            |(attempt, low_watermark, room, ranks, ttl_ms, delivery)| {
                Body::Register(Register { attempt, low_watermark, room, ranks, ttl_ms, delivery })
            }
        ),
        ((a(), a()), "[a-f0-9]{1,256}", "[a-z]{0,80}", n(), n(), delivery()).prop_map(
            |((attempt, low_watermark), hash, compatibility, bytes, ttl_ms, delivery)| {
                let hash = ContentHash::new(&hash).unwrap();
                Body::XferReq(XferReq {
                    attempt,
                    low_watermark,
                    hash,
                    compatibility,
                    bytes,
                    ttl_ms,
                    delivery,
                })
            }
        ),
        a().prop_map(|attempt| Body::Registered(Registered { attempt })),
        (
            a(),
            prop::collection::vec((small(), small()), 0..50),
            prop::option::of(small()),
            prop::collection::vec(any::<u16>(), 0..40)
        )
            .prop_map(|(attempt, done, total, skipped)| Body::Progress(Progress {
                attempt,
                done,
                total,
                skipped
            })),
        (a(), cause(), any::<bool>()).prop_map(|(attempt, cause, quiet)| Body::Failed(Failed {
            attempt,
            cause,
            quiet
        })),
        (a(), room(), prop::option::of(n().prop_map(SessionId)), cause(), a(), prop::option::of(n()))
            .prop_map(|(attempt, room, lease_id, cause, low_watermark, failed_ms_ago)| Body::Abort(Abort {
                attempt,
                room,
                lease_id,
                cause,
                low_watermark,
                failed_ms_ago
            })),
        a().prop_map(|attempt| Body::AbortAck(AbortAck { attempt })),
        (a(), [n(), n(), n(), n()], pages(), prop::option::of(small().prop_map(AuxIndex)), groups())
            .prop_map(|(attempt, [number, lease_id, lease_ms, interval_ms], pages, aux, groups)| {
                Body::Granted(Granted {
                    attempt,
                    number,
                    lease_id: SessionId(lease_id),
                    pages,
                    aux,
                    lease_ms,
                    interval_ms,
                    groups,
                })
            }),
        (n(), a(), runs(), runs(), any::<bool>()).prop_map(
            |(number, low_watermark, leases, asked, writes)| {
                Body::Heartbeat(Heartbeat { number, low_watermark, leases, asked, writes })
            }
        ),
        (n(), a(), n(), runs(), n()).prop_map(|(number, low_watermark, lease_ms, leases, permit_ms)| {
            Body::HeartbeatAck(HeartbeatAck { number, low_watermark, lease_ms, leases, permit_ms })
        }),
        (a(), runs(), any::<bool>()).prop_map(|(low_watermark, attempts, answer)| Body::Release(Release {
            low_watermark,
            attempts,
            answer
        })),
        runs().prop_map(|attempts| Body::Released(Released { attempts })),
    ]
}

/// Where the fields of a frame begin.
fn fields(frame: &[u8]) -> usize {
    3 + match frame[3] {
        0xcc => 2,
        0xcd => 3,
        0xce => 5,
        0xcf => 9,
        _ => 1,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_messages_are_read_as_written_and_neither_cut_nor_longer(
        body in body(), conversation in number(), at in any::<prop::sample::Index>(), more in any::<u8>(),
    ) {
        let frame = Frame { conversation: ConversationId(conversation), body };
        let bytes = frame.encode().unwrap();
        prop_assert_eq!(Frame::decode(&bytes), Ok(frame.clone()));
        prop_assert_eq!(Frame::conversation_of(&bytes), Some(ConversationId(conversation)));
        let cut = at.index(bytes.len());
        prop_assert!(Frame::decode(&bytes[..cut]).is_err(), "cut at {} of {}", cut, bytes.len());
        let longer = [&bytes[..], &[more]].concat();
        prop_assert!(Frame::decode(&longer).is_err());
        // A field of a newer version.
        let mut newer = bytes.to_vec();
        newer[fields(&bytes)] += 1;
        newer.extend([0x92, more & 0x7f, 0xc0]);
        prop_assert_eq!(Frame::decode(&newer), Ok(frame));
    }

    #[test]
    fn a_damaged_message_is_refused_or_is_another_message(
        body in body(), conversation in number(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = Frame { conversation: ConversationId(conversation), body }.encode().unwrap().to_vec();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(read) = Frame::decode(&bytes) {
            prop_assert_eq!(Frame::conversation_of(&bytes), Some(read.conversation));
            let again = read.encode().unwrap();
            prop_assert_eq!(Frame::decode(&again), Ok(read));
        }
    }
}
