//! `select`, `certify` and the instruction-set level.

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use super::arrays::{Bytes, KeepArray, Rows, contiguous, positions};
use super::errors::{CertkError, detached};
use crate::certificate::Status;
use crate::select::{self as core, MaxKeep, Options};

type Flags<'py> = Bound<'py, PyArray1<bool>>;
type Floats<'py> = Bound<'py, PyArray1<f64>>;
type Counts<'py> = Bound<'py, PyArray1<i64>>;
type Selected<'py> = (
    Counts<'py>,
    Counts<'py>,
    Bound<'py, PyAny>,
    Floats<'py>,
    Floats<'py>,
    Flags<'py>,
    Bound<'py, PyArray1<u8>>,
);
type Certified<'py> =
    (Counts<'py>, Floats<'py>, Floats<'py>, Option<Flags<'py>>, Option<Flags<'py>>);

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
    eps: PyReadonlyArray1<'py, f64>,
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
) -> PyResult<Selected<'py>> {
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
    let eps = contiguous(&eps, "eps")?;
    let options = Options::new()
        .min_keep(min_keep)
        .max_keep(limit(max_keep, max_keep_fraction))
        .keep_first(keep_first)
        .keep_last(keep_last)
        .block_size(block_size)
        .prove_minimal(prove_minimal)
        .threads(threads);
    let longest = scores.longest();
    let found = detached(py, |hook| core::select_with(&scores, eps, &options, hook))?;
    let status = found.status.iter().map(|&status: &Status| status as u8).collect();
    Ok((
        PyArray1::from_vec(py, found.k),
        PyArray1::from_vec(py, found.indptr),
        positions(py, found.indices, longest),
        PyArray1::from_vec(py, found.tail_mass_upper),
        PyArray1::from_vec(py, found.tail_mass_lower),
        PyArray1::from_vec(py, found.minimal),
        PyArray1::from_vec(py, status),
    ))
}

#[pyfunction]
#[allow(clippy::too_many_arguments)] // the Python wrapper's options, one for one
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn certify<'py>(
    py: Python<'py>,
    scores: &Bound<'py, PyAny>,
    dtype: &str,
    eps: Option<PyReadonlyArray1<'py, f64>>,
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
) -> PyResult<Certified<'py>> {
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
    let eps = eps.as_ref().map(|eps| contiguous(eps, "eps")).transpose()?;
    let judged =
        detached(py, |hook| core::certify_with(&scores, &keep, eps, independent, threads, hook))?;
    let flags = |flags: Option<Vec<bool>>| flags.map(|flags| PyArray1::from_vec(py, flags));
    Ok((
        PyArray1::from_vec(py, judged.k),
        PyArray1::from_vec(py, judged.tail_mass_upper),
        PyArray1::from_vec(py, judged.tail_mass_lower),
        flags(judged.holds),
        flags(judged.minimal),
    ))
}

#[pyfunction]
pub(super) fn simd_level() -> PyResult<&'static str> {
    Ok(core::simd_level()?)
}

#[pyfunction]
pub(super) fn set_simd_level(level: Option<&str>) -> PyResult<()> {
    Ok(core::force_simd_level(level)?)
}
