//! The library through its front door, on a real SQLite file and a real disk.

mod access;
mod continuing;
mod creation;
mod events;
mod generate;
mod golden;
mod harness;
mod importing;
mod interruptions;
mod leases;
mod nasty;
mod opening;
mod pg_server;
mod postgres_ledger;
mod postgres_source;
mod random;
mod real_data;
mod reference;
mod resume;
mod same_bytes;
mod sample;
mod shared;
mod structure;
mod tampering;
mod verifying;
mod visibility;
