//! The server through its front doors: a real port, real processes, a real file system.

mod api;
mod cli;
mod crash;
mod described;
mod download;
mod edge;
mod events;
mod harness;
#[path = "../../../ibid/tests/it/fetching/hostile.rs"]
#[allow(dead_code, reason = "the library's tests use the rest")]
mod hostile;
mod links;
mod log;
mod offload;
mod openapi;
#[path = "../../../ibid/tests/it/pg_server.rs"]
#[allow(dead_code, reason = "the library's tests use the rest")]
mod pg_server;
mod postgres;
mod process;
mod ranges;
mod resuming;
#[path = "../../../ibid/tests/it/s3_server.rs"]
#[allow(dead_code, reason = "the library's tests use the rest")]
mod s3_server;
mod signals;
mod upgrade;
mod watching;
