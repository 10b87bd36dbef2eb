//! Files that users name, written atomically.
//!
//! The content goes into an unnamed file in the target's folder, which replaces the target at the end. A full
//! disk or an interrupt thus leaves the old content, and no temporary file. Symbolic links are kept and
//! followed. Anything other than a file, such as a device, a pipe or an inherited descriptor, is written to
//! directly.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufWriter, ErrorKind, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rustix::fs::{AtFlags, CWD, linkat};
use tempfile::TempPath;
use tilewright_device::mapped;
use tilewright_formats::A_DATABASE;

use crate::error::Error;

/// Maximum number of links followed in a row, as on Linux.
const MOST_LINKS: usize = 40;

/// Minimum size in bytes of a file that is mapped: below, a copy is cheaper than a mapping.
const LEAST_MAPPED_BYTES: u64 = 1 << 20;

/// Permissions of a new file, before the user's mask.
const NEW_MODE: u32 = 0o666;

/// Destination of output.
#[derive(Debug)]
pub enum Destination {
    /// Standard output, named by `-` or `/dev/stdout`; nothing else may be printed there.
    Stdout(File),
    /// Other inherited descriptor, such as `/dev/fd/3`.
    Descriptor(File),
    /// Device, or named pipe.
    Special(PathBuf),
    /// Regular file, existing or new, with symbolic links resolved.
    File(PathBuf),
}

/// Output that is written, but not yet in its place.
#[derive(Debug)]
pub enum StagedFile {
    /// Content that was written directly.
    Settled,
    /// Temporary file beside its target.
    Aside(Aside, PathBuf),
    /// Content in memory, as the existing file cannot be replaced atomically.
    InMemory(Vec<u8>, PathBuf),
}

/// Temporary file, deleted when dropped.
#[derive(Debug)]
pub struct Aside {
    file: File,
    /// Name of the file, if the file system does not support unnamed files.
    name: Option<TempPath>,
}

/// Writes a file atomically.
///
/// # Errors
/// As [`Destination::at`] and [`Destination::write`].
pub fn write_whole(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    Destination::at(path)?.write(write)
}

/// Writes a file atomically, as [`write_whole`] does; the folder is created if missing.
///
/// # Errors
/// As [`write_whole`], and if the folder cannot be created.
pub fn write_into_folder(path: &Path, bytes: &[u8]) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    write_whole(path, |file| file.write_all(bytes))
}

/// Writes a file that can be recreated, such as a cache entry, readable by its owner only and atomic for
/// other processes. It is not flushed to disk, so that a power failure may truncate it.
///
/// # Errors
/// If the folder is missing or cannot be written, or the disk is full.
pub fn write_passing(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let aside = Aside::in_folder_of(path)?;
    aside.file.set_permissions(Permissions::from_mode(0o600))?;
    put(&aside.file, |file| file.write_all(bytes))?;
    aside.replace(path)
}

/// Writes a file that only its owner may read, such as a key.
///
/// # Errors
/// As [`write_whole`], and if the path exists but is not a regular file.
pub fn write_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let Destination::File(target) = Destination::at(path)? else { return Err(ErrorKind::InvalidInput.into()) };
    let aside = Aside::in_folder_of(&target)?;
    aside.file.set_permissions(Permissions::from_mode(0o600))?;
    put(&aside.file, |file| file.write_all(bytes))?;
    aside.replace(&target)
}

/// Checks that the user's output path can be written, before the work that produces the output; `other` says
/// how to name another path.
///
/// # Errors
/// Bad input if the path cannot be written, or is a database or the log of one, because the user mixed up two
/// options.
pub fn writable(path: &Path, other: &str) -> Result<Destination, Error> {
    let name = path.display();
    let refused = |reason: &str| Err(Error::input(format!("{name} {reason} (give {other})")));
    if is_database(path) {
        return refused("is a database and would be written over");
    }
    if is_beside_database(path) {
        return refused("is where the database beside it has its log");
    }
    Destination::at(path).map_err(|error| Error::input(format!("cannot write {name}: {error} (give {other})")))
}

/// Checks that writing to this destination overwrites none of `files`, which are still needed.
///
/// # Errors
/// Bad input if it is the same file as one of them.
pub fn check_apart(path: &Path, place: &Destination, files: &[&Path], other: &str) -> Result<(), Error> {
    match files.iter().find(|file| place.is_at(file)) {
        None => Ok(()),
        Some(file) => {
            let [name, file] = [path, file].map(Path::display);
            Err(Error::input(format!("{name} would be written over {file}, which is needed (give {other})")))
        }
    }
}

/// Whether a file is an SQLite database, by its first bytes.
fn is_database(path: &Path) -> bool {
    let mut start = Vec::new();
    let is_read = path.is_file() && File::open(path).is_ok_and(|file| file.take(16).read_to_end(&mut start).is_ok());
    is_read && start == A_DATABASE
}

/// Whether SQLite would take a file of this name for a part of the database beside it.
fn is_beside_database(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let mut databases = ["-wal", "-shm", "-journal"].iter().filter_map(|ending| name.strip_suffix(ending));
    databases.any(|database| is_database(&path.with_file_name(database)))
}

/// Reads a file that the user named; `wanted` describes the expected content.
///
/// # Errors
/// Bad input if it cannot be read.
pub fn read(path: &Path, wanted: &str) -> Result<Vec<u8>, Error> {
    let name = path.display();
    if path.is_dir() {
        return Err(Error::input(format!("cannot read {name}: it is a folder (give {wanted})")));
    }
    fs::read(path).map_err(|error| Error::input(format!("cannot read {name}: {error} (give {wanted})")))
}

/// Memory-maps a file that the user named, or reads it if it is small. A mapped file must not be truncated
/// meanwhile (see [`mapped`]).
///
/// # Errors
/// As [`read`].
pub fn map(path: &Path, wanted: &str) -> Result<Bytes, Error> {
    let is_large = |file: &fs::Metadata| file.is_file() && file.len() >= LEAST_MAPPED_BYTES;
    let file = File::open(path).ok().filter(|file| file.metadata().is_ok_and(|file| is_large(&file)));
    match file.and_then(|file| mapped::map(&file).ok()) {
        Some(bytes) => Ok(bytes),
        None => Ok(Bytes::from(read(path, wanted)?)),
    }
}

impl Destination {
    /// Resolves a path to a destination, and checks that it can be written. An inherited descriptor is
    /// duplicated now, as its number may be reused later.
    ///
    /// # Errors
    /// If the path is a folder or not writable, its folder does not exist, or it is a descriptor that is not
    /// open.
    pub fn at(path: &Path) -> io::Result<Destination> {
        if path == Path::new("-") {
            return Ok(Destination::Stdout(io::stdout().as_fd().try_clone_to_owned()?.into()));
        }
        let is_folder = || io::Error::new(ErrorKind::IsADirectory, "it is a folder");
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(is_folder());
        }
        // Uses the path as given, because the system may forbid following other users' links.
        let there = match path.metadata() {
            Ok(there) if there.is_dir() => return Err(is_folder()),
            Ok(there) => Some(there),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let target = match follow(path)? {
            Followed::Path(target) => target,
            Followed::Descriptor(1) => {
                return Ok(Destination::Stdout(io::stdout().as_fd().try_clone_to_owned()?.into()));
            }
            Followed::Descriptor(2) => {
                return Ok(Destination::Descriptor(io::stderr().as_fd().try_clone_to_owned()?.into()));
            }
            // Files are opened to append: otherwise they would be written from the start.
            Followed::Descriptor(_) => {
                return Ok(Destination::Descriptor(OpenOptions::new().append(true).open(path)?));
            }
        };
        match there {
            // Opening a pipe would wait for its reader.
            Some(there) if !there.is_file() => return Ok(Destination::Special(target)),
            // A file that the user cannot write must not be replaced either.
            Some(_) => drop(OpenOptions::new().write(true).open(path)?),
            None => drop(Aside::in_folder_of(&target)?),
        }
        Ok(Destination::File(target))
    }

    /// Whether the destination is the same file as this path, by another name or a link.
    pub fn is_at(&self, path: &Path) -> bool {
        let Destination::File(target) = self else { return false };
        let file = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
        let is_same = |other: Followed| matches!(other, Followed::Path(other) if other == *target);
        file(path).is_some_and(|there| Some(there) == file(target)) || follow(path).is_ok_and(is_same)
    }

    /// Writes the content.
    ///
    /// # Errors
    /// Errors of `write`, a full disk, or a destination that can no longer be written. An existing file is
    /// left unchanged.
    pub fn write(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        self.stage(write)?.settle()
    }

    /// Writes the content without replacing the destination yet, for several files that belong together.
    ///
    /// # Errors
    /// As [`Destination::write`].
    pub fn stage(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<StagedFile> {
        let target = match self {
            Destination::Stdout(file) | Destination::Descriptor(file) => {
                return put(file, write).map(|()| StagedFile::Settled);
            }
            Destination::Special(path) => {
                let file = OpenOptions::new().write(true).open(path)?;
                return put(&file, write).map(|()| StagedFile::Settled);
            }
            Destination::File(target) => target,
        };
        let there = match OpenOptions::new().write(true).open(target) {
            Ok(there) => Some(there.metadata()?),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let aside = Aside::in_folder_of(target).and_then(|aside| {
            there.as_ref().map_or(Ok(()), |there| aside.belong_as(there))?;
            Ok(aside)
        });
        match aside {
            Ok(aside) => {
                put(&aside.file, write)?;
                // Before the intact file is replaced: some file systems report a full disk only now.
                aside.file.sync_data()?;
                Ok(StagedFile::Aside(aside, target.clone()))
            }
            Err(error) if there.is_none() => Err(error),
            Err(_) => {
                let mut bytes = Vec::new();
                write(&mut bytes)?;
                Ok(StagedFile::InMemory(bytes, target.clone()))
            }
        }
    }
}

impl StagedFile {
    /// Moves the content to its destination.
    ///
    /// # Errors
    /// If the destination cannot be written. An existing file is left unchanged.
    pub fn settle(self) -> io::Result<()> {
        match self {
            StagedFile::Settled => Ok(()),
            StagedFile::InMemory(bytes, target) => write_over(&target, &bytes),
            StagedFile::Aside(aside, target) => {
                let mut content = aside.file.try_clone()?;
                aside.replace(&target).or_else(|error| {
                    // A mount point, or another user's file in a shared folder, cannot be replaced, and is
                    // overwritten.
                    if !target.is_file() {
                        return Err(error);
                    }
                    let mut bytes = Vec::new();
                    content.rewind()?;
                    content.read_to_end(&mut bytes)?;
                    write_over(&target, &bytes)
                })
            }
        }
    }
}

impl Aside {
    /// Creates a temporary file in the folder of `target`.
    fn in_folder_of(target: &Path) -> io::Result<Aside> {
        let folder = target.parent().unwrap_or(Path::new("/"));
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        match options.clone().mode(NEW_MODE).custom_flags(libc::O_TMPFILE).open(folder) {
            // The file gets its name by a link from that path.
            Ok(_) if !Path::new("/proc/self/fd").exists() => {}
            Ok(file) => return Ok(Aside { file, name: None }),
            // The file system, or the kernel, does not support unnamed files.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) => {}
            Err(error) => return Err(error),
        }
        let mode = Permissions::from_mode(NEW_MODE);
        let named = names().permissions(mode).tempfile_in(folder).map_err(|error| io::Error::from(error.kind()))?;
        let (file, name) = named.into_parts();
        Ok(Aside { file, name: Some(name) })
    }

    /// Sets the owner and the permissions to those of another file.
    fn belong_as(&self, other: &fs::Metadata) -> io::Result<()> {
        let own = self.file.metadata()?;
        if (own.uid(), own.gid()) != (other.uid(), other.gid()) {
            fchown(&self.file, Some(other.uid()), Some(other.gid()))?;
        }
        self.file.set_permissions(other.permissions())
    }

    /// Moves the file to the path of `target`, replacing an existing file.
    fn replace(self, target: &Path) -> io::Result<()> {
        let name = match self.name {
            Some(name) => name,
            None => {
                let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                let link = |name: &Path| Ok(linkat(CWD, &*open, CWD, name, AtFlags::SYMLINK_FOLLOW)?);
                let folder = target.parent().unwrap_or(Path::new("/"));
                let named = names().make_in(folder, link).map_err(|error| io::Error::from(error.kind()))?;
                named.into_temp_path()
            }
        };
        name.persist(target).map_err(|error| error.error)
    }
}

/// Unpredictable names of temporary files.
fn names() -> tempfile::Builder<'static, 'static> {
    let mut names = tempfile::Builder::new();
    names.prefix(".tilewright-").suffix(".part").rand_bytes(12);
    names
}

/// Target of a path after all links are followed.
enum Followed {
    Path(PathBuf),
    /// Descriptor that is open in this process.
    Descriptor(u32),
}

/// Follows links, also to a target that does not exist.
fn follow(path: &Path) -> io::Result<Followed> {
    let descriptors = Path::new("/proc/self/fd").canonicalize().ok();
    let mut path = path.to_owned();
    for _ in 0..=MOST_LINKS {
        let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = folder.canonicalize().map_err(|error| match error.kind() {
            ErrorKind::NotFound => io::Error::new(error.kind(), format!("there is no folder {}", folder.display())),
            _ => error,
        })?;
        if descriptors.as_ref() == Some(&folder)
            && let Some(number) = name.to_str().and_then(|name| name.parse().ok())
        {
            return Ok(Followed::Descriptor(number));
        }
        let here = folder.join(name);
        let Ok(to) = here.read_link() else { return Ok(Followed::Path(here)) };
        path = folder.join(to);
    }
    Err(io::Error::other("its links lead to each other"))
}

fn put(file: &File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 16, file);
    let written = write(&mut out).and_then(|()| out.flush());
    // Discards the rest of the buffer, which dropping `out` would try to write once more.
    let _ = out.into_parts();
    written
}

/// Overwrites a file that cannot be replaced; on failure, restores its content.
fn write_over(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let before = fs::read(path).ok();
    let mut file = OpenOptions::new().write(true).open(path)?;
    let mut hold = |bytes: &[u8]| {
        file.rewind()?;
        file.write_all(bytes)?;
        file.set_len(bytes.len() as u64)?;
        file.sync_data()
    };
    hold(bytes).inspect_err(|_| {
        let _ = before.map(|before| hold(&before));
    })
}

/// Opens a file for locking; creates it if needed.
///
/// # Errors
/// If the file can be neither opened nor created.
pub fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use std::thread;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn names_in(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().mode() & 0o7777
    }

    fn write(path: &Path, text: &str) -> io::Result<()> {
        write_whole(path, |out| out.write_all(text.as_bytes()))
    }

    /// Whether this is root, who may write everywhere.
    fn is_root(folder: &Path) -> bool {
        folder.metadata().unwrap().uid() == 0
    }

    fn run(program: &str, arguments: &[&str]) -> bool {
        Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
    }

    #[test]
    fn a_new_file_is_as_the_mask_has_it_and_alone() {
        let folder = folder();
        let [new, plain] = ["new", "plain"].map(|name| folder.path().join(name));
        fs::write(folder.path().join("new.part"), "the user's").unwrap();
        fs::write(&plain, "").unwrap();
        write(&new, "text").unwrap();
        assert_eq!(fs::read(&new).unwrap(), b"text");
        assert_eq!(mode(&new), mode(&plain));
        assert_eq!(fs::read(folder.path().join("new.part")).unwrap(), b"the user's");
        assert_eq!(names_in(folder.path()), ["new", "new.part", "plain"]);
    }

    #[test]
    fn a_file_that_is_replaced_keeps_its_permissions_and_owner() {
        let folder = folder();
        let file = folder.path().join("file");
        fs::write(&file, "before, and longer").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        let owner = if is_root(folder.path()) { 12345 } else { file.metadata().unwrap().uid() };
        fchown(File::open(&file).unwrap(), Some(owner), None).unwrap();
        write(&file, "after").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"after");
        assert_eq!((mode(&file), file.metadata().unwrap().uid()), (0o640, owner));
        assert_eq!(names_in(folder.path()), ["file"]);
    }

    #[test]
    fn what_is_there_survives_a_failure() {
        let folder = folder();
        let file = folder.path().join("file");
        let fail = || {
            write_whole(&file, |out| {
                out.write_all(&[0; 1 << 17])?;
                Err(ErrorKind::StorageFull.into())
            })
        };
        assert_eq!(fail().unwrap_err().kind(), ErrorKind::StorageFull);
        assert!(names_in(folder.path()).is_empty());
        write(&file, "before").unwrap();
        assert_eq!(fail().unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(fs::read(&file).unwrap(), b"before");
        assert_eq!(names_in(folder.path()), ["file"]);
    }

    #[test]
    fn whoever_is_killed_leaves_nothing_behind() {
        let folder = folder();
        let target = folder.path().join("file");
        if Aside::in_folder_of(&target).unwrap().name.is_some() {
            eprintln!("skipped: this file system has no files without a name");
            return;
        }
        write_whole(&target, |out| {
            out.write_all(&[0; 1 << 17])?;
            assert!(names_in(folder.path()).is_empty(), "it has no name before it is whole");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn files_that_belong_together_come_together() {
        let folder = folder();
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        write(&one, "before").unwrap();
        let staged = Destination::at(&one).unwrap().stage(|out| out.write_all(b"after")).unwrap();
        assert_eq!(fs::read(&one).unwrap(), b"before");
        Destination::at(&other).unwrap().stage(|_| Err(ErrorKind::StorageFull.into())).unwrap_err();
        drop(staged);
        assert_eq!(fs::read(&one).unwrap(), b"before");
        assert_eq!(names_in(folder.path()), ["one"]);
    }

    #[test]
    fn links_stay_and_what_they_lead_to_is_written() {
        let folder = folder();
        let below = folder.path().join("below");
        fs::create_dir(&below).unwrap();
        for before in [Some("before"), None] {
            let [file, near, far] = [below.join("file"), below.join("near"), folder.path().join("far")];
            if let Some(before) = before {
                fs::write(&file, before).unwrap();
            }
            symlink("file", &near).unwrap();
            symlink("below/near", &far).unwrap();
            write(&far, "after").unwrap();
            assert!(far.is_symlink() && near.is_symlink() && !file.is_symlink());
            assert_eq!(fs::read(&file).unwrap(), b"after");
            assert_eq!(names_in(&below), ["file", "near"]);
            [file, near, far].iter().for_each(|path| fs::remove_file(path).unwrap());
        }
        let [ring, lost] = ["ring", "lost"].map(|name| folder.path().join(name));
        symlink("ring", &ring).unwrap();
        write(&ring, "after").unwrap_err();
        symlink("nowhere/file", &lost).unwrap();
        let error = write(&lost, "after").unwrap_err().to_string();
        assert!(error.contains("there is no folder") && error.contains("nowhere"), "{error}");
    }

    #[test]
    fn one_place_may_have_many_names() {
        let folder = folder();
        let [file, link, hard, other] = ["file", "link", "hard", "other"].map(|name| folder.path().join(name));
        symlink("file", &link).unwrap();
        let is_at = |path: &Path| Destination::at(&link).unwrap().is_at(path);
        assert_eq!([&file, &link, &other].map(|path| is_at(path)), [true, true, false]);
        write(&file, "before").unwrap();
        fs::hard_link(&file, &hard).unwrap();
        write(&other, "before").unwrap();
        assert_eq!([&file, &link, &hard, &other].map(|path| is_at(path)), [true, true, true, false]);
        assert!(!Destination::at(Path::new("/dev/null")).unwrap().is_at(Path::new("/dev/null")));
    }

    #[test]
    fn folders_are_no_files() {
        let folder = folder();
        let slash = format!("{}/new/", folder.path().display());
        for path in [folder.path(), Path::new(&slash), Path::new("/"), Path::new("..")] {
            let error = write(path, "text").unwrap_err().to_string();
            assert!(error.contains("it is a folder"), "{}: {error}", path.display());
        }
        write(&folder.path().join("no/file"), "text").unwrap_err();
        assert!(names_in(folder.path()).is_empty());
    }

    #[test]
    fn a_pipe_with_a_name_is_written_to() {
        let folder = folder();
        let pipe = folder.path().join("pipe");
        if !run("mkfifo", &[pipe.to_str().unwrap()]) {
            eprintln!("skipped: there is no mkfifo");
            return;
        }
        let reader = pipe.clone();
        let reader = thread::spawn(move || fs::read(reader).unwrap());
        write(&pipe, "text").unwrap();
        assert_eq!(reader.join().unwrap(), b"text");
        assert_eq!(names_in(folder.path()), ["pipe"]);
        assert!(!pipe.metadata().unwrap().is_file());
    }

    #[test]
    fn a_device_stays_one() {
        let folder = folder();
        let device = folder.path().join("null");
        if !run("mknod", &[device.to_str().unwrap(), "c", "1", "3"]) {
            eprintln!("skipped: only root makes devices");
            return;
        }
        let link = folder.path().join("link");
        symlink(&device, &link).unwrap();
        for path in [&device, &link] {
            write(path, "text").unwrap();
            assert!(!device.is_symlink() && !device.metadata().unwrap().is_file());
        }
        assert_eq!(names_in(folder.path()), ["link", "null"]);
        assert!(write(Path::new("/dev/full"), "text").is_err());
    }

    #[test]
    fn a_descriptor_is_written_to_at_its_end() {
        let folder = folder();
        let path = folder.path().join("log");
        fs::write(&path, "before ").unwrap();
        let open = OpenOptions::new().append(true).open(&path).unwrap();
        write(Path::new(&format!("/dev/fd/{}", open.as_raw_fd())), "after").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"before after");
        let inode = |metadata: fs::Metadata| metadata.ino();
        assert_eq!(inode(open.metadata().unwrap()), inode(path.metadata().unwrap()));
        write(Path::new("/dev/fd/987"), "after").unwrap_err();
    }

    #[test]
    fn what_cannot_be_replaced_is_written_over() {
        let folder = folder();
        let file = folder.path().join("file");
        fs::write(&file, "before, and longer").unwrap();
        let inode = file.metadata().unwrap().ino();
        StagedFile::InMemory(b"after".into(), file.clone()).settle().unwrap();
        assert_eq!((fs::read(&file).unwrap(), file.metadata().unwrap().ino()), (b"after".into(), inode));
        if is_root(folder.path()) {
            eprintln!("skipped: root may write to every folder");
            return;
        }
        fs::set_permissions(folder.path(), Permissions::from_mode(0o555)).unwrap();
        write(&file, "at last").unwrap();
        assert_eq!((fs::read(&file).unwrap(), file.metadata().unwrap().ino()), (b"at last".into(), inode));
        assert_eq!(write(&folder.path().join("new"), "text").unwrap_err().kind(), ErrorKind::PermissionDenied);
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn what_may_not_be_written_is_not_replaced() {
        let folder = folder();
        let file = folder.path().join("file");
        fs::write(&file, "before").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o444)).unwrap();
        if is_root(folder.path()) {
            eprintln!("skipped: root may write to every file");
            return;
        }
        assert_eq!(write(&file, "after").unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(fs::read(&file).unwrap(), b"before");
    }
}
