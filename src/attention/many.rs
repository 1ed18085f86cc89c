//! Many rows of a head: by codes where that pays, else together in f32.

use super::job::{Answer, AttentionJob, GROUP, MANY, RowBudget, Unit};
use super::options::AttentionOptions;
use crate::error::Error;
use crate::index::{Guess, Moments};
use crate::kernels::PANEL_ROWS;
use crate::runtime::reused::Reused;

/// Most rows that are answered by codes of keys and values, eight at a time: more are faster together in f32.
const CODED: usize = 32;
/// Rows that are pruned at a time.
const PRUNED: usize = 8;
/// So many rows that are left of others are answered by themselves.
const ALONE: usize = GROUP;
/// Many rows that keep a larger share of their keys are faster together, with all keys.
const SPARSE_ROWS: f64 = 0.02;

impl AttentionJob<'_> {
    pub(super) fn unit(&self, unit: &Unit, budget: RowBudget<'_>) -> Result<Reused<Answer>, Error> {
        // One by one, so that an option that is added does not compile before all ways of answering rows (by codes, a few at
        // a time, many together) have decided what they do about it.
        let &AttentionOptions {
            even_if_slower,
            // Where something is chosen: `ask_for`.
            mapped: _,
            // What a row sees: `QueryRows`. Its scores: `AttentionJob::scale`. All ways ask for its sink where its weights are summed.
            scale: _,
            causal: _,
            lengths: _,
            mask: _,
            sinks: _,
            // Of outputs, whichever way they were computed.
            precision: _,
            ball: _,
            // Where weights may come from codes: `attend_coded`.
            value_index: _,
            threads: _,
        } = &self.query_rows.options;
        if self.query_rows.rows_of(unit.head).len() <= CODED
            && !even_if_slower
            && let Some(answers) = self.attend_coded(unit, budget)?
        {
            return Ok(answers);
        }
        if unit.rows.len() < MANY {
            return self.attend_few(unit, budget);
        }
        let mut answers: Reused<Option<Answer>> = unit.rows.iter().map(|_| None).collect();
        if self.index.is_some() {
            let together = !budget.careful && !even_if_slower && self.fit_together();
            let left = if budget.careful || !self.fit_together() {
                (0..unit.rows.len()).collect()
            } else {
                self.attend_thinned(unit, budget, &mut answers)?
            };
            self.prune_many(unit, &left, (budget, together), &mut answers)?;
        }
        let answered = answers.iter().any(Option::is_some);
        let open: Reused<usize> = (0..answers.len()).filter(|&at| answers[at].is_none()).collect();
        let rows: Reused<usize> = open.iter().map(|&at| unit.rows[at]).collect();
        for (at, rows) in open.chunks(PANEL_ROWS).zip(rows.chunks(PANEL_ROWS)) {
            // Rows that may drop nothing lose nothing by it.
            let each = even_if_slower && budget.eps.any(|eps| eps > 0.0);
            // A few that are left of many would fill a panel of their own.
            let alone = budget.careful || each || rows.len() <= ALONE && answered;
            let together = if alone { None } else { self.attend_tile(unit.head, rows)? };
            if let Some(mut found) = together {
                for (&at, found) in at.iter().zip(found.drain(..)) {
                    answers[at] = Some(found);
                }
                continue;
            }
            for (at, rows) in at.chunks(GROUP).zip(rows.chunks(GROUP)) {
                let mut found = self.attend_few(&Unit { rows, threads: 1, ..*unit }, budget)?;
                for (&at, found) in at.iter().zip(found.drain(..)) {
                    answers[at] = Some(found);
                }
            }
        }
        Ok(answers.drain(..).flatten().collect())
    }

    /// Answers those of many rows that can be thinned, in f64, if a few of them show that this is worth it.
    fn prune_many(
        &self,
        unit: &Unit,
        places: &[usize],
        (budget, together): (RowBudget<'_>, bool),
        answers: &mut [Option<Answer>],
    ) -> Result<(), Error> {
        let mut guess = Guess::default();
        let step = (places.len() / GROUP).max(1);
        let shown: Reused<usize> = places.iter().copied().step_by(step).take(GROUP).collect();
        let pruned = self.attend_pruned(unit, &shown, budget, (None, &mut guess, answers))?;
        let (kept, seen) = shown.iter().fold((0, 0), |(kept, seen), &at| {
            let here = answers[at].as_ref().map_or(0, |answer| answer.kept);
            (kept + here, seen + self.query_rows.row_visibility(unit.rows[at]).count())
        });
        let sparse = kept as f64 <= SPARSE_ROWS * seen as f64;
        if !pruned || (together && !sparse) || places.len() <= shown.len() {
            return Ok(());
        }
        let Some(index) = self.index else { return Ok(()) };
        // So many rows are worth a look at the codes themselves.
        let forms = self.forms(unit.head, index.head(unit.head))?;
        let rest: Reused<usize> = places.iter().copied().filter(|at| !shown.contains(at)).collect();
        for some in rest.chunks(PRUNED) {
            let by = (Some(forms.moments()), &mut guess, &mut *answers);
            self.attend_pruned(unit, some, budget, by)?;
        }
        Ok(())
    }

    /// Answers those of some rows that can be thinned; whether there are any.
    fn attend_pruned(
        &self,
        unit: &Unit,
        places: &[usize],
        budget: RowBudget<'_>,
        (moments, guess, answers): (Option<&Moments>, &mut Guess, &mut [Option<Answer>]),
    ) -> Result<bool, Error> {
        let list: Reused<usize> = places.iter().map(|&at| unit.rows[at]).collect();
        let mut rows = self.rows(unit.head, &list, budget, moments)?;
        self.prune_by_codes(unit.head, &mut rows, guess, 1)?;
        let mut open = rows.iter().map(|row| row.open);
        let places: Reused<usize> =
            places.iter().copied().filter(|_| open.next() == Some(false)).collect();
        rows.retain(|row| !row.open);
        for (&at, found) in places.iter().zip(self.average(unit.head, &mut rows, 1)?.drain(..)) {
            answers[at] = Some(found);
        }
        Ok(!places.is_empty())
    }
}
