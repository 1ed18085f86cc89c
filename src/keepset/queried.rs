//! Rows of queries over keys, scored on demand and never all at once.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::block::Rounding;
use super::family::{Family, Laid};
use super::source::{Limits, Source};
use super::streamed::{LEAST_BUDGET, Narrow, Picked, Total};
use crate::certificate::Certificate;
use crate::error::Error;
use crate::kernels::{BESIDE, Simd, padded_stride};
use crate::rows::{Keep, PerRow, Scores};
use crate::runtime::interrupt;
use crate::runtime::threads;
use crate::select::{HIDDEN, RowWeights, certify_listed, weigh_row};

/// Rows scored together.
const TOGETHER: usize = 16;
/// Rows scored together if they need little memory.
const MOST_TOGETHER: usize = 128;
/// Terms of products between two checks for an interrupt.
const PORTION: usize = 1 << 33;

/// Rows of queries with the budgets of all, some of which are to be served.
pub(super) struct Queried<'a> {
    pub(super) families: &'a [Family<'a>],
    /// Keys of each family in panels, if they are held.
    pub(super) laid: Vec<Option<Laid>>,
    pub(super) eps: PerRow<'a, f64>,
    pub(super) rounding: Rounding,
    /// Rows to be served; all without a list.
    pub(super) counted: Option<Vec<usize>>,
    pub(super) rows: usize,
    pub(super) keys: usize,
    /// One past the last key that a row to be served sees.
    pub(super) seen: usize,
    /// Keys per column.
    pub(super) block_size: usize,
    pub(super) simd: Simd,
    pub(super) threads: usize,
    pub(super) scratch: Scratch,
    /// Sum of the weights of each row, once computed.
    pub(super) totals: Vec<OnceLock<Total>>,
}

/// Buffers for scores, passed from task to task.
#[derive(Default)]
pub(super) struct Scratch {
    narrow: Mutex<Vec<Vec<f32>>>,
    wide: Mutex<Vec<Vec<f64>>>,
}

/// Lends a buffer of at least `len` to `work`.
fn lent<T: Clone + Default, R>(
    shelf: &Mutex<Vec<Vec<T>>>,
    len: usize,
    work: impl FnOnce(&mut Vec<T>) -> R,
) -> R {
    let shelved = || shelf.lock().unwrap_or_else(PoisonError::into_inner);
    let mut room = shelved().pop().unwrap_or_default();
    if room.len() < len {
        room = vec![T::default(); len];
    }
    let answer = work(&mut room);
    shelved().push(room);
    answer
}

/// Some rows of a family, ready to be scored: their entries, the number of keys each sees, and radii.
struct Some {
    queries: Vec<f64>,
    sees: Vec<i64>,
    radii: Vec<f64>,
}

impl Some {
    /// Returns the largest number of keys that one of the rows sees.
    fn reach(&self) -> usize {
        self.sees.iter().copied().max().unwrap_or(0).unsigned_abs() as usize
    }
}

/// Proof about a row: the ends of its tail mass, and `true` if it is within its budget.
type Ends = (f64, f64, bool);

/// Ends before anything is proven.
const OPEN: Ends = (0.0, 1.0, false);

impl Source for Queried<'_> {
    const LIMITS: Limits = Limits { few: 32, first: 32, stored: true };

    fn rows(&self) -> usize {
        self.counted.as_ref().map_or(self.rows, Vec::len)
    }

    fn block_size(&self) -> usize {
        self.block_size
    }

    fn eps(&self, row: usize) -> f64 {
        self.eps.of(self.row(row))
    }

    fn looks_again_fast(&self) -> bool {
        (0..self.rows()).all(|row| self.eps(row) >= LEAST_BUDGET)
    }

    fn weigh(
        &self,
        listed: &[usize],
        stride: usize,
        to: &mut [f32],
    ) -> Result<Vec<RowWeights>, Error> {
        let listed: Vec<usize> = listed.iter().map(|&row| self.row(row)).collect();
        let mut all = Vec::with_capacity(listed.len());
        let mut slots = to;
        for (f, range) in self.by_family(&listed) {
            let some = &listed[range];
            let laid = self.laid(f)?;
            let places;
            (places, slots) = slots.split_at_mut(some.len() * stride);
            let tasks: Vec<_> =
                some.chunks(TOGETHER).zip(places.chunks_mut(TOGETHER * stride)).collect();
            for portion in portions(tasks, self.portion(f)) {
                let work = |(rows, slots): (&[usize], &mut [f32])| {
                    self.weigh_some((f, &laid), rows, slots, stride)
                };
                for weights in threads::map(self.threads, portion, 1, work)? {
                    all.extend(weights?);
                }
                interrupt::check()?;
            }
        }
        Ok(all)
    }

    fn judge(&self, kept: &[bool], listed: &[usize]) -> Result<Certificate, Error> {
        let listed: Vec<usize> = listed.iter().map(|&row| self.row(row)).collect();
        self.certify(kept, &listed)
    }
}

impl Queried<'_> {
    /// Returns the number, among all rows, of a row to be served.
    fn row(&self, row: usize) -> usize {
        self.counted.as_ref().map_or(row, |counted| counted[row])
    }

    /// Returns the families of rows, with the places of these rows in the list. Adjacent rows of one family are
    /// grouped.
    fn by_family(&self, listed: &[usize]) -> Vec<(usize, Range<usize>)> {
        let mut parts: Vec<(usize, Range<usize>)> = Vec::new();
        for (at, &row) in listed.iter().enumerate() {
            let f = self.families.partition_point(|family| family.first + family.rows <= row);
            match parts.last_mut() {
                Some((last, range)) if *last == f => range.end = at + 1,
                _ => parts.push((f, at..at + 1)),
            }
        }
        parts
    }

    /// Returns the panels of a family, laid out again if they are not held.
    fn laid(&self, f: usize) -> Result<Cow<'_, Laid>, Error> {
        match &self.laid[f] {
            Some(laid) => Ok(Cow::Borrowed(laid)),
            None => Ok(Cow::Owned(self.families[f].laid(self.simd, self.threads)?)),
        }
    }

    /// Returns the number of tasks between two checks for an interrupt.
    fn portion(&self, f: usize) -> usize {
        let family = &self.families[f];
        let work = TOGETHER.saturating_mul(family.len.max(1)).saturating_mul(family.dim);
        (PORTION / work).max(1) * self.threads
    }

    /// Reads some rows of a family.
    fn read(&self, f: usize, rows: &[usize]) -> Result<Some, Error> {
        let family = &self.families[f];
        let mut some = Some {
            queries: Vec::with_capacity(rows.len() * family.dim),
            sees: Vec::with_capacity(rows.len()),
            radii: Vec::with_capacity(rows.len()),
        };
        let mut query = Vec::new();
        for row in rows {
            let row = row - family.first;
            family.query(row, &mut query)?;
            let reach = family.reach(&query);
            some.queries.extend_from_slice(&query);
            some.sees.push(family.sees(row) as i64);
            some.radii.push(family.radius(reach, &self.rounding));
        }
        Ok(some)
    }

    /// Scores some rows of a family in f64, and passes the scores to `work`.
    fn wide<R>(
        &self,
        (f, laid): (usize, &Laid),
        some: &Some,
        work: impl FnOnce(&Scores<'_>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let family = &self.families[f];
        let stride = self.keys.next_multiple_of(BESIDE) + BESIDE / 2;
        let rows = some.sees.len();
        lent(&self.scratch.wide, TOGETHER * stride, |room| {
            family.wide(self.simd, laid, &some.queries, some.reach(), (room, stride));
            let scores = Scores::strided(&room[..], &[rows, self.keys], &[stride])?;
            let scores = scores.scale(family.block.scale)?.radius(&some.radii)?;
            work(&scores.lengths(&some.sees)?)
        })
    }

    fn weigh_some(
        &self,
        (f, laid): (usize, &Laid),
        rows: &[usize],
        slots: &mut [f32],
        stride: usize,
    ) -> Result<Vec<RowWeights>, Error> {
        let some = self.read(f, rows)?;
        self.wide((f, laid), &some, |scores| {
            let slots = slots.chunks_mut(stride).enumerate();
            if self.block_size == 1 {
                return slots.map(|(j, slot)| weigh_row(scores, j, slot)).collect();
            }
            let mut single = vec![0.0; padded_stride(self.keys)];
            slots
                .map(|(j, slot)| {
                    let found = weigh_row(scores, j, &mut single)?;
                    self.add_up(&single, slot);
                    Ok(found)
                })
                .collect()
        })
    }

    /// Sums the weights of keys to those of columns.
    fn add_up(&self, single: &[f32], slot: &mut [f32]) {
        slot.fill(0.0);
        for (to, keys) in slot.iter_mut().zip(single[..self.keys].chunks(self.block_size)) {
            let seen = keys.iter().filter(|weight| **weight != HIDDEN);
            let sum: f64 = seen.clone().map(|weight| f64::from(*weight)).sum();
            *to = if seen.count() == 0 { HIDDEN } else { sum as f32 };
        }
    }

    /// Certifies the loss of rows to a set of columns: by f32 products, then by f64 products for rows that those leave
    /// undecided. Rows whose totals are known need only the products with the kept keys.
    pub(super) fn certify(&self, kept: &[bool], listed: &[usize]) -> Result<Certificate, Error> {
        // The last block may end with keys that no row to be served sees: these are not kept.
        let mut keys: Vec<u8> =
            (0..self.seen).map(|key| u8::from(kept[key / self.block_size])).collect();
        keys.resize(self.keys.next_multiple_of(BESIDE), 0);
        let mut found: Vec<Ends> = vec![OPEN; listed.len()];
        for (f, range) in self.by_family(listed) {
            let laid = self.laid(f)?;
            let undecided = |found: &[Ends], at: &usize| {
                !found[*at].2 && found[*at].0 <= self.eps.of(listed[*at])
            };
            let fewer_kept = 2 * keys.iter().filter(|key| **key != 0).count() <= self.keys;
            let known = |at: &usize| {
                let row = listed[*at];
                let precise = !fewer_kept || self.eps.of(row) >= LEAST_BUDGET;
                precise && self.totals[row].get().is_some()
            };
            let (again, mut open): (Vec<usize>, Vec<usize>) = range.partition(known);
            if !again.is_empty() {
                let picked = self.families[f].pick(&laid, &keys, fewer_kept);
                let work = |rows: &[usize]| self.certify_again(f, &picked, rows);
                self.look(f, (listed, &again), MOST_TOGETHER, work, &mut found)?;
                open.extend(again.into_iter().filter(|at| undecided(&found, at)));
                open.sort_unstable();
            }
            let work = |rows: &[usize]| self.certify_narrow((f, &laid), rows, &keys);
            self.look(f, (listed, &open), MOST_TOGETHER, work, &mut found)?;
            open.retain(|at| undecided(&found, at));
            let work = |rows: &[usize]| self.certify_wide((f, &laid), rows, &keys);
            self.look(f, (listed, &open), TOGETHER, work, &mut found)?;
        }
        let mut all = Certificate::new(listed.len(), true)?;
        for (lower, upper, holds) in found {
            all.tail_mass_lower.push(lower);
            all.tail_mass_upper.push(upper);
            all.holds.iter_mut().for_each(|all| all.push(holds));
        }
        Ok(all)
    }

    /// Runs `work` on rows of a family, given as places in a list, at most `most` together, and writes the results to
    /// the same places.
    fn look(
        &self,
        f: usize,
        (listed, places): (&[usize], &[usize]),
        most: usize,
        work: impl Fn(&[usize]) -> Result<Vec<Ends>, Error> + Sync,
        found: &mut [Ends],
    ) -> Result<(), Error> {
        let size = places.len().div_ceil(self.threads).clamp(TOGETHER, most);
        let task = |places: &[usize]| {
            let rows: Vec<usize> = places.iter().map(|&at| listed[at]).collect();
            work(&rows)
        };
        for places in places.chunks(size * self.portion(f).div_ceil(size / TOGETHER)) {
            let ends = threads::map(self.threads, places.chunks(size), 1, task)?;
            let ends = ends.into_iter().collect::<Result<Vec<_>, Error>>()?;
            for (&at, ends) in places.iter().zip(ends.into_iter().flatten()) {
                found[at] = ends;
            }
            interrupt::check()?;
        }
        Ok(())
    }

    /// Reads the rows of a family whose f32 radius is useful, with their places. The result of a row must not depend on
    /// its neighbours, which depend on the number of threads.
    fn read_narrow(&self, f: usize, rows: &[usize]) -> Result<(Vec<usize>, Narrow), Error> {
        let family = &self.families[f];
        // A negated entry gives negated products, bit for bit.
        let sign = if family.block.scale < 0.0 { -1.0 } else { 1.0 };
        let mut places = Vec::with_capacity(rows.len());
        let mut some = Narrow {
            queries: Vec::with_capacity(rows.len() * family.dim),
            sees: Vec::with_capacity(rows.len()),
            radii: Vec::with_capacity(rows.len()),
        };
        let mut query = Vec::new();
        for (at, row) in rows.iter().enumerate() {
            let row = row - family.first;
            family.query(row, &mut query)?;
            let Some(radius) = family.narrow_radius(family.reach(&query), &self.rounding) else {
                continue;
            };
            places.push(at);
            some.queries.extend(query.iter().map(|&entry| (sign * entry) as f32));
            some.sees.push(family.sees(row));
            some.radii.push(radius);
        }
        Ok((places, some))
    }

    fn certify_narrow(
        &self,
        (f, laid): (usize, &Laid),
        rows: &[usize],
        keys: &[u8],
    ) -> Result<Vec<Ends>, Error> {
        let (places, Narrow { queries, sees, radii }) = self.read_narrow(f, rows)?;
        let (family, simd) = (&self.families[f], self.simd);
        let sums = lent(&self.scratch.narrow, 0, |room| {
            family.stream(simd, laid, (&queries, &sees), keys, room)
        });
        let mut found = vec![OPEN; rows.len()];
        for ((at, sums), radius) in places.into_iter().zip(sums).zip(radii) {
            let row = rows[at];
            self.totals[row].get_or_init(|| sums.total());
            let (lower, upper) = sums.ends(radius);
            found[at] = (lower, upper, upper <= self.eps.of(row));
        }
        Ok(found)
    }

    /// Certifies from the kept or the dropped keys alone, for rows whose totals are known.
    fn certify_again(&self, f: usize, picked: &Picked, rows: &[usize]) -> Result<Vec<Ends>, Error> {
        let (places, Narrow { queries, sees, radii }) = self.read_narrow(f, rows)?;
        let (family, simd) = (&self.families[f], self.simd);
        let sums = lent(&self.scratch.narrow, 0, |room| {
            family.stream_picked(simd, picked, (&queries, &sees), room)
        });
        let scale = family.block.scale.abs();
        let mut found = vec![OPEN; rows.len()];
        let each = places.into_iter().zip(sums).zip(sees.iter().zip(radii));
        for ((at, sums), (&sees, radius)) in each {
            let row = rows[at];
            let Some(&total) = self.totals[row].get() else { continue };
            let (lower, upper) = sums.ends_within((total, picked.kept), sees, radius, scale);
            found[at] = (lower, upper, upper <= self.eps.of(row));
        }
        Ok(found)
    }

    fn certify_wide(
        &self,
        (f, laid): (usize, &Laid),
        rows: &[usize],
        keys: &[u8],
    ) -> Result<Vec<Ends>, Error> {
        let some = self.read(f, rows)?;
        let eps: Vec<f64> = rows.iter().map(|&row| self.eps.of(row)).collect();
        self.wide((f, laid), &some, |scores| {
            let judged = certify_rows(scores, keys, Some(&eps))?;
            let ends = judged.tail_mass_lower.iter().zip(&judged.tail_mass_upper);
            let holds = judged.holds.iter().flatten();
            Ok(ends.zip(holds).map(|((&lower, &upper), &holds)| (lower, upper, holds)).collect())
        })
    }
}

fn certify_rows(
    scores: &Scores<'_>,
    keys: &[u8],
    eps: Option<&[f64]>,
) -> Result<Certificate, Error> {
    let all: Vec<usize> = (0..scores.rows()).collect();
    certify_listed(scores, &Keep::Mask { kept: keys, strides: &[0] }, eps, &all, 1)
}

/// Splits tasks into portions.
fn portions<T>(tasks: Vec<T>, size: usize) -> impl Iterator<Item = Vec<T>> {
    let mut tasks = tasks.into_iter();
    std::iter::from_fn(move || {
        let some: Vec<T> = tasks.by_ref().take(size).collect();
        (!some.is_empty()).then_some(some)
    })
}
