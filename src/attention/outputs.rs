//! Outputs of attention, in the precision asked for.

use std::ops::Range;

use half::{bf16, f16};

use super::options::Precision;
use crate::rows::{Data, Number};
use crate::runtime::held::Held;
use crate::runtime::recycled::Recycled;

/// Outputs of attention, one vector after another, stored in the chosen [`Precision`].
///
/// They are computed in f64 and rounded to it (f16 and bf16 by way of f32).
///
/// ```
/// # use certk_rs::{AttentionOptions, Budget, Outputs, Precision, Vectors, attention};
/// # let q = Vectors::new("q", &[4.0_f32, 0.0], &[1, 1, 2])?;
/// # let k = Vectors::new("k", &[3.0_f32, 0.0, 0.0, 3.0, -3.0, 0.0], &[1, 3, 2])?;
/// # let v = Vectors::new("v", &[0.1_f32, 20.0, 30.0], &[1, 3, 1])?;
/// let options = AttentionOptions::new().precision(Precision::F32);
/// let found = attention(&q, &k, &v, Budget::TailMass(&[0.0]), None, &options)?;
/// let Outputs::F32(stored) = &found.out else { panic!("f32 was asked for") };
/// assert_eq!(found.out.as_slice::<f32>(), Some(&stored[..]));
/// assert_eq!(found.out.to_f64(), [f64::from(stored[0])]);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Outputs {
    /// Double precision.
    F64(Vec<f64>),
    /// Single precision.
    F32(Vec<f32>),
    /// IEEE half precision.
    F16(Vec<f16>),
    /// Brain floating point.
    Bf16(Vec<bf16>),
}

impl Default for Outputs {
    /// Returns no outputs, in f64.
    fn default() -> Self {
        Outputs::empty(Precision::F64)
    }
}

/// Runs generic code for the vector of numbers.
macro_rules! for_outputs {
    ($outputs:expr, $all:ident => $work:expr) => {
        match $outputs {
            Outputs::F64($all) => $work,
            Outputs::F32($all) => $work,
            Outputs::F16($all) => $work,
            Outputs::Bf16($all) => $work,
        }
    };
}

impl<'a> From<&'a Outputs> for Data<'a> {
    fn from(outputs: &'a Outputs) -> Self {
        for_outputs!(outputs, all => all.into())
    }
}

impl Outputs {
    /// Returns the number of entries, of all vectors together.
    pub fn len(&self) -> usize {
        for_outputs!(self, all => all.len())
    }

    /// Returns `true` if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the precision of the stored entries.
    pub fn precision(&self) -> Precision {
        match self {
            Outputs::F64(_) => Precision::F64,
            Outputs::F32(_) => Precision::F32,
            Outputs::F16(_) => Precision::F16,
            Outputs::Bf16(_) => Precision::Bf16,
        }
    }

    /// Returns the entry at `i`, exactly, or `None` past the end.
    pub fn get(&self, i: usize) -> Option<f64> {
        Data::from(self).get(i)
    }

    /// Returns all entries, exactly.
    pub fn to_f64(&self) -> Vec<f64> {
        let mut wide = Vec::new();
        self.widen(0..self.len(), &mut wide);
        wide
    }

    /// Returns the stored entries, if they are of this type: `as_slice::<f32>()`.
    pub fn as_slice<T: Number>(&self) -> Option<&[T]> {
        T::slice(self.into())
    }

    fn empty(precision: Precision) -> Self {
        match precision {
            Precision::F64 => Outputs::F64(Vec::new()),
            Precision::F32 => Outputs::F32(Vec::new()),
            Precision::F16 => Outputs::F16(Vec::new()),
            Precision::Bf16 => Outputs::Bf16(Vec::new()),
        }
    }

    /// Makes this `count` zeros of a precision. Memory for numbers of this precision is reused.
    pub(super) fn reset(&mut self, precision: Precision, count: usize) {
        if self.precision() != precision {
            *self = Outputs::empty(precision);
        }
        self.clear();
        match self {
            Outputs::F64(all) => all.resize(count, 0.0),
            Outputs::F32(all) => all.resize(count, 0.0),
            Outputs::F16(all) => all.resize(count, f16::ZERO),
            Outputs::Bf16(all) => all.resize(count, bf16::ZERO),
        }
    }

    /// Stores entries from `at` on. They have this precision already, so that none changes.
    pub(super) fn write(&mut self, at: usize, entries: &[f64]) {
        fn narrow<T>(to: &mut [T], entries: &[f64], one: impl Fn(f64) -> T) {
            to.iter_mut().zip(entries).for_each(|(to, &entry)| *to = one(entry));
        }
        let places = at..at + entries.len();
        match self {
            Outputs::F64(all) => all[places].copy_from_slice(entries),
            Outputs::F32(all) => narrow(&mut all[places], entries, |entry| entry as f32),
            Outputs::F16(all) => {
                narrow(&mut all[places], entries, |entry| f16::from_f32(entry as f32));
            }
            Outputs::Bf16(all) => {
                // The rounded number's first bits: compilers vectorize this.
                let first = |entry| ((entry as f32).to_bits() >> 16) as u16;
                narrow(&mut all[places], entries, |entry| bf16::from_bits(first(entry)));
            }
        }
    }

    /// Replaces the contents of `to` by the entries at some places.
    pub(super) fn widen(&self, places: Range<usize>, to: &mut Vec<f64>) {
        to.clear();
        match self {
            Outputs::F64(all) => to.extend_from_slice(&all[places]),
            Outputs::F32(all) => to.extend(all[places].iter().map(|&entry| f64::from(entry))),
            Outputs::F16(all) => to.extend(all[places].iter().map(|&entry| f64::from(entry))),
            Outputs::Bf16(all) => {
                let wide =
                    |entry: &bf16| f64::from(f32::from_bits(u32::from(entry.to_bits()) << 16));
                to.extend(all[places].iter().map(wide));
            }
        }
    }
}

impl Held for Outputs {
    fn held(&self) -> usize {
        for_outputs!(self, all => all.held())
    }
}

impl Recycled for Outputs {
    fn clear(&mut self) {
        for_outputs!(self, all => all.clear());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Attention, AttentionOptions, Budget, attention};
    use crate::rows::Vectors;

    const PRECISIONS: [Precision; 4] =
        [Precision::F64, Precision::F32, Precision::F16, Precision::Bf16];

    /// Three outputs of five entries that no narrower precision holds, some of them subnormal in f16.
    fn attended(precision: Precision) -> Attention {
        let numbers = |count: usize, step: f64| -> Vec<f32> {
            (0..count).map(|i| ((i as f64 * step).fract() - 0.5) as f32 * 3.0).collect()
        };
        let (queries, keys) = (numbers(3 * 8, 0.618), numbers(20 * 8, 0.755));
        let mut values = numbers(20 * 5, 0.414);
        values.iter_mut().step_by(5).for_each(|entry| *entry *= 1e-6);
        let q = Vectors::new("q", &queries, &[3, 8]).unwrap();
        let k = Vectors::new("k", &keys, &[20, 8]).unwrap();
        let v = Vectors::new("v", &values, &[20, 5]).unwrap();
        let options = AttentionOptions::new().precision(precision);
        attention(&q, &k, &v, Budget::TailMass(&[0.01]), None, &options).unwrap()
    }

    #[test]
    fn stored_numbers_are_those_of_f64_rounded() {
        let wide = attended(Precision::F64);
        let Outputs::F64(exact) = &wide.out else { panic!("f64 was asked for") };
        let single: Vec<f32> = exact.iter().map(|&entry| entry as f32).collect();
        let half: Vec<f16> = single.iter().map(|&entry| f16::from_f32(entry)).collect();
        let brain: Vec<bf16> = single.iter().map(|&entry| bf16::from_f32(entry)).collect();
        assert_eq!(attended(Precision::F32).out, Outputs::F32(single));
        assert_eq!(attended(Precision::F16).out, Outputs::F16(half));
        assert_eq!(attended(Precision::Bf16).out, Outputs::Bf16(brain));
    }

    #[test]
    fn every_reader_sees_the_same_numbers() {
        for precision in PRECISIONS {
            let found = attended(precision);
            let wide = found.out.to_f64();
            assert_eq!((found.out.precision(), found.out.len(), wide.len()), (precision, 15, 15));
            for (i, &entry) in wide.iter().enumerate() {
                assert_eq!(found.out.get(i), Some(entry));
                assert_eq!(found.row(i / 5)[i % 5], entry);
            }
            assert_eq!(found.out.get(15), None);
            assert!(!found.out.is_empty() && Outputs::empty(precision).is_empty());
            let typed = [
                found.out.as_slice::<f64>().is_some(),
                found.out.as_slice::<f32>().is_some(),
                found.out.as_slice::<f16>().is_some(),
                found.out.as_slice::<bf16>().is_some(),
            ];
            assert_eq!(typed, PRECISIONS.map(|other| other == precision));
        }
    }

    /// A result that is given back may be of another precision than the next call asks for.
    #[test]
    fn memory_of_another_precision_is_no_harm() {
        let fresh = PRECISIONS.map(attended);
        for first in &fresh {
            for second in &fresh {
                first.clone().recycle();
                assert_eq!(&attended(second.out.precision()), second);
            }
        }
    }

    #[cfg(feature = "ndarray")]
    #[test]
    fn views_are_of_the_stored_type() {
        let found = attended(Precision::F16);
        let view = found.outputs::<f16>().unwrap();
        assert_eq!(view.dim(), (3, 5));
        assert_eq!(f64::from(view[[2, 4]]), found.row(2)[4]);
        assert!(found.outputs::<bf16>().is_none());
    }
}
