//! How ways end.
