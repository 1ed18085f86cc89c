//! Bytes of one head that grow at their end while others read what is there.

use append_only_bytes::{AppendOnlyBytes, BytesSlice};

/// Room for numbers, at an address where they can be read as such; it never moves.
pub(super) struct Grown {
    bytes: AppendOnlyBytes,
    /// Bytes before the first number.
    start: usize,
    room: usize,
}

/// No number is longer.
const ALIGNED: usize = 8;

impl Grown {
    pub(super) fn with_room(room: usize) -> Self {
        let mut bytes = AppendOnlyBytes::with_capacity(room + ALIGNED);
        let start = bytes.as_bytes().as_ptr().align_offset(ALIGNED).min(ALIGNED);
        bytes.push_slice(&[0; ALIGNED][..start]);
        Grown { bytes, start, room }
    }

    /// Bytes that still fit.
    pub(super) fn left(&self) -> usize {
        self.room - (self.bytes.len() - self.start)
    }

    /// Appends what fits; more is a mistake of ours.
    pub(super) fn push(&mut self, more: &[u8]) {
        assert!(more.len() <= self.left(), "readers would see memory move");
        self.bytes.push_slice(more);
    }

    /// What is there now. It stays as it is, and lives as long as somebody reads it.
    pub(super) fn so_far(&self) -> BytesSlice {
        self.bytes.slice(self.start..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_stays_while_more_comes() {
        let mut grown = Grown::with_room(40);
        grown.push(bytemuck::bytes_of(&[1u64, 2]));
        let before = grown.so_far();
        let reader = std::thread::spawn(move || {
            for _ in 0..1000 {
                assert_eq!(bytemuck::cast_slice::<u8, u64>(before.as_bytes()), [1, 2]);
            }
            before.as_bytes().as_ptr().addr()
        });
        for number in 3..6u64 {
            grown.push(bytemuck::bytes_of(&number));
        }
        assert_eq!(grown.left(), 0);
        let now = grown.so_far();
        assert_eq!(bytemuck::cast_slice::<u8, u64>(now.as_bytes()), [1, 2, 3, 4, 5]);
        assert_eq!(reader.join().unwrap(), now.as_bytes().as_ptr().addr());
    }
}
