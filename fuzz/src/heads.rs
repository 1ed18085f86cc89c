//! Queries, keys and values of a few heads, made of a tape, and the scores that they have.

use certk_rs::{Kind, Vectors};

use super::stored::Stored;
use super::tape::{Noise, Tape};
use super::truth::{Key, Row};

/// Vectors of some heads, one after another.
#[derive(Debug)]
pub(crate) struct Matrices {
    pub(crate) stored: Stored,
    pub(crate) heads: usize,
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) shape: Vec<usize>,
}

impl Matrices {
    /// Mostly ordinary vectors, rarely any numbers.
    pub(crate) fn new(
        tape: &mut Tape<'_>,
        [heads, rows, dim]: [usize; 3],
        dtype: usize,
        is_flat: bool,
    ) -> Self {
        let n = heads * rows * dim;
        let stored = match tape.below(8) {
            7 => Stored::of_type(tape, n, dtype),
            way => {
                let mut noise = Noise::new(tape.u64());
                let size = tape.one_of(&[1.0, 0.1, 3.0, 20.0]);
                let mut numbers: Vec<f64> = (0..n).map(|_| size * noise.normal()).collect();
                if way < 3 {
                    // Entries of a few levels: scores that tie.
                    numbers.iter_mut().for_each(|x| *x = (*x / size).round() * size);
                }
                if way == 3 && n > 0 {
                    // A key far from all others.
                    let from = tape.below(heads * rows) * dim;
                    numbers[from..from + dim].iter_mut().for_each(|x| *x *= 100.0);
                }
                if way == 4 {
                    // Runs of keys that are alike.
                    for run in numbers.chunks_mut(16 * dim) {
                        let first = run[..dim].to_vec();
                        for row in run.chunks_mut(dim) {
                            row.iter_mut().zip(&first).for_each(|(x, to)| *x = to + 0.05 * *x);
                        }
                    }
                }
                Stored::narrowed(&numbers, dtype)
            }
        };
        let shape = if is_flat { vec![rows, dim] } else { vec![heads, rows, dim] };
        Matrices { stored, heads, rows, dim, shape }
    }

    pub(crate) fn vectors(&self, argument: &'static str) -> Vectors<'_> {
        Vectors::new(argument, self.stored.data(), &self.shape).unwrap()
    }

    pub(crate) fn batch(&self) -> &[usize] {
        &self.shape[..self.shape.len() - 2]
    }

    /// The same with some rows of each head only.
    pub(crate) fn part(&self, rows: std::ops::Range<usize>) -> Matrices {
        let (wide, stride) = (self.stored.wide(), self.rows * self.dim);
        let numbers: Vec<f64> = (0..self.heads)
            .flat_map(|head| &wide[head * stride..][rows.start * self.dim..rows.end * self.dim])
            .copied()
            .collect();
        let mut shape = self.shape.clone();
        let axis = shape.len() - 2;
        shape[axis] = rows.len();
        Matrices {
            stored: Stored::narrowed(&numbers, self.stored.dtype()),
            heads: self.heads,
            rows: rows.len(),
            dim: self.dim,
            shape,
        }
    }

    /// The same with other rows put in before some positions, which are those of the result where they are.
    pub(crate) fn with_others(&self, tape: &mut Tape<'_>) -> (Matrices, Vec<u32>) {
        let count = 1 + tape.below(20);
        let mut gone: Vec<u32> = (0..count).map(|_| tape.below(self.rows + count) as u32).collect();
        gone.sort_unstable();
        gone.dedup();
        // Positions of the result leave no hole at its end.
        while gone.last().is_some_and(|last| *last as usize >= self.rows + gone.len()) {
            gone.pop();
        }
        let rows = self.rows + gone.len();
        let mut noise = Noise::new(tape.u64());
        let size = tape.one_of(&[1.0, 0.1, 40.0]);
        let wide = self.stored.wide();
        let mut numbers = Vec::with_capacity(self.heads * rows * self.dim);
        for head in wide
            .chunks((self.rows * self.dim).max(1))
            .chain(std::iter::repeat(&[][..]))
            .take(self.heads)
        {
            let mut own = head.chunks(self.dim);
            for at in 0..rows as u32 {
                match (gone.binary_search(&at).is_ok(), own.len()) {
                    (false, 1..) => numbers.extend(own.next().unwrap()),
                    _ => numbers.extend((0..self.dim).map(|_| size * noise.normal())),
                }
            }
        }
        let mut shape = self.shape.clone();
        let axis = shape.len() - 2;
        shape[axis] = rows;
        let stored = Stored::narrowed(&numbers, self.stored.dtype());
        (Matrices { stored, heads: self.heads, rows, dim: self.dim, shape }, gone)
    }

    pub(crate) fn is_finite(&self) -> bool {
        self.stored.wide().iter().all(|x| x.is_finite())
    }
}

/// Limits on the keys that rows of queries see.
#[derive(Debug)]
pub(crate) struct Sight {
    pub(crate) causal: bool,
    pub(crate) lengths: Option<Vec<i64>>,
    pub(crate) mask: Option<(Vec<u8>, Vec<usize>)>,
}

impl Sight {
    pub(crate) fn new(tape: &mut Tape<'_>, queries: &Matrices, n: usize) -> Self {
        let rows = queries.heads * queries.rows;
        let causal = tape.rarely(3);
        let lengths = tape.rarely(4).then(|| {
            let count = if tape.rarely(2) { rows } else { 1 };
            (0..count).map(|_| tape.below(n + 1) as i64).collect()
        });
        let mask = tape.rarely(4).then(|| {
            let seed = u64::from(tape.u8());
            let mut axes = queries.batch().to_vec();
            axes.push(queries.rows);
            let mut strides = vec![0; axes.len()];
            let mut step = n;
            for (stride, len) in strides.iter_mut().zip(axes).rev() {
                *stride = step;
                step *= len;
            }
            let mut noise = Noise::new(seed);
            let byte = |bits: u64| if bits >> 33 & 3 == 0 { 0 } else { bits as u8 | 1 };
            ((0..rows * n).map(|_| byte(noise.bits())).collect(), strides)
        });
        Sight { causal, lengths, mask }
    }

    pub(crate) fn shows(&self, queries: &Matrices, n: usize, row: usize, key: usize) -> bool {
        let query = row % queries.rows;
        let length = self
            .lengths
            .as_ref()
            .map_or(n as i64, |lengths| lengths[if lengths.len() == 1 { 0 } else { row }]);
        (key as i64) < length
            && (!self.causal || key + queries.rows <= query + n)
            && self.mask.as_ref().is_none_or(|(bytes, _)| bytes[row * n + key] != 0)
    }
}

/// A row's scores in f64 as a row of logits, and how far each may be off.
pub(crate) fn scored(
    queries: &Matrices,
    keys: &Matrices,
    sight: &Sight,
    scale: f64,
    row: usize,
) -> Row {
    let (q, k) = (queries.stored.wide(), keys.stored.wide());
    let query = &q[row * queries.dim..][..queries.dim];
    let head = row / queries.rows / (queries.heads / keys.heads);
    let head = &k[head * keys.rows * keys.dim..][..keys.rows * keys.dim];
    let mut off = 0.0f64;
    let one = |(j, key): (usize, &[f64])| {
        let shown = sight.shows(queries, keys.rows, row, j);
        let (mut sum, mut size) = (0.0, 0.0);
        for (a, b) in query.iter().zip(key) {
            sum += a * b;
            size += (a * b).abs();
        }
        if shown {
            off = off.max(size * scale.abs());
        }
        Key { shown, number: sum, bias: 0.0 }
    };
    let list: Vec<Key> = head.chunks_exact(keys.dim).enumerate().map(one).collect();
    let mut row = Row::new(list, Kind::Logits, scale, 0.0);
    row.blur += 4.0 * (keys.dim + 4) as f64 * off * f64::EPSILON;
    if row.blur.is_nan() {
        row.blur = f64::INFINITY;
    }
    row
}
