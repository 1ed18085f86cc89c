//! Sessions in files that a crash leaves whole: one safetensors file each, written aside, synced and renamed.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use axum::http::StatusCode;
use safetensors::tensor::{Metadata, TensorInfo};
use xxhash_rust::xxh3::Xxh3;

use super::name;
use super::tensors::{LENGTHS, Layout};
use super::version::{self, Outline, Pen, Version};
use crate::compute::Watch;
use crate::failure::Failure;
use crate::tensors::Dtype;

/// What a file says that it is.
const FORMAT: &str = "certk session 1";
const ENDING: &str = "safetensors";
/// What a file is called that was not finished.
const UNFINISHED: &str = ".unfinished-";
/// No header of ours is longer.
const HEADER: u64 = 1 << 16;
/// Bytes that are read or hashed before a watch is asked.
const PORTION: usize = 1 << 20;

pub(crate) struct Files {
    folder: PathBuf,
    /// Held by who writes or removes a file.
    pub(super) writing: Mutex<()>,
    /// Locked as long as this service runs: two of them would undo each other's work.
    _lock: File,
}

/// Why a file was not read.
#[derive(Debug)]
pub(super) enum Trouble {
    Damaged(String),
    Missing,
    Other(Failure),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Trouble::Missing,
            io::ErrorKind::UnexpectedEof => Trouble::Damaged("it ends too soon".into()),
            _ => Trouble::Other(unwritable(&error)),
        }
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Trouble::Other(failure)
    }
}

fn unwritable(error: &io::Error) -> Failure {
    tracing::error!(%error, "the data folder");
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, format!("the data folder: {error}"))
}

/// A file's header, read.
struct Head {
    outline: Outline,
    hash: String,
}

impl Files {
    /// The files of a folder, and what sessions lie there. What cannot be one of them is set aside.
    pub(super) fn open(folder: &Path) -> io::Result<(Self, Vec<(String, Outline)>)> {
        fs::create_dir_all(folder)?;
        let lock = File::create(folder.join(".lock"))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("another service works in {}", folder.display()),
            ),
            TryLockError::Error(error) => error,
        })?;
        let files = Files { folder: folder.to_owned(), writing: Mutex::new(()), _lock: lock };
        let mut found = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let Some(file) = path.file_name().and_then(OsStr::to_str) else { continue };
            if file.starts_with(UNFINISHED) {
                fs::remove_file(&path)?;
                continue;
            }
            if path.extension() != Some(OsStr::new(ENDING)) {
                continue;
            }
            let name = path.file_stem().and_then(OsStr::to_str).unwrap_or_default().to_owned();
            if !name::valid(&name) {
                continue;
            }
            let read = File::open(&path).map_err(Trouble::from);
            match read.and_then(|file| head(&mut BufReader::new(&file), &name, &file)) {
                Ok(head) => found.push((name, head.outline)),
                Err(Trouble::Damaged(why)) => files.set_aside(&name, &why),
                Err(trouble) => tracing::error!(name, ?trouble, "a file cannot be read"),
            }
        }
        Ok((files, found))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.{ENDING}"))
    }

    /// Writes a version so that after a crash there is either the file that was there before or all of this one.
    pub(super) fn write(&self, name: &str, of: &Version, watch: &Watch) -> Result<(), Failure> {
        let outline = of.outline();
        let mut hash = start(name, &outline);
        portions(of, |bytes| {
            watch.check()?;
            hash.update(bytes);
            Ok(())
        })?;
        let header = header(name, &outline, &format!("{:032x}", hash.digest128()))?;
        let io = |error: io::Error| unwritable(&error);
        let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&self.folder);
        let file = file.map_err(io)?;
        let mut to = BufWriter::new(&file);
        to.write_all(&(header.len() as u64).to_le_bytes()).map_err(io)?;
        to.write_all(&header).map_err(io)?;
        portions(of, |bytes| {
            watch.check()?;
            to.write_all(bytes).map_err(io)
        })?;
        to.flush().map_err(io)?;
        drop(to);
        file.as_file().sync_all().map_err(io)?;
        file.persist(self.path(name)).map_err(|error| io(error.error))?;
        self.sync().map_err(io)
    }

    /// Has the folder remember what was renamed or removed. Windows opens no folder as a file.
    fn sync(&self) -> io::Result<()> {
        if cfg!(unix) { File::open(&self.folder)?.sync_all() } else { Ok(()) }
    }

    /// Reads a session into memory that `room` gives for it.
    pub(super) fn read(
        &self,
        name: &str,
        room: impl FnOnce(&Outline) -> Result<Pen, Failure>,
        watch: &Watch,
    ) -> Result<(Outline, Pen), Trouble> {
        let file = File::open(self.path(name))?;
        let mut from = BufReader::new(&file);
        let head = head(&mut from, name, &file)?;
        let outline = head.outline;
        let layout = outline.layout;
        let mut pen = room(&outline)?;
        let mut hash = start(name, &outline);
        let mut portion = vec![0; PORTION];
        for values in [false, true] {
            let bytes = outline.n * if values { layout.value() } else { layout.key() };
            for i in 0..layout.heads {
                let (keys_to, values_to) = pen.head(i);
                let to = if values { values_to } else { keys_to };
                let mut left = bytes;
                while left > 0 {
                    watch.check()?;
                    let some = &mut portion[..left.min(PORTION)];
                    from.read_exact(some)?;
                    hash.update(some);
                    to.push(some);
                    left -= some.len();
                }
            }
        }
        if format!("{:032x}", hash.digest128()) != head.hash {
            return Err(Trouble::Damaged("its numbers are not those that were written".into()));
        }
        Ok((outline, pen))
    }

    /// Whether there was one.
    pub(super) fn remove(&self, name: &str) -> Result<(), Failure> {
        match fs::remove_file(self.path(name)) {
            Ok(()) => self.sync().map_err(|error| unwritable(&error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(unwritable(&error)),
        }
    }

    /// Gives a damaged file another name, under which nothing reads it, and says so in the log.
    pub(super) fn set_aside(&self, name: &str, why: &str) {
        let from = self.path(name);
        let to = self.folder.join(format!("{name}.damaged-{}", version::next(0)));
        let moved = fs::rename(&from, &to).and_then(|()| self.sync());
        tracing::error!(name, why, to = %to.display(), ?moved, "a damaged file is set aside");
    }
}

/// The keys of all heads, then their values, in portions.
fn portions(
    of: &Version,
    mut with: impl FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let keys = of.heads.iter().map(|head| head.keys.as_bytes());
    let values = of.heads.iter().map(|head| head.values.as_bytes());
    keys.chain(values).flat_map(|bytes| bytes.chunks(PORTION)).try_for_each(&mut with)
}

/// A hash that has seen all that a header says.
fn start(name: &str, outline: &Outline) -> Xxh3 {
    let Outline { number, layout, n } = outline;
    let mut hash = Xxh3::new();
    hash.update(format!("{FORMAT} {name} {number} {layout:?} {n};").as_bytes());
    hash
}

fn header(name: &str, outline: &Outline, hash: &str) -> Result<Vec<u8>, Failure> {
    let Outline { number, layout, n } = *outline;
    let about = [
        ("format", FORMAT.to_owned()),
        ("name", name.to_owned()),
        ("version", number.to_string()),
        ("xxh3", hash.to_owned()),
    ];
    let about: HashMap<_, _> = about.into_iter().map(|(key, text)| (key.into(), text)).collect();
    let (keys, values) = (layout.heads * n * layout.key(), layout.heads * n * layout.value());
    let tensor = |width, from, bytes| TensorInfo {
        dtype: layout.dtype.stored(),
        shape: vec![layout.heads, n, width],
        data_offsets: (from, from + bytes),
    };
    let mut tensors = vec![("keys".to_owned(), tensor(layout.dim, 0, keys))];
    tensors.extend(layout.values.map(|width| ("values".to_owned(), tensor(width, keys, values))));
    let failed = |problem: String| Failure::bug(&format!("a header: {problem}"));
    let header = Metadata::new(Some(about), tensors).map_err(|error| failed(error.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| failed(error.to_string()))?;
    // So that numbers begin at a multiple of eight.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

/// Reads and judges what stands before the numbers.
fn head(from: &mut impl Read, name: &str, file: &File) -> Result<Head, Trouble> {
    let damaged = |why: &str| Trouble::Damaged(why.to_owned());
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER {
        return Err(damaged("its header is longer than any of ours"));
    }
    let mut text = vec![0; length as usize];
    from.read_exact(&mut text)?;
    let header: Metadata = serde_json::from_slice(&text)
        .map_err(|error| Trouble::Damaged(format!("its header: {error}")))?;
    let about = |key: &str| header.metadata().as_ref().and_then(|about| about.get(key));
    if about("format").map(String::as_str) != Some(FORMAT)
        || about("name").map(String::as_str) != Some(name)
    {
        return Err(damaged("it is no session, or another one"));
    }
    let number = about("version").and_then(|text| text.parse().ok());
    let (Some(number), Some(hash)) = (number, about("xxh3")) else {
        return Err(damaged("its header says no version, or no hash"));
    };
    let tensor = |name: &str| header.info(name);
    let Some(keys) = tensor("keys") else { return Err(damaged("it has no keys")) };
    let (&[heads, n, dim], Some(dtype)) = (&keys.shape[..], Dtype::of(keys.dtype)) else {
        return Err(damaged("its keys have another shape or type than any of ours"));
    };
    let mut layout = Layout { dtype, heads, dim, values: None };
    if let Some(values) = tensor("values") {
        let &[value_heads, value_n, width] = &values.shape[..] else {
            return Err(damaged("its values have another shape than any of ours"));
        };
        if (value_heads, value_n, values.dtype) != (heads, n, keys.dtype)
            || !LENGTHS.contains(&width)
        {
            return Err(damaged("its values do not go with its keys"));
        }
        layout.values = Some(width);
    }
    if !LENGTHS.contains(&heads) || !LENGTHS.contains(&dim) || dtype == Dtype::F64 {
        return Err(damaged("its keys have another shape or type than any of ours"));
    }
    let start = 8 + length;
    let have = file.metadata()?.len();
    if header.tensors().len() != 1 + usize::from(layout.values.is_some())
        || have != start + header.data_len() as u64
        || keys.data_offsets.0 != 0
    {
        return Err(damaged("it is shorter or longer than it says"));
    }
    Ok(Head { outline: Outline { number, layout, n }, hash: hash.clone() })
}
