//! Concatenation of lists of positions.

use std::mem::MaybeUninit;

use super::huge_pages;

/// Number of positions from which several threads copy faster than one.
const SHARED: usize = 1 << 16;

/// Part of a list, and its destination.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    from: &'a [u32],
    to: &'a mut [MaybeUninit<u32>],
}

/// Piece of this many positions that has been copied.
#[derive(Debug)]
pub(crate) struct Copied(usize);

impl Piece<'_> {
    pub(crate) fn copy(self) -> Copied {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            to.write(*from);
        }
        Copied(self.from.len())
    }
}

/// Appends all parts in order. Long ones are copied by `share_out` on several threads: the first touch of new memory
/// costs more than the copy.
///
/// # Panics
/// If `share_out` omits a piece.
pub(crate) fn append_all(
    to: &mut Vec<u32>,
    parts: &[&[u32]],
    share_out: impl FnOnce(Vec<Piece<'_>>) -> Vec<Copied>,
) {
    let total = parts.iter().map(|part| part.len()).sum();
    to.reserve(total);
    huge_pages::ask_for(to);
    if total < SHARED || parts.len() < 2 {
        for part in parts {
            to.extend_from_slice(part);
        }
        return;
    }
    let mut room = &mut to.spare_capacity_mut()[..total];
    let mut pieces = Vec::with_capacity(parts.len());
    for &from in parts {
        let (place, behind) = room.split_at_mut(from.len());
        pieces.push(Piece { from, to: place });
        room = behind;
    }
    let copied: usize = share_out(pieces).into_iter().map(|Copied(len)| len).sum();
    assert_eq!(copied, total, "every piece is copied");
    // SAFETY: the pieces are the first `total` places behind the old end, cut in order. Only `copy` makes a `Copied`, which
    // consumes its piece and writes all of it, so lengths that sum to `total` are those of all pieces.
    unsafe { to.set_len(to.len() + total) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_order() {
        for scale in [1, 7000] {
            let parts: Vec<Vec<u32>> =
                (0..9).map(|i| (0..i * scale).map(|j| 1000 * i + j).collect()).collect();
            let lent: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
            let mut all = vec![5];
            append_all(&mut all, &lent, |pieces| {
                pieces.into_iter().rev().map(Piece::copy).collect()
            });
            assert_eq!(all, [vec![5], parts.concat()].concat());
        }
    }

    #[test]
    #[should_panic(expected = "every piece is copied")]
    fn no_piece_is_left_out() {
        let part = vec![1; SHARED];
        append_all(&mut vec![], &[&part, &part], |pieces| {
            pieces.into_iter().skip(1).map(Piece::copy).collect()
        });
    }
}
