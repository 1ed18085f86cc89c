//! Weighted sums of stored vectors.
//!
//! SAFETY: what is `unsafe` here asks for a CPU with the level's instructions. Lengths are checked by the methods of
//! [`Simd`] that run a pass.

use crate::kernels::isa::{Element, LANES, Lanes, LanesOf, Level, Scalar};
use crate::kernels::matrix::{AHEAD, Keys, Picked};
use crate::kernels::simd::{Pass, Simd};

/// Groups of entries summed at a time.
const WIDTH: usize = 4;

struct Average<'a, E, W> {
    values: Keys<'a, E>,
    picked: Picked<'a>,
    weights: &'a [W],
    sums: &'a mut [f64],
}

impl<E: Element, W: Copy + Into<f64>> Average<'_, E, W> {
    /// Adds rows from `from` on, as many as there are weights, to `G` groups of sums from an entry on.
    #[inline(always)]
    unsafe fn groups<L: Level, const G: usize>(
        &mut self,
        from: usize,
        weights: &[E::Scalar],
        at: usize,
    ) {
        // The first of these calls prefetches rows.
        let fetched = match self.picked {
            Picked::Listed(list) if at == 0 => list.get(from + AHEAD..).unwrap_or(&[]),
            _ => &[],
        };
        let mut sums = [LanesOf::<L, E>::splat(E::Scalar::default()); G];
        for (i, &weight) in weights.iter().enumerate() {
            if let Some(&ahead) = fetched.get(i) {
                self.values.fetch::<L>(ahead as usize);
            }
            let row = self.values.row(self.picked.row(from + i));
            let weight = LanesOf::<L, E>::splat(weight);
            for (g, sum) in sums.iter_mut().enumerate() {
                *sum = Keys::group::<L>(row, at + g * LANES).mul_add(weight, *sum);
            }
        }
        for (g, sum) in sums.into_iter().enumerate() {
            let to = &mut self.sums[at + g * LANES..][..LANES];
            E::double::<L>(sum).add(L::F64::load(to.as_ptr())).store(to.as_mut_ptr());
        }
    }
}

impl<E: Element, W: Copy + Into<f64>> Pass for Average<'_, E, W> {
    #[inline(always)]
    unsafe fn run<L: Level>(mut self) {
        let width = self.sums.len();
        let whole = width / (WIDTH * LANES) * (WIDTH * LANES);
        let of = self.weights;
        for (chunk, of) in of.chunks(LANES).enumerate() {
            let mut weights = [E::Scalar::default(); LANES];
            for (weight, &of) in weights.iter_mut().zip(of) {
                *weight = E::Scalar::nearest(of.into());
            }
            let (from, weights) = (chunk * LANES, &weights[..of.len()]);
            for at in (0..whole).step_by(WIDTH * LANES) {
                self.groups::<L, WIDTH>(from, weights, at);
            }
            for at in (whole..width).step_by(LANES) {
                self.groups::<L, 1>(from, weights, at);
            }
        }
    }
}

impl Simd {
    /// Adds weighted rows to sums in whole groups: sixteen terms at a time in the rows' own precision, with weights
    /// rounded to it, then in f64. Of a list as many rows are read as there are weights; the next ones are prefetched.
    pub(crate) fn average<E: Element, W: Copy + Into<f64>>(
        self,
        values: Keys<'_, E>,
        picked: Picked<'_>,
        weights: &[W],
        sums: &mut [f64],
    ) {
        assert!(sums.len() == values.dim().next_multiple_of(LANES));
        if let Picked::Listed(list) = picked {
            assert!(list.len() >= weights.len());
        }
        self.run(Average { values, picked, weights, sums });
    }
}

struct Farthest<'a, E> {
    values: Keys<'a, E>,
    count: usize,
    centre: &'a [f64],
}

impl<E: Element> Pass<f64> for Farthest<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Level>(self) -> f64 {
        let mut most = 0.0;
        for i in 0..self.count {
            let row = self.values.row(i);
            let square = {
                let mut sum = L::F64::splat(0.0);
                for (g, centre) in self.centre.chunks_exact(LANES).enumerate() {
                    let value = E::double::<L>(Keys::group::<L>(row, g * LANES));
                    let away = value.sub(L::F64::load(centre.as_ptr()));
                    sum = away.mul_add(away, sum);
                }
                sum.sum()
            };
            // NaN stays NaN.
            most = if square <= most { most } else { square };
            if square.is_nan() {
                return square;
            }
        }
        most
    }
}

impl Simd {
    /// Returns the largest squared distance of rows from a centre, in f64; NaN if a row is not finite.
    pub(crate) fn farthest<E: Element>(
        self,
        values: Keys<'_, E>,
        count: usize,
        centre: &[f64],
    ) -> f64 {
        assert!(centre.len() == values.dim().next_multiple_of(LANES));
        self.run(Farthest { values, count, centre })
    }
}
