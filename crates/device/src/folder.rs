//! Temporary folders for files that drivers and programs write.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Temporary folder of this process, removed with its contents when dropped.
pub struct Folder(PathBuf);

impl Folder {
    /// Creates a folder named by `prefix` and the process id, and removes folders left by killed processes.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn new(prefix: &str) -> io::Result<Folder> {
        static N_FOLDERS: AtomicU64 = AtomicU64::new(0);
        let parent = std::env::temp_dir();
        for entry in fs::read_dir(&parent)?.flatten() {
            let name = entry.file_name();
            let numbers = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_prefix('-'));
            let owner = numbers.and_then(|numbers| numbers.split('-').next()?.parse::<u32>().ok());
            if owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let number = N_FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!("{prefix}-{}-{number}", std::process::id()));
        fs::create_dir(&folder)?;
        Ok(Folder(folder))
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
