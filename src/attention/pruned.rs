//! Rows thinned by codes: the kept keys, and a bound on the mass of the others.

use half::{bf16, f16};

use super::job::{AttentionJob, GROUP, MANY};
use super::pending::{PendingRow, grow};
use super::stretches::by_stretches;
use crate::error::Error;
use crate::index::{
    Chosen, Coded, Codes, Guess, MISSES, PanelRow, Prepared, Step, ThresholdSearch, ThresholdState,
    for_coded_dtype, matrix,
};
use crate::kernels::{Keys, LANES, Picked, Simd};
use crate::runtime::reused::Reused;

/// Ascending positions for each of a few rows.
pub(super) type Lists<'a> = [&'a [u32]; MANY];

impl AttentionJob<'_> {
    /// Answers the rows that codes and a few exact scores decide, and closes them.
    pub(super) fn prune_by_codes(
        &self,
        head: usize,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<(), Error> {
        let Some(codes) = self.index.map(|index| index.head(head)) else { return Ok(()) };
        let (simd, mut guess) = (self.simd, Guess::default());
        for row in rows.iter_mut() {
            row.listed = row.prepared.as_ref().is_some_and(|prepared| {
                Codes::can_split(&prepared.code_error, self.query_rows.row_visibility(row.number))
            });
        }
        let listed: Reused<usize> = (0..rows.len()).filter(|&at| rows[at].listed).collect();
        for four in listed.chunks(GROUP) {
            if let &[a, b, c, d] = four
                && let Ok(four) = rows.get_disjoint_mut([a, b, c, d])
            {
                list_together(codes, (simd, threads), four, &guess)?;
                continue;
            }
            for &at in four {
                list_together(codes, (simd, threads), [&mut rows[at]], &guess)?;
            }
        }
        for _ in (0..=MISSES).filter(|_| !listed.is_empty()) {
            for_coded_dtype!(self.keys, E => self.rescore(head, matrix::<E>(self.keys, head), rows, threads))?;
            for row in rows.iter_mut().filter(|row| row.listed) {
                let above = &row.scratch.query.above;
                row.flat |= above.flat;
                if !row.open {
                    guess.learn(above);
                }
                // Its list began too high.
                row.listed = row.open && !row.flat && above.again;
                if row.listed {
                    list_together(codes, (simd, threads), [row], &guess)?;
                }
            }
            if !rows.iter().any(|row| row.listed) {
                break;
            }
        }
        // Rows that could not be listed.
        let padded = codes.len().next_multiple_of(LANES);
        let mut left = 0;
        for row in rows.iter_mut() {
            row.listed = false;
            if row.open && !row.flat && row.prepared.is_some() {
                let prepared = &*row.prepared.insert(codes.prepare(simd, &row.wide, self.scale));
                let scores = &mut row.scratch.query.scores;
                grow(scores, padded)?;
                scores.resize(padded, 0.0);
                codes.scan(simd, [prepared.coarse()], [&mut scores[..]], threads)?;
                left += 1;
            }
        }
        if left == 0 {
            return Ok(());
        }
        for_coded_dtype!(self.keys, E => self.rescore(head, matrix::<E>(self.keys, head), rows, threads))
    }

    /// Turns scores by codes into answers.
    fn rescore<E: Coded>(
        &self,
        head: usize,
        keys: Keys<'_, E>,
        rows: &mut [PendingRow],
        threads: usize,
    ) -> Result<(), Error> {
        let Some(codes) = self.index.map(|index| index.head(head)) else { return Ok(()) };
        let simd = self.simd;
        let sees = |row: usize| self.query_rows.row_visibility(row);
        // These are always read.
        let uncoded: Reused<u32> = codes.uncoded().collect();
        self.ask_for(head, &[&uncoded]);
        let mut states: Reused<Option<ThresholdState>> = rows.iter().map(|_| None).collect();
        // Those that are listed come first, and alone.
        let turn = rows.iter().any(|row| row.listed);
        let waits = |row: &PendingRow| row.open && !row.flat && row.prepared.is_some();
        let mut active: Reused<bool> =
            rows.iter().map(|row| waits(row) && row.listed == turn).collect();
        for (at, row) in rows.iter_mut().enumerate() {
            if !(turn && active[at]) {
                continue;
            }
            if let Some((search, scratch)) = row.search(sees(row.number), codes, keys, simd) {
                states[at] = search.begin_above(scratch);
            }
            active[at] = states[at].is_some();
        }
        while active.contains(&true) {
            let mut chosen: Reused<Option<Chosen>> = rows.iter().map(|_| None).collect();
            for (at, row) in rows.iter_mut().enumerate() {
                if !active[at] {
                    continue;
                }
                let Some((search, scratch)) = row.search(sees(row.number), codes, keys, simd)
                else {
                    continue;
                };
                match search.choose(scratch, &mut states[at])? {
                    Step::Done(found) => {
                        (row.upper, row.scored, row.rung) = (found.upper, found.scored, found.rung);
                        (row.kept, row.open) = (Some(found.kept), false);
                        active[at] = false;
                    }
                    Step::Dense { flat } => (row.flat, active[at]) = (flat, false),
                    Step::Score(list) => {
                        ThresholdSearch::<E>::make_room(scratch, &list)?;
                        chosen[at] = Some(list);
                    }
                }
            }
            let mut lists: Lists<'_> = [&[]; MANY];
            for (list, chosen) in lists.iter_mut().zip(&chosen) {
                *list = chosen.as_ref().map_or(&[], |chosen| &chosen.kept);
            }
            let lists = &lists[..rows.len()];
            self.ask_for(head, lists);
            score_chosen(keys, rows, lists, (simd, threads))?;
            for (at, (row, chosen)) in rows.iter_mut().zip(chosen.drain(..)).enumerate() {
                let Some(chosen) = chosen else { continue };
                let Some((search, scratch)) = row.search(sees(row.number), codes, keys, simd)
                else {
                    continue;
                };
                if let Some(found) = search.judge(scratch, &mut states[at], chosen)? {
                    (row.upper, row.scored, row.rung) = (found.upper, found.scored, found.rung);
                    (row.kept, row.open) = (Some(found.kept), false);
                    active[at] = false;
                }
            }
        }
        Ok(())
    }
}

/// Lists the keys that some rows may keep.
fn list_together<const Q: usize>(
    codes: &Codes,
    (simd, threads): (Simd, usize),
    rows: [&mut PendingRow; Q],
    guess: &Guess,
) -> Result<(), Error> {
    codes.split(
        simd,
        rows.map(|row| {
            let PendingRow { prepared, prefix, eps, scratch, .. } = row;
            let above = &mut scratch.query.above;
            let numbers = prepared.as_ref().map(Prepared::coarse).unwrap_or_default();
            PanelRow { numbers, prefix: *prefix, eps: *eps, above }
        }),
        guess,
        threads,
    )
}

/// Scores the selected keys, stretch by stretch for all rows, so that they share pages and caches, or row by row over
/// threads.
fn score_chosen<E: Coded>(
    keys: Keys<'_, E>,
    rows: &mut [PendingRow],
    lists: &[&[u32]],
    (simd, threads): (Simd, usize),
) -> Result<(), Error> {
    let offset = |row: &PendingRow| row.prepared.as_ref().map_or(0.0, |prepared| prepared.offset);
    if threads > 1 {
        for (row, list) in rows.iter_mut().zip(lists) {
            let offset = offset(row);
            let to = &mut row.scratch.query.exact[..list.len()];
            row.query.score_listed((simd, threads), keys, list, offset, to)?;
        }
        return Ok(());
    }
    by_stretches(lists, |row, list, (from, end)| {
        let offset = offset(&rows[row]);
        let PendingRow { query, scratch, .. } = &mut rows[row];
        let to = &mut scratch.query.exact[from..end];
        query.score(simd, keys, Picked::Listed(&list[from..]), offset, to);
    });
    Ok(())
}
