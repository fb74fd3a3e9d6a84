//! Chat exports that are exact, repeatable and resumable.
//!
//! This library is everything of ibid that is true without HTTP, a command line or an
//! environment; and in [`client`] the other end, which speaks HTTP to a server. See `ARCHITECTURE.md` for how the pieces stand to each other.

pub mod append;
pub mod client;
pub mod contents;
pub mod cut;
pub mod event;
pub mod export;
pub mod exporter;
pub mod failpoint;
pub mod ids;
pub mod import;
pub mod janitor;
pub mod json;
pub mod key;
pub mod ledger;
pub mod limits;
pub mod link;
pub mod next_release;
pub mod parts;
pub mod postgres;
pub mod render;
pub mod scope;
pub mod segment;
pub mod snapshot;
pub mod source;
pub mod sqlite;
pub mod time;
pub mod token;
pub mod vault;
pub mod verify;
pub mod work;
pub mod worker;
