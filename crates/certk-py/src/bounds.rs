//! The bounds on the tail mass.

use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::arguments::{count, threads as thread_count};
use super::arrays::{Budgets, Rows, Stored, column, contiguous, flat};
use super::errors::{CertkError, Raise, detached, run};
use certk_rs::bindings::{self, default_floats, with_threads};
use certk_rs::bounds::{self as core, Blocks, Cuts, GapRule};
use certk_rs::{Error, Options, Scores, select};

type Floats<'py> = PyResult<Bound<'py, PyArray1<f64>>>;
type Ranks<'py> = Bound<'py, PyArray1<i64>>;

#[pyfunction]
pub(super) fn kl_from_tail_mass<'py>(
    py: Python<'py>,
    tail_mass: PyReadonlyArrayDyn<'py, f64>,
) -> Floats<'py> {
    let _modes = default_floats();
    let (values, shape) = (flat(&tail_mass, "tail_mass")?, tail_mass.shape());
    let found = detached(py, || bindings::kl_from_tail_masses(values, shape))?;
    Ok(PyArray1::from_vec(py, found))
}

fn of_divergences<'py>(
    py: Python<'py>,
    kl: &PyReadonlyArrayDyn<'py, f64>,
    bound: fn(f64) -> Result<f64, Error>,
) -> Floats<'py> {
    let (values, shape) = (flat(kl, "kl")?, kl.shape());
    let found = detached(py, || bindings::of_divergences(values, shape, bound))?;
    Ok(PyArray1::from_vec(py, found))
}

#[pyfunction]
pub(super) fn tail_mass_from_kl<'py>(
    py: Python<'py>,
    kl: PyReadonlyArrayDyn<'py, f64>,
) -> Floats<'py> {
    let _modes = default_floats();
    of_divergences(py, &kl, core::tail_mass_from_kl)
}

#[pyfunction]
pub(super) fn pinsker<'py>(py: Python<'py>, kl: PyReadonlyArrayDyn<'py, f64>) -> Floats<'py> {
    let _modes = default_floats();
    of_divergences(py, &kl, core::pinsker)
}

#[pyfunction]
pub(super) fn bretagnolle_huber<'py>(
    py: Python<'py>,
    kl: PyReadonlyArrayDyn<'py, f64>,
) -> Floats<'py> {
    let _modes = default_floats();
    of_divergences(py, &kl, core::bretagnolle_huber)
}

#[pyfunction]
pub(super) fn required_gap<'py>(
    py: Python<'py>,
    n: PyReadonlyArrayDyn<'py, i64>,
    k: PyReadonlyArrayDyn<'py, i64>,
    eps: PyReadonlyArrayDyn<'py, f64>,
) -> Floats<'py> {
    let _modes = default_floats();
    if k.shape() != n.shape() || eps.shape() != n.shape() {
        return Err(CertkError::new_err("n, k and eps must have one shape; broadcast them"));
    }
    let shape = n.shape();
    let (n, k, eps) = (flat(&n, "n")?, flat(&k, "k")?, flat(&eps, "eps")?);
    let found = detached(py, || bindings::required_gaps(n, k, eps, shape))?;
    Ok(PyArray1::from_vec(py, found))
}

/// A bound that takes a number of kept keys for every row.
type RuleOfK = fn(&Scores<'_>, &[i64]) -> Result<Vec<f64>, Error>;

fn with_k<'py>(
    py: Python<'py>,
    scores: Stored<'py>,
    k: &PyReadonlyArray1<'py, i64>,
    threads: Option<&Bound<'py, PyAny>>,
    rule: RuleOfK,
) -> Floats<'py> {
    let rows = Rows::plain(scores, None);
    let (scores, k, threads) = (rows.scores()?, contiguous(k, "k")?, thread_count(threads)?);
    let found = run(py, &scores, || with_threads(threads, || rule(&scores, k)))?;
    Ok(PyArray1::from_vec(py, found))
}

#[pyfunction]
pub(super) fn score_gap<'py>(
    py: Python<'py>,
    scores: Stored<'py>,
    k: PyReadonlyArray1<'py, i64>,
    threads: Option<&Bound<'py, PyAny>>,
) -> Floats<'py> {
    let _modes = default_floats();
    with_k(py, scores, &k, threads, core::score_gap)
}

#[pyfunction]
pub(super) fn single_gap<'py>(
    py: Python<'py>,
    scores: Stored<'py>,
    k: PyReadonlyArray1<'py, i64>,
    threads: Option<&Bound<'py, PyAny>>,
) -> Floats<'py> {
    let _modes = default_floats();
    with_k(py, scores, &k, threads, core::single_gap)
}

#[pyfunction]
pub(super) fn multi_gap<'py>(
    py: Python<'py>,
    scores: Stored<'py>,
    k: PyReadonlyArray1<'py, i64>,
    cuts: Option<PyReadonlyArray1<'py, i64>>,
    n_cuts: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> Floats<'py> {
    let _modes = default_floats();
    let rows = Rows::plain(scores, None);
    let (scores, k, threads) = (rows.scores()?, contiguous(&k, "k")?, thread_count(threads)?);
    let most = count("n_cuts", n_cuts, 0)?;
    let cuts = match &cuts {
        Some(cuts) => Cuts::At(contiguous(cuts, "cuts")?),
        None => Cuts::Best(most),
    };
    let bound = || core::multi_gap(&scores, k, cuts);
    let found = run(py, &scores, || with_threads(threads, bound))?;
    Ok(PyArray1::from_vec(py, found))
}

#[pyfunction]
pub(super) fn best_cuts<'py>(
    py: Python<'py>,
    scores: Stored<'py>,
    k: PyReadonlyArray1<'py, i64>,
    n_cuts: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Ranks<'py>, Ranks<'py>)> {
    let _modes = default_floats();
    let rows = Rows::plain(scores, None);
    let (scores, k, threads) = (rows.scores()?, contiguous(&k, "k")?, thread_count(threads)?);
    let most = count("n_cuts", n_cuts, 0)?;
    let best = || core::best_cuts(&scores, k, most);
    let found = run(py, &scores, || with_threads(threads, best))?;
    let counts = column(py, "scores", found.iter().map(|cuts| cuts.len() as i64))?;
    let mut cuts = bindings::list("scores", found.iter().map(Vec::len).sum()).raise()?;
    cuts.extend(found.into_iter().flatten().map(|cut| cut as i64));
    Ok((PyArray1::from_vec(py, cuts), counts))
}

#[pyfunction]
pub(super) fn blockwise<'py>(
    py: Python<'py>,
    sizes: PyReadonlyArrayDyn<'py, i64>,
    upper: PyReadonlyArrayDyn<'py, f64>,
    lower: PyReadonlyArrayDyn<'py, f64>,
    kept: PyReadonlyArrayDyn<'py, u8>,
    threads: Option<&Bound<'py, PyAny>>,
) -> Floats<'py> {
    let _modes = default_floats();
    let threads = thread_count(threads)?;
    let blocks = Blocks::new(
        sizes.shape(),
        flat(&sizes, "sizes")?,
        flat(&upper, "upper")?,
        flat(&lower, "lower")?,
        flat(&kept, "kept")?,
    )
    .raise()?;
    let found = detached(py, || with_threads(threads, || core::blockwise(&blocks)))?;
    Ok(PyArray1::from_vec(py, found))
}

#[pyfunction]
pub(super) fn smallest_k<'py>(
    py: Python<'py>,
    scores: Stored<'py>,
    eps: Budgets<'py>,
    rule: &Bound<'py, PyAny>,
    n_cuts: &Bound<'py, PyAny>,
    threads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Ranks<'py>> {
    let _modes = default_floats();
    let rows = Rows::plain(scores, None);
    let (scores, eps, threads) = (rows.scores()?, eps.slice()?, thread_count(threads)?);
    let cuts = count("n_cuts", n_cuts, 0)?;
    let name = rule.cast::<PyString>().ok().map(|name| name.to_str()).transpose()?;
    let rule = match name {
        Some("exact") => None,
        Some("single_gap") => Some(GapRule::SingleGap),
        Some("multi_gap") => Some(GapRule::MultiGap { cuts }),
        Some("threshold") => Some(GapRule::Threshold),
        _ => {
            return Err(CertkError::new_err(format!(
                "rule is {}; use \"exact\", \"single_gap\", \"multi_gap\" or \"threshold\"",
                rule.repr()?
            )));
        }
    };
    let smallest = || match rule {
        Some(rule) => core::smallest_k(&scores, eps, rule),
        None => Ok(select(&scores, eps, &Options::new().prove_minimal(true))?.k),
    };
    let found = run(py, &scores, || with_threads(threads, smallest))?;
    Ok(PyArray1::from_vec(py, found))
}
