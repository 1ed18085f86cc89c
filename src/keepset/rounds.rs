//! Rounds of solving for some rows and checking the others; rows that lose too much join.
//!
//! Few rows of many set a limit. A set within the budget of every row is feasible, for any rows it was found with, and
//! a lower bound for some rows is one for all. So the last round encloses the size as if all rows had been in the
//! program. Weights are held for its rows only. The others are checked in order: a sample, which grows while its rows
//! keep to their budgets; then the rows near their budgets; at last all.

use super::frame::Frame;
use super::problem::{Best, Problem};
use super::repair::repair;
use super::source::Source;
use crate::certificate::Status;
use crate::error::Error;
use crate::runtime::interrupt;
use crate::runtime::memory::{filled, list};
use crate::select::Effort;

/// Least and most rows that may join in a round; in between, as many as the program has.
const JOIN: (usize, usize) = (16, 512);
/// Ratio of the first sample to the rows of the first program, and of each sample to the previous one.
const GROWTH: usize = 4;
/// Inverse of the largest share of a sample that may lose too much for the sample to grow.
const TOLERATED: usize = 64;
/// Share of a sample losing too much above which all rows are weighed: in any case, and if most rows of the program set
/// a limit.
const MOST: (f64, f64) = (0.75, 0.2);
/// Bytes of weights up to which all rows are weighed; also the limit for the selected rows.
const AT_ONCE: usize = 1 << 29;
/// Share of the budget from which rows are checked before all others.
const NEAR: f32 = 0.9;
/// Share of the budget below which a row without influence is removed.
const IDLE: f64 = 0.9;
/// Number of rounds, after which sets are only repaired.
const ROUNDS: usize = 40;
/// Rounds, and least relative growth of the lower bound in them (as an inverse), below which a last set is repaired.
/// With many limiting rows, other rows lose too much each time.
const STALLED: (usize, usize) = (5, 1000);
/// Rounds in which a set for all rows may become smaller.
const POLISHED: usize = 3;
/// Most columns that a repair may add: one in so many, and this many in any case.
const REPAIRED: (usize, usize) = (1000, 1);
/// Rows repaired together.
const TOGETHER: usize = 256;
/// Halvings of the range of the loss, when `max_keep` asks for the least attainable one: before and after all rows are
/// checked.
const PROBES: (usize, usize) = (10, 24);
/// Excess over the loss of the program's rows at which another row joins, where all lose too much.
const WORSE: f64 = 1e-3;

/// A set of columns with its certificates.
pub(super) struct Found {
    pub(super) kept: Vec<bool>,
    pub(super) status: Status,
    pub(super) upper: Vec<f64>,
    pub(super) lower: Vec<f64>,
    pub(super) lower_bound: usize,
    pub(super) weights: Vec<f64>,
}

impl Found {
    fn size(&self) -> usize {
        self.kept.iter().filter(|kept| **kept).count()
    }
}

/// Finds a set for all rows of a source.
pub(super) fn solve<S: Source>(
    source: &S,
    frame: &Frame,
    effort: Effort,
    threads: usize,
) -> Result<Found, Error> {
    let rows = source.rows();
    if frame.visible.iter().all(|visible| !visible) {
        let none = vec![0.0; rows];
        return Ok(Found {
            kept: frame.visible.clone(),
            status: Status::Empty,
            upper: none.clone(),
            lower: none.clone(),
            lower_bound: 0,
            weights: none,
        });
    }
    let mut ratios = list("scores", rows)?;
    ratios.resize(rows, 0.0);
    let mut problem = Problem::new(frame, threads)?;
    problem.effort = effort;
    let mut rounds = Rounds {
        source,
        frame,
        problem,
        order: Spread::new(rows),
        ratios,
        bound: (0, Vec::new()),
        sample: rows,
        fast: source.looks_again_fast(),
        attempts: 0,
    };
    rounds.begin()?;
    rounds.run()
}

/// Order of rows in which every prefix is spread over all.
struct Spread {
    rows: usize,
    step: usize,
}

impl Spread {
    fn new(rows: usize) -> Self {
        let common = |mut a: usize, mut b: usize| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        // Near the golden section, and without a common divisor.
        let mut step = (rows as u128 * 618_033_988_749 / 1_000_000_000_000).max(1) as usize;
        while common(step, rows.max(1)) != 1 {
            step += 1;
        }
        Spread { rows, step }
    }

    fn row(&self, at: usize) -> usize {
        ((at as u128 * self.step as u128) % self.rows as u128) as usize
    }
}

struct Rounds<'a, S> {
    source: &'a S,
    frame: &'a Frame,
    problem: Problem<'a>,
    order: Spread,
    /// Largest share of its budget that each row was last seen to lose; 0 if it was not checked.
    ratios: Vec<f32>,
    /// Best lower bound so far, with rows and their weights.
    bound: (usize, Vec<(usize, f32)>),
    /// Number of rows that are checked.
    sample: usize,
    /// `true` if checking them again takes little time.
    fast: bool,
    /// Number of failures by rounding.
    attempts: usize,
}

/// Certificates of all rows.
struct Judged {
    upper: Vec<f64>,
    lower: Vec<f64>,
    /// Rows that lose too much, worst first, with their ratios of loss to budget.
    over: Vec<(usize, f64)>,
}

impl<S: Source> Rounds<'_, S> {
    fn rows(&self) -> usize {
        self.source.rows()
    }

    /// Fills the first program.
    fn begin(&mut self) -> Result<(), Error> {
        let few = self.rows() <= S::LIMITS.few;
        let first = if few { self.rows() } else { S::LIMITS.first };
        if !few && !self.fast {
            self.sample = (GROWTH * first).min(self.rows());
        }
        let mut listed: Vec<usize> = (0..first).map(|at| self.order.row(at)).collect();
        listed.sort_unstable();
        self.problem.thorough = few;
        self.problem.admit(self.source, &listed)
    }

    /// Returns `true` if that many rows fit in the program.
    fn hold(&self, rows: usize) -> bool {
        rows <= S::LIMITS.few
            || rows.saturating_mul(self.problem.stride * size_of::<f32>()) <= AT_ONCE
    }

    fn run(&mut self) -> Result<Found, Error> {
        let few = self.problem.thorough;
        let mut gain = (0, 0);
        // A set for all rows, and its round. For some more rounds a smaller set is searched.
        let mut settled: Option<(usize, Found)> = None;
        for round in 0.. {
            interrupt::check()?;
            let best = self.problem.search()?;
            let thorough = std::mem::replace(&mut self.problem.thorough, few);
            self.take(&best);
            if let Some((since, found)) = &settled {
                if best.size >= found.size() || round > since + POLISHED {
                    break;
                }
                self.problem.thorough = true;
            }
            if self.bound.0 > gain.1 + gain.1 / STALLED.1 {
                gain = (round, self.bound.0);
            }
            if best.size > self.frame.max_keep {
                return self.run_over();
            }
            let stalled = round >= ROUNDS || round >= gain.0 + STALLED.0;
            if stalled && thorough {
                if settled.is_some() {
                    break;
                }
                return self.repaired(best);
            }
            self.problem.thorough |= stalled;
            self.leave_out(&best)?;
            if self.sample < self.rows() || self.fast && self.problem.rows() < self.rows() {
                let first: Vec<usize> = (0..self.sample).map(|at| self.order.row(at)).collect();
                let over = self.check(&best.kept, first, 1.0)?;
                if self.all_join(over.len(), self.sample)? {
                    continue;
                }
                if over.len() <= self.sample / TOLERATED && self.sample < self.rows() {
                    self.sample = self.sample.saturating_mul(GROWTH).min(self.rows());
                    gain.0 = round;
                }
                if !over.is_empty() {
                    if !self.join(&over)? {
                        if settled.is_some() {
                            break;
                        }
                        return self.repaired(best);
                    }
                    continue;
                }
                if self.sample < self.rows() {
                    continue;
                }
            }
            let Some(found) = self.settle(best)? else { continue };
            let enough = self.problem.is_enough(found.size(), self.bound.0);
            if thorough || enough || self.problem.effort == Effort::Fast {
                return Ok(match settled {
                    Some((_, other))
                        if found.status != Status::Certified || other.size() <= found.size() =>
                    {
                        self.bounded(other)
                    }
                    _ => found,
                });
            }
            settled = Some((round, found));
            self.problem.thorough = true;
        }
        let (_, found) = settled.expect("only a set for all rows ends the rounds");
        Ok(self.bounded(found))
    }

    /// Checks the rows near their budgets, then all. A small lack of a few rows is added to the set. Otherwise rows
    /// have joined the program, and there is no answer yet.
    fn settle(&mut self, best: Best) -> Result<Option<Found>, Error> {
        let near: Vec<usize> = (0..self.rows()).filter(|&j| self.ratios[j] >= NEAR).collect();
        let mut kept = best.kept.clone();
        if near.len() < self.rows() / 2 {
            let over = self.check(&kept, near, 1.0)?;
            if !over.is_empty() && !self.mended(&over, best.size, &mut kept)? {
                return if self.join(&over)? { Ok(None) } else { self.repaired(best).map(Some) };
            }
        }
        let judged = self.judge_all(&kept, 1.0)?;
        if judged.over.is_empty() {
            return Ok(Some(self.found(kept, judged, Status::Certified)));
        }
        if self.mended(&judged.over, best.size, &mut kept)? {
            let again = self.judge_all(&kept, 1.0)?;
            if again.over.is_empty() {
                return Ok(Some(self.found(kept, again, Status::Certified)));
            }
        }
        let more = self.all_join(judged.over.len(), self.rows())? || self.join(&judged.over)?;
        if more { Ok(None) } else { self.repaired(best).map(Some) }
    }

    /// Adds to a set what a few rows lack, if that is little.
    fn mended(
        &self,
        over: &[(usize, f64)],
        size: usize,
        kept: &mut Vec<bool>,
    ) -> Result<bool, Error> {
        if over.len() > TOGETHER || self.rows() == self.problem.rows() {
            return Ok(false);
        }
        let mut trial = kept.clone();
        self.mend(over, &mut trial, 0)?;
        let count = trial.iter().filter(|kept| **kept).count();
        let fits = count <= size + (size / REPAIRED.0).max(REPAIRED.1);
        if fits && count <= self.frame.max_keep {
            *kept = trial;
            return Ok(true);
        }
        Ok(false)
    }

    /// Stores a better lower bound.
    fn take(&mut self, best: &Best) {
        if best.lower_bound > self.bound.0 {
            let mixture = best.mixture.iter();
            let weights = mixture.map(|&(j, weight)| (self.problem.listed[j], weight)).collect();
            self.bound = (best.lower_bound, weights);
        }
    }

    /// Removes rows of the program that set no limit and are far below their budgets.
    fn leave_out(&mut self, best: &Best) -> Result<(), Error> {
        if self.problem.rows() == self.rows() || self.problem.rows() <= S::LIMITS.few {
            return Ok(());
        }
        let ratios = self.problem.ratios(&best.kept)?;
        let keep: Vec<bool> = (ratios.iter().zip(&self.problem.multipliers))
            .map(|(ratio, a)| *a > 0.0 || *ratio >= IDLE)
            .collect();
        self.problem.retain(&keep);
        Ok(())
    }

    /// Returns the rows outside the program that lose more than `most` times their budget, worst first.
    fn check(
        &mut self,
        kept: &[bool],
        mut rows: Vec<usize>,
        most: f64,
    ) -> Result<Vec<(usize, f64)>, Error> {
        let mut inside = self.problem.listed.clone();
        inside.sort_unstable();
        rows.retain(|row| inside.binary_search(row).is_err());
        rows.sort_unstable();
        let judged = self.source.judge(kept, &rows)?;
        let holds = judged.holds.iter().flatten();
        let mut over = Vec::new();
        for ((&row, upper), holds) in rows.iter().zip(&judged.tail_mass_upper).zip(holds) {
            let ratio = upper / self.source.eps(row).max(f64::MIN_POSITIVE);
            self.ratios[row] = ratio as f32;
            if ratio > most && !(*holds && most >= 1.0) {
                over.push((row, ratio));
            }
        }
        over.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        Ok(over)
    }

    /// Judges all rows, and lists those that lose more than `most` times their budget.
    fn judge_all(&mut self, kept: &[bool], most: f64) -> Result<Judged, Error> {
        let rows = self.rows();
        let (mut upper, mut lower) = (filled("scores", rows, 0.0)?, filled("scores", rows, 0.0)?);
        let mut open = filled("scores", rows, true)?;
        if S::LIMITS.stored {
            let masses = self.problem.masses(kept, self.source.block_size())?;
            for (&row, (low, high)) in self.problem.listed.iter().zip(masses) {
                if high <= self.source.eps(row) {
                    (lower[row], upper[row], open[row]) = (low, high, false);
                }
            }
        }
        let listed: Vec<usize> = (0..rows).filter(|&row| open[row]).collect();
        let judged = self.source.judge(kept, &listed)?;
        let holds = judged.holds.iter().flatten();
        let ends = judged.tail_mass_lower.iter().zip(&judged.tail_mass_upper);
        for ((&row, (low, high)), holds) in listed.iter().zip(ends).zip(holds) {
            (lower[row], upper[row], open[row]) = (*low, *high, !holds);
        }
        let mut over = Vec::new();
        for row in 0..rows {
            let ratio = upper[row] / self.source.eps(row).max(f64::MIN_POSITIVE);
            self.ratios[row] = ratio as f32;
            if ratio > most && open[row] {
                over.push((row, ratio));
            }
        }
        over.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        Ok(Judged { upper, lower, over })
    }

    /// Lets the first of the given rows join. Returns `false` if there is no room. A row of the program is listed only
    /// by rounding.
    fn join(&mut self, over: &[(usize, f64)]) -> Result<bool, Error> {
        let inside = |row: &usize| self.problem.listed.contains(row);
        let most = self.problem.rows().clamp(JOIN.0, JOIN.1);
        let mut new: Vec<usize> = Vec::new();
        let mut rounding = false;
        for (row, _) in over {
            if inside(row) {
                rounding = true;
            } else if new.len() < most {
                new.push(*row);
            }
        }
        if !self.hold(self.problem.rows() + new.len()) {
            return Ok(false);
        }
        new.sort_unstable();
        self.problem.admit(self.source, &new)?;
        if rounding {
            self.problem.set_more_aside(self.attempts);
            self.attempts += 1;
        }
        Ok(true)
    }

    /// Lets all rows join if so many of some rows lose too much that most would join in the end, and there is room.
    /// Returns `true` if they did.
    fn all_join(&mut self, over: usize, of: usize) -> Result<bool, Error> {
        let rows = self.problem.rows();
        let say = self.problem.multipliers.iter().filter(|a| **a > 0.0).count();
        let share = over as f64 / of.saturating_sub(rows).max(1) as f64;
        let many = share > MOST.0 || share > MOST.1 && say * 2 > rows;
        if !many || rows == self.rows() || !self.hold(self.rows()) {
            return Ok(false);
        }
        let inside = self.problem.listed.clone();
        let mut inside = inside.iter().copied().peekable();
        let rest: Vec<usize> =
            (0..self.rows()).filter(|row| inside.next_if_eq(row).is_none()).collect();
        self.problem.admit(self.source, &rest)?;
        self.problem.multipliers.fill(0.0);
        self.problem.thorough = true;
        self.sample = self.rows();
        Ok(true)
    }

    fn found(&self, kept: Vec<bool>, judged: Judged, status: Status) -> Found {
        let Judged { upper, lower, .. } = judged;
        let weights = vec![0.0; self.rows()];
        self.bounded(Found { kept, status, upper, lower, lower_bound: 0, weights })
    }

    /// Returns the set with the best lower bound so far.
    fn bounded(&self, mut found: Found) -> Found {
        found.weights.fill(0.0);
        for &(row, weight) in &self.bound.1 {
            found.weights[row] = f64::from(weight);
        }
        found.lower_bound = self.bound.0.min(found.size());
        found
    }

    /// Returns the set with the columns that the rows still lack, when no more rows join the program.
    fn repaired(&mut self, best: Best) -> Result<Found, Error> {
        let Best { mut kept, .. } = best;
        for pass in 0.. {
            let judged = self.judge_all(&kept, 1.0)?;
            if judged.over.is_empty() {
                return Ok(self.found(kept, judged, Status::Certified));
            }
            self.mend(&judged.over, &mut kept, pass)?;
            if kept.iter().filter(|kept| **kept).count() > self.frame.max_keep {
                return self.run_over();
            }
        }
        unreachable!("a set of all columns loses nothing")
    }

    /// Adds to a set what some rows lack.
    fn mend(&self, over: &[(usize, f64)], kept: &mut [bool], pass: usize) -> Result<(), Error> {
        let mut added = 0;
        for rows in over.chunks(TOGETHER) {
            let mut some = Problem::new(self.frame, self.problem.threads)?;
            let mut rows: Vec<usize> = rows.iter().map(|(row, _)| *row).collect();
            rows.sort_unstable();
            some.admit(self.source, &rows)?;
            for attempt in 0..pass.min(3) {
                some.set_more_aside(attempt);
            }
            added += repair(&some, kept)?;
            interrupt::check()?;
        }
        if added == 0 || pass > 8 {
            kept.copy_from_slice(&self.frame.visible);
        }
        Ok(())
    }

    /// Finds a set of `max_keep` columns, fewer than all rows need.
    fn run_over(&mut self) -> Result<Found, Error> {
        let mut round = 0;
        loop {
            interrupt::check()?;
            let all = self.sample >= self.rows();
            let best = self.problem.shrink(if all { PROBES.1 } else { PROBES.0 })?;
            let most = self.problem.ratios(&best.kept)?.into_iter().fold(1.0, f64::max);
            let most = most * (1.0 + WORSE);
            if !all {
                let first: Vec<usize> = (0..self.sample).map(|at| self.order.row(at)).collect();
                let over = self.check(&best.kept, first, most)?;
                let inside = self.problem.rows();
                self.join_over(&over)?;
                // Without room for more rows, the others are still checked.
                if over.len() <= self.sample / TOLERATED || self.problem.rows() == inside {
                    self.sample = self.sample.saturating_mul(GROWTH).min(self.rows());
                }
                round += 1;
                continue;
            }
            let judged = self.judge_all(&best.kept, most)?;
            let inside = self.problem.rows();
            if round < ROUNDS && !judged.over.is_empty() {
                self.join_over(&judged.over)?;
                round += 1;
                if self.problem.rows() > inside {
                    self.problem.search()?;
                    continue;
                }
            }
            let eps = |row: usize| self.source.eps(row);
            if (0..self.rows()).all(|row| judged.upper[row] <= eps(row)) {
                self.bound.0 = self.bound.0.min(best.size);
                return Ok(self.found(best.kept, judged, Status::Certified));
            }
            let listed = &self.problem.listed;
            let losses: Vec<f64> = listed.iter().map(|&row| judged.upper[row]).collect();
            let proof = self.problem.bound_for(&losses, best.size)?;
            self.bound = (0, Vec::new());
            self.take(&proof);
            return Ok(self.found(best.kept, judged, Status::OverBudget));
        }
    }

    /// Lets rows join as far as there is room; rows of the program do not count.
    fn join_over(&mut self, over: &[(usize, f64)]) -> Result<(), Error> {
        let most = self.problem.rows().clamp(JOIN.0, JOIN.1);
        let listed = &self.problem.listed;
        let mut new: Vec<usize> = over
            .iter()
            .map(|(row, _)| *row)
            .filter(|row| !listed.contains(row))
            .take(most)
            .collect();
        if self.hold(self.problem.rows() + new.len()) {
            new.sort_unstable();
            self.problem.admit(self.source, &new)?;
        }
        Ok(())
    }
}
