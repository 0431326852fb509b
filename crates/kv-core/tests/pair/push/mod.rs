//! The push protocol between two nodes.

mod aborts;
mod delivery;
mod frames;
mod peers;
mod refusals;

use kv_core::Room;

const ROOM: Room = Room::Number(42);
