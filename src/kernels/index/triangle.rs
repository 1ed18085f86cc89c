//! Entries of a symmetric matrix in memory: all rows, or of each only what is not left of the diagonal's group.

use crate::kernels::isa::LANES;

/// The places of the entries of a matrix of whole groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Triangle {
    width: usize,
    whole: bool,
}

impl Triangle {
    /// Returns the number of entries of a matrix without those left of the diagonal's groups.
    pub(crate) fn packed(width: usize) -> usize {
        width * (width + LANES) / 2
    }

    /// Returns the places of a matrix of so many entries, all or packed; `None` of another number.
    pub(crate) fn of(width: usize, entries: usize) -> Option<Self> {
        let whole = entries == width * width;
        (whole || entries == Self::packed(width)).then_some(Triangle { width, whole })
    }

    /// Returns the place of the first diagonal entry of a group of rows, and the distance between rows of that group.
    #[inline(always)]
    pub(super) fn group(self, group: usize) -> (usize, usize) {
        let Triangle { width, whole } = self;
        let left = group * LANES;
        if whole {
            return (left * width + left, width);
        }
        // Groups before it are shorter from one to the next by a group of columns.
        let before = group * width - LANES / 2 * group * group.saturating_sub(1);
        (LANES * before, width - left)
    }

    /// Returns the places of the entries of the diagonal.
    pub(crate) fn diagonal(self) -> impl Iterator<Item = usize> {
        (0..self.width / LANES).flat_map(move |group| {
            let (start, stride) = self.group(group);
            (start..).step_by(stride + 1).take(LANES)
        })
    }

    /// Returns the places of the entries of a row from the diagonal's group on.
    pub(crate) fn row(self, row: usize) -> std::ops::Range<usize> {
        let group = row / LANES;
        let (start, stride) = self.group(group);
        let start = start + row % LANES * stride;
        start..start + self.width - group * LANES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_has_a_place_of_its_own() {
        for width in [16, 32, 48, 128] {
            let packed = Triangle::of(width, Triangle::packed(width)).unwrap();
            let places: Vec<usize> = (0..width).flat_map(|row| packed.row(row)).collect();
            assert!(places.iter().copied().eq(0..Triangle::packed(width)), "{width}");
            let diagonal = (0..width).map(|row| packed.row(row).start + row % LANES);
            assert!(packed.diagonal().eq(diagonal));
            let whole = Triangle::of(width, width * width).unwrap();
            let row = |row| row * width + row / LANES * LANES..(row + 1) * width;
            assert!((0..width).all(|at| whole.row(at) == row(at)));
            assert_eq!(Triangle::of(width, width * width + 1), None);
        }
    }
}
