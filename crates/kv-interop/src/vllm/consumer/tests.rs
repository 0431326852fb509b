//! The receiving half against scripted vLLM engines.

mod rig;

mod failing;
mod pulling;
mod pushing;
