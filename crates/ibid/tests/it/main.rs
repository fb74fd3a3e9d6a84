//! The library through its front door, on a real SQLite file and a real disk.

mod events;
mod generate;
mod harness;
mod nasty;
mod random;
mod real_data;
mod reference;
mod sample;
mod shared;
