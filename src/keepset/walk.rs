//! Choice among the keys near the boundary. Walks from the worst key of the mixture upwards drop each key that every
//! row can still afford, in several orders that differ by a little noise. Exchanges of single keys make room for more.

use super::dual::{Part, SHARED};
use crate::error::Error;
use crate::kernels::Scalar;
use crate::runtime::ambient::asked_each;
use crate::runtime::memory::check_memory;
use crate::runtime::threads;

/// Walks over the contested keys.
const TRIALS: u32 = 24;
/// Rows that a key is compared with at a time; most are decided after the first of these.
const FIRST_ROWS: usize = 16;
/// Rounds of exchanges, and keys that are tried in all of them for each key of the part, if that is more than asked
/// for.
const EXCHANGES: usize = 8;
const TRIED: usize = 16;
/// Factor that covers the rounding of a part's weights.
const ROUNDED: f64 = 1.0 + 1.0 / 4_194_304.0;

/// Remaining budgets, and the dropped keys.
#[derive(Clone)]
struct Walk {
    left: Vec<f64>,
    dropped: Vec<u32>,
}

/// Keys stored one after another, rows with the least left first.
struct Columns {
    weights: Vec<f64>,
    rows: usize,
}

impl Columns {
    fn new(part: &Part, rows: &[usize], flushed: &[f64]) -> Result<Self, Error> {
        const TILE: usize = 16;
        let mut weights = vec![0.0; rows.len() * part.keys.len()];
        let size = (rows.len() * TILE).max(1);
        let lay = |(t, tile): (usize, &mut [f64])| {
            for (at, &row) in rows.iter().enumerate() {
                let from = &part.row(row)[t * TILE..];
                for (to, &weight) in tile[at..].iter_mut().step_by(rows.len()).zip(from) {
                    *to = f64::from(weight) * ROUNDED + flushed[row];
                }
            }
        };
        let tiles = weights.chunks_mut(size).enumerate();
        threads::map(part.threads, tiles, SHARED.div_ceil(size), lay)?;
        Ok(Columns { weights, rows: rows.len() })
    }

    fn key(&self, key: u32) -> &[f64] {
        &self.weights[key as usize * self.rows..][..self.rows]
    }
}

impl Walk {
    fn drop_affordable(&mut self, columns: &Columns, key: u32) -> bool {
        let weights = columns.key(key);
        let too_much = |(weights, left): (&[f64], &[f64])| {
            let over = weights.iter().zip(left).map(|(weight, left)| u32::from(weight > left));
            over.fold(0, std::ops::BitOr::bitor) != 0
        };
        if weights.chunks(FIRST_ROWS).zip(self.left.chunks(FIRST_ROWS)).any(too_much) {
            return false;
        }
        for (left, weight) in self.left.iter_mut().zip(weights) {
            *left -= weight;
        }
        self.dropped.push(key);
        true
    }

    /// Takes dropped keys back, the heaviest first, where that makes room for two others, or for one that weighs less
    /// in the mixture.
    fn exchange(&mut self, columns: &Columns, among: &[(f32, u32)], keys: usize, tries: usize) {
        let mut gone = vec![false; keys];
        for &key in &self.dropped {
            gone[key as usize] = true;
        }
        let mut before = self.left.clone();
        let mut fitting = Vec::new();
        let (mut tried, most) = (0, tries.max(TRIED * keys));
        for _ in asked_each(0..EXCHANGES) {
            let mut changed = false;
            let tight = Tight::new(columns, among, &self.left);
            for &(mixed, key) in asked_each(among.iter().rev()) {
                if !gone[key as usize] || tried > most {
                    continue;
                }
                before.copy_from_slice(&self.left);
                let count = self.dropped.len();
                for (left, weight) in self.left.iter_mut().zip(columns.key(key)) {
                    *left += weight;
                }
                let mut lighter = false;
                tight.find(&self.left, &mut fitting);
                tried += fitting.len() + among.len() / Tight::TOGETHER;
                for &at in &fitting {
                    let (other_mixed, other) = among[at as usize];
                    let fits = !gone[other as usize]
                        && other != key
                        && self.drop_affordable(columns, other);
                    lighter |= fits && other_mixed < mixed;
                }
                let new = self.dropped.len() - count;
                if new > 1 || lighter {
                    gone[key as usize] = false;
                    for &other in &self.dropped[count..] {
                        gone[other as usize] = true;
                    }
                    changed = true;
                } else {
                    self.dropped.truncate(count);
                    self.left.copy_from_slice(&before);
                }
            }
            // Keys taken back are still listed, some of them twice.
            self.dropped.clear();
            self.dropped.extend((0..keys as u32).filter(|&key| gone[key as usize]));
            if !changed {
                return;
            }
        }
    }
}

/// Keys in the rows with the least left, in f32. These rows reject most keys that some row cannot afford, many at a
/// time.
struct Tight {
    rows: Vec<usize>,
    /// Rounded down, key after key for each row, and infinite beyond the last.
    weights: Vec<f32>,
    keys: usize,
}

impl Tight {
    /// Keys compared together.
    const TOGETHER: usize = 64;
    const MOST_ROWS: usize = 48;

    fn new(columns: &Columns, among: &[(f32, u32)], left: &[f64]) -> Self {
        let mut rows: Vec<usize> = (0..left.len()).collect();
        rows.sort_by(|&j, &k| left[j].total_cmp(&left[k]).then(j.cmp(&k)));
        rows.truncate(Self::MOST_ROWS);
        let keys = among.len().next_multiple_of(Self::TOGETHER);
        let mut weights = vec![f32::INFINITY; rows.len() * keys];
        for (at, (_, key)) in asked_each(among.iter().enumerate()) {
            let of_key = columns.key(*key);
            for (r, &row) in rows.iter().enumerate() {
                let (block, place) = (at / Self::TOGETHER, at % Self::TOGETHER);
                weights[(block * rows.len() + r) * Self::TOGETHER + place] = below(of_key[row]);
            }
        }
        Tight { rows, weights, keys: among.len() }
    }

    /// Finds the keys that these rows can afford, and hardly any others, by their places in the list.
    fn find(&self, left: &[f64], fitting: &mut Vec<u32>) {
        fitting.clear();
        let limits: Vec<f32> = self.rows.iter().map(|&row| f32::at_least(left[row])).collect();
        let block = self.rows.len() * Self::TOGETHER;
        if block == 0 {
            fitting.extend(0..self.keys as u32);
            return;
        }
        for (b, weights) in self.weights.chunks_exact(block).enumerate() {
            let mut fits = [u32::MAX; Self::TOGETHER];
            for (weights, limit) in weights.chunks_exact(Self::TOGETHER).zip(&limits) {
                let mut any = 0;
                for (fits, weight) in fits.iter_mut().zip(weights) {
                    *fits &= u32::from(weight <= limit).wrapping_neg();
                    any |= *fits;
                }
                if any == 0 {
                    break;
                }
            }
            let places = fits.iter().enumerate().filter(|(_, fits)| **fits != 0);
            fitting.extend(places.map(|(place, _)| (b * Self::TOGETHER + place) as u32));
        }
    }
}

/// Returns the largest f32 number not above another.
fn below(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) > value { near.next_down() } else { near }
}

/// Returns a number in [-1, 1) from two others.
fn noise(trial: u64, key: u32) -> f32 {
    // The finaliser of splitmix64.
    let mut z = trial.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(key) << 1 | 1);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 40) as f32 / 8_388_608.0 - 1.0
}

/// Returns the keys of a part to drop, as indices into it, and the remainder of each row's budget.
///
/// `mixed` are their weights in the mixture, `flushed` is the bound on a weight of 0 in each row. Exchanges take time,
/// so a limit is given, and there are none if it is 0.
pub(super) fn walk(
    part: &Part,
    (mixed, multipliers): (&[f32], &[f64]),
    flushed: &[f64],
    exchanges: usize,
) -> Result<(Vec<u32>, Vec<f64>), Error> {
    // Rows that could lose the whole part set no limit.
    let loses_all = |j: usize| -> f64 {
        let sum: f64 = part.row(j).iter().map(|weight| f64::from(*weight)).sum();
        sum * ROUNDED + mixed.len() as f64 * flushed[j]
    };
    let mut rows: Vec<usize> =
        (0..part.free.len()).filter(|&j| loses_all(j) >= part.free[j]).collect();
    rows.sort_by(|&j, &k| multipliers[k].total_cmp(&multipliers[j]).then(j.cmp(&k)));
    // Their weights once more, in f64.
    check_memory("scores", rows.len().saturating_mul(part.keys.len()), size_of::<f64>())?;
    let columns = Columns::new(part, &rows, flushed)?;
    let mut order: Vec<(f32, u32)> = mixed.iter().copied().zip(0..).collect();
    order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let start = Walk { left: rows.iter().map(|&j| part.free[j]).collect(), dropped: Vec::new() };
    let mut plain = start.clone();
    let mut first_kept = order.len();
    let mut last_dropped = 0;
    for (rank, &(_, key)) in asked_each(order.iter().enumerate()) {
        if plain.drop_affordable(&columns, key) {
            last_dropped = rank;
        } else {
            first_kept = first_kept.min(rank);
        }
    }
    // In order, down to a clean cut: no other order does better.
    if order.is_empty() || last_dropped < first_kept {
        return Ok(finish(&plain.dropped, part, flushed));
    }
    // Keys far below the first that did not fit are dropped in any order.
    let margin = (last_dropped - first_kept) / 2 + 4 * rows.len().min(64);
    let sure = first_kept.saturating_sub(margin);
    let end = (last_dropped + margin).min(order.len());
    let mut prefix = start;
    for &(_, key) in asked_each(&order[..sure]) {
        prefix.drop_affordable(&columns, key);
    }
    let contested = &order[sure..end];
    let spread = contested[contested.len() - 1].0 - contested[0].0;
    let trial = |trial: u64| {
        let amplitude = spread * [0.4, 0.2, 0.1, 0.05][(trial % 4) as usize];
        let shaken = |&(mixed, key): &(f32, u32)| (mixed + amplitude * noise(trial, key), key);
        let mut noisy: Vec<(f32, u32)> = contested.iter().map(shaken).collect();
        noisy.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let mut walk = Walk { left: prefix.left.clone(), dropped: Vec::new() };
        for &(_, key) in asked_each(noisy.iter().chain(&order[end..])) {
            walk.drop_affordable(&columns, key);
        }
        walk
    };
    let mut best = plain;
    let least = SHARED.div_ceil(contested.len() * FIRST_ROWS);
    // The first of the walks that drop as many, for any assignment to threads.
    for mut walk in threads::map(part.threads, (0..TRIALS).map(u64::from), least, trial)? {
        if prefix.dropped.len() + walk.dropped.len() > best.dropped.len() {
            walk.dropped.splice(..0, prefix.dropped.iter().copied());
            best = walk;
        }
    }
    if exchanges > 0 {
        let among = &order[sure..(2 * end - sure).min(order.len())];
        best.exchange(&columns, among, part.keys.len(), exchanges);
    }
    Ok(finish(&best.dropped, part, flushed))
}

/// Returns the dropped keys, and the remainder of all budgets.
fn finish(dropped: &[u32], part: &Part, flushed: &[f64]) -> (Vec<u32>, Vec<f64>) {
    let left = (part.free.iter().enumerate())
        .map(|(j, free)| {
            let weights = part.row(j);
            let sum: f64 = dropped.iter().map(|&key| f64::from(weights[key as usize])).sum();
            free - sum * ROUNDED - dropped.len() as f64 * flushed[j]
        })
        .collect();
    (dropped.to_vec(), left)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every key that all rows can afford is found, and few others.
    #[test]
    fn tight_rows_tell_what_fits() {
        for (rows, keys, spread) in [(1, 1, 1.0), (3, 64, 2.0), (60, 65, 30.0), (200, 700, 3.0)] {
            let number = |trial: u64, key: usize| {
                (f64::from(noise(trial, key as u32)) * spread).exp() / (rows + keys) as f64
            };
            let weights = (0..rows * keys).map(|at| number(1, at)).collect();
            let columns = Columns { weights, rows };
            let left: Vec<f64> = (0..rows).map(|row| 8.0 * number(2, row)).collect();
            let among: Vec<(f32, u32)> = (0..keys as u32).rev().map(|key| (0.5, key)).collect();
            let tight = Tight::new(&columns, &among, &left);
            let mut found = Vec::new();
            for less in [1.0, 0.7, 1e-9, -1.0] {
                let left: Vec<f64> = left.iter().map(|left| left * less).collect();
                tight.find(&left, &mut found);
                let fits = |at: &u32| {
                    let key = columns.key(among[*at as usize].1);
                    key.iter().zip(&left).all(|(weight, left)| weight <= left)
                };
                let real: Vec<u32> = (0..keys as u32).filter(fits).collect();
                assert!(real.iter().all(|at| found.contains(at)));
                assert!(found.len() <= real.len() + keys / 4, "{rows} {keys} {less}");
            }
        }
    }

    #[test]
    fn rounding_to_f32_goes_one_way() {
        for value in [0.0, 1.0, -1.0, 0.1, 1e-60, -1e-60, 1e60, -1e60, 5e-324, 1.0 + 1e-12] {
            assert!(f64::from(below(value)) <= value && value <= f64::from(f32::at_least(value)));
        }
    }
}
