//! Transfer parameters to JSON, with the keys in the module's table.

use kv_core::Room;
use serde_json::{Map, Value, json};

use super::{Leases, Leg, RemoteKv, TransferParams};

impl TransferParams {
    /// The parameters as one JSON object, for a request's or a response's `kv_transfer_params`.
    pub fn to_value(&self) -> Value {
        let mut map = self.unknown.clone();
        map.insert("do_remote_prefill".to_owned(), json!(matches!(self.leg, Leg::Decode { .. })));
        map.insert("do_remote_decode".to_owned(), json!(self.is_prefill()));
        if let Some(mode) = self.mode {
            map.insert("transfer_mode".to_owned(), json!(mode.to_string()));
        }
        if let Some(remote) = self.remote() {
            remote.write(&mut map);
        }
        Value::Object(map)
    }

    /// The parameters as the text of one JSON object, as [`to_value`](Self::to_value) writes it.
    pub fn to_json(&self) -> String {
        self.to_value().to_string()
    }
}

impl RemoteKv {
    /// Writes the keys whose values are known, in the types that vLLM's classes expect. An unknown value is
    /// left out and not written as null: vLLM's engines compare `remote_registration_generation` with a
    /// number, and a null there ends the engine's step with a `TypeError`.
    fn write(&self, map: &mut Map<String, Value>) {
        let groups =
            || self.block_ids.iter().map(|pages| pages.iter().collect::<Vec<u32>>()).collect::<Vec<_>>();
        for (key, value) in [
            ("remote_engine_id", Some(json!(self.engine.as_str()))),
            ("remote_request_id", self.room.as_ref().map(|room| json!(room.to_string()))),
            ("remote_host", Some(json!(self.host))),
            ("remote_port", Some(json!(self.port))),
            ("remote_block_ids", (!self.block_ids.is_empty()).then(|| json!(groups()))),
            ("tp_size", self.tp_size.map(Value::from)),
            ("dcp_size", self.dcp_size.map(Value::from)),
            ("pp_size", self.pp_size.map(Value::from)),
            ("remote_num_tokens", self.num_tokens.map(Value::from)),
            ("remote_blocks_expiry_time", self.expiry_time.map(Value::from)),
            ("remote_registration_generation", self.registration_generation.map(Value::from)),
            ("remote_dp_rank", self.dp_rank.map(Value::from)),
            ("kv_leases", self.leases.as_ref().map(|leases| leases.to_value(self.room.as_ref()))),
        ] {
            map.extend(value.map(|value| (key.to_owned(), value)));
        }
    }
}

impl Leases {
    fn to_value(&self, room: Option<&Room>) -> Value {
        let ranks: Vec<Value> = self
            .ranks
            .iter()
            .map(|lease| {
                let lease_id = format!("{:016x}", lease.lease_id.0);
                json!({ "rank": lease.rank, "incarnation": lease.incarnation.to_string(), "lease_id": lease_id })
            })
            .collect();
        let mut value = json!({
            "bootstrap_addr": self.bootstrap_addr,
            "num_pages": self.num_pages,
            "lease_seconds": self.lease.as_secs_f64(),
            "lease_renewable": self.renewable,
            "ranks": ranks,
        });
        if let Some(map) = value.as_object_mut() {
            let number = |room: &Room| if let Room::Number(number) = room { Some(*number) } else { None };
            let optional =
                [("bootstrap_room", room.and_then(number)), ("page_size", self.page_size.map(u64::from))];
            let known = optional.into_iter().filter_map(|(key, value)| Some((key, value?)));
            map.extend(known.map(|(key, value)| (key.to_owned(), json!(value))));
        }
        value
    }
}
