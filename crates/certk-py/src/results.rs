//! Results whose arrays are made on first use.
//!
//! Making an array of a vector costs some hundred nanoseconds, and a result has up to ten: for one short row more than
//! the search. So each is made when it is first read, without a copy, and later reads return the same array.

use std::sync::Mutex;

use numpy::{Element, PyArray1, PyArrayDyn, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyTuple;

use super::arrays::Budgets;
use certk_rs::bindings::list;
use certk_rs::montecarlo::TailEstimate;
use certk_rs::{
    Certificate, Error, KeepSet, OutputError, OutputSelection, Scores, SearchResult, Selection,
    Status,
};

/// Field of a result, as Python gets it; `batch` is the shape of the rows.
pub(super) trait Field {
    fn get<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyAny>>;
}

/// Declares a result: a frozen class, with a line per field.
macro_rules! result {
    ($(#[$about:meta])* $name:ident { $($field:ident: $kind:ty,)+ }) => {
        $(#[$about])*
        pub(super) struct $name {
            /// Shape of the rows.
            pub(super) batch: Vec<usize>,
            $(pub(super) $field: $kind,)+
        }

        #[pymethods]
        impl $name {
            $(
                #[getter]
                fn $field<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.$field.get(py, &self.batch)
                }
            )+
        }
    };
}
pub(super) use result;

/// A vector, or the read-only array that owns it by now.
pub(super) struct Flat<T: Element>(Mutex<State<T>>);

enum State<T: Element> {
    Found(Vec<T>),
    Made(Py<PyArray1<T>>),
}

impl<T: Element> Flat<T> {
    /// Returns the array. The first caller makes it; the others wait without holding up the interpreter.
    fn array<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<T>> {
        let mut state = self.0.lock_py_attached(py).expect("an array could not be made before");
        match &mut *state {
            State::Made(array) => array.bind(py).clone(),
            State::Found(values) => {
                let array = PyArray1::from_vec(py, std::mem::take(values));
                array.readwrite().make_nonwriteable();
                *state = State::Made(array.clone().unbind());
                array
            }
        }
    }
}

impl<T: Element> From<Vec<T>> for Flat<T> {
    fn from(values: Vec<T>) -> Self {
        Flat(Mutex::new(State::Found(values)))
    }
}

impl<T: Element> Field for Flat<T> {
    fn get<'py>(&self, py: Python<'py>, _batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.array(py).into_any())
    }
}

/// One entry per row, as an array in the batch shape.
pub(super) struct PerRow<T: Element>(Flat<T>);

impl<T: Element> From<Vec<T>> for PerRow<T> {
    fn from(values: Vec<T>) -> Self {
        PerRow(values.into())
    }
}

impl<T: Element> Field for PerRow<T> {
    fn get<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.0.array(py).reshape(batch)?.into_any())
    }
}

impl<F: Field> Field for Option<F> {
    fn get<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        self.as_ref().map_or_else(|| Ok(py.None().into_bound(py)), |field| field.get(py, batch))
    }
}

impl Field for usize {
    fn get<'py>(&self, py: Python<'py>, _batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.into_pyobject(py)?.into_any())
    }
}

/// A Python object is returned unchanged.
impl<T> Field for Py<T> {
    fn get<'py>(&self, py: Python<'py>, _batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.bind(py).as_any().clone())
    }
}

/// Shape of the scores: the batch shape and n, which is unknown for ragged rows.
pub(super) struct Shape(Option<usize>);

impl Shape {
    fn of(scores: &Scores<'_>) -> Self {
        Shape((!scores.is_ragged()).then(|| scores.longest()))
    }
}

impl Field for Shape {
    fn get<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        let axes: Vec<_> = batch.iter().copied().map(Some).chain([self.0]).collect();
        Ok(PyTuple::new(py, axes)?.into_any())
    }
}

/// Budgets as the caller gave them.
pub(super) enum Asked {
    All(Flat<f64>),
    Each(Py<PyArrayDyn<f64>>),
}

impl From<&Budgets<'_>> for Asked {
    fn from(budgets: &Budgets<'_>) -> Self {
        match budgets {
            Budgets::All(number) => Asked::All(number.to_vec().into()),
            Budgets::Each(array) => Asked::Each(array.as_unbound().clone_ref(array.py())),
        }
    }
}

impl Field for Asked {
    fn get<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Asked::All(number) => Ok(number.array(py).reshape(())?.into_any()),
            Asked::Each(array) => array.get(py, batch),
        }
    }
}

/// Positions: 32 bits if every row's length fits.
pub(super) enum Positions {
    Narrow(Flat<i32>),
    Wide(Flat<i64>),
}

impl Positions {
    fn new(positions: Vec<u32>, longest: usize) -> Result<Self, Error> {
        if i32::try_from(longest).is_ok() {
            return Ok(Positions::Narrow(bytemuck::allocation::cast_vec(positions).into()));
        }
        Ok(Positions::Wide(wide(positions)?.into()))
    }
}

/// Returns positions in 64 bits.
fn wide(positions: Vec<u32>) -> Result<Vec<i64>, Error> {
    let mut wide = list("scores", positions.len())?;
    wide.extend(positions.into_iter().map(i64::from));
    Ok(wide)
}

impl Field for Positions {
    fn get<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Positions::Narrow(positions) => positions.get(py, batch),
            Positions::Wide(positions) => positions.get(py, batch),
        }
    }
}

result! {
    /// Result of `select`.
    #[pyclass(frozen, subclass, module = "certk_rs._native")]
    Selected {
        shape: Shape,
        eps: Asked,
        k: PerRow<i64>,
        indptr: Flat<i64>,
        indices: Positions,
        tail_mass_upper: PerRow<f64>,
        tail_mass_lower: PerRow<f64>,
        minimal: PerRow<bool>,
        status: PerRow<u8>,
        score_indptr: Option<Py<PyArray1<i64>>>,
    }
}

impl Selected {
    pub(super) fn new(
        found: Selection,
        scores: &Scores<'_>,
        eps: &Budgets<'_>,
        score_indptr: Option<Py<PyArray1<i64>>>,
    ) -> Result<Self, Error> {
        let selected = Selected::over(found, scores.batch_shape(), scores.longest(), eps)?;
        Ok(Selected { shape: Shape::of(scores), score_indptr, ..selected })
    }

    /// Returns the result for rows of shape `batch` over `n` keys.
    fn over(found: Selection, batch: &[usize], n: usize, eps: &Budgets<'_>) -> Result<Self, Error> {
        let status: Vec<u8> = found.status.into_iter().map(|status: Status| status as u8).collect();
        Ok(Selected {
            batch: batch.to_vec(),
            shape: Shape(Some(n)),
            eps: eps.into(),
            k: found.k.into(),
            indptr: found.indptr.into(),
            indices: Positions::new(found.indices, n)?,
            tail_mass_upper: found.tail_mass_upper.into(),
            tail_mass_lower: found.tail_mass_lower.into(),
            minimal: found.minimal.into(),
            status: status.into(),
            score_indptr: None,
        })
    }
}

/// Result of a search of an index: a selection, and statistics of the search.
#[pyclass(frozen, extends = Selected, module = "certk_rs._native")]
pub(super) struct Searched {
    scored: PerRow<i64>,
    rung: PerRow<u8>,
}

impl Searched {
    /// Returns the result for rows of shape `batch` over `n` keys.
    pub(super) fn new(
        found: SearchResult,
        batch: &[usize],
        n: usize,
        eps: &Budgets<'_>,
    ) -> Result<PyClassInitializer<Self>, Error> {
        let rung: Vec<u8> = found.rung.into_iter().map(|rung| rung as u8).collect();
        let selected = Selected::over(found.selection, batch, n, eps)?;
        let searched = Searched { scored: found.scored.into(), rung: rung.into() };
        Ok(PyClassInitializer::from(selected).add_subclass(searched))
    }
}

#[pymethods]
impl Searched {
    #[getter]
    fn scored<'py>(this: PyRef<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        this.scored.get(py, &this.as_super().batch)
    }

    #[getter]
    fn rung<'py>(this: PyRef<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        this.rung.get(py, &this.as_super().batch)
    }
}

result! {
    /// Result of `certify`.
    #[pyclass(frozen, module = "certk_rs._native")]
    Certified {
        shape: Shape,
        k: PerRow<i64>,
        tail_mass_upper: PerRow<f64>,
        tail_mass_lower: PerRow<f64>,
        eps: Option<Asked>,
        holds: Option<PerRow<bool>>,
        minimal: Option<PerRow<bool>>,
    }
}

impl Certified {
    pub(super) fn new(found: Certificate, scores: &Scores<'_>, eps: Option<&Budgets<'_>>) -> Self {
        Certified {
            batch: scores.batch_shape().to_vec(),
            shape: Shape::of(scores),
            k: found.k.into(),
            tail_mass_upper: found.tail_mass_upper.into(),
            tail_mass_lower: found.tail_mass_lower.into(),
            eps: eps.map(Asked::from),
            holds: found.holds.map(PerRow::from),
            minimal: found.minimal.map(PerRow::from),
        }
    }
}

result! {
    /// Result of `keep_set`.
    #[pyclass(frozen, module = "certk_rs._native")]
    Kept {
        shape: Shape,
        eps: Asked,
        indices: Flat<i64>,
        status: usize,
        tail_mass_upper: PerRow<f64>,
        tail_mass_lower: PerRow<f64>,
        lower_bound: usize,
        weights: PerRow<f64>,
    }
}

impl Kept {
    pub(super) fn new(
        found: KeepSet,
        scores: &Scores<'_>,
        eps: &Budgets<'_>,
    ) -> Result<Self, Error> {
        Kept::of_queries(found, scores.batch_shape().to_vec(), scores.longest(), eps)
    }

    /// Returns the result for rows of shape `batch` over `n` keys.
    pub(super) fn of_queries(
        found: KeepSet,
        batch: Vec<usize>,
        n: usize,
        eps: &Budgets<'_>,
    ) -> Result<Self, Error> {
        Ok(Kept {
            batch,
            shape: Shape(Some(n)),
            eps: eps.into(),
            indices: wide(found.indices)?.into(),
            status: found.status as usize,
            tail_mass_upper: found.tail_mass_upper.into(),
            tail_mass_lower: found.tail_mass_lower.into(),
            lower_bound: found.lower_bound,
            weights: found.weights.into(),
        })
    }
}

result! {
    /// Result of `output_error`.
    #[pyclass(frozen, module = "certk_rs._native")]
    OutputBounds {
        exact: PerRow<f64>,
        diameter: PerRow<f64>,
        ball: PerRow<f64>,
        spectral: PerRow<f64>,
        variance: PerRow<f64>,
        best: PerRow<f64>,
        which: PerRow<u8>,
        farthest_pair: PerRow<bool>,
        norm: PerRow<f64>,
        chi_square: PerRow<f64>,
    }
}

impl OutputBounds {
    pub(super) fn new(found: OutputError, scores: &Scores<'_>) -> Self {
        let which: Vec<u8> = found.which.into_iter().map(|which| which as u8).collect();
        OutputBounds {
            batch: scores.batch_shape().to_vec(),
            exact: found.exact.into(),
            diameter: found.diameter.into(),
            ball: found.ball.into(),
            spectral: found.spectral.into(),
            variance: found.variance.into(),
            best: found.best.into(),
            which: which.into(),
            farthest_pair: found.farthest_pair.into(),
            norm: found.norm.into(),
            chi_square: found.chi_square.into(),
        }
    }
}

result! {
    /// Result of `select_output`.
    #[pyclass(frozen, module = "certk_rs._native")]
    OutputSelected {
        indptr: Flat<i64>,
        indices: Positions,
        tail_mass_upper: PerRow<f64>,
        tail_mass_lower: PerRow<f64>,
        out_tol: Asked,
        error_upper: PerRow<f64>,
        minimal: PerRow<bool>,
    }
}

impl OutputSelected {
    pub(super) fn new(
        found: OutputSelection,
        scores: &Scores<'_>,
        out_tol: &Budgets<'_>,
    ) -> Result<Self, Error> {
        Ok(OutputSelected {
            batch: scores.batch_shape().to_vec(),
            indptr: found.indptr.into(),
            indices: Positions::new(found.indices, scores.longest())?,
            tail_mass_upper: found.tail_mass_upper.into(),
            tail_mass_lower: found.tail_mass_lower.into(),
            out_tol: out_tol.into(),
            error_upper: found.error_upper.into(),
            minimal: found.minimal.into(),
        })
    }
}

result! {
    /// Result of draws from tails.
    #[pyclass(frozen, module = "certk_rs._native")]
    Estimated {
        lower: PerRow<f64>,
        upper: PerRow<f64>,
        point: PerRow<f64>,
        draws: PerRow<i64>,
    }
}

impl Estimated {
    /// Returns the result for rows of shape `batch`.
    pub(super) fn new(found: TailEstimate, batch: Vec<usize>) -> Self {
        Estimated {
            batch,
            lower: found.lower.into(),
            upper: found.upper.into(),
            point: found.point.into(),
            draws: found.draws.into(),
        }
    }
}
