//! What does not fit is refused with the field and both values, and what is no message of SGLang's is dropped.

use super::*;
use kv_core::layout::HND;
use kv_core::{Holds, Layout, TransportError};

#[test]
fn a_prefill_engine_that_does_not_fit_is_refused_by_field_and_values() {
    let cause = |place, fields| {
        let mut rig = Rig::decode(&args(tp(2, 0)));
        let session = rig.open(1, 9);
        rig.answer(vec![rank(place, 7001, 5, fields)]);
        assert_eq!(rig.ways.len(), 0, "no way is opened");
        assert_eq!(
            rig.failures[&session].peer.as_ref().unwrap().to_string(),
            format!("theirs/{}", place.tp_rank)
        );
        rig.cause(session)
    };
    let differs = |field: &str, ours: &str, theirs: &str| {
        format!("the peer's cache does not fit: {field} differs: {ours} here, {theirs} at the peer")
    };
    let with = |fields| cause(tp(2, 0), fields);
    assert_eq!(with(serde_json::json!({"page_size": 64})), differs("page_size (--page-size)", "16", "64"));
    assert_eq!(
        with(serde_json::json!({"kv_cache_dtype": "torch.bfloat16"})),
        differs("kv_cache_dtype (--kv-cache-dtype)", "torch.float16", "torch.bfloat16")
    );
    assert_eq!(
        with(serde_json::json!({"decode_allocation_policy": "prefill_complete"})),
        differs(
            "decode_allocation_policy (--disaggregation-decode-allocation-policy)",
            "early",
            "prefill_complete"
        )
    );
    assert_eq!(
        with(serde_json::json!({"enable_kv_cache_sharding": true})),
        differs("enable_kv_cache_sharding (--enable-kv-cache-sharding)", "false", "true")
    );
    assert_eq!(cause(tp(3, 0), plain()), differs("attn_tp_size (--tp-size)", "2", "3"));
    assert_eq!(
        cause(tp(4, 0), plain()),
        differs("kv_data_mem_kinds", "DRAM", "VRAM, where attn_tp_size differs (2 here, 4 there)")
    );
    assert_eq!(
        cause(tp(2, 1), plain()),
        differs("ranks that serve this rank", "1", "0")
            + ": all of them must have registered, under one engine id"
    );
    assert!(with(serde_json::json!({"rank_port": 70000})).contains("the sglang offer of a rank"));
}

#[test]
fn commands_that_sglang_cannot_express_end_the_session_and_hand_back_the_pages() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let unnumbered = rig.open(1, 0);
    assert_eq!(rig.cause(unnumbered), "the peer broke the protocol: SGLang's rooms are numbers above 0");
    let (one, twin) = (rig.open(2, 9), rig.open(3, 9));
    assert!(rig.cause(twin).starts_with("requests 9 and 9 have the same id"));
    let pages = rig.pages(&[1]);
    rig.input(Input::Command(Command::InitReceiver { session: one, pages, aux: None }));
    assert_eq!(rig.cause(one), "an aux row is given on one side only (sender true, receiver false)");
    let far = rig.open(4, 10);
    rig.init(far, &[2], 8);
    assert_eq!(rig.cause(far), "aux row 8 is out of range: there are 8 rows");
    let twice = rig.open(5, 11);
    rig.init(twice, &[3], 0);
    rig.init(twice, &[4], 0);
    assert!(rig.cause(twice).starts_with("init was called again"));
    assert_eq!([one, far, twice].map(|session| rig.back(session)), [Some(1), Some(1), Some(2)]);
    let unknown = SessionId(77);
    rig.init(unknown, &[5], 0);
    assert_eq!(rig.back(unknown), Some(1));
}

#[test]
fn a_way_that_cannot_be_opened_fails_the_sessions_that_need_it() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let session = rig.open(1, 9);
    rig.init(session, &[1], 0);
    rig.answer(vec![rank(tp(1, 0), 7001, 5, plain())]);
    let (peer, _) = rig.ways.remove(0);
    rig.input(Input::ConnectFailed { peer, error: TransportError::PeerGone });
    assert_eq!(
        (rig.cause(session).as_str(), rig.back(session)),
        ("cannot connect to the peer: the peer is gone", Some(1))
    );
    rig.open(2, 10);
    assert_eq!(rig.lookups.len(), 1, "the answer is not used again");
}

#[test]
fn messages_out_of_form_or_place_are_counted_and_dropped() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let session = rig.open(1, 9);
    for malformed in [
        &[][..],
        &[""],
        &["KV_STATUS"],
        &["KV_STATUS", "x", "4", "0"],
        &["hello", "9"],
        &["ABORT_ACK", "9", "-1"],
    ] {
        rig.hear(malformed);
    }
    rig.input(Input::Frame { from: kv_core::Origin(1), frame: Bytes::from_static(b"\xff\xff") });
    assert_eq!((rig.gauges.of(Ignored::Malformed), rig.gauges.of(Ignored::UnknownRequest)), (7, 0));
    // Nobody has told the rank anything yet, so that it can have done nothing.
    for unexpected in [&["KV_STATUS", "9", "4", "0"][..], &["KV_STATUS", "8", "0", "0"], &["ABORT", "9"]] {
        rig.hear(unexpected);
    }
    assert_eq!((rig.gauges.of(Ignored::Malformed), rig.gauges.of(Ignored::UnknownRequest)), (7, 3));
    assert_eq!((rig.states(session).as_str(), rig.said().len()), ("", 0));
}

#[test]
fn a_cache_that_sglang_cannot_address_is_refused_by_setting_and_values() {
    let refused = |role, change: &dyn Fn(kv_core::KvArgsBuilder) -> kv_core::KvArgsBuilder, aux: &[u64]| {
        let mut args = change(KvArgs::builder("ours", 0).pages(64, 16).heads(1, 2));
        for (buffer, len) in (0..).zip(aux) {
            args = args.region(Region::dram(RegionRole::Aux, 0x10_0000 + buffer * 0x1_0000, 8 * len, *len));
        }
        let config =
            SglangConfig::new(role).with(|config| config.aux_rooms = Some(Box::new(|_: AuxIndex| 0)));
        SglangMachine::new(&args.build().unwrap(), config, agent()).map(|_| ()).unwrap_err().to_string()
    };
    let region = |holds| Region::dram(RegionRole::Kv, 0x1_0000, 64 * 256, 256).layer(0).holds(holds);
    let decode = WorkerRole::Decode;
    let page_major = refused(decode, &|args| args.region(region(Holds::KeyValue)), &AUX_ITEM_LENS);
    assert!(
        page_major.starts_with("holds of region 0 is KeyValue; SGLang's peers need keys, values or a latent")
    );
    let layers = refused(decode, &|args| args.region(region(Holds::Key).layers(0..2)), &AUX_ITEM_LENS);
    assert!(layers.starts_with("layers of region 0 is 2; SGLang's peers need 1"), "{layers}");
    let axes = |args: kv_core::KvArgsBuilder| {
        args.layout(Layout::default().with(|layout| layout.axes = HND)).region(region(Holds::Key))
    };
    assert!(refused(decode, &axes, &AUX_ITEM_LENS).starts_with("layout.axes is [Layer, Part, Head, Token]"));
    let own = refused(decode, &|args| args.region(region(Holds::Key).axes(HND)), &AUX_ITEM_LENS);
    assert!(own.starts_with("form of region 0 is") && own.contains("Part, Head, Token"), "{own}");
    let opaque = |args: kv_core::KvArgsBuilder| args.region(region(Holds::Opaque));
    let mut aux = AUX_ITEM_LENS;
    aux[6] = 128;
    assert_eq!(refused(decode, &opaque, &aux), "item_len of aux region 6 is 128; SGLang's peers need 64");
    assert_eq!(refused(decode, &opaque, &aux[..9]), "regions of role aux is 9; SGLang's peers need 10");
    assert!(refused(WorkerRole::Encode, &opaque, &AUX_ITEM_LENS).starts_with("role is encode"));
}
