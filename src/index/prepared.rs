//! A query in the frame of codes, with what its own codes lose.

use super::frame::OwnFrame;
use super::gram::{CodeError, Gram};
use crate::kernels::{BIAS, Coarse, STEP, Simd, Step};
use crate::numerics::certified_sums::Compensated;
use crate::runtime::reused::Reused;

/// The most that the absolute values of a query's numbers may add up to: times 127 it must be below 2^31.
const MOST: f64 = 16_700_000.0;

/// The largest number of a query, so that its high half is a signed byte.
const TOP: f64 = 32_639.0;

/// Squares of a query's entries, and of what their numbers leave out, are normal in f64 if the largest is in this range.
const SQUARED: std::ops::Range<f64> = 1e-100..1e100;

/// The nearest whole number of one that is far below 2^51: the sum has no digits behind the point. The function of the standard
/// library is a call where nothing is known of the processor.
fn whole(number: f64) -> f64 {
    const SHIFT: f64 = 1.5 * (1u64 << 52) as f64;
    (number + SHIFT) - SHIFT
}

/// A query as codes are scored with, and what the scores are worth.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub(super) steps: Reused<Step>,
    pub(super) correction: i32,
    pub(super) factor: f32,
    pub(crate) code_error: CodeError,
    /// The same of scores by both planes, where there is a low one.
    pub(crate) fine_error: Option<CodeError>,
    /// Offset of scores by codes: the scale times the product of the query with the mean, within f64 roundings.
    pub(crate) offset: f64,
}

impl Prepared {
    /// A query in the frame of keys; `scale` multiplies all products.
    pub(super) fn new(
        simd: Simd,
        query: &[f64],
        scale: f64,
        frame: &OwnFrame<'_>,
        (gram, low): (&Gram<'_>, Option<&Gram<'_>>),
    ) -> Self {
        let dim = query.len();
        let (moved, size) = frame.query(query);
        let factor = scale / size;
        let top = moved.iter().fold(0.0, |top: f64, entry| top.max(entry.abs()));
        let sum: f64 = moved.iter().map(|entry| entry.abs()).sum();
        let unit = (top / TOP).max(sum / (MOST - dim as f64)).max(f64::MIN_POSITIVE);
        let numbers: Reused<i16> = moved.iter().map(|entry| whole(entry / unit) as i16).collect();
        let unresolved: f64 = moved
            .iter()
            .zip(&numbers)
            .map(|(entry, &number)| entry - unit * f64::from(number))
            .map(|rest| rest * rest)
            .sum();
        // The subtraction above may be off by a rounding of its operands, the sum by one for each term.
        let terms = 1e-12 + dim as f64 * f64::EPSILON;
        let unresolved = unresolved.sqrt() * (1.0 + terms) + sum * (1.0 + terms) * 1e-15;
        let correction: i32 = numbers
            .iter()
            .fold(0, |sum: i32, &number| sum.wrapping_sub(i32::from(BIAS) * i32::from(number)));
        let mut padded = numbers;
        padded.resize(dim.next_multiple_of(STEP), 0);
        // A plain sum of many terms would lose more than `Query` allows for.
        let products = query.iter().zip(&*frame.mean).map(|(q, m)| q * f64::from(*m));
        let offset = products.collect::<Compensated>().value();
        let computed = (factor * unit) as f32;
        let slip = (f64::from(computed) - factor * unit).abs() / unit + factor.abs() * 1e-15;
        let known = top == 0.0 || SQUARED.contains(&top);
        let how = (unresolved, (factor, slip));
        let fine_error = low.map(|low| {
            if known {
                low.fine_error(gram, simd, &moved, how, frame.moves() + 2)
            } else {
                CodeError::NOTHING
            }
        });
        let code_error = if known {
            gram.code_error(simd, &moved, unresolved, (factor, slip), frame.moves())
        } else {
            CodeError::NOTHING
        };
        Prepared {
            steps: padded.as_chunks::<STEP>().0.iter().map(|four| Step::new(*four)).collect(),
            correction,
            factor: computed,
            code_error,
            fine_error,
            offset: scale * offset,
        }
    }

    /// Returns the numbers that codes are multiplied by.
    pub(super) fn numbers(&self) -> impl Iterator<Item = i16> {
        self.steps.iter().flat_map(Step::numbers)
    }

    pub(crate) fn coarse(&self) -> Coarse<'_> {
        Coarse { steps: &self.steps, correction: self.correction, factor: self.factor }
    }
}
