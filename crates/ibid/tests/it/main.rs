//! The library through its front door, on real databases and a real disk.

mod access;
mod apart;
mod continuing;
mod creation;
mod events;
mod faults;
mod generate;
mod golden;
mod harness;
mod importing;
mod interruptions;
mod joining;
mod leases;
mod nasty;
mod object_store;
mod opening;
mod own_tables;
mod pg_server;
mod pooler;
mod postgres_ledger;
mod postgres_source;
mod postgres_stress;
mod random;
mod real_data;
mod reference;
mod resume;
#[allow(dead_code, reason = "the server's tests use the rest")]
mod s3_server;
mod same_bytes;
mod sample;
mod shared;
mod structure;
mod sweeping;
mod tampering;
mod verifying;
mod visibility;
