//! Which of the keys near the boundary go: walks from the worst key of the mixture upwards that drop what every row can
//! still afford, in several orders that differ by a little noise; and exchanges of single keys, which make room for more.

use super::dual::Part;
use crate::error::Error;
use crate::memory::check_memory;

/// Walks over the contested keys.
const TRIALS: u64 = 24;
/// Rounds of exchanges.
const EXCHANGES: usize = 8;
/// How much of a row's budget is set aside against the rounding of the weights of a part.
const ROUNDED: f64 = 1.0 + 1.0 / 4_194_304.0;

/// What rows have left, and what was dropped.
#[derive(Clone)]
struct Walk {
    left: Vec<f64>,
    dropped: Vec<u32>,
}

/// Keys laid out one behind another, rows with little to spare first.
struct Columns {
    weights: Vec<f64>,
    rows: usize,
}

impl Columns {
    fn new(part: &Part, rows: &[usize], flushed: &[f64]) -> Self {
        const TILE: usize = 16;
        let mut weights = vec![0.0; rows.len() * part.keys.len()];
        for (t, tile) in weights.chunks_mut((rows.len() * TILE).max(1)).enumerate() {
            for (at, &row) in rows.iter().enumerate() {
                let from = &part.row(row)[t * TILE..];
                for (to, &weight) in tile[at..].iter_mut().step_by(rows.len()).zip(from) {
                    *to = f64::from(weight) * ROUNDED + flushed[row];
                }
            }
        }
        Columns { weights, rows: rows.len() }
    }

    fn key(&self, key: u32) -> &[f64] {
        &self.weights[key as usize * self.rows..][..self.rows]
    }
}

impl Walk {
    fn drop_affordable(&mut self, columns: &Columns, key: u32) -> bool {
        let weights = columns.key(key);
        if weights.iter().zip(&self.left).any(|(weight, left)| weight > left) {
            return false;
        }
        for (left, weight) in self.left.iter_mut().zip(weights) {
            *left -= weight;
        }
        self.dropped.push(key);
        true
    }

    /// Takes dropped keys back, the heaviest first, where that makes room for two others, or for one that weighs less in the
    /// mixture.
    fn exchange(&mut self, columns: &Columns, among: &[(f32, u32)], keys: usize) {
        let mut gone = vec![false; keys];
        for &key in &self.dropped {
            gone[key as usize] = true;
        }
        let mut before = self.left.clone();
        for _ in 0..EXCHANGES {
            let mut changed = false;
            for &(mixed, key) in among.iter().rev() {
                if !gone[key as usize] {
                    continue;
                }
                before.copy_from_slice(&self.left);
                let count = self.dropped.len();
                for (left, weight) in self.left.iter_mut().zip(columns.key(key)) {
                    *left += weight;
                }
                let mut lighter = false;
                for &(other_mixed, other) in among {
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
            // Keys that were taken back are still listed, some of them twice.
            self.dropped.clear();
            self.dropped.extend((0..keys as u32).filter(|&key| gone[key as usize]));
            if !changed {
                return;
            }
        }
    }
}

/// A number in [-1, 1) from two others.
fn noise(trial: u64, key: u32) -> f32 {
    // The finaliser of splitmix64.
    let mut z = trial.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(key) << 1 | 1);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 40) as f32 / 8_388_608.0 - 1.0
}

/// The keys of a part that go, as indices into it, and what is left of each row's budget.
///
/// `mixed` are their weights in the mixture, `flushed` is what a weight of 0 may weigh in each row. Exchanges take time,
/// so there are only `thorough` ones.
pub(super) fn walk(
    part: &Part,
    mixed: &[f32],
    multipliers: &[f64],
    flushed: &[f64],
    thorough: bool,
) -> Result<(Vec<u32>, Vec<f64>), Error> {
    // Rows that could lose the whole part have no say.
    let loses_all = |j: usize| -> f64 {
        let sum: f64 = part.row(j).iter().map(|weight| f64::from(*weight)).sum();
        sum * ROUNDED + mixed.len() as f64 * flushed[j]
    };
    let mut rows: Vec<usize> =
        (0..part.free.len()).filter(|&j| loses_all(j) >= part.free[j]).collect();
    rows.sort_by(|&j, &k| multipliers[k].total_cmp(&multipliers[j]).then(j.cmp(&k)));
    // Their weights once more, in f64.
    check_memory("scores", rows.len().saturating_mul(part.keys.len()), size_of::<f64>())?;
    let columns = Columns::new(part, &rows, flushed);
    let mut order: Vec<(f32, u32)> = mixed.iter().copied().zip(0..).collect();
    order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let start = Walk { left: rows.iter().map(|&j| part.free[j]).collect(), dropped: Vec::new() };
    let mut plain = start.clone();
    let mut first_kept = order.len();
    let mut last_dropped = 0;
    for (rank, &(_, key)) in order.iter().enumerate() {
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
    // What is far below the first key that did not fit is dropped in any order.
    let margin = (last_dropped - first_kept) / 2 + 4 * rows.len().min(64);
    let sure = first_kept.saturating_sub(margin);
    let end = (last_dropped + margin).min(order.len());
    let mut prefix = start;
    for &(_, key) in &order[..sure] {
        prefix.drop_affordable(&columns, key);
    }
    let contested = &order[sure..end];
    let spread = contested[contested.len() - 1].0 - contested[0].0;
    let mut best = plain;
    let mut noisy: Vec<(f32, u32)> = Vec::with_capacity(contested.len());
    for trial in 0..TRIALS {
        let amplitude = spread * [0.4, 0.2, 0.1, 0.05][(trial % 4) as usize];
        noisy.clear();
        noisy.extend(
            contested.iter().map(|&(mixed, key)| (mixed + amplitude * noise(trial, key), key)),
        );
        noisy.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let mut walk = prefix.clone();
        for &(_, key) in noisy.iter().chain(&order[end..]) {
            walk.drop_affordable(&columns, key);
        }
        if walk.dropped.len() > best.dropped.len() {
            best = walk;
        }
    }
    if thorough {
        best.exchange(&columns, &order[sure..(2 * end - sure).min(order.len())], part.keys.len());
    }
    Ok(finish(&best.dropped, part, flushed))
}

/// What is left of all budgets after a walk, too.
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
