//! `attention`.

use half::{bf16, f16};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use std::sync::{PoisonError, RwLock};

use super::arguments;
use super::arrays::{Budgets, Bytes, Stored, column, contiguous, copied};
use super::errors::{CertkError, detached};
use super::key_index::{KeyIndex, Tables, vectors};
use crate::attention::{self as core, Attention, AttentionOptions, Budget, Precision};
use crate::threads::default_floats;

/// Output in the precision of the queries (half precisions as their bits), upper ends, k, scored, rung, errors of the weights and
/// of the sums, rounding of the output, bounds of its error.
type Answers<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<u8>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<f64>>,
    Option<Bound<'py, PyArray1<f64>>>,
);

#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct ValueBall(RwLock<core::ValueBall>);

impl ValueBall {
    /// A copy of the ball as it is: no call holds it while it waits for the interpreter.
    fn now(&self, py: Python<'_>) -> core::ValueBall {
        py.detach(|| self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

#[pymethods]
impl ValueBall {
    #[staticmethod]
    fn build(
        py: Python<'_>,
        values: &Bound<'_, PyAny>,
        dtype: &str,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let _modes = default_floats();
        let stored = Stored::new(values, dtype)?;
        let values = vectors(&stored, "v")?;
        let threads = arguments::threads(threads)?;
        let ball = detached(py, || core::ValueBall::new(&values, threads))?;
        Ok(ValueBall(RwLock::new(ball)))
    }

    fn append(&self, py: Python<'_>, values: &Bound<'_, PyAny>, dtype: &str) -> PyResult<()> {
        let _modes = default_floats();
        let stored = Stored::new(values, dtype)?;
        let values = vectors(&stored, "v")?;
        detached(py, || self.0.write().unwrap_or_else(PoisonError::into_inner).append(&values))
    }

    fn radii<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_vec(py, self.now(py).radii())
    }

    #[getter]
    fn len(&self, py: Python<'_>) -> usize {
        self.now(py).len()
    }
}

fn precision(dtype: &str) -> Precision {
    match dtype {
        "float32" => Precision::F32,
        "float16" => Precision::F16,
        "bfloat16" => Precision::Bf16,
        _ => Precision::F64,
    }
}

/// Numbers that are of a precision already, as an array of it.
fn stored_as(py: Python<'_>, out: Vec<f64>, precision: Precision) -> PyResult<Bound<'_, PyAny>> {
    Ok(match precision {
        Precision::F64 => PyArray1::from_vec(py, out).into_any(),
        Precision::F32 => column(py, "out", out.into_iter().map(|v| v as f32))?.into_any(),
        Precision::F16 => {
            let bits = out.into_iter().map(|v| f16::from_f32(v as f32).to_bits());
            column(py, "out", bits)?.into_any()
        }
        Precision::Bf16 => {
            let bits = out.into_iter().map(|v| bf16::from_f32(v as f32).to_bits());
            column(py, "out", bits)?.into_any()
        }
    })
}

/// An index that was built here, or its arrays.
pub(super) enum Index<'py> {
    Built(Bound<'py, KeyIndex>),
    Tables(Tables<'py>),
}

impl<'py> FromPyObject<'_, 'py> for Index<'py> {
    type Error = PyErr;

    fn extract(index: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(match index.cast::<KeyIndex>() {
            Ok(index) => Index::Built(index.to_owned()),
            Err(_) => Index::Tables(index.extract()?),
        })
    }
}

#[pyfunction]
#[pyo3(signature = (queries, queries_dtype, keys, keys_dtype, values, values_dtype, eps, index, scale, causal, lengths, threads,
    mask=None, out_tol=None, ball=None, even_if_slower=None, sinks=None))]
#[expect(clippy::too_many_arguments)] // the Python wrapper's options, one for one
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn attention<'py>(
    py: Python<'py>,
    queries: &Bound<'py, PyAny>,
    queries_dtype: &str,
    keys: &Bound<'py, PyAny>,
    keys_dtype: &str,
    values: &Bound<'py, PyAny>,
    values_dtype: &str,
    eps: Option<Budgets<'py>>,
    index: Option<Index<'py>>,
    scale: Option<&Bound<'py, PyAny>>,
    causal: &Bound<'py, PyAny>,
    lengths: Option<PyReadonlyArray1<'py, i64>>,
    threads: Option<&Bound<'py, PyAny>>,
    mask: Option<&Bound<'py, PyAny>>,
    out_tol: Option<Budgets<'py>>,
    ball: Option<&Bound<'py, ValueBall>>,
    even_if_slower: Option<&Bound<'py, PyAny>>,
    sinks: Option<PyReadonlyArray1<'py, f64>>,
) -> PyResult<Answers<'py>> {
    let _modes = default_floats();
    let stored = [
        Stored::new(queries, queries_dtype)?,
        Stored::new(keys, keys_dtype)?,
        Stored::new(values, values_dtype)?,
    ];
    let queries = vectors(&stored[0], "q")?;
    let keys = vectors(&stored[1], "k")?;
    let values = vectors(&stored[2], "v")?;
    let budget = match (&eps, &out_tol) {
        (Some(eps), None) => Budget::TailMass(eps.slice()?),
        (None, Some(out_tol)) => Budget::Output(out_tol.slice()?),
        _ => {
            return Err(CertkError::new_err(
                "eps and out_tol exclude each other; pass one of them: a budget on the tail mass, or on the output's error",
            ));
        }
    };
    let precision = precision(queries_dtype);
    let mask = mask.map(Bytes::new).transpose()?;
    let mask = mask.as_ref().map(|mask| mask.data("mask")).transpose()?;
    let ball = ball.map(|ball| ball.get().now(py));
    let options = AttentionOptions {
        scale: scale.map(|scale| arguments::real("scale", scale)).transpose()?,
        causal: arguments::flag("causal", causal)?,
        lengths: lengths.as_ref().map(|lengths| contiguous(lengths, "lengths")).transpose()?,
        mask: mask.as_ref().map(|(bytes, strides)| (*bytes, &strides[..])),
        sinks: sinks.as_ref().map(|sinks| contiguous(sinks, "sinks")).transpose()?,
        precision,
        ball: ball.as_ref(),
        even_if_slower: match even_if_slower {
            Some(flag) => arguments::flag("even_if_slower", flag)?,
            None => false,
        },
        threads: arguments::threads(threads)?,
    };
    let (built, tables) = match &index {
        Some(Index::Built(index)) => (Some(index.get()), None),
        Some(Index::Tables(tables)) => (None, Some(tables.index(stored[1].shape(), keys_dtype)?)),
        None => (None, None),
    };
    let found = detached(py, || {
        let read = built.map(KeyIndex::read);
        let index = read.as_deref().or(tables.as_ref());
        core::attention(&queries, &keys, &values, budget, index, &options)
    })?;
    Ok((
        stored_as(py, found.out, precision)?,
        PyArray1::from_vec(py, found.tail_mass_upper),
        PyArray1::from_vec(py, found.k),
        PyArray1::from_vec(py, found.scored),
        column(py, "out", found.rung.into_iter().map(|rung| rung as u8))?,
        PyArray1::from_vec(py, found.weight_error),
        PyArray1::from_vec(py, found.sum_error),
        PyArray1::from_vec(py, found.rounding),
        found.within.map(|bounds| PyArray1::from_vec(py, bounds)),
    ))
}

/// `Attention::error_bound` of what `attention` returned, the output widened.
#[pyfunction]
#[expect(clippy::too_many_arguments)] // what the call before took and gave
#[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
pub(super) fn attention_error<'py>(
    py: Python<'py>,
    queries: &Bound<'py, PyAny>,
    queries_dtype: &str,
    values: &Bound<'py, PyAny>,
    values_dtype: &str,
    causal: &Bound<'py, PyAny>,
    lengths: Option<PyReadonlyArray1<'py, i64>>,
    threads: Option<&Bound<'py, PyAny>>,
    mask: Option<&Bound<'py, PyAny>>,
    ball: Option<&Bound<'py, ValueBall>>,
    sinks: Option<PyReadonlyArray1<'py, f64>>,
    out: PyReadonlyArray1<'py, f64>,
    tail_mass_upper: PyReadonlyArray1<'py, f64>,
    k: PyReadonlyArray1<'py, i64>,
    weight_error: PyReadonlyArray1<'py, f64>,
    sum_error: PyReadonlyArray1<'py, f64>,
    rounding: PyReadonlyArray1<'py, f64>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let _modes = default_floats();
    let stored = [Stored::new(queries, queries_dtype)?, Stored::new(values, values_dtype)?];
    let queries = vectors(&stored[0], "q")?;
    let values = vectors(&stored[1], "v")?;
    let mask = mask.map(Bytes::new).transpose()?;
    let mask = mask.as_ref().map(|mask| mask.data("mask")).transpose()?;
    let ball = ball.map(|ball| ball.get().now(py));
    let options = AttentionOptions {
        causal: arguments::flag("causal", causal)?,
        lengths: lengths.as_ref().map(|lengths| contiguous(lengths, "lengths")).transpose()?,
        mask: mask.as_ref().map(|(bytes, strides)| (*bytes, &strides[..])),
        sinks: sinks.as_ref().map(|sinks| contiguous(sinks, "sinks")).transpose()?,
        ball: ball.as_ref(),
        threads: arguments::threads(threads)?,
        ..AttentionOptions::default()
    };
    let found = Attention {
        out: copied(&out, "out")?,
        tail_mass_upper: copied(&tail_mass_upper, "out")?,
        k: copied(&k, "out")?,
        weight_error: copied(&weight_error, "out")?,
        sum_error: copied(&sum_error, "out")?,
        rounding: copied(&rounding, "out")?,
        ..Attention::default()
    };
    let bounds = detached(py, || found.error_bound(&queries, &values, &options))?;
    Ok(PyArray1::from_vec(py, bounds))
}
