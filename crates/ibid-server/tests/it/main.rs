//! The server through its front doors: a real port, real processes, a real file system.

mod api;
mod cli;
mod download;
mod harness;
mod links;
mod process;
