//! Transfer parameters from JSON: every bound is checked before anything is copied, and no input panics.

use std::time::Duration;

use kv_core::layout::MAX_CACHE_GROUPS;
use kv_core::{EngineId, Incarnation, PageList, RequestId, Room, SessionId, TransferMode};
use serde_json::{Map, Value};

use super::error::ParamsError;
use super::fields::{Fields, bounded, mistyped, number, real, required};
use super::remote::host_and_port;
use super::{
    Leases, Leg, MAX_BLOCKS, MAX_PARAMS_BYTES, MAX_RANKS, MAX_UNKNOWN_KEYS, RankLease, RemoteKv,
    TransferParams,
};

/// Longest host name, in bytes (RFC 1035).
const MAX_HOST: usize = 255;
/// Longest lease, in seconds: a week.
const MAX_LEASE_SECONDS: u64 = 7 * 86_400;

/// Every key that this module reads; the others go to [`TransferParams::unknown`].
const KNOWN: [&str; 16] = [
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "remote_registration_generation",
    "transfer_mode",
    "remote_dp_rank",
    "kv_leases",
];

impl TransferParams {
    /// Parses the JSON text of `kv_transfer_params`, which may have [`MAX_PARAMS_BYTES`] bytes at most.
    pub fn parse(text: &str) -> Result<TransferParams, ParamsError> {
        if text.len() > MAX_PARAMS_BYTES {
            return Err(ParamsError::TooLong { got: text.len(), max: MAX_PARAMS_BYTES });
        }
        let value = serde_json::from_str(text)
            .map_err(|error| ParamsError::NotJson { line: error.line(), column: error.column() })?;
        TransferParams::from_value(&value)
    }

    /// Reads the parameters from the value of `kv_transfer_params` in a request's body that is parsed
    /// already.
    pub fn from_value(value: &Value) -> Result<TransferParams, ParamsError> {
        let fields = Fields::of("kv_transfer_params", value)?;
        let prefill = fields.flag("do_remote_prefill")?;
        let decode = fields.flag("do_remote_decode")?;
        let leg = match (prefill, decode) {
            (true, true) => {
                return Err(ParamsError::Conflict {
                    field: "do_remote_prefill",
                    got: true.into(),
                    other: "do_remote_decode",
                    expected: true.into(),
                });
            }
            (false, false) => Leg::Local,
            (true, false) => Leg::Decode { remote: Box::new(remote(fields)?) },
            (false, true) => Leg::Prefill {
                cached: if is_cached(fields)? { Some(Box::new(remote(fields)?)) } else { None },
            },
        };
        Ok(TransferParams { leg, mode: mode(fields)?, unknown: unknown(fields)? })
    }
}

/// True if parameters to a prefill worker say enough of KV of an earlier turn to read the KV. As in vLLM, a
/// prefill worker computes the prompt where one of these keys is absent; proxies write all of them as null.
fn is_cached(fields: Fields<'_>) -> Result<bool, ParamsError> {
    let listed = fields.list("remote_block_ids", MAX_BLOCKS)?.is_some_and(|list| !list.is_empty());
    let address = ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"];
    let addressed = address.iter().all(|field| fields.get(field).is_some());
    Ok(addressed && (listed || fields.get("kv_leases").is_some()))
}

fn mode(fields: Fields<'_>) -> Result<Option<TransferMode>, ParamsError> {
    let Some(text) = fields.text("transfer_mode", usize::MAX)? else { return Ok(None) };
    let expected = "push, pull or auto";
    let refused = |_| ParamsError::Type { field: "transfer_mode", expected, got: text.into() };
    text.parse().map(Some).map_err(refused)
}

fn unknown(fields: Fields<'_>) -> Result<Map<String, Value>, ParamsError> {
    let unknown = || fields.0.iter().filter(|(key, _)| !KNOWN.contains(&key.as_str()));
    bounded("kv_transfer_params", unknown().count(), MAX_UNKNOWN_KEYS)?;
    Ok(unknown().map(|(key, value)| (key.clone(), value.clone())).collect())
}

fn remote(fields: Fields<'_>) -> Result<RemoteKv, ParamsError> {
    let text = |field, max| fields.text(field, max).and_then(|value| required(field, value));
    let engine = EngineId::new(text("remote_engine_id", usize::MAX)?)?;
    let request = fields.text("remote_request_id", usize::MAX)?.map(RequestId::new).transpose()?;
    let host = text("remote_host", MAX_HOST)?;
    let port = fields.number("remote_port", 1, u64::from(u16::MAX))?;
    let port = u16::try_from(required("remote_port", port)?).unwrap_or(u16::MAX);
    let size = |field| fields.small(field, 1, MAX_RANKS);
    let block_ids = block_ids(fields)?;
    let leases = fields.get("kv_leases").map(|value| leases(value, &block_ids)).transpose()?;
    let (leases, number) = leases.unzip();
    let number = number.flatten();
    Ok(RemoteKv {
        engine,
        room: room(request, number)?,
        mode: mode(fields)?,
        host: host.to_owned(),
        port,
        block_ids,
        tp_size: size("tp_size")?,
        dcp_size: size("dcp_size")?,
        pp_size: size("pp_size")?,
        dp_rank: fields.small("remote_dp_rank", 0, MAX_RANKS - 1)?,
        num_tokens: fields.small("remote_num_tokens", 0, u32::MAX)?,
        expiry_time: fields.real("remote_blocks_expiry_time")?,
        registration_generation: fields.number("remote_registration_generation", 0, u64::MAX)?,
        leases,
    })
}

/// The request's room. A numbered room is written twice: as the digits of `remote_request_id`, and as the
/// number `bootstrap_room`, which says that the digits are a number. The digits count. Routers that keep JSON
/// numbers as doubles round a number above 2^53 and leave a text alone, so the two are compared as doubles.
/// A wrong room could not lead a reader to the pages of another request either: a holder serves the leases
/// that the reader names.
fn room(request: Option<RequestId>, number: Option<&Value>) -> Result<Option<Room>, ParamsError> {
    let (Some(request), Some(number)) = (&request, number) else { return Ok(request.map(Room::Request)) };
    let digits = request.as_str().parse::<u64>().ok().filter(|room| room.to_string() == request.as_str());
    match digits.filter(|digits| real(number) == Some(*digits as f64)) {
        Some(digits) => Ok(Some(Room::Number(digits))),
        None => Err(ParamsError::Conflict {
            field: "bootstrap_room",
            got: number.into(),
            other: "remote_request_id",
            expected: request.as_str().into(),
        }),
    }
}

/// The list of pages of each cache group. Older engines send one flat list, which is read as one group.
fn block_ids(fields: Fields<'_>) -> Result<Vec<PageList>, ParamsError> {
    const FIELD: &str = "remote_block_ids";
    let Some(list) = fields.list(FIELD, MAX_BLOCKS)? else { return Ok(Vec::new()) };
    if list.first().is_some_and(|first| first.is_number() || first.is_string()) {
        return Ok(vec![page_list(list)?]);
    }
    bounded(FIELD, list.len(), MAX_CACHE_GROUPS)?;
    let mut total = 0;
    let mut groups = Vec::with_capacity(list.len());
    for group in list {
        let pages = group.as_array().ok_or_else(|| mistyped(FIELD, "a list of lists of pages", group))?;
        total += pages.len();
        bounded(FIELD, total, MAX_BLOCKS)?;
        groups.push(page_list(pages)?);
    }
    Ok(groups)
}

fn page_list(pages: &[Value]) -> Result<PageList, ParamsError> {
    let page = |value| number("remote_block_ids", value, 0, u64::from(u32::MAX - 1));
    let pages = pages.iter().map(|value| page(value).map(|page| u32::try_from(page).unwrap_or(u32::MAX)));
    Ok(PageList::from_pages(pages.collect::<Result<Vec<u32>, ParamsError>>()?)?)
}

/// The leases, and `bootstrap_room` if the room is numbered.
fn leases<'a>(value: &'a Value, block_ids: &[PageList]) -> Result<(Leases, Option<&'a Value>), ParamsError> {
    let fields = Fields::of("kv_leases", value)?;
    let addr = required("bootstrap_addr", fields.text("bootstrap_addr", MAX_HOST + 8)?)?;
    host_and_port("bootstrap_addr", addr)?;
    let max_pages = u32::try_from(MAX_BLOCKS).unwrap_or(u32::MAX);
    let num_pages = required("num_pages", fields.small("num_pages", 0, max_pages)?)?;
    let listed: usize = block_ids.iter().map(PageList::len).sum();
    if !block_ids.is_empty() && listed != num_pages as usize {
        return Err(ParamsError::Conflict {
            field: "num_pages",
            got: u64::from(num_pages).into(),
            other: "remote_block_ids",
            expected: (listed as u64).into(),
        });
    }
    let list = required("ranks", fields.list("ranks", MAX_RANKS as usize)?)?;
    let ranks = list.iter().map(rank).collect::<Result<Vec<RankLease>, ParamsError>>()?;
    let mut numbers: Vec<u32> = ranks.iter().map(|lease| lease.rank).collect();
    numbers.sort_unstable();
    if let Some(pair) = numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ParamsError::Conflict {
            field: "rank",
            got: u64::from(pair[1]).into(),
            other: "another entry of ranks",
            expected: u64::from(pair[0]).into(),
        });
    }
    let leases = Leases {
        bootstrap_addr: addr.to_owned(),
        num_pages,
        page_size: fields.small("page_size", 1, u32::MAX)?,
        lease: lease(fields)?,
        renewable: fields.flag("lease_renewable")?,
        ranks,
    };
    fields.real("bootstrap_room")?;
    Ok((leases, fields.get("bootstrap_room")))
}

fn lease(fields: Fields<'_>) -> Result<Duration, ParamsError> {
    const FIELD: &str = "lease_seconds";
    let seconds = required(FIELD, fields.real(FIELD)?)?;
    let in_range = (0.0..=MAX_LEASE_SECONDS as f64).contains(&seconds);
    let lease = if in_range { Duration::try_from_secs_f64(seconds).ok() } else { None };
    let got = || fields.get(FIELD).map_or_else(|| "".into(), Into::into);
    lease.ok_or_else(|| ParamsError::Range { field: FIELD, got: got(), min: 0, max: MAX_LEASE_SECONDS })
}

fn rank(value: &Value) -> Result<RankLease, ParamsError> {
    let fields = Fields::of("ranks", value)?;
    let incarnation = match required("incarnation", fields.bits("incarnation")?)? {
        // Zero is no worker's incarnation.
        0 => {
            return Err(ParamsError::Range { field: "incarnation", got: 0.into(), min: 1, max: u64::MAX });
        }
        bits => Incarnation::from_random(bits),
    };
    Ok(RankLease {
        rank: required("rank", fields.small("rank", 0, u32::MAX)?)?,
        incarnation,
        lease_id: SessionId(required("lease_id", fields.bits("lease_id")?)?),
    })
}
