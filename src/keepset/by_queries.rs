//! One set for many queries, from the queries and keys themselves.

use super::KeepSet;
use super::block::{Block, QueryOptions, Rounding};
use super::family::{Family, MOST_RADIUS};
use super::frame::{Frame, ends};
use super::queried::{Queried, Scratch};
use super::rounds::{self, Found};
use super::source::{Seen, Source};
use crate::certificate::Status;
use crate::error::Error;
use crate::kernels::Simd;
use crate::rows::{PerRow, Stored};
use crate::runtime::memory::{check_memory, filled, product};
use crate::runtime::threads;
use crate::select::{MaxKeep, Options};
use std::sync::OnceLock;

/// Terms of products up to which one thread is faster than several.
const SERIAL: usize = 1 << 21;
/// Bytes of keys in f32 that are held from pass to pass.
const HELD: usize = 1 << 29;

/// Finds one set of keys whose dropped mass is proven to be at most `eps` in every row, for rows given as queries and
/// keys. Unlike [`keep_set`](super::keep_set) it never holds all scores at once.
///
/// Rows are numbered by block, then head, then query. Key i of every block is the same position, though its vector may
/// differ. A row's scores are the real-number products of the stored vectors, times the scale. Rows far from their
/// budgets are certified by f32 products, whose rounding is part of the proof; the others by f64 products.
///
/// The options `max_keep`, `keep_first`, `keep_last`, `block_size`, `effort` and `threads` apply. Positions are counted
/// over the keys that at least one counted row sees; others are never kept.
///
/// With a `block_size`, whole blocks are kept, as few as possible; the last visible block may be shorter. Forced
/// positions force their blocks, and `max_keep` is rounded down to whole blocks. `lower_bound` is the number of keys of
/// the smallest sets of so few blocks that none of fewer will do.
///
/// ```
/// use certk_rs::{Block, Options, QueryOptions, Vectors, keep_set_of_queries};
/// let queries = Vectors::new("q", &[1.0_f32, 0.0, 0.0, 1.0], &[2, 2])?;
/// let keys = Vectors::new("keys", &[6.0_f32, 0.0, 0.0, 6.0, -6.0, -6.0], &[3, 2])?;
/// let blocks = [Block::new(queries, keys, 1.0)];
/// let set = keep_set_of_queries(&blocks, &[0.01], &QueryOptions::new(), &Options::new())?;
/// assert_eq!(set.indices, [0, 1]);
/// assert!(set.tail_mass_upper.iter().all(|&lost| lost <= 0.01));
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// The [`Error`] for invalid vectors, budgets or options, for too little memory, or for a call that was ended.
pub fn keep_set_of_queries(
    blocks: &[Block<'_>],
    eps: &[f64],
    rows: &QueryOptions<'_>,
    options: &Options,
) -> Result<KeepSet, Error> {
    let _environment = threads::default_floats();
    options.check()?;
    let all = judge(blocks, rows, options)?;
    let shape = [all];
    let remedy = "pass one number, or one for each row: blocks, heads, queries";
    let budgets = PerRow::new("eps", eps, all, remedy)?.budgets(&shape)?;
    // The answer, and a few numbers per row.
    check_memory("q", all, 192)?;
    let (simd, keys) = (Simd::current()?, blocks.first().map_or(0, Block::keys));
    let dim = blocks.iter().map(|block| block.keys.dim()).max().unwrap_or(1);
    let work = all.saturating_mul(keys).saturating_mul(dim);
    let threads = threads::count(options.threads, work > SERIAL)?;
    let rounding = Rounding { slack: rows.slack, roundings: rows.roundings.into() };
    let (mut families, mut laid, mut held, mut first) = (Vec::new(), Vec::new(), 0usize, 0);
    for block in blocks {
        for kv_head in 0..block.keys.heads() {
            let place = (kv_head, first);
            let (family, own) = Family::new(block, place, rows.causal_offset, (simd, threads))?;
            held = held.saturating_add(4 * family.len * family.dim);
            first += family.rows;
            laid.push((held <= HELD).then_some(own));
            families.push(family);
        }
    }
    let counted = rows.counted.map(|counted| (0..all).filter(|&row| counted[row]).collect());
    let mut source = Queried {
        families: &families,
        laid,
        eps: budgets,
        rounding,
        counted,
        rows: all,
        keys,
        seen: 0,
        block_size: options.block_size,
        simd,
        threads,
        scratch: Scratch::default(),
        totals: (0..all).map(|_| OnceLock::new()).collect(),
    };
    source.check_radii()?;
    let frame;
    (source.seen, frame) = source.frame(options)?;
    if let Some(given) = rows.given {
        return source.judged(given);
    }
    let found = rounds::solve(&source, &frame, options.effort, threads)?;
    source.answer(found)
}

/// Checks the arguments and returns the number of rows.
fn judge(blocks: &[Block<'_>], rows: &QueryOptions<'_>, options: &Options) -> Result<usize, Error> {
    // Named one by one, so that a new option does not compile before it is decided here.
    let &Options {
        min_keep,
        block_size,
        max_keep,
        keep_first,
        keep_last,
        prove_minimal: _,
        effort: _,
        threads: _,
    } = options;
    if min_keep > 1 {
        let remedy = "use keep_first or keep_last, or leave it at 1";
        return Err(Error::Conflict { first: "min_keep", second: "keep_set", remedy });
    }
    let mut all = 0usize;
    for block in blocks {
        let (heads, kv_heads) = (block.queries.heads(), block.keys.heads());
        if block.queries.dim() != block.keys.dim() || kv_heads == 0 || heads % kv_heads != 0 {
            let problem =
                "keys must have as many entries, and their heads divide those of the queries";
            return Err(block.queries.misfit(problem.into()));
        }
        if matches!(block.queries.data, Stored::F64(_)) {
            return Err(block
                .queries
                .misfit("queries in float64 are not taken: convert them".into()));
        }
        let n = blocks[0].keys();
        if block.keys() != n || u32::try_from(n).is_err() {
            let problem = format!("all blocks have as many keys as the first, {n}, below 2^32");
            return Err(block.keys.misfit(problem));
        }
        if !block.scale.is_finite() {
            return Err(Error::Option {
                argument: "scale",
                value: block.scale.to_string(),
                problem: "it must be finite",
            });
        }
        all = all.saturating_add(product("q", &[heads, block.queries.len()])?);
    }
    if let Some(counted) = rows.counted
        && counted.len() != all
    {
        let remedy = "pass one flag for each row: blocks, heads, queries";
        return Err(Error::Length {
            argument: "counted",
            got: counted.len(),
            expected: all,
            remedy,
        });
    }
    if let Some(given) = rows.given {
        let expected = blocks.first().map_or(0, Block::keys);
        if given.len() != expected {
            let remedy = "pass one flag for each key";
            return Err(Error::Length { argument: "given", got: given.len(), expected, remedy });
        }
        let chosen = [
            (block_size > 1, "block_size"),
            (max_keep.is_some(), "max_keep"),
            (keep_first > 0, "keep_first"),
            (keep_last > 0, "keep_last"),
        ];
        if let Some((_, second)) = chosen.into_iter().find(|(set, _)| *set) {
            let remedy = "nothing is chosen where the keys are given: leave it out";
            return Err(Error::Conflict { first: "given", second, remedy });
        }
    }
    if !(0.0..=1.0).contains(&rows.slack) {
        return Err(Error::Option {
            argument: "slack",
            value: rows.slack.to_string(),
            problem: "it must lie between 0 and 1",
        });
    }
    Ok(all)
}

impl Queried<'_> {
    /// Checks that every row is finite, and that its radius leaves something to prove.
    fn check_radii(&self) -> Result<(), Error> {
        for family in self.families {
            let chunk = 4096;
            let rows = family.rows.div_ceil(chunk);
            let work = |part: usize| {
                let mut query = Vec::new();
                for row in part * chunk..((part + 1) * chunk).min(family.rows) {
                    family.query(row, &mut query)?;
                    let radius = family.radius(family.reach(&query), &self.rounding);
                    if radius > MOST_RADIUS || radius.is_nan() {
                        return Err(family.block.queries.misfit(format!(
                            "scores are so large (scale {:?}) that rounding in float64 may change them by more than \
                             {MOST_RADIUS}: check the vectors and the scale",
                            family.block.scale
                        )));
                    }
                }
                Ok(())
            };
            for done in threads::map(self.threads, 0..rows, 1, work)? {
                done?;
            }
        }
        Ok(())
    }

    /// Returns one past the last key that a counted row sees, and the columns.
    fn frame(&self, options: &Options) -> Result<(usize, Frame), Error> {
        let (mut seen, mut lossless) = (0, 0);
        for row in 0..self.rows() {
            let at = self.counted.as_ref().map_or(row, |counted| counted[row]);
            let f = self.families.partition_point(|f| f.first + f.rows <= at);
            let sees = self.families[f].sees(at - self.families[f].first);
            seen = seen.max(sees);
            if self.eps(row) == 0.0 {
                lossless = lossless.max(sees);
            }
        }
        let (size, columns) = (self.block_size, self.keys.div_ceil(self.block_size));
        let prefix = |keys: usize| (0..columns).map(|column| column * size < keys).collect();
        let flags = Seen { visible: prefix(seen), lossless: prefix(lossless) };
        let first = options.keep_first.min(seen).div_ceil(size);
        let last = seen.div_ceil(size) - (seen - options.keep_last.min(seen)) / size;
        let last = if options.keep_last == 0 { 0 } else { last };
        let asked = ends(&flags.visible, first, last);
        #[allow(clippy::cast_sign_loss)] // judged to be positive
        let max_keep = match options.max_keep {
            None => usize::MAX,
            Some(MaxKeep::Count(count)) => count,
            Some(MaxKeep::Fraction(share)) => ((seen as f64 * share) as usize).max(1),
        };
        let max_keep = if max_keep >= seen { usize::MAX } else { max_keep / size };
        Ok((seen, Frame::new(flags, asked, max_keep)?))
    }

    /// Certifies all rows for a given set of keys.
    fn judged(&self, given: &[bool]) -> Result<KeepSet, Error> {
        let every: Vec<usize> = (0..self.rows).collect();
        let found = self.certify(given, &every)?;
        let counts = |row: usize| {
            self.counted.as_ref().is_none_or(|these| these.binary_search(&row).is_ok())
        };
        let over = (found.tail_mass_upper.iter().enumerate())
            .any(|(row, &upper)| upper > self.eps.of(row) && counts(row));
        let status = if self.seen == 0 {
            Status::Empty
        } else if over {
            Status::OverBudget
        } else {
            Status::Certified
        };
        Ok(KeepSet {
            indices: (0..self.seen).filter(|&key| given[key]).map(|key| key as u32).collect(),
            status,
            tail_mass_upper: found.tail_mass_upper,
            tail_mass_lower: found.tail_mass_lower,
            lower_bound: 0,
            weights: filled("q", self.rows, 0.0)?,
        })
    }

    /// Returns a set of keys with the certificates of all rows.
    fn answer(&self, found: Found) -> Result<KeepSet, Error> {
        let Found { kept, status, upper, lower, lower_bound, weights } = found;
        let (size, seen) = (self.block_size, self.seen);
        let keys = (0..seen).filter(|key| kept[key / size]).map(|key| key as u32).collect();
        // The last block may be shorter.
        let missing = (size - seen % size) % size;
        let mut set = KeepSet {
            indices: keys,
            status,
            tail_mass_upper: upper,
            tail_mass_lower: lower,
            lower_bound: (lower_bound * size).saturating_sub(missing),
            weights,
        };
        if let Some(counted) = &self.counted {
            set = self.spread(set, &kept, counted)?;
        }
        Ok(set)
    }

    /// Adds the rows that are not counted.
    fn spread(&self, set: KeepSet, kept: &[bool], counted: &[usize]) -> Result<KeepSet, Error> {
        let mut inside = counted.iter().copied().peekable();
        let others: Vec<usize> =
            (0..self.rows).filter(|row| inside.next_if_eq(row).is_none()).collect();
        let empty = set.status == Status::Empty;
        let judged = self.certify(kept, &others)?;
        let all = |some: &[f64], rest: Option<&[f64]>| -> Result<Vec<f64>, Error> {
            let mut all = filled("q", self.rows, 0.0)?;
            for (&row, value) in counted.iter().zip(some) {
                all[row] = *value;
            }
            for (&row, value) in others.iter().zip(rest.into_iter().flatten()) {
                all[row] = *value;
            }
            Ok(all)
        };
        debug_assert!(!empty || set.indices.is_empty());
        Ok(KeepSet {
            tail_mass_upper: all(&set.tail_mass_upper, Some(&judged.tail_mass_upper))?,
            tail_mass_lower: all(&set.tail_mass_lower, Some(&judged.tail_mass_lower))?,
            weights: all(&set.weights, None)?,
            ..set
        })
    }
}
