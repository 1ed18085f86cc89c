//! `select`, `certify` and the instruction-set level.

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use super::arrays::{Budgets, Bytes, KeepArray, Rows};
use super::errors::{CertkError, run};
use super::results::{Certified, Selected};
use crate::select::{self as core, MaxKeep, Options};

/// A limit given as a count or as a fraction.
pub(super) fn limit(count: Option<usize>, fraction: Option<f64>) -> Option<MaxKeep> {
    count.map(MaxKeep::Count).or(fraction.map(MaxKeep::Fraction))
}

#[pyfunction]
#[allow(clippy::too_many_arguments)] // the Python wrapper's options, one for one
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn select<'py>(
    py: Python<'py>,
    scores: &Bound<'py, PyAny>,
    dtype: &str,
    eps: Budgets<'py>,
    kind: &str,
    scale: f64,
    mask: Option<&Bound<'py, PyAny>>,
    mask_dtype: Option<&str>,
    lengths: Option<PyReadonlyArray1<'py, i64>>,
    indptr: Option<PyReadonlyArray1<'py, i64>>,
    causal_offset: Option<i64>,
    min_keep: usize,
    max_keep: Option<usize>,
    max_keep_fraction: Option<f64>,
    keep_first: usize,
    keep_last: usize,
    block_size: usize,
    prove_minimal: bool,
    threads: Option<usize>,
) -> PyResult<Selected> {
    let rows = Rows::new(
        scores,
        dtype,
        kind,
        scale,
        mask,
        mask_dtype,
        lengths,
        indptr,
        causal_offset,
        None,
    )?;
    let scores = rows.scores()?;
    let eps = eps.slice()?;
    let options = Options::new()
        .min_keep(min_keep)
        .max_keep(limit(max_keep, max_keep_fraction))
        .keep_first(keep_first)
        .keep_last(keep_last)
        .block_size(block_size)
        .prove_minimal(prove_minimal)
        .threads(threads);
    let found = run(py, scores.rows().saturating_mul(scores.longest()), |hook| {
        core::select_with(&scores, eps, &options, hook)
    })?;
    Ok(Selected::new(found, scores.batch_shape(), scores.longest()))
}

#[pyfunction]
#[allow(clippy::too_many_arguments)] // the Python wrapper's options, one for one
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn certify<'py>(
    py: Python<'py>,
    scores: &Bound<'py, PyAny>,
    dtype: &str,
    eps: Option<Budgets<'py>>,
    kind: &str,
    scale: f64,
    mask: Option<&Bound<'py, PyAny>>,
    mask_dtype: Option<&str>,
    lengths: Option<PyReadonlyArray1<'py, i64>>,
    indptr: Option<PyReadonlyArray1<'py, i64>>,
    causal_offset: Option<i64>,
    keep_mask: Option<&Bound<'py, PyAny>>,
    keep_indptr: Option<PyReadonlyArray1<'py, i64>>,
    keep_indices: Option<PyReadonlyArray1<'py, i64>>,
    independent: bool,
    threads: Option<usize>,
) -> PyResult<Certified> {
    let rows = Rows::new(
        scores,
        dtype,
        kind,
        scale,
        mask,
        mask_dtype,
        lengths,
        indptr,
        causal_offset,
        None,
    )?;
    let scores = rows.scores()?;
    let keep = match (keep_mask, keep_indptr, keep_indices) {
        (Some(mask), None, None) => KeepArray::Mask(Bytes::new(mask)?),
        (None, Some(indptr), Some(indices)) => KeepArray::Indices(indptr, indices),
        _ => {
            return Err(CertkError::new_err("keep must be given once, as a mask or as indices"));
        }
    };
    let mut strides = Vec::new();
    let keep = keep.keep(&mut strides)?;
    let eps = eps.as_ref().map(Budgets::slice).transpose()?;
    let found = run(py, scores.rows().saturating_mul(scores.longest()), |hook| {
        core::certify_with(&scores, &keep, eps, independent, threads, hook)
    })?;
    Ok(Certified::new(found, scores.batch_shape()))
}

#[pyfunction]
pub(super) fn simd_level() -> PyResult<&'static str> {
    Ok(core::simd_level()?)
}

#[pyfunction]
pub(super) fn set_simd_level(level: Option<&str>) -> PyResult<()> {
    Ok(core::force_simd_level(level)?)
}
