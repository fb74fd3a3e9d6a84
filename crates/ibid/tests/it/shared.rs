//! Real chats and hard cases, which lie beside the project and are no part of it.

use std::path::PathBuf;

/// A file of the shared folder, or `None` where that folder is not: then it says that `test` is
/// skipped, and the test passes.
pub fn shared(test: &str, file: &str) -> Option<PathBuf> {
    #[expect(
        clippy::disallowed_methods,
        reason = "where the data for tests lies is no configuration of the product"
    )]
    let folder = std::env::var_os("IBID_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = folder.join(file);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: {test}, because there is no {}", path.display());
    None
}
