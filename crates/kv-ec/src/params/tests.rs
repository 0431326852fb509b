use kv_core::IdError;
use proptest::prelude::*;

use super::*;

/// An answer with one entry that the encoder has and one that it does not have, as vLLM's connector writes it.
const RESPONSE: &str = r#"{
    "0a3f": {
        "modality": "image", "item_indices": [0, 2], "metadata": {"image_grid_thw": [1, 20, 16]},
        "peer_host": "10.1.2.3", "peer_port": 5601, "size_bytes": 573440, "shape": [80, 3584]
    },
    "77b0": {"modality": "video", "item_indices": [1], "metadata": {}}
}"#;

fn hash(text: &str) -> ContentHash {
    ContentHash::new(text).unwrap()
}

fn parsed(value: &Value) -> Result<EcTransferParams, EcParamsError> {
    EcTransferParams::from_value(value)
}

/// The response with another value of a field of its first item.
fn with(field: &str, value: Value) -> Value {
    let mut all: Value = serde_json::from_str(RESPONSE).unwrap();
    all["0a3f"][field] = value;
    all
}

fn refused(field: &str, value: Value) -> (&'static str, Problem) {
    let error = parsed(&with(field, value)).unwrap_err();
    assert_eq!(error.item, Some(hash("0a3f")));
    (error.field, error.problem)
}

#[test]
fn a_vllm_response_is_read_and_written_again_without_a_change() {
    let params = EcTransferParams::parse(RESPONSE).unwrap();
    let item = &params.items[&hash("0a3f")];
    assert_eq!((item.modality.as_str(), &item.item_indices[..]), ("image", &[0, 2][..]));
    assert_eq!(item.metadata["image_grid_thw"], json!([1, 20, 16]));
    let held = item.held.as_ref().unwrap();
    assert_eq!(*held, Held::new("10.1.2.3", 5601, 80, 3584, 2, 7168));
    let again: Value = serde_json::from_str(&params.to_json()).unwrap();
    assert_eq!(again, serde_json::from_str::<Value>(RESPONSE).unwrap());
}

#[test]
fn an_item_without_a_peer_is_one_that_the_producer_does_not_have() {
    let params = EcTransferParams::parse(RESPONSE).unwrap();
    assert_eq!(params.items[&hash("77b0")].held, None);
    let nulls = json!({"x": {"modality": null, "item_indices": null, "metadata": null, "peer_host": null,
        "peer_port": null, "size_bytes": null, "shape": null}});
    assert_eq!(parsed(&nulls).unwrap().items[&hash("x")], Item::new("", []));
    assert_eq!(parsed(&Value::Null).unwrap(), EcTransferParams::default());
    // A peer without a size is no peer.
    for field in ["peer_port", "size_bytes", "shape"] {
        assert_eq!(refused(field, Value::Null), (field, Problem::Missing));
    }
}

#[test]
fn numbers_are_accepted_in_every_form_that_routers_write() {
    for port in [json!(5602), json!(5602.0), json!("5602")] {
        let params = parsed(&with("peer_port", port)).unwrap();
        assert_eq!(params.items[&hash("0a3f")].held.as_ref().unwrap().peer_port, 5602);
    }
    let size = |value| parsed(&with("size_bytes", value)).unwrap().items[&hash("0a3f")].held.clone().unwrap();
    assert_eq!(size(json!("18446744073709551615")).size_bytes, u64::MAX);
    let range = |got: &str, max| Problem::Range { got: got.into(), min: 1, max };
    for (port, got) in
        [(json!(0), "0"), (json!(-1), "-1"), (json!(70000.0), "70000.0"), (json!("70000"), "\"70000\"")]
    {
        assert_eq!(refused("peer_port", port), ("peer_port", range(got, 65535)));
    }
    let too_large = json!("99999999999999999999");
    assert_eq!(refused("size_bytes", too_large), ("size_bytes", range("\"99999999999999999999\"", u64::MAX)));
    let expected = "a whole number";
    for value in [json!(7.5), json!("7 "), json!(true), json!(1e16), json!(""), json!([7])] {
        let (field, problem) = refused("size_bytes", value);
        assert!(
            field == "size_bytes" && matches!(problem, Problem::Type { expected: e, .. } if e == expected)
        );
    }
}

#[test]
fn a_wrong_field_is_named_with_its_item_and_its_value() {
    let expected = "a list of rows and width";
    for (shape, got) in [(json!([80]), "a list of length 1"), (json!([80, 3584, 1]), "a list of length 3")] {
        assert_eq!(refused("shape", shape), ("shape", Problem::Type { got: got.into(), expected }));
    }
    let range = Problem::Range { got: "0".into(), min: 1, max: u64::from(u32::MAX) };
    assert_eq!(refused("shape", json!([0, 3584])), ("shape[0]", range.clone()));
    assert_eq!(refused("shape", json!([80, 0])), ("shape[1]", range));
    let text = json!("x".repeat(65));
    let got = format!("\"{}\"…", "x".repeat(64));
    assert_eq!(refused("metadata", text), ("metadata", Problem::Type { got, expected: "an object" }));
    let error = parsed(&with("peer_port", json!(70000))).unwrap_err();
    assert_eq!(error.to_string(), "item 0a3f: peer_port is 70000, and must be 1 to 65535");
    assert_eq!(refused("peer_host", json!("")).0, "peer_host");
    let error = parsed(&json!({"": {}})).unwrap_err();
    let length = IdError::Length { field: "content_hash", got: 0, max: kv_core::MAX_CONTENT_HASH };
    assert_eq!((error.field, error.problem), ("ec_transfer_params", Problem::Hash(length)));
    let error = EcTransferParams::parse("{\n!").unwrap_err();
    assert_eq!(error.problem, Problem::NotJson { line: 2, column: 1 });
}

#[test]
fn every_length_is_bounded_before_anything_is_copied() {
    let long = |got, max| Problem::TooLong { got, max };
    let many = |count: usize| (0..count).map(|key| (key.to_string(), json!({}))).collect::<Value>();
    assert_eq!(parsed(&many(MAX_ITEMS + 1)).unwrap_err().problem, long(MAX_ITEMS + 1, MAX_ITEMS));
    assert_eq!(parsed(&many(MAX_ITEMS)).unwrap().items.len(), MAX_ITEMS);
    assert_eq!(refused("item_indices", json!(vec![0; 4097])).1, long(4097, MAX_INDICES));
    assert_eq!(refused("metadata", many(65)).1, long(65, MAX_EXTRA_KEYS));
    assert_eq!(refused("peer_host", json!("h".repeat(256))).1, long(256, 255));
    assert_eq!(refused("modality", json!("m".repeat(65))).1, long(65, 64));
    let mut item = with("peer_port", json!(1));
    (0..65).for_each(|key| item["0a3f"][key.to_string()] = json!(key));
    assert_eq!(parsed(&item).unwrap_err().problem, long(65, MAX_EXTRA_KEYS));
    let text = " ".repeat(MAX_PARAMS_BYTES + 1);
    let error = EcTransferParams::parse(&text).unwrap_err();
    assert_eq!(error.problem, long(MAX_PARAMS_BYTES + 1, MAX_PARAMS_BYTES));
}

#[test]
fn fields_of_other_releases_reach_the_next_worker_unchanged() {
    let params = parsed(&with("lease_seconds", json!({"a": [1]}))).unwrap();
    assert_eq!(params.to_value()["0a3f"]["lease_seconds"], json!({"a": [1]}));
}

#[test]
fn numbers_that_are_passed_on_lose_not_one_bit() {
    for number in ["2.107886634442258e-19", "-6.652269350886165e+267"] {
        let text = format!(r#"{{"0a3f":{{"x":{number}}}}}"#);
        let json = EcTransferParams::parse(&text).unwrap().to_json();
        assert!(json.contains(number), "{json}");
        assert_eq!(EcTransferParams::parse(&json).unwrap(), EcTransferParams::parse(&text).unwrap());
    }
}

#[test]
fn a_consumer_refuses_what_does_not_fit_its_placeholders_its_model_or_its_blocks() {
    // 3 rows of 10 bytes take 2 blocks of 16 bytes.
    let held = Held::new("h", 1, 3, 5, 2, 16);
    assert_eq!(held.size_bytes, 32);
    assert_eq!(held.check(3, 5, 2, 16), Ok(Shape { rows: 3, row_bytes: 10 }));
    let refused = |held: &Held, rows, width, element, block| {
        let error = held.check(rows, width, element, block).unwrap_err();
        match error.problem {
            Problem::Conflict { got, expected } => (error.field, got, expected),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&held, 4, 5, 2, 16), ("shape[0]", 3, 4));
    assert_eq!(refused(&held, 3, 6, 2, 16), ("shape[1]", 5, 6));
    assert_eq!(refused(&held, 3, 5, 4, 16), ("size_bytes", 32, 64));
    assert_eq!(refused(&held, 3, 5, 2, 15), ("size_bytes", 32, 30));
    assert_eq!(refused(&Held { size_bytes: 30, ..held.clone() }, 3, 5, 2, 16), ("size_bytes", 30, 32));
    assert!(Held::new("h", 1, u32::MAX, u32::MAX, 4, 0).check(1, u32::MAX, u32::MAX, 0).is_err());
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9.]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        let key = prop::sample::select(vec![
            "modality",
            "item_indices",
            "metadata",
            "peer_host",
            "peer_port",
            "size_bytes",
            "shape",
            "x",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..8)
                .prop_map(|pairs| pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_json_is_refused_or_read_and_reading_again_gives_the_same(value in any_json()) {
        if let Ok(params) = parsed(&value) {
            prop_assert_eq!(parsed(&params.to_value()).unwrap(), params.clone());
            prop_assert_eq!(EcTransferParams::parse(&params.to_json()).unwrap(), params);
        }
    }
}
