//! Certifies a set that somebody else chose.

use super::batch::{Hook, load, with_workspace};
use super::row::{Aim, Field, Law, Rule};
use super::workspace::{Buffers, Workspace, padded};
use crate::certificate::{self, Certificate, Verdict};
use crate::error::Error;
use crate::kernels::{Element, Given, LANES, Loaded, Scalar, Scaled, Shifted, Simd, Stored};
use crate::mass::{CHUNK, Slack, Split};
use crate::scores::{Data, Keep, Keys64, Kind, Law as Meaning, Mask, Scores};
use crate::threads;

/// Judges kept sets: an interval that contains the real tail mass of each row and, given budgets, whether it holds.
///
/// With `independent` the answer comes from a slow check in scalar f64 that shares no kernel with the selector.
/// A row whose budget the fast arithmetic cannot decide is decided again in f64.
///
/// # Errors
/// Whatever is wrong with the scores, the budgets or the kept set, by variant.
pub fn certify(
    scores: &Scores<'_>,
    keep: &Keep<'_>,
    eps: Option<&[f64]>,
    independent: bool,
    threads: Option<usize>,
) -> Result<Certificate, Error> {
    certify_with(scores, keep, eps, independent, threads, &mut || Ok(()))
}

/// Elements per task, and between two calls of the hook.
const TASK: usize = 1 << 15;
const PORTION: usize = 1 << 24;

pub(crate) fn certify_with(
    scores: &Scores<'_>,
    keep: &Keep<'_>,
    eps: Option<&[f64]>,
    independent: bool,
    threads: Option<usize>,
    hook: Hook<'_>,
) -> Result<Certificate, Error> {
    if let Some(eps) = eps {
        scores.check_eps(eps)?;
    }
    keep.check(scores)?;
    let judge = Judge { scores, keep, eps, simd: Simd::current()? };
    let (rows, n) = (scores.rows(), scores.longest().max(1));
    let threads = threads::count(threads, rows.saturating_mul(n) > 2 * TASK)?;
    let one = |row: usize| {
        if independent {
            certificate::check_row(scores, keep, row, judge.eps(row))
        } else {
            with_workspace(|workspace| judge.row(row, workspace))
        }
    };
    let mut result = Certificate::new(eps.is_some());
    // The slow check takes some hundred times as long.
    let portion = (if independent { PORTION >> 6 } else { PORTION } / n).max(1);
    for start in (0..rows).step_by(portion) {
        let end = (start + portion).min(rows);
        let least = (TASK / n).max(1);
        for verdict in threads::map(threads, start..end, least, one)? {
            result.push(&verdict?);
        }
        hook()?;
    }
    Ok(result)
}

#[derive(Clone, Copy)]
struct Judge<'a> {
    scores: &'a Scores<'a>,
    keep: &'a Keep<'a>,
    eps: Option<&'a [f64]>,
    simd: Simd,
}

/// A verdict, and whether better arithmetic could still change it.
struct Opinion {
    verdict: Verdict,
    open: bool,
}

impl Judge<'_> {
    fn eps(&self, row: usize) -> Option<f64> {
        self.eps.map(|eps| if eps.len() == 1 { eps[0] } else { eps[row] })
    }

    fn row(&self, row: usize, workspace: &mut Workspace) -> Result<Verdict, Error> {
        let scores = self.scores;
        let plain = scores.kind != Kind::Probs
            && scores.scale != 0.0
            && !matches!(scores.mask, Some(Mask::Additive(_)));
        if plain {
            let opinion = match scores.data {
                Data::F32(data) => self.native(data, row, workspace),
                Data::F64(data) => self.native(data, row, workspace),
                Data::F16(data) => self.native(data, row, workspace),
                Data::Bf16(data) => self.native(data, row, workspace),
            }?;
            if !opinion.open {
                return Ok(opinion.verdict);
            }
        }
        let opinion = self.double(row, workspace)?;
        if opinion.open {
            // Ties and stored weights can be decided exactly, and the checker does.
            return certificate::check_row(scores, self.keep, row, self.eps(row));
        }
        Ok(opinion.verdict)
    }

    fn native<E: Buffers>(
        &self,
        data: &[E],
        row: usize,
        workspace: &mut Workspace,
    ) -> Result<Opinion, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let span = self.scores.span(row);
        let mut buffer = std::mem::take(E::keys(workspace));
        let keys = padded(&mut buffer, span.n, E::MASKED);
        let loaded = load(self.simd, self.scores, data, &span, false, keys);
        let result = if loaded.bad {
            let place = self.scores.place(row, None);
            Err(self.scores.judge(row).err().unwrap_or(Error::ScoreNan { place }))
        } else {
            let scale = self.scores.scale.abs();
            let radius = self.scores.row_radius(row);
            let slack = if size_of::<E::Scalar>() == 8 {
                Slack::f64(span.visible, radius)
            } else {
                Slack::f32(radius)
            };
            if scale == 1.0 {
                self.judge(keys, &loaded, Shifted(loaded.largest), slack, row, workspace)
            } else {
                let law = Scaled { shift: loaded.largest.into(), scale };
                self.judge(keys, &loaded, law, slack, row, workspace)
            }
        };
        *E::keys(workspace) = buffer;
        result
    }

    fn double(&self, row: usize, workspace: &mut Workspace) -> Result<Opinion, Error> {
        let mut keys = std::mem::take(&mut workspace.f64);
        let result = self.scores.keys64(row, &mut keys).and_then(|meaning| {
            let Keys64 { law, largest, error } = meaning;
            let n = keys.len();
            let finite = keys.iter().filter(|key| **key > f64::NEG_INFINITY).count();
            keys.resize(n.next_multiple_of(LANES), f64::NEG_INFINITY);
            let loaded = Loaded { largest, finite, bad: false };
            match law {
                Meaning::Exp { scale: 1.0 } => {
                    let slack = Slack::f64(n, error);
                    self.judge(&keys, &loaded, Shifted(largest), slack, row, workspace)
                }
                Meaning::Exp { scale } => {
                    let law = Scaled { shift: largest, scale };
                    self.judge(&keys, &loaded, law, Slack::f64(n, error), row, workspace)
                }
                Meaning::Weight => {
                    self.judge(&keys, &loaded, Stored, Slack::weights(n), row, workspace)
                }
            }
        });
        workspace.f64 = keys;
        result
    }

    fn judge<E: Buffers, W: Law<E::Scalar>>(
        &self,
        keys: &[E],
        loaded: &Loaded<E::Scalar>,
        law: W,
        slack: Slack,
        row: usize,
        workspace: &mut Workspace,
    ) -> Result<Opinion, Error>
    where
        E::Scalar: Element<Scalar = E::Scalar>,
    {
        let n = self.scores.span(row).n;
        let mut keep = std::mem::take(&mut workspace.keep);
        let bytes = padded(&mut keep, keys.len().max(n), 0);
        let laid = self.keep.lay(self.scores, row, &mut bytes[..n]);
        bytes[n..].fill(0);
        let given = self.sums(keys, &bytes[..keys.len()], law);
        workspace.keep = keep;
        laid?;
        if loaded.finite == 0 {
            return Ok(Opinion { verdict: Verdict::EMPTY, open: false });
        }
        let split =
            Split { tail: given.tail, dropped: given.dropped, head: given.head, kept: given.kept };
        let upper = split.upper(slack.certify, slack.flush);
        let lower = split.lower(slack.certify, slack.flush).min(upper);
        let mut verdict = Verdict { kept: split.kept, upper, lower, holds: false, minimal: false };
        let Some(eps) = self.eps(row) else {
            return Ok(Opinion { verdict, open: false });
        };
        verdict.holds = upper <= eps;
        if !verdict.holds {
            return Ok(Opinion { verdict, open: lower <= eps });
        }
        let fewer = split.kept - 1;
        if fewer == 0 || eps == 0.0 && split.dropped == 0 {
            verdict.minimal = true;
            return Ok(Opinion { verdict, open: false });
        }
        if given.worst_kept >= given.best_dropped {
            // A set of the best keys: one key less is the best smaller set. Its head is a difference, whose relative
            // error is at most three times as large, because the key taken away is the smallest of at least two.
            let mut weights = [E::Scalar::default(); LANES];
            self.simd.weights(&[given.worst_kept; LANES], law, &mut weights);
            let weight: f64 = weights[0].into();
            let smaller = Split {
                tail: split.tail + weight,
                dropped: split.dropped + 1,
                head: (split.head - weight).max(0.0),
                kept: fewer,
            };
            verdict.minimal = smaller.lower(3.0 * slack.certify, slack.flush) > eps;
            let open = !verdict.minimal && smaller.upper(3.0 * slack.certify, slack.flush) > eps;
            return Ok(Opinion { verdict, open });
        }
        let field = Field {
            simd: self.simd,
            keys,
            live: loaded.finite,
            largest: loaded.largest,
            forced: (0.0, 0),
            shared: false,
        };
        let rule = Rule {
            eps,
            slack,
            min_keep: 1,
            max_keep: usize::MAX,
            aim: Aim::Refute,
            exact_ties: false,
        };
        let least = field.search(law, &rule, E::scratch(workspace));
        verdict.minimal = least.minimal && split.kept <= least.split.kept;
        Ok(Opinion { verdict, open: false })
    }

    fn sums<E: Element, W: Law<E::Scalar>>(
        &self,
        keys: &[E],
        keep: &[u8],
        law: W,
    ) -> Given<E::Scalar> {
        let mut total = Given {
            head: 0.0,
            kept: 0,
            tail: 0.0,
            dropped: 0,
            worst_kept: E::Scalar::INFINITY,
            best_dropped: E::Scalar::NEG_INFINITY,
        };
        for (keys, keep) in keys.chunks(CHUNK).zip(keep.chunks(CHUNK)) {
            let part = self.simd.given(keys, keep, law);
            total.head += part.head;
            total.kept += part.kept;
            total.tail += part.tail;
            total.dropped += part.dropped;
            if part.worst_kept < total.worst_kept {
                total.worst_kept = part.worst_kept;
            }
            if part.best_dropped > total.best_dropped {
                total.best_dropped = part.best_dropped;
            }
        }
        total
    }
}
