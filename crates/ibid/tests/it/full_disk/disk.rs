//! File systems of 64 MiB in memory, which tests mount where they may.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

pub fn where_one_can_mount(test: &str, run: impl FnOnce()) {
    let tries = "mount -t tmpfs -o size=64m ibid /mnt && umount /mnt";
    let can = |program: &str, args: &[&str]| {
        let tried = Command::new(program)
            .args(args)
            .args(["-c", tries])
            .output();
        tried.is_ok_and(|output| output.status.success())
    };
    // In a namespace of its own: elsewhere others may try it at the same moment.
    if can("unshare", &["-m", "sh"]) {
        return run();
    }
    if !can("unshare", &["-rm", "sh"]) {
        eprintln!("skipped: {test}, because no file system can be mounted here");
        return;
    }
    let again = Command::new("unshare")
        .args(["-rm", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("full_disk::mounted::{test}")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&again.stdout);
    assert!(again.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
}

/// A file system of 64 MiB.
pub struct Disk {
    folder: tempfile::TempDir,
}

impl Disk {
    pub fn mount() -> Arc<Disk> {
        let folder = tempfile::Builder::new()
            .prefix("ibid-disk-")
            .tempdir_in("/tmp")
            .unwrap();
        let disk = Disk { folder };
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64m", "ibid"])
            .arg(disk.path()));
        Arc::new(disk)
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn free(&self) -> u64 {
        let found = rustix::fs::statvfs(self.path()).unwrap();
        found.f_bavail * found.f_frsize
    }

    fn ballast(&self) -> PathBuf {
        self.path().join("ballast")
    }

    /// Fills it up until so much is left.
    pub fn fill(&self, left: u64) {
        let ballast = vec![0; usize::try_from(self.free() - left).unwrap()];
        std::fs::write(self.ballast(), ballast).unwrap();
        assert!(self.free() <= left);
    }

    pub fn empty(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }

    pub fn remount(&self, how: &str) {
        // All is said again: what `mount` adds by itself is not allowed in a namespace.
        let options = format!("remount,{how},size=64m");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &options, "ibid"]);
        run(command.arg(self.path()));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Also where something is still open in it.
        let _ = Command::new("umount").arg("-l").arg(self.path()).output();
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
}
