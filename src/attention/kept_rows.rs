//! Exact keys and values that are kept beside the codes of all.

use super::exact_rows::ExactRows;
use crate::error::{Error, Place};
use crate::index::{Coded, for_coded_dtype, matrix};
use crate::rows::Vectors;
use half::{bf16, f16};

/// Exact keys and values of some positions of each head, beside indexes of all: listed ones, of as many as each head has, and
/// those of the last positions of every head.
///
/// Rows of the heads lie end to end, without padding.
///
/// ```
/// use certk_rs::{KeptRows, Vectors};
/// // Of two heads the keys at 4 and 7, and at 5.
/// let rows = Vectors::new("rows", &[0.5_f32; 3 * 2], &[3, 2])?;
/// let kept = KeptRows::new(&rows, &rows, &[4, 7, 5], &[0, 2, 3])?;
/// assert!(KeptRows::new(&rows, &rows, &[7, 4, 5], &[0, 2, 3]).is_err());
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KeptRows<'a> {
    pub(super) keys: Vectors<'a>,
    pub(super) values: Vectors<'a>,
    positions: &'a [u32],
    starts: &'a [usize],
    pub(super) tail: Option<(Vectors<'a>, Vectors<'a>)>,
}

impl<'a> KeptRows<'a> {
    /// Takes the keys `(rows, d)` and values `(rows, d_v)` of all heads, one head behind the other; the position of each row
    /// among the keys of its head, ascending; and where the rows of each head start, with the number of rows at the end.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn new(
        keys: &Vectors<'a>,
        values: &Vectors<'a>,
        positions: &'a [u32],
        starts: &'a [usize],
    ) -> Result<Self, Error> {
        let rows = positions.len();
        for vectors in [keys, values] {
            if !vectors.batch().is_empty() || vectors.len() != rows {
                return Err(vectors.misfit(format!(
                    "there are {rows} positions: pass (rows, d), a row for each"
                )));
            }
        }
        let wrong =
            |problem: String| Error::Shape { argument: "positions", shape: vec![rows], problem };
        let ends = starts.first() == Some(&0) && starts.last() == Some(&rows);
        if !ends || !starts.is_sorted() {
            return Err(wrong(format!("starts of heads ascend from 0 to {rows}: {starts:?}")));
        }
        for (head, ends) in starts.windows(2).enumerate() {
            let of_head = &positions[ends[0]..ends[1]];
            if let Some(at) = of_head.windows(2).position(|pair| pair[0] >= pair[1]) {
                let (a, b) = (of_head[at], of_head[at + 1]);
                return Err(wrong(format!("those of head {head} must ascend: {b} follows {a}")));
            }
        }
        Ok(KeptRows { keys: keys.clone(), values: values.clone(), positions, starts, tail: None })
    }

    /// Adds the keys `(..., m, d)` and values `(..., m, d_v)` of the last m positions of all heads.
    #[must_use]
    pub fn with_tail(self, keys: &Vectors<'a>, values: &Vectors<'a>) -> Self {
        KeptRows { tail: Some((keys.clone(), values.clone())), ..self }
    }

    /// Returns the rows of all heads at the last positions, or else those that are listed.
    pub(super) fn some(&self) -> (&Vectors<'a>, &Vectors<'a>) {
        let tail = self.tail.as_ref().filter(|(keys, _)| keys.len() > 0);
        tail.map_or((&self.keys, &self.values), |(keys, values)| (keys, values))
    }

    /// Judges the rows as those of keys, and of values, of so many heads.
    pub(super) fn check(
        &self,
        (batch, n): (&[usize], usize),
        [keys, values]: [(&'static str, usize); 2],
    ) -> Result<(), Error> {
        let heads: usize = batch.iter().product();
        if self.starts.len() != heads + 1 {
            let problem = format!(
                "starts has {} entries for {heads} heads: pass one more than heads",
                self.starts.len()
            );
            return Err(Error::Shape {
                argument: "starts",
                shape: vec![self.starts.len()],
                problem,
            });
        }
        let m = self.tail.as_ref().map_or(0, |(keys, _)| keys.len());
        let tails = self.tail.as_ref();
        let all = [
            (&self.keys, tails.map(|tail| &tail.0), keys),
            (&self.values, tails.map(|tail| &tail.1), values),
        ];
        for (listed, tail, (dtype, dim)) in all {
            for vectors in [Some(listed), tail].into_iter().flatten() {
                if vectors.dim() != dim {
                    return Err(vectors.misfit(format!("the index is of vectors of {dim} entries")));
                }
                if vectors.len() == 0 {
                    continue;
                }
                let stored = for_coded_dtype!(vectors, E => Ok(E::NAME))?;
                if stored != dtype {
                    let (argument, place) = (vectors.argument(), Place(vec![]));
                    let problem = format!("are {stored}, but were {dtype} when they were indexed");
                    return Err(Error::OtherKeys { argument, place, problem });
                }
            }
            if let Some(tail) = tail
                && (tail.batch() != batch || tail.len() != m || m > n)
            {
                return Err(tail.misfit(format!("pass rows of the last positions of {n}, as many keys as values, for heads {batch:?}")));
            }
        }
        for ends in self.starts.windows(2) {
            if let Some(&last) =
                self.positions[ends[0]..ends[1]].last().filter(|last| **last as usize >= n - m)
            {
                let problem = format!("{last} is not before the last {m} of {n} positions");
                return Err(Error::Shape {
                    argument: "positions",
                    shape: vec![self.positions.len()],
                    problem,
                });
            }
        }
        Ok(())
    }

    /// Returns the keys and the values of a head, of which there are `n`.
    pub(super) fn of_head<K: Coded, V: Coded>(
        &self,
        head: usize,
        n: usize,
    ) -> (ExactRows<'_, K>, ExactRows<'_, V>) {
        let (from, end) = (self.starts[head], self.starts[head + 1]);
        let positions = &self.positions[from..end];
        let rows =
            (matrix::<K>(&self.keys, 0).behind(from), matrix::<V>(&self.values, 0).behind(from));
        let (first, tail) = match &self.tail {
            Some((keys, values)) if keys.len() > 0 => {
                (n - keys.len(), (matrix::<K>(keys, head), matrix::<V>(values, head)))
            }
            _ => (n, rows),
        };
        let (keys, values) = (rows.0, rows.1);
        (
            ExactRows { listed: keys, positions, tail: tail.0, first },
            ExactRows { listed: values, positions, tail: tail.1, first },
        )
    }
}
