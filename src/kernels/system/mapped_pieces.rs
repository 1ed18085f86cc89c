//! Pieces of files, mapped side by side: an array may begin in one file and continue in another.

use std::io;

/// Bytes of a file, and their destination. All numbers but the descriptor are multiples of the page size.
#[derive(Debug, Clone, Copy)]
pub struct MappedPiece {
    /// Offset in the memory.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
    /// Descriptor of the open file.
    pub descriptor: i32,
    /// Offset in the file.
    pub offset: u64,
    /// `true` to write changes of the memory to the file; else they are private to this process.
    pub shared: bool,
}

/// Range of addresses with pieces of files in it. It is unchanged until dropped.
///
/// It returns an address and no memory. Whoever makes a slice there must ensure that this lives as long, that nobody
/// writes there meanwhile, and that the files are not truncated: a read behind the end of a file kills the process.
#[derive(Debug)]
pub struct MappedPieces {
    start: usize,
    len: usize,
}

impl MappedPieces {
    /// Maps the pieces.
    ///
    /// # Errors
    /// The error of the system, or [`io::ErrorKind::InvalidInput`] for a piece that is outside of the range or reaches
    /// behind the last page of its file.
    #[cfg(unix)]
    pub fn new(len: usize, pieces: &[MappedPiece]) -> io::Result<Self> {
        use libc::{MAP_ANON, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE};
        let fits =
            |piece: &MappedPiece| piece.at.checked_add(piece.len).is_some_and(|end| end <= len);
        if len == 0 || !pieces.iter().all(fits) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for piece in pieces {
            let end = piece.offset.checked_add(piece.len as u64);
            if end.is_none_or(|end| end > pages_end(piece.descriptor).unwrap_or(0)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
        }
        // SAFETY: new addresses, of the system's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                PROT_NONE,
                MAP_PRIVATE | MAP_ANON | MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // From here on dropped on failure, with all pieces.
        let room = Self { start: start as usize, len };
        for piece in pieces {
            let how = if piece.shared { MAP_SHARED } else { MAP_PRIVATE | MAP_NORESERVE };
            let offset = libc::off_t::try_from(piece.offset).map_err(io::Error::other)?;
            // SAFETY: the piece takes the place of addresses that were reserved above, and that nobody has been told of yet.
            let at = unsafe {
                libc::mmap(
                    (room.start + piece.at) as *mut libc::c_void,
                    piece.len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    how | MAP_FIXED,
                    piece.descriptor,
                    offset,
                )
            };
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(room)
    }

    /// Fails: other systems cannot map files side by side.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(unix))]
    pub fn new(_len: usize, _pieces: &[MappedPiece]) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the first address.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Returns the number of bytes.
    #[allow(clippy::len_without_is_empty)] // there is none without bytes
    pub fn len(&self) -> usize {
        self.len
    }

    /// Releases the pages: they no longer count as memory of the process, and are read again from their files. Changes
    /// to pieces that are not shared are lost.
    pub fn let_go(&self) {
        #[cfg(unix)]
        // SAFETY: these addresses were mapped by `new`; what is in the files is read again from there.
        unsafe {
            libc::madvise(self.start as *mut libc::c_void, self.len, libc::MADV_DONTNEED);
        }
    }
}

/// Returns the offset of the end of the last page of an open file.
#[cfg(unix)]
fn pages_end(descriptor: i32) -> Option<u64> {
    let mut about = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: any number may be asked about. What is written is valid where there is such a file, and so are zeros.
    let about =
        unsafe { (libc::fstat(descriptor, about.as_mut_ptr()) == 0).then(|| about.assume_init())? };
    // SAFETY: a query without side effects; -1 if there is no answer.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    u64::try_from(about.st_size).ok()?.checked_next_multiple_of(page)
}

#[cfg(unix)]
impl Drop for MappedPieces {
    fn drop(&mut self) {
        // SAFETY: these addresses were mapped by `new`, and whoever reads there holds on to this.
        unsafe { libc::munmap(self.start as *mut libc::c_void, self.len) };
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    /// Returns the byte at a place of the pieces.
    fn byte(pieces: &MappedPieces, at: usize) -> u8 {
        assert!(at < pieces.len());
        // SAFETY: a byte of a piece that is mapped.
        unsafe { *((pieces.start() + at) as *const u8) }
    }

    #[test]
    fn pieces_of_two_files_lie_side_by_side() {
        // A whole number of pages on every system.
        const PAGE: usize = 1 << 16;
        let directory = std::env::temp_dir();
        let files = [1u8, 5].map(|first| {
            let path = directory.join(format!("certk-pieces-{}-{first}", std::process::id()));
            let mut options = std::fs::File::options();
            let file = options.read(true).write(true).create_new(true).open(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            for (i, value) in (first..first + 4).enumerate() {
                file.write_all_at(&vec![value; PAGE], (i * PAGE) as u64).unwrap();
            }
            file
        });
        let piece = |at, len, file: usize, offset| MappedPiece {
            at: at * PAGE,
            len: len * PAGE,
            descriptor: files[file].as_raw_fd(),
            offset: (offset * PAGE) as u64,
            shared: file == 1,
        };
        let pieces =
            MappedPieces::new(6 * PAGE, &[piece(0, 2, 0, 1), piece(2, 1, 1, 3), piece(4, 1, 1, 0)])
                .unwrap();
        let seen = |places: &[usize]| -> Vec<u8> {
            places.iter().map(|&place| byte(&pieces, place * PAGE + 7)).collect()
        };
        assert_eq!(seen(&[0, 1, 2, 4]), [2, 3, 8, 5]);
        files[1].write_all_at(&[77], 7).unwrap();
        pieces.let_go();
        assert_eq!(seen(&[0, 1, 2, 4]), [2, 3, 8, 77]);
        assert!(MappedPieces::new(PAGE, &[piece(0, 2, 0, 0)]).is_err());
        assert!(MappedPieces::new(0, &[]).is_err());
        // Reading behind the end of a file would end the process.
        for past in [piece(0, 1, 0, 4), piece(0, 3, 0, 2)] {
            let error = MappedPieces::new(4 * PAGE, &[past]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        }
        assert!(
            MappedPieces::new(PAGE, &[MappedPiece { descriptor: -1, ..piece(0, 1, 0, 0) }])
                .is_err()
        );
    }
}
