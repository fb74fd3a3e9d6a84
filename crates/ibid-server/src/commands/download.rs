//! `ibid download`: a link into a file.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;
use ibid::client::{Expected, Fetch, Link};
use serde_json::json;

use super::fetching::{self, Secret, client_failure};
use super::{Failure, say};
use crate::config::escape;

/// Download an export by its link, and verify it
///
/// What is downloaded is kept in FILE.part, and what is known of it in FILE.part.json; the same
/// command goes on from there, also with a fresh link when the first has expired. If the server
/// has another file by then it is fetched whole. FILE appears whole and verified by its SHA-256
/// or not at all.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ibid download 'https://chat.example/download/k3v9...?u=alice&exp=...&k=...&sig=...' -o alice.jsonl.gz
  ibid download \"$LINK\" -o alice.jsonl.gz --connections 4")]
pub struct DownloadArgs {
    /// The link, in quotes; `-` reads it from standard input, where other users of this machine
    /// cannot see it
    #[arg(value_name = "URL")]
    url: Secret,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace FILE if it is there
    #[arg(long)]
    force: bool,
    /// Connections at the same time, 1 to 32
    #[arg(long, value_name = "N", default_value = "1", value_parser = fetching::connections)]
    connections: NonZeroU32,
    /// The SHA-256 that the file must have, in hex [default: what the server says]
    #[arg(long, value_name = "HEX", value_parser = sha256)]
    sha256: Option<[u8; 32]>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

fn sha256(text: &str) -> Result<[u8; 32], &'static str> {
    let bytes = hex::decode(text).ok();
    let digest = bytes.and_then(|bytes| bytes.try_into().ok());
    digest.ok_or("a SHA-256 is 64 hexadecimal digits")
}

/// Downloads one file.
///
/// # Errors
/// The server refuses or does not answer, what comes is not the file, or it cannot be written.
pub async fn run(args: DownloadArgs) -> Result<(), Failure> {
    let url = match args.url.0.as_str() {
        "-" => {
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map_err(|e| {
                Failure::usage(format!("the link cannot be read from standard input: {e}"))
            })?;
            line.trim().to_owned()
        }
        url => url.to_owned(),
    };
    let link = Link::of_url(&url).map_err(client_failure)?;
    let expected = |sha256| Expected {
        sha256,
        bytes: None,
    };
    let fetch = Fetch {
        connections: args.connections,
        replace: args.force,
        expected: args.sha256.map(expected),
        ..Fetch::default()
    };
    let fetched = fetching::fetch(&fetch, link, &args.output, None).await?;
    let file = args.output.display().to_string();
    let sha256 = hex::encode(fetched.sha256);
    if args.json {
        let line = json!({
            "file": file,
            "bytes": fetched.bytes,
            "sha256": sha256,
            "resumed": fetched.resumed,
        });
        say(&line.to_string());
    } else {
        say(&format!(
            "{}: {} bytes, sha256 {sha256}",
            escape(&file),
            fetched.bytes
        ));
    }
    Ok(())
}
