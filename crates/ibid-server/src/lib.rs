//! The ibid process: HTTP API, workers, command line, configuration.

pub mod config;
pub mod range;
