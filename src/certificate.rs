//! Certificates of kept sets, and a slow independent check that shares no code with the selector.
//!
//! The check works in scalar f64 and sorts. It uses only the order, the rows and the rigorous sums.

use crate::error::Error;
use crate::names::names;
use crate::numerics::certified_sums::{self, Compensated, ErrorBound, ExactSum, SplitSums};
use crate::numerics::exact_share::leaves_exactly;
use crate::numerics::order;
use crate::numerics::sorting;
use crate::rows::{Keep, Scores, WeightKind};
use crate::runtime::ambient::{self, asked, pieces};
use crate::runtime::memory::room;
use crate::runtime::recycled::{self, recycled};
use crate::runtime::reused::{Reused, filled_again};

/// Status of a row's answer.
///
/// ```
/// use certk_rs::{Options, Scores, Status, select};
/// let scores = Scores::new(&[1.0_f32, 0.0, f32::NEG_INFINITY, f32::NEG_INFINITY], &[2, 2])?;
/// let found = select(&scores, &[0.1], &Options::new())?;
/// assert_eq!(found.status, [Status::Certified, Status::Empty]);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Status {
    /// The reported upper bound of the tail mass is within the budget.
    #[default]
    Certified = 0,
    /// `max_keep` forbids keeping enough keys; the reported upper bound still holds.
    OverBudget = 1,
    /// The row has no visible key.
    Empty = 2,
}

names! { Status, "status", "use \"certified\", \"over_budget\" or \"empty\"", {
    "certified" => Status::Certified,
    "over_budget" => Status::OverBudget,
    "empty" => Status::Empty,
} }

/// Proven statements about the kept set of each row.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Certificate {
    /// Number of visible keys kept, per row.
    pub k: Vec<i64>,
    /// Upper bound on the real tail mass, per row.
    pub tail_mass_upper: Vec<f64>,
    /// Lower bound on the real tail mass, per row.
    pub tail_mass_lower: Vec<f64>,
    /// `true` where the tail mass is proven to be within the row's budget; `None` without budgets.
    pub holds: Option<Vec<bool>>,
    /// `true` where the set is proven to hold and fewer keys are proven not to suffice; `None` without budgets.
    pub minimal: Option<Vec<bool>>,
}

/// Proven statements about the kept set of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) kept: usize,
    pub(crate) upper: f64,
    pub(crate) lower: f64,
    pub(crate) holds: bool,
    pub(crate) minimal: bool,
}

impl Verdict {
    /// Verdict of a row without visible keys: nothing can be lost.
    pub(crate) const EMPTY: Verdict =
        Verdict { kept: 0, upper: 0.0, lower: 0.0, holds: true, minimal: true };
}

recycled!(Certificate { k, tail_mass_upper, tail_mass_lower, holds, minimal });

impl Certificate {
    /// Returns the buffers to this thread, or to this [`Context`](crate::Context), for later calls of the same kind.
    /// Those calls then allocate none.
    pub fn recycle(self) {
        recycled::recycle(self);
    }

    /// Bytes per row.
    pub(crate) const ROW: usize = 3 * size_of::<i64>() + 2;

    /// Returns a certificate with room for `rows` rows.
    ///
    /// # Errors
    /// [`Error::NoMemory`].
    pub(crate) fn new(rows: usize, with_eps: bool) -> Result<Self, Error> {
        let mut all: Certificate = recycled::empty();
        let flags = |flags: Option<Vec<bool>>| {
            with_eps.then(|| {
                let mut flags = flags.unwrap_or_default();
                room("scores", &mut flags, rows).map(|()| flags)
            })
        };
        room("scores", &mut all.k, rows)?;
        room("scores", &mut all.tail_mass_upper, rows)?;
        room("scores", &mut all.tail_mass_lower, rows)?;
        (all.holds, all.minimal) = (flags(all.holds).transpose()?, flags(all.minimal).transpose()?);
        Ok(all)
    }

    pub(crate) fn push(&mut self, verdict: &Verdict) {
        self.k.push(verdict.kept as i64);
        self.tail_mass_upper.push(verdict.upper);
        self.tail_mass_lower.push(verdict.lower);
        if let Some(holds) = &mut self.holds {
            holds.push(verdict.holds);
        }
        if let Some(minimal) = &mut self.minimal {
            minimal.push(verdict.minimal);
        }
    }
}

/// Judges one row's kept set in scalar f64, with a sort.
///
/// # Errors
/// As [`Scores::wide_scores`] and [`Keep::lay`].
pub(crate) fn check_row(
    scores: &Scores<'_>,
    keep: &Keep<'_>,
    row: usize,
    eps: Option<f64>,
) -> Result<Verdict, Error> {
    let mut keys: Reused<f64> = Reused::new();
    let about = scores.wide_scores(row, &mut keys)?;
    let mut kept: Reused<u8> = filled_again("scores", keys.len(), 0)?;
    keep.lay(scores, row, &mut kept)?;
    let weigh = |key: f64| match about.weight_kind {
        WeightKind::Weight => key,
        // Halves, because the difference may overflow where the product does not.
        WeightKind::Exp { scale } => {
            certified_sums::exp((0.5 * key - 0.5 * about.largest) * scale * 2.0)
        }
    };
    let visible = pieces(&keys).flatten().filter(|key| **key > f64::NEG_INFINITY).count();
    let mut entries: Reused<((f64, u32), f64, bool)> = Reused::with_hint(visible);
    room("scores", &mut entries, visible)?;
    entries.extend(
        asked(keys.iter().zip(&kept).enumerate())
            .filter(|(_, (key, _))| **key > f64::NEG_INFINITY)
            .map(|(j, (&key, &byte))| ((key, j as u32), weigh(key), byte != 0)),
    );
    if entries.is_empty() {
        return Ok(Verdict::EMPTY);
    }
    let slack = match about.weight_kind {
        // Rounded three times in x, an exponential and two sums: well inside the slack of the f64 kernels.
        WeightKind::Exp { .. } => ErrorBound::f64(0, about.error),
        WeightKind::Weight => ErrorBound::weights(0),
    };
    let split = sums(&entries, |entry| entry.2);
    let mut upper = split.upper(slack.certify, slack.flush);
    let lower = split.lower(slack.certify, slack.flush).min(upper);
    let Some(eps) = eps else {
        ambient::check()?;
        let holds = false;
        return Ok(Verdict { kept: split.kept, upper, lower, holds, minimal: false });
    };
    let weights = about.weight_kind == WeightKind::Weight;
    let first = entries[0].0.0;
    let equal = about.error == 0.0 && asked(&entries).all(|entry| entry.0.0 == first);
    let total = entries.len() as u64;
    let exactly = |entries: &[((f64, u32), f64, bool)], chosen: &dyn Fn(usize) -> bool| {
        let count = asked(0..entries.len()).filter(|&i| chosen(i)).count() as u64;
        if equal {
            return Ok(count > 0 && certified_sums::equal_weights_hold(count, total, eps));
        }
        if count == 0 {
            return Ok(false);
        }
        if !weights {
            let levels = entries.iter().enumerate().map(|(i, entry)| (entry.0.0, chosen(i)));
            let split = ((total - count) as usize, total as usize);
            return Ok(about.error == 0.0 && leaves_exactly(eps, split, levels)?);
        }
        let (mut tail, mut all) = (ExactSum::new(), ExactSum::new());
        for (i, entry) in asked(entries.iter().enumerate()) {
            all.add(entry.1);
            if !chosen(i) {
                tail.add(entry.1);
            }
        }
        Ok::<_, Error>(tail.compare_share(&all, eps).is_le())
    };
    let holds = upper <= eps || exactly(&entries, &|i| entries[i].2)?;
    if holds {
        upper = upper.min(eps);
    }
    // The best set with one key less: if that one provably loses too much, no set of its size can do.
    sorting::sort(&mut entries, |a, b| order::worst_first(&b.0, &a.0));
    let fewer = split.kept.saturating_sub(1);
    for (i, entry) in asked(entries.iter_mut().enumerate()) {
        entry.2 = i < fewer;
    }
    let smaller = sums(&entries, |entry| entry.2);
    let refuted = fewer == 0
        || smaller.lower(slack.certify, slack.flush) > eps
        || ((equal || weights) && !exactly(&entries, &|i| i < fewer)?);
    ambient::check()?;
    Ok(Verdict { kept: split.kept, upper, lower, holds, minimal: holds && refuted })
}

fn sums<T>(entries: &[(T, f64, bool)], chosen: impl Fn(&(T, f64, bool)) -> bool) -> SplitSums {
    let (mut head, mut tail) = (Compensated::default(), Compensated::default());
    let mut kept = 0;
    for entry in asked(entries) {
        if chosen(entry) {
            head.add(entry.1);
            kept += 1;
        } else {
            tail.add(entry.1);
        }
    }
    SplitSums { tail: tail.value(), dropped: entries.len() - kept, head: head.value(), kept }
}
