//! Chat exports that are exact, repeatable and resumable.
//!
//! This library is everything of ibid that is true without HTTP, a command line or an
//! environment. See `ARCHITECTURE.md` for how the pieces stand to each other.

pub mod cut;
pub mod event;
pub mod ids;
pub mod json;
pub mod render;
pub mod segment;
pub mod snapshot;
pub mod time;
