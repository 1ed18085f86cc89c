//! Decision of one row: read, searched by keys or by blocks, settled, then listed.

use super::candidates::Candidates;
use super::constraints::Constraints;
use super::job::{SelectJob, Typed};
use super::options::{Options, allowed_keys};
use super::read::{Row, RowScores, Source};
use super::scratch::{Computed, Forced, PerDtype, ReadScratch, RowScratch, Searches};
use super::search_blocks;
use super::search_row::Search;
use super::selection::Decision;
use super::settle;
use super::weight_fn::{InvertibleWeightFn, WeightFns, for_weights};
use crate::error::Error;
use crate::kernels::{Element, InDouble, LANES};
use crate::runtime::memory::{check_memory, room};
use crate::runtime::reused::{Reused, filled_again};

impl<E: PerDtype, M: WeightFns<E::Scalar>> Typed<'_, E, M> {
    /// Decides a row and lists its kept keys: in its own dtype, or else in f64.
    pub(super) fn row(
        &self,
        row: usize,
        threads: usize,
        scratch: &mut RowScratch,
        out: &mut Vec<u32>,
    ) -> Result<Decision, Error> {
        let (job, options, mark) = (self.job, self.job.options, out.len());
        let mut source = Source {
            threads,
            copied: options.keep_first > 0 || options.keep_last > 0,
            searched: options.block_size == 1,
            prefetch: self.prefetch(row),
            ..Source::new(job.scores, row, job.simd)
        };
        let RowScratch { read, search, forced, .. } = scratch;
        if source.is_plain(&mut read.admitted)? {
            let mut decision = self.plain_row(&source, read, search, forced, out);
            if let Err(Error::Changed { .. }) = decision {
                out.truncate(mark);
                source.copied = true;
                decision = self.plain_row(&source, read, search, forced, out);
            }
            let decision = decision?;
            // The f64 search has already decided rows without blocks.
            let again = E::SINGLE && options.prove_minimal && options.block_size > 1;
            if !(again && decision.open(job.eps(row))) {
                return Ok(decision);
            }
            out.truncate(mark);
        }
        let (read, kind) = source.double(&mut read.copies.f64)?;
        for_weights!(kind, read.keys.largest, weight_fn =>
            job.decide(row, read, weight_fn, search, forced, out))
    }

    fn plain_row(
        &self,
        source: &Source<'_>,
        read: &mut ReadScratch,
        search: &mut Searches,
        forced: &mut Forced,
        out: &mut Vec<u32>,
    ) -> Result<Decision, Error> {
        let row = source.row;
        if source.searched
            && let Some(read) = source.listed(self.stored, read)?
        {
            let weight_fn = self.weight_fns.of(read.keys.largest);
            return self.job.decide(row, read, weight_fn, search, forced, out);
        }
        let read = source.whole(self.stored, read)?;
        let weight_fn = self.weight_fns.of(read.keys.largest);
        self.job.decide(row, read, weight_fn, search, forced, out)
    }
}

impl SelectJob<'_> {
    /// Decides a row that was read and lists its kept keys.
    fn decide<E: InDouble<Scalar: Computed>, W: InvertibleWeightFn<E::Scalar>>(
        &self,
        number: usize,
        row: Row<'_, E>,
        weight_fn: W,
        search: &mut Searches,
        forced: &mut Forced,
        out: &mut Vec<u32>,
    ) -> Result<Decision, Error> {
        let Row { mut scores, positions, keys, slack, finer, exact_ties } = row;
        if keys.visible == 0 {
            return Ok(Decision::EMPTY);
        }
        // Every option is handled below, except those for the caller.
        let &Options {
            min_keep,
            max_keep: _, // by `allowed_keys`
            keep_first,
            keep_last,
            block_size,
            prove_minimal,
            effort: _,
            threads: _,
        } = self.options;
        forced.find(scores.as_slice(), keys.visible, keep_first, keep_last)?;
        let count = forced.first.len() + forced.last.len();
        let constraints = Constraints {
            min_keep: min_keep.clamp(1, keys.visible),
            max_keep: allowed_keys(self.options, keys.visible, count, self.scores, number)?,
            exact_ties,
            ..Constraints::new(self.eps(number), slack)
        };
        if block_size > 1 {
            let keys = &Candidates { scores: scores.as_slice(), ..keys };
            let (row, size) = ((self.scores, number), block_size);
            return search_blocks::search(keys, weight_fn, &constraints, size, forced, row, out);
        }
        let own = forced.take_from(&mut scores)?;
        let scores = scores.as_slice();
        let fixed = Candidates { scores: &own[..], threads: 1, ..keys }.mass(weight_fn)?;
        let visible = keys.visible - count;
        let keys = Candidates { scores, visible, forced: (fixed, count), ..keys };
        let constraints = &constraints;
        let scratch = E::Scalar::scratch(search);
        let mut found = Search { keys: &keys, weight_fn, rule: constraints }.run(None, scratch)?;
        let mut decision = found.decision(constraints);
        if W::EXACT && decision.open(constraints.eps) {
            // Two lists of keys with their positions, each grown by doubling.
            check_memory("scores", visible, 4 * size_of::<(f64, u32)>())?;
            settle::stored_weights(scores, &own, &mut found, constraints);
            decision = found.decision(constraints);
        }
        if exact_ties && count > 0 && decision.open(constraints.eps) {
            settle::tie(scores, &own, &mut found, constraints)?;
            decision = found.decision(constraints);
        }
        if let Some(slack) = finer.filter(|_| prove_minimal && decision.open(constraints.eps)) {
            let constraints = &Constraints { slack, ..*constraints };
            let worst = found.worst.map(|worst| worst.0);
            found = settle::in_double(&keys, &own, weight_fn, constraints, worst, &mut search.f64)?;
            decision = found.decision(constraints);
        }
        let mark = out.len();
        let at = |j: &u32| positions.map_or(*j, |list| list[*j as usize]);
        out.extend(forced.first.iter().map(at));
        if let Some(boundary) = found.worst {
            keys.emit(positions, decision.kept, boundary, out)?;
        }
        out.extend(forced.last.iter().map(at));
        // A row that is read in place can change between the sums and the list; then it is copied.
        if out.len() - mark != decision.kept {
            return Err(Error::Changed { place: self.scores.place(number, None) });
        }
        Ok(decision)
    }
}

impl Forced {
    /// Lists the first and the last unmasked positions; a position claimed by both is listed once.
    fn find<E: Element>(
        &mut self,
        scores: &[E],
        visible: usize,
        keep_first: usize,
        keep_last: usize,
    ) -> Result<(), Error> {
        self.first.clear();
        self.last.clear();
        let first = keep_first.min(visible);
        let last = keep_last.min(visible - first);
        room("keep_first", &mut self.first, first)?;
        room("keep_last", &mut self.last, last)?;
        let masked = E::MASKED.widen();
        let shows = |j: &usize| scores[*j].widen() > masked;
        if first > 0 {
            self.first.extend((0..scores.len()).filter(shows).take(first).map(|j| j as u32));
        }
        if last > 0 {
            self.last.extend((0..scores.len()).rev().filter(shows).take(last).map(|j| j as u32));
            self.last.reverse();
        }
        Ok(())
    }

    /// Hides the forced keys of a row, which do not compete, and returns their scores in whole groups.
    fn take_from<E: Element>(&self, scores: &mut RowScores<'_, E>) -> Result<Reused<E>, Error> {
        let count = self.first.len() + self.last.len();
        if count == 0 {
            return Ok(Reused::default());
        }
        let mut own = filled_again("keep_first", count.next_multiple_of(LANES), E::MASKED)?;
        let scores = scores.copied();
        for (score, &position) in own.iter_mut().zip(self.first.iter().chain(&self.last)) {
            *score = std::mem::replace(&mut scores[position as usize], E::MASKED);
        }
        Ok(own)
    }
}
