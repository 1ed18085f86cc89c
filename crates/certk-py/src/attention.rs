//! `attention`.

use half::vec::HalfFloatVecExt;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use std::sync::{Arc, Mutex, RwLock};

use super::arguments;
use super::arrays::{Budgets, Bytes, Stored, contiguous};
use super::errors::{CertkError, Raise, detached, guarded};
use super::key_index::{HALF_CHANGED, KeyIndex, Tables, ends, vectors};
use super::results::{Field, PerRow, result};
use super::value_index::{ValueIndex, Values};
use certk_rs::bindings::{copied, default_floats, list, with_threads};
use certk_rs::{
    self as core, Attention, AttentionOptions, Budget, Error, KeptRows, Outputs, Ragged, Weights,
};

#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct ValueBall(RwLock<core::ValueBall>);

impl ValueBall {
    /// Returns a copy of the ball, so that no call holds the lock while it waits for the interpreter.
    fn now(&self, py: Python<'_>) -> PyResult<core::ValueBall> {
        py.detach(|| guarded(|| self.0.read().expect(HALF_CHANGED).clone()))
    }
}

#[pymethods]
impl ValueBall {
    #[staticmethod]
    fn build(
        py: Python<'_>,
        values: Stored<'_>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let _modes = default_floats();
        let values = vectors(&values, "v")?;
        let threads = arguments::threads(threads)?;
        let ball = detached(py, || with_threads(threads, || core::ValueBall::new(&values)))?;
        Ok(ValueBall(RwLock::new(ball)))
    }

    fn append(&self, py: Python<'_>, values: Stored<'_>) -> PyResult<()> {
        let _modes = default_floats();
        let values = vectors(&values, "v")?;
        detached(py, || self.0.write().expect(HALF_CHANGED).append(&values))
    }

    /// Returns the values' shape, and per head the centre, padded, and the radius.
    #[expect(clippy::type_complexity)] // two lists
    fn parts<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Vec<usize>, Vec<Bound<'py, PyArray1<f64>>>)> {
        let _modes = default_floats();
        let ball = self.now(py)?;
        let parts = ball.parts().map(|part| PyArray1::from_vec(py, part));
        Ok((ball.shape(), parts.collect()))
    }

    #[staticmethod]
    fn of_parts(
        py: Python<'_>,
        shape: Vec<usize>,
        heads: Vec<PyReadonlyArray1<'_, f64>>,
    ) -> PyResult<Self> {
        let _modes = default_floats();
        let parts = heads.iter().map(|head| contiguous(head, "a ball"));
        let parts = parts.collect::<PyResult<Vec<_>>>()?;
        let ball = detached(py, || core::ValueBall::of_parts(&shape, &parts))?;
        Ok(ValueBall(RwLock::new(ball)))
    }

    fn radii<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<f64>>> {
        Ok(PyArray1::from_vec(py, self.now(py)?.radii()))
    }

    #[getter]
    fn len(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.now(py)?.len())
    }
}

/// Returns outputs as an array of their type, half precisions as their bits.
fn array(py: Python<'_>, out: Outputs) -> Bound<'_, PyAny> {
    match out {
        Outputs::F64(out) => PyArray1::from_vec(py, out).into_any(),
        Outputs::F32(out) => PyArray1::from_vec(py, out).into_any(),
        Outputs::F16(out) => PyArray1::<u16>::from_vec(py, out.reinterpret_into()).into_any(),
        Outputs::Bf16(out) => PyArray1::<u16>::from_vec(py, out.reinterpret_into()).into_any(),
        _ => unreachable!("no other precision is asked for"),
    }
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

/// Options from Python: causal, lengths, mask, sinks, a soft cap, a bias, a ball around the values, an index of them, threads.
#[derive(FromPyObject)]
struct Sight<'py>(
    Bound<'py, PyAny>,
    Option<PyReadonlyArray1<'py, i64>>,
    Option<Bound<'py, PyAny>>,
    Option<PyReadonlyArray1<'py, f64>>,
    Option<Bound<'py, PyAny>>,
    Option<Stored<'py>>,
    Option<Bound<'py, ValueBall>>,
    Option<Values<'py>>,
    Option<Bound<'py, PyAny>>,
);

impl Sight<'_> {
    /// Lends the borrowed options to `work`.
    fn with<R>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(AttentionOptions<'_>) -> PyResult<R>,
    ) -> PyResult<R> {
        let Sight(causal, lengths, mask, sinks, soft_cap, bias, ball, values, threads) = self;
        let mask = mask.as_ref().map(Bytes::new).transpose()?;
        let mask = mask.as_ref().map(|mask| mask.data("mask")).transpose()?;
        let bias = bias.as_ref().map(|bias| vectors(bias, "bias")).transpose()?;
        let ball = ball.as_ref().map(|ball| ball.get().now(py)).transpose()?;
        let values = values.as_ref().map(|values| values.now(py)).transpose()?;
        // Only `attention` checks the options that a bound of the error ignores.
        let mut options = AttentionOptions::new()
            .causal(arguments::flag("causal", causal)?)
            .lengths(lengths.as_ref().map(|lengths| contiguous(lengths, "lengths")).transpose()?)
            .sinks(sinks.as_ref().map(|sinks| contiguous(sinks, "sinks")).transpose()?)
            .soft_cap(soft_cap.as_ref().map(|cap| arguments::real("soft_cap", cap)).transpose()?)
            .bias(bias.as_ref())
            .ball(ball.as_ref())
            .value_index(values.as_ref())
            .threads(arguments::threads(threads.as_ref())?);
        options.mask = mask.as_ref().map(|(bytes, strides)| (*bytes, &strides[..]));
        work(options)
    }
}

result! {
    /// Result of `attention`; half precisions of the output as their bits.
    #[pyclass(frozen, module = "certk_rs._native")]
    Attended {
        out: Py<PyAny>,
        tail_mass_upper: PerRow<f64>,
        error_bound: ErrorBound,
        k: PerRow<i64>,
        scored: PerRow<i64>,
        rung: PerRow<u8>,
        log_mass_lower: PerRow<f64>,
        log_mass_upper: PerRow<f64>,
    }
}

/// Bound of each row's error, or the data for computing it on first use.
pub(super) struct ErrorBound(Mutex<Bounding>);

enum Bounding {
    Owed(Arc<Owed>),
    Done(PerRow<f64>),
}

/// Arguments and result of a call, as Python objects; the output is an array by now.
struct Owed {
    found: Attention,
    out: Py<PyAny>,
    queries: Py<PyAny>,
    values: Py<PyAny>,
    /// Batch axes, starts and counts of the values of each head, if these differ.
    ragged: Option<Heads>,
    sight: Py<PyAny>,
}

/// Batch axes, and where each head starts and how many rows it has.
type Heads = (Vec<usize>, Vec<usize>, Vec<usize>);

/// Returns rows of which each head has another number, in pages or as `heads` says.
fn ragged<'a>(
    argument: &'static str,
    stored: &'a Stored<'_>,
    (batch, starts, counts): &Heads,
) -> PyResult<Ragged<'a>> {
    if let Some(paged) = stored.paged(argument)? {
        return Ok(paged);
    }
    let dim = stored.shape().last().copied().unwrap_or(0);
    Ragged::new(argument, stored.data(argument)?, batch, dim, starts, counts).raise()
}

impl Owed {
    /// Returns the result with its output.
    fn of(&self, out: Outputs) -> Result<Attention, Error> {
        let found = &self.found;
        let mut all = Attention::default();
        all.out = out;
        all.tail_mass_upper = copied("out", &found.tail_mass_upper)?;
        all.k = copied("out", &found.k)?;
        all.weight_error = copied("out", &found.weight_error)?;
        all.sum_error = copied("out", &found.sum_error)?;
        all.coded_error = copied("out", &found.coded_error)?;
        all.rounding = copied("out", &found.rounding)?;
        Ok(all)
    }

    /// Computes the bound by a pass over the values.
    fn bound(&self, py: Python<'_>) -> PyResult<Vec<f64>> {
        let _modes = default_floats();
        let (queries, values): (Stored<'_>, Stored<'_>) =
            (self.queries.extract(py)?, self.values.extract(py)?);
        let queries = vectors(&queries, "q")?;
        let stored: Stored<'_> = self.out.extract(py)?;
        let stored = stored.data("out")?;
        let mut out = list("out", stored.len()).raise()?;
        out.extend((0..stored.len()).filter_map(|at| stored.get(at)));
        let found = self.of(Outputs::F64(out)).raise()?;
        let sight = self.sight.extract::<Sight<'_>>(py)?;
        if let Some(heads) = &self.ragged {
            let values = ragged("v", &values, heads)?;
            return sight.with(py, |options| {
                detached(py, || found.error_bound_of_ragged(&queries, &values, &options))
            });
        }
        let values = vectors(&values, "v")?;
        sight.with(py, |options| detached(py, || found.error_bound(&queries, &values, &options)))
    }
}

impl Field for ErrorBound {
    /// Returns the bound. Concurrent threads each compute it and get the array of the first one done, so none waits. A
    /// computed bound no longer holds the values.
    fn get<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let poisoned = "an array could not be made before";
        let owed = match &*self.0.lock_py_attached(py).expect(poisoned) {
            Bounding::Done(bound) => return bound.get(py, batch),
            Bounding::Owed(owed) => Arc::clone(owed),
        };
        let bound = owed.bound(py)?;
        let mut state = self.0.lock_py_attached(py).expect(poisoned);
        if let Bounding::Owed(_) = &*state {
            *state = Bounding::Done(bound.into());
        }
        let Bounding::Done(bound) = &*state else { unreachable!("it is done") };
        bound.get(py, batch)
    }
}

/// A budget on the tail mass, or one on the output.
type Loss<'py> = (Option<Budgets<'py>>, Option<Budgets<'py>>);

/// The scale, whether to drop keys even if that is slower, whether weights come from exact scores alone, and whether keys or values
/// lie in mapped files.
type How<'py> = (Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>, bool, bool);

fn budget<'b>(loss: &'b Loss<'_>) -> PyResult<Budget<'b>> {
    match loss {
        (Some(eps), None) => Ok(Budget::TailMass(eps.slice()?)),
        (None, Some(out_tol)) => Ok(Budget::Output(out_tol.slice()?)),
        _ => Err(CertkError::new_err(
            "eps and out_tol exclude each other; pass one of them: a budget on the tail mass, or on the output's error",
        )),
    }
}

/// Sets what `how` says.
fn with_how<'a>(
    options: AttentionOptions<'a>,
    how: How<'_>,
    q: &Stored<'_>,
) -> PyResult<AttentionOptions<'a>> {
    let (scale, even_if_slower, exact_weights, mapped) = how;
    Ok(options
        .scale(scale.map(|scale| arguments::real("scale", &scale)).transpose()?)
        .precision(q.precision())
        .even_if_slower(match even_if_slower {
            Some(slower) => arguments::flag("even_if_slower", &slower)?,
            None => false,
        })
        .weights(if exact_weights { Weights::Exact } else { Weights::Codes })
        .mapped(mapped))
}

#[pyfunction]
#[expect(clippy::too_many_arguments)] // queries, keys, values, and how
pub(super) fn attention<'py>(
    py: Python<'py>,
    q: Bound<'py, PyAny>,
    k: Stored<'py>,
    v: Bound<'py, PyAny>,
    index: Option<Index<'py>>,
    loss: Loss<'py>,
    how: How<'py>,
    sight: Bound<'py, PyAny>,
) -> PyResult<Attended> {
    let _modes = default_floats();
    let stored: [Stored<'_>; 2] = [q.extract()?, v.extract()?];
    let queries = vectors(&stored[0], "q")?;
    let keys = vectors(&k, "k")?;
    let values = vectors(&stored[1], "v")?;
    let budget = budget(&loss)?;
    let (built, tables) = match &index {
        Some(Index::Built(index)) => (Some(index.get()), None),
        Some(Index::Tables(tables)) => (None, Some(tables.index(k.shape(), k.dtype())?)),
        None => (None, None),
    };
    let found = sight.extract::<Sight<'_>>()?.with(py, |options| {
        let options = with_how(options, how, &stored[0])?;
        detached(py, || {
            let read = built.map(KeyIndex::read);
            let index = read.as_deref().or(tables.as_ref());
            core::attention(&queries, &keys, &values, budget, index, &options)
        })
    })?;
    owing(py, found, (q, &stored[0]), v, None, sight)
}

/// Attends to rows of which each head has another number: keys and values, each all rows of all heads, and the heads.
#[pyfunction]
#[expect(clippy::too_many_arguments)] // queries, keys, values, and how
pub(super) fn attention_of_ragged<'py>(
    py: Python<'py>,
    q: Bound<'py, PyAny>,
    k: Stored<'py>,
    v: Bound<'py, PyAny>,
    heads: Heads,
    loss: Loss<'py>,
    how: How<'py>,
    sight: Bound<'py, PyAny>,
) -> PyResult<Attended> {
    let _modes = default_floats();
    let stored: [Stored<'_>; 2] = [q.extract()?, v.extract()?];
    let queries = vectors(&stored[0], "q")?;
    let (keys, values) = (ragged("k", &k, &heads)?, ragged("v", &stored[1], &heads)?);
    let budget = budget(&loss)?;
    let found = sight.extract::<Sight<'_>>()?.with(py, |options| {
        let options = with_how(options, how, &stored[0])?;
        detached(py, || core::attention_of_ragged(&queries, &keys, &values, budget, &options))
    })?;
    owing(py, found, (q, &stored[0]), v, Some(heads), sight)
}

/// Returns a result that computes its bound on first use, unless it has one.
fn owing<'py>(
    py: Python<'py>,
    mut found: Attention,
    (q, queries): (Bound<'py, PyAny>, &Stored<'_>),
    v: Bound<'py, PyAny>,
    ragged: Option<Heads>,
    sight: Bound<'py, PyAny>,
) -> PyResult<Attended> {
    let batch = queries.shape().split_last().map_or(&[][..], |(_, batch)| batch).to_vec();
    let out = array(py, std::mem::take(&mut found.out)).unbind();
    let owed = if found.within.is_some() {
        None
    } else {
        let mut owed = Attention::default();
        owed.tail_mass_upper = copied("out", &found.tail_mass_upper).raise()?;
        owed.k = copied("out", &found.k).raise()?;
        owed.weight_error = std::mem::take(&mut found.weight_error);
        owed.sum_error = std::mem::take(&mut found.sum_error);
        owed.coded_error = std::mem::take(&mut found.coded_error);
        owed.rounding = std::mem::take(&mut found.rounding);
        Some(Owed {
            out: (out.clone_ref(py), queries.dtype()).into_pyobject(py)?.into_any().unbind(),
            queries: q.unbind(),
            values: v.unbind(),
            ragged,
            sight: sight.unbind(),
            found: owed,
        })
    };
    attended(batch, out, found, owed)
}

/// Returns a result whose bound is known, or owed.
fn attended(
    batch: Vec<usize>,
    out: Py<PyAny>,
    found: Attention,
    owed: Option<Owed>,
) -> PyResult<Attended> {
    let bound = match owed {
        Some(owed) => Bounding::Owed(Arc::new(owed)),
        None => Bounding::Done(found.within.unwrap_or_default().into()),
    };
    let (lower, upper) = ends(&found.log_mass)?;
    let rung: Vec<u8> = found.rung.into_iter().map(|rung| rung as u8).collect();
    Ok(Attended {
        batch,
        out,
        tail_mass_upper: found.tail_mass_upper.into(),
        error_bound: ErrorBound(Mutex::new(bound)),
        k: found.k.into(),
        scored: found.scored.into(),
        rung: rung.into(),
        log_mass_lower: lower.into(),
        log_mass_upper: upper.into(),
    })
}

/// Rows of all heads, their values, their positions, where those of each head start, and the keys and values at the last
/// positions.
#[derive(FromPyObject)]
struct Kept<'py>(
    Stored<'py>,
    Stored<'py>,
    PyReadonlyArray1<'py, u32>,
    Vec<usize>,
    Option<(Stored<'py>, Stored<'py>)>,
);

/// Attends from codes of keys and values, and kept rows.
#[pyfunction]
#[expect(clippy::too_many_arguments)] // queries, codes, rows, and how
pub(super) fn attention_from_codes<'py>(
    py: Python<'py>,
    q: Stored<'py>,
    index: &KeyIndex,
    values: &ValueIndex,
    kept: Bound<'py, PyAny>,
    eps: Budgets<'py>,
    scale: Option<Bound<'py, PyAny>>,
    sight: Bound<'py, PyAny>,
) -> PyResult<Attended> {
    let _modes = default_floats();
    let queries = vectors(&q, "q")?;
    let Kept(keys, stored, positions, starts, tail) = kept.extract()?;
    let rows = (vectors(&keys, "kept.keys")?, vectors(&stored, "kept.values")?);
    let positions = contiguous(&positions, "kept.positions")?;
    let mut rows = KeptRows::new(&rows.0, &rows.1, positions, &starts).raise()?;
    if let Some((keys, values)) = &tail {
        rows = rows.with_tail(&vectors(keys, "kept.tail")?, &vectors(values, "kept.tail")?);
    }
    let mut found = sight.extract::<Sight<'_>>()?.with(py, |options| {
        let options = options
            .scale(scale.map(|scale| arguments::real("scale", &scale)).transpose()?)
            .precision(q.precision());
        let eps = eps.slice()?;
        detached(py, || {
            let (index, values) = (index.read(), values.read());
            core::attention_from_codes(&queries, &index, &values, &rows, eps, &options)
        })
    })?;
    let batch = q.shape().split_last().map_or(&[][..], |(_, batch)| batch).to_vec();
    let out = array(py, std::mem::take(&mut found.out)).unbind();
    attended(batch, out, found, None)
}
