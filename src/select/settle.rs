//! Decides a set again where its sums leave it open: in f64 after f32, or in exact arithmetic.

use super::candidates::{Boundary, Candidates};
use super::constraints::Constraints;
use super::scratch::SearchScratch;
use super::search_row::Search;
use super::weight_fn::InvertibleWeightFn;
use crate::error::Error;
use crate::kernels::{Element, InDouble, Scalar};
use crate::numerics::certified_sums::{self, Compensated, ExactSum, SplitSums};
use crate::numerics::exact_share::leaves_exactly;
use crate::numerics::order;
use crate::numerics::sorting;
use crate::runtime::memory::room;
use crate::runtime::reused::Reused;

/// Width of the range above the f32 boundary that is searched in f64, in natural-log units. Together the slacks of f32
/// come to 7e-5 of the tail's mass. That much lies within 7e-5 of the boundary where the density of mass there is the
/// tail's mass per unit, and rows whose density is fifty times smaller have few keys to look at.
const WIDTH: f64 = 1.0 / 256.0;

/// Decides by f64 sums, given the worst score that f32 keeps. `forced` are the scores of forced keys, in whole groups.
///
/// The boundary that f32 found is right but for a few keys: the two precisions differ by some thousandths of a per cent
/// of the tail. One f64 pass over the stored scores sums both sides of a narrow range there. The usual rule then
/// decides among the keys inside. If the boundary is not in the range, the search continues as after any wrong guess.
///
/// # Errors
/// As [`Search::run`].
pub(super) fn in_double<E: InDouble, W: InvertibleWeightFn<E::Scalar>>(
    candidates: &Candidates<'_, E>,
    forced: &[E],
    weight_fn: W,
    constraints: &Constraints,
    worst: Option<E::Scalar>,
    scratch: &mut SearchScratch<f64>,
) -> Result<Boundary<E::Scalar>, Error> {
    let &Candidates { simd, visible, rough, threads, .. } = candidates;
    let weight_fn = weight_fn.double();
    let (scores, largest) = (E::in_double(candidates.scores), candidates.largest.into());
    let own = Candidates::new(simd, E::in_double(forced), visible, largest);
    let forced = (own.mass(weight_fn)?, candidates.forced.1);
    let smallest = candidates.smallest.into();
    let candidates = Candidates { scores, rough, smallest, forced, threads, ..own };
    let range = worst.filter(|&worst| worst > E::Scalar::LOWEST).map(|worst| {
        let worst: f64 = worst.into();
        let scale = weight_fn.scale().unwrap_or(1.0);
        (worst, worst + WIDTH / scale)
    });
    // An empty range, where floats are far apart, is ignored.
    let range = range.filter(|range| range.0 < range.1);
    let Boundary { split, worst, minimal, exact } =
        Search { keys: &candidates, weight_fn, rule: constraints }.run(range, scratch)?;
    // A key is at or above a number exactly if it is at or above the next float of its own type.
    let worst = worst.map(|(score, last)| (E::Scalar::at_least(score), last));
    Ok(Boundary { split, worst, minimal, exact })
}

/// Decides a row of stored weights in exact arithmetic, by sums of integers: drops the worst kept keys while the loss
/// stays within the budget.
pub(super) fn stored_weights<E: Element>(
    scores: &[E],
    forced: &[E],
    found: &mut Boundary<E::Scalar>,
    constraints: &Constraints,
) {
    let Some(boundary) = found.worst else {
        return;
    };
    let masked = E::MASKED.widen();
    let visible = scores.iter().enumerate().map(|(j, score)| (score.widen(), j as u32));
    let (mut kept, dropped): (Vec<_>, Vec<_>) =
        visible.filter(|entry| entry.0 > masked).partition(|entry| order::kept(entry, &boundary));
    kept.sort_unstable_by(order::worst_first);
    let mut tail = ExactSum::new();
    let mut total = ExactSum::new();
    for entry in &dropped {
        tail.add(entry.0.into());
        total.add(entry.0.into());
    }
    for entry in &kept {
        total.add(entry.0.into());
    }
    let (mut forced_mass, mut forced_count) = (Compensated::default(), 0);
    for weight in forced.iter().map(|score| score.widen()).filter(|weight| *weight > masked) {
        total.add(weight.into());
        forced_mass.add(weight.into());
        forced_count += 1;
    }
    let holds = |tail: &ExactSum| tail.compare_share(&total, constraints.eps).is_le();
    if !holds(&tail) {
        return;
    }
    let (mut dropping, mut refused) = (0, false);
    // The boundary is a competing key: one of them stays.
    let least = constraints.min_keep.saturating_sub(forced_count).max(1);
    while kept.len() - dropping > least && !refused {
        tail.add(kept[dropping].0.into());
        refused = !holds(&tail);
        dropping += usize::from(!refused);
    }
    let weigh = |entries: &mut dyn Iterator<Item = &(E::Scalar, u32)>, mut sum: Compensated| {
        entries.for_each(|entry| sum.add(entry.0.into()));
        sum.value()
    };
    found.split = SplitSums {
        tail: weigh(&mut dropped.iter().chain(&kept[..dropping]), Compensated::default()),
        dropped: dropped.len() + dropping,
        head: weigh(&mut kept[dropping..].iter(), forced_mass),
        kept: kept.len() - dropping + forced_count,
    };
    found.worst = Some(kept[dropping]);
    found.minimal = refused || forced_count == 0 || forced_count < constraints.min_keep;
    found.exact = true;
}

/// Decides a row with forced keys whose tail mass can equal the budget exactly. Drops a share `eps` of its keys, if
/// that drops the same share of each level of equal scores.
///
/// # Errors
/// [`Error::NoMemory`].
pub(super) fn tie<E: Element>(
    scores: &[E],
    forced: &[E],
    found: &mut Boundary<E::Scalar>,
    constraints: &Constraints,
) -> Result<(), Error> {
    let eps = constraints.eps;
    let visible = found.split.kept + found.split.dropped;
    let dropped = certified_sums::equal_weights_droppable(visible as u64, eps) as usize;
    // Not below `min_keep`. `max_keep` is met already by a row over its budget.
    let fits = visible - dropped >= constraints.min_keep.max(1) && dropped >= found.split.dropped;
    if dropped == 0 || !fits || !certified_sums::is_share(dropped as u64, visible as u64, eps) {
        return Ok(());
    }
    let shows = |score: &E::Scalar| *score > E::MASKED.widen();
    let competing = scores.iter().enumerate().map(|(j, score)| (score.widen(), j as u32));
    let mut ranked: Reused<(E::Scalar, u32)> = Reused::new();
    room("scores", &mut ranked, visible)?;
    ranked.extend(competing.filter(|entry| shows(&entry.0)));
    sorting::sort(&mut ranked, order::worst_first);
    if dropped > ranked.len() {
        return Ok(());
    }
    let competing = ranked.iter().enumerate().map(|(at, entry)| (entry.0.into(), at >= dropped));
    let kept = forced.iter().map(|score| score.widen()).filter(shows);
    let entries = competing.chain(kept.map(|score| (score.into(), true)));
    if leaves_exactly(eps, (dropped, visible), entries)? {
        let split = SplitSums { tail: eps, dropped, head: 1.0 - eps, kept: visible - dropped };
        // One key less would lose more than the budget.
        let worst = ranked.get(dropped).copied();
        *found = Boundary { split, worst, minimal: true, exact: true };
    }
    Ok(())
}
