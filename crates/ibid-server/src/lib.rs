//! The ibid process: HTTP API, workers, command line, configuration.

pub mod api;
pub mod cli;
pub mod commands;
pub mod config;
pub mod edge;
pub mod keys;
pub mod lifecycle;
pub mod metrics;
pub mod port;
pub mod range;
pub mod signals;
pub mod telemetry;
pub mod tls;
