//! Sending sessions under a scripted scheduler, scripted vLLM engines and a scripted clock.

mod decoder;
mod pull;
mod push;
mod registering;
