//! Set and lower bound for the rows of a program.

use super::problem::{Best, Problem};
use super::search::SetSearch;
use crate::error::Error;

impl Problem<'_> {
    /// Finds a small set within the budgets of all rows of the program, and a lower bound; `max_keep` does not count.
    pub(super) fn search(&mut self) -> Result<Best, Error> {
        let mut best = self.all_visible();
        if self.frame.forced_count < best.size {
            let search = SetSearch::new(self, &self.aims)?;
            self.multipliers = search.improve(true, Some(&self.multipliers), &mut best)?;
        }
        Ok(best)
    }

    /// Raises the margin of rows whose margin rounding has used up; in the end to infinity, so that all columns are
    /// kept.
    pub(super) fn set_more_aside(&mut self, attempt: usize) {
        for margin in &mut self.margin {
            *margin = if attempt < 2 { 64.0 * *margin + 1e-9 } else { f64::INFINITY };
        }
    }

    /// Finds a set of `max_keep` columns whose largest ratio of loss to budget is small, by `probes` bisections of a
    /// common factor of all budgets.
    pub(super) fn shrink(&self, probes: usize) -> Result<Best, Error> {
        let least = self.aims.iter().copied().filter(|e| *e > 0.0).fold(1.0, f64::min);
        let (mut low, mut high) = (0.0, -least.ln());
        let mut fitting: Option<Best> = None;
        let mut start = self.multipliers.clone();
        for _ in 0..probes {
            let middle = 0.5 * (low + high);
            let scaled: Vec<f64> = self.aims.iter().map(|e| e * middle.exp()).collect();
            let mut probe = self.all_visible();
            start = SetSearch::new(self, &scaled)?.improve(true, Some(&start), &mut probe)?;
            if probe.size <= self.frame.max_keep {
                high = middle;
                fitting = Some(probe);
            } else {
                low = middle;
            }
        }
        let mut kept = fitting.map_or_else(|| self.frame.forced.clone(), |probe| probe.kept);
        // Use every allowed column, the most valuable first.
        let mut size = kept.iter().filter(|k| **k).count();
        let equal = vec![1.0; self.rows()];
        let alone = self.multipliers.iter().all(|a| *a <= 0.0);
        let multipliers = if alone { &equal } else { &self.multipliers };
        for i in SetSearch::new(self, &self.aims)?.ranked(multipliers)? {
            if size >= self.frame.max_keep {
                break;
            }
            if !std::mem::replace(&mut kept[i as usize], true) {
                size += 1;
            }
        }
        Ok(Best { kept, size, ..self.all_visible() })
    }

    /// Returns a lower bound for sets that lose, in each row of the program, at most the budget or the given loss.
    pub(super) fn bound_for(&self, losses: &[f64], size: usize) -> Result<Best, Error> {
        let achieved: Vec<f64> = (self.aims.iter().zip(losses))
            .map(|(aim, loss)| aim.max(*loss).min(1f64.next_down()))
            .collect();
        let mut proof = self.all_visible();
        proof.size = usize::MAX;
        SetSearch::new(self, &achieved)?.improve(false, None, &mut proof)?;
        proof.lower_bound = proof.lower_bound.min(size);
        Ok(proof)
    }
}
