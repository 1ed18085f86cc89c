//! Rows of scores with all that may be said of them, made of a tape, and what each row then is.

use certk_rs::{Kind, Mask, Scores};

use super::stored::Stored;
use super::tape::Tape;
use super::truth::{Key, Row};

/// An owned call's rows.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) stored: Stored,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    indptr: Option<Vec<i64>>,
    pub(crate) kind: Kind,
    pub(crate) scale: f64,
    mask: Option<Laid>,
    lengths: Option<Vec<i64>>,
    causal: Option<i64>,
    pub(crate) radius: Option<Vec<f64>>,
}

#[derive(Debug)]
struct Laid {
    what: What,
    strides: Vec<usize>,
}

#[derive(Debug)]
enum What {
    Bytes(Vec<u8>),
    Biases(Stored),
}

/// Strides of batch axes before rows of `n`: close together, apart, or of which some axes repeat; and how much they need.
pub(crate) fn strides(tape: &mut Tape<'_>, batch: &[usize], n: usize) -> (Vec<usize>, usize) {
    let apart = if tape.rarely(3) { tape.below(5) } else { 0 };
    let mut strides = vec![0; batch.len()];
    let mut step = n + apart;
    for (stride, &len) in strides.iter_mut().zip(batch).rev() {
        if tape.rarely(6) {
            continue;
        }
        *stride = step;
        step *= len;
    }
    let reach = batch.iter().zip(&strides).map(|(len, stride)| (len.max(&1) - 1) * stride);
    let need = reach.sum::<usize>() + n;
    (strides, need)
}

pub(crate) fn length(tape: &mut Tape<'_>) -> usize {
    match tape.below(8) {
        0..=3 => tape.below(24),
        4 | 5 => tape.below(300),
        6 => tape.below(5000),
        _ => {
            let near = [16, 64, 512, 1024, 4096, 8192, 65_536];
            tape.one_of(&near) + tape.below(5) - 2
        }
    }
}

impl Rows {
    pub(crate) fn new(tape: &mut Tape<'_>) -> Self {
        let n = length(tape);
        let batch: Vec<usize> = match tape.below(6) {
            0..=2 => vec![1],
            3 => vec![],
            4 => vec![1 + tape.below(3)],
            _ => vec![1 + tape.below(2), tape.below(3) + usize::from(n > 0)],
        };
        let kind = tape.one_of(&[Kind::Logits, Kind::Logits, Kind::LogProbs, Kind::Probs]);
        let ragged = batch.len() == 1 && tape.rarely(6);
        let (strides, need) =
            if ragged { (vec![0], batch[0] * n) } else { strides(tape, &batch, n) };
        let empty = batch.contains(&0) || n == 0;
        let mut stored = Stored::new(tape, if empty { 0 } else { need });
        if kind == Kind::Probs && tape.below(4) > 0 {
            // Mostly weights that are allowed.
            let positive: Vec<f64> = stored.wide().iter().map(|x| x.abs()).collect();
            stored = Stored::narrowed(&positive, stored.dtype());
        }
        let mut shape = batch.clone();
        shape.push(n);
        let mut rows = Rows {
            stored,
            shape,
            strides,
            indptr: None,
            kind,
            scale: 1.0,
            mask: None,
            lengths: None,
            causal: None,
            radius: None,
        };
        if kind != Kind::Probs {
            let usual = [1.0, 1.0, 0.125, 0.176_776_695_296_636_9, -1.0, -0.3, 0.0, 1e-30];
            rows.scale = if tape.rarely(8) { tape.f64() } else { tape.one_of(&usual) };
            if !rows.scale.is_finite() {
                rows.scale = 2.0;
            }
            let count: usize = batch.iter().product();
            if tape.rarely(8) {
                let each = tape.rarely(2) && count > 0;
                let radii = (0..if each { count } else { 1 })
                    .map(|_| tape.one_of(&[0.0, 1e-9, 1e-3, 0.1, 3.0, 300.0]));
                rows.radius = Some(radii.collect());
            }
        }
        let total = rows.stored.data().len();
        if ragged {
            let mut ends: Vec<i64> = (1..batch[0]).map(|_| tape.below(total + 1) as i64).collect();
            ends.extend([0, total as i64]);
            ends.sort_unstable();
            rows.indptr = Some(ends);
            return rows;
        }
        let (what, seed) = (tape.below(6), tape.u8());
        if what >= 3 {
            let (strides, need) = self::strides(tape, &batch, n);
            let what = if what == 5 && kind != Kind::Probs {
                What::Biases(Stored::new(tape, need))
            } else {
                // About a quarter hidden, and what shows is any byte but 0.
                let byte = |i: usize| {
                    let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9 + 2 * u64::from(seed));
                    if mixed >> 7 & 3 == 0 { 0 } else { (mixed >> 16) as u8 | 1 }
                };
                What::Bytes((0..need).map(byte).collect())
            };
            rows.mask = Some(Laid { what, strides });
        }
        if tape.rarely(4) {
            let count: usize = batch.iter().product();
            let count = if tape.rarely(2) { count } else { 1 };
            rows.lengths = Some((0..count).map(|_| tape.below(n + 1) as i64).collect());
        }
        if !batch.is_empty() && tape.rarely(6) {
            let far = tape.one_of(&[0, 1, -1, i64::MAX, i64::MIN, 5]);
            rows.causal = Some(if tape.rarely(2) { far } else { tape.below(n + 1) as i64 });
        }
        rows
    }

    pub(crate) fn scores(&self) -> Scores<'_> {
        let data = self.stored.data();
        let scores = match &self.indptr {
            Some(indptr) => Scores::ragged(data, indptr),
            None => Scores::strided(data, &self.shape, &self.strides),
        };
        let mut scores = scores.unwrap().scale(self.scale).unwrap().kind(self.kind).unwrap();
        if let Some(Laid { what, strides }) = &self.mask {
            let mask = match what {
                What::Bytes(bytes) => Mask::Allowed(bytes),
                What::Biases(biases) => Mask::Additive(biases.data()),
            };
            scores = scores.mask(mask, strides).unwrap();
        }
        if let Some(lengths) = &self.lengths {
            scores = scores.lengths(lengths).unwrap();
        }
        if let Some(offset) = self.causal {
            scores = scores.causal_offset(offset).unwrap();
        }
        if let Some(radius) = &self.radius {
            scores = scores.radius(radius).unwrap();
        }
        scores
    }

    pub(crate) fn count(&self) -> usize {
        match &self.indptr {
            Some(indptr) => indptr.len() - 1,
            None => self.shape[..self.shape.len() - 1].iter().product(),
        }
    }

    pub(crate) fn is_ragged(&self) -> bool {
        self.indptr.is_some()
    }

    /// The stretch of the stored numbers that a row is, for ragged rows.
    pub(crate) fn stretch(&self, row: usize) -> Option<std::ops::Range<usize>> {
        let indptr = self.indptr.as_ref()?;
        Some(indptr[row] as usize..indptr[row + 1] as usize)
    }

    /// Returns `true` if a mask adds biases to the scores.
    pub(crate) fn is_biased(&self) -> bool {
        matches!(&self.mask, Some(Laid { what: What::Biases(_), .. }))
    }

    pub(crate) fn radius_of(&self, row: usize) -> f64 {
        self.radius.as_ref().map_or(0.0, |radii| radii[if radii.len() == 1 { 0 } else { row }])
    }

    /// A row's keys as they are defined to be, one by one.
    pub(crate) fn row(&self, row: usize, wide: &[f64]) -> Row {
        let batch = &self.shape[..self.shape.len() - 1];
        let (mut place, mut rest) = (vec![0; batch.len()], row);
        for (i, &len) in place.iter_mut().zip(batch).rev() {
            *i = rest % len.max(1);
            rest /= len.max(1);
        }
        let at = |strides: &[usize]| place.iter().zip(strides).map(|(i, s)| i * s).sum::<usize>();
        let stretch = match self.stretch(row) {
            Some(stretch) => stretch,
            None => at(&self.strides)..at(&self.strides) + self.shape[self.shape.len() - 1],
        };
        let n = stretch.len();
        let length = self
            .lengths
            .as_ref()
            .map_or(n as i64, |lengths| lengths[if lengths.len() == 1 { 0 } else { row }]);
        let last = self.causal.map_or(i128::MAX, |offset| {
            i128::from(offset) + place.last().map_or(0, |&i| i as i128)
        });
        let biases = match &self.mask {
            Some(Laid { what: What::Biases(biases), strides }) => {
                Some((biases.wide(), biases.hides_at(), at(strides)))
            }
            _ => None,
        };
        let keys = stretch.enumerate().map(|(j, from)| {
            let mut bias = 0.0;
            let mut shown = (j as i64) < length && j as i128 <= last;
            match &self.mask {
                Some(Laid { what: What::Bytes(bytes), strides }) => {
                    shown &= bytes[at(strides) + j] != 0;
                }
                Some(_) => {
                    let (biases, hides, start) = biases.as_ref().unwrap();
                    bias = biases[start + j];
                    // A NaN hides nothing.
                    shown &= !(bias <= *hides);
                }
                None => {}
            }
            Key { shown, number: wide[from], bias }
        });
        Row::new(keys.collect(), self.kind, self.scale, self.radius_of(row))
    }
}
