//! Ways of answering a unit: by codes of keys and values, a few rows at a time, or many together over all keys.

use super::job::{Answer, AttentionJob, GROUP, MANY, RowBudget, Unit};
use super::options::{AttentionOptions, Weights};
use crate::error::Error;
use crate::runtime::reused::Reused;

/// Most rows of a head that are answered by codes of keys and values: more are faster together.
const CODED: usize = 32;

impl AttentionJob<'_> {
    pub(super) fn unit(&self, unit: &Unit, budget: RowBudget<'_>) -> Result<Reused<Answer>, Error> {
        if let Some(there) = self.from_codes {
            return self.attend_from_codes(unit, there, budget);
        }
        // One by one, so that an option that is added does not compile before all ways of answering rows have decided what
        // they do about it.
        let &AttentionOptions {
            even_if_slower,
            weights,
            // Where something is chosen: `ask_for`.
            mapped: _,
            // What a row sees: `QueryRows`. Its scores: `AttentionJob::scale`. All ways ask for its sink where its weights are summed.
            scale: _,
            causal: _,
            lengths: _,
            mask: _,
            sinks: _,
            // Where scores are made, in each way: `score_changes`.
            soft_cap: _,
            bias: _,
            // Of outputs, whichever way they were computed.
            precision: _,
            ball: _,
            // Where weights may come from codes: `attend_coded`.
            value_index: _,
            threads: _,
        } = &self.query_rows.options;
        if self.query_rows.rows_of(unit.head).len() <= CODED
            && !even_if_slower
            && weights == Weights::Codes
            && let Some(answers) = self.attend_coded(unit, budget)?
        {
            return Ok(answers);
        }
        if unit.rows.len() < MANY {
            return self.attend_few(unit, budget);
        }
        // Rows that may drop nothing lose nothing by going together.
        let one_by_one = budget.careful || even_if_slower && budget.eps.any(|eps| eps > 0.0);
        let mut answers: Reused<Option<Answer>> = unit.rows.iter().map(|_| None).collect();
        if !one_by_one && self.fit_together() {
            self.attend_tile(unit.head, unit.rows, budget, &mut answers)?;
        }
        let open: Reused<usize> = (0..answers.len()).filter(|&at| answers[at].is_none()).collect();
        for open in open.chunks(GROUP) {
            let rows: Reused<usize> = open.iter().map(|&at| unit.rows[at]).collect();
            let some = Unit { rows: &rows, threads: 1, ..*unit };
            for (&at, answer) in open.iter().zip(self.attend_few(&some, budget)?.drain(..)) {
                answers[at] = Some(answer);
            }
        }
        Ok(answers.drain(..).flatten().collect())
    }
}
