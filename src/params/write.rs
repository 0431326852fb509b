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
    fn write(&self, map: &mut Map<String, Value>) {
        let groups: Vec<Vec<u32>> = self.block_ids.iter().map(|pages| pages.iter().collect()).collect();
        for (key, value) in [
            ("remote_engine_id", json!(self.engine.as_str())),
            ("remote_request_id", json!(self.room.to_string())),
            ("remote_host", json!(self.host)),
            ("remote_port", json!(self.port)),
            ("remote_block_ids", json!(groups)),
            ("tp_size", json!(self.tp_size)),
            ("dcp_size", json!(self.dcp_size)),
            ("pp_size", json!(self.pp_size)),
            ("remote_num_tokens", json!(self.num_tokens)),
            ("remote_blocks_expiry_time", json!(self.expiry_time)),
            ("remote_registration_generation", json!(self.registration_generation)),
        ] {
            map.insert(key.to_owned(), value);
        }
        if let Some(dp_rank) = self.dp_rank {
            map.insert("remote_dp_rank".to_owned(), json!(dp_rank));
        }
        if let Some(leases) = &self.leases {
            map.insert("kv_leases".to_owned(), leases.to_value(&self.room));
        }
    }
}

impl Leases {
    fn to_value(&self, room: &Room) -> Value {
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
        if let (Room::Number(number), Some(map)) = (room, value.as_object_mut()) {
            map.insert("bootstrap_room".to_owned(), json!(number));
        }
        value
    }
}
