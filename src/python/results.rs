//! Results that keep what Rust found until Python asks for it.
//!
//! Making an array of a vector costs some hundred nanoseconds, and a result has up to seven: for one short row more than
//! the search. So each is made when it is first asked for, without a copy, and from then on it is the same array.

use std::sync::Mutex;

use numpy::{Element, PyArray1, PyArrayDyn, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyTuple;

use super::arrays::Budgets;
use crate::certificate::{Certificate, Status};
use crate::error::Error;
use crate::index::SearchResult;
use crate::memory;
use crate::rows::Scores;
use crate::select::Selection;

/// A vector, or the read-only array that owns it by now.
struct Field<T: Element>(Mutex<State<T>>);

enum State<T: Element> {
    Found(Vec<T>),
    Made(Py<PyArray1<T>>),
}

impl<T: Element> Field<T> {
    fn new(values: Vec<T>) -> Self {
        Field(Mutex::new(State::Found(values)))
    }

    /// The array, flat. Whoever comes first makes it; the others wait for it without holding up the interpreter.
    fn flat<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<T>> {
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

    /// The array with one entry per row, in the batch shape.
    fn rows<'py>(&self, py: Python<'py>, batch: &[usize]) -> PyResult<Bound<'py, PyArrayDyn<T>>> {
        self.flat(py).reshape(batch)
    }
}

/// What was asked: the shape of the scores, and the budgets.
struct Asked {
    batch: Vec<usize>,
    /// Unknown for ragged rows.
    n: Option<usize>,
    eps: Eps,
}

enum Eps {
    None,
    All(Field<f64>),
    Each(Py<PyArrayDyn<f64>>),
}

impl Asked {
    fn new(scores: &Scores<'_>, eps: Option<Budgets<'_>>) -> Self {
        let n = (!scores.is_ragged()).then(|| scores.longest());
        Asked::over(scores.batch_shape(), n, eps)
    }

    fn over(batch: &[usize], n: Option<usize>, eps: Option<Budgets<'_>>) -> Self {
        let eps = match eps {
            None => Eps::None,
            Some(Budgets::All(number)) => Eps::All(Field::new(number.to_vec())),
            Some(Budgets::Each(array)) => Eps::Each(array.as_unbound().clone_ref(array.py())),
        };
        Asked { batch: batch.to_vec(), n, eps }
    }

    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let axes: Vec<_> = self.batch.iter().copied().map(Some).chain([self.n]).collect();
        PyTuple::new(py, axes)
    }

    fn eps<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArrayDyn<f64>>>> {
        Ok(match &self.eps {
            Eps::None => None,
            Eps::All(number) => Some(number.rows(py, &[])?),
            Eps::Each(array) => Some(array.bind(py).clone()),
        })
    }
}

/// What `select` found.
#[pyclass(frozen, subclass, module = "certk_rs._native")]
pub(super) struct Selected {
    asked: Asked,
    k: Field<i64>,
    indptr: Field<i64>,
    indices: Indices,
    tail_mass_upper: Field<f64>,
    tail_mass_lower: Field<f64>,
    minimal: Field<bool>,
    status: Field<u8>,
    score_indptr: Option<Py<PyArray1<i64>>>,
}

/// Positions: 32 bits where every row's length fits.
enum Indices {
    Narrow(Field<i32>),
    Wide(Field<i64>),
}

impl Selected {
    pub(super) fn new(
        found: Selection,
        scores: &Scores<'_>,
        eps: Budgets<'_>,
        score_indptr: Option<Py<PyArray1<i64>>>,
    ) -> Result<Self, Error> {
        Selected::of(found, Asked::new(scores, Some(eps)), scores.longest(), score_indptr)
    }

    fn of(
        found: Selection,
        asked: Asked,
        longest: usize,
        score_indptr: Option<Py<PyArray1<i64>>>,
    ) -> Result<Self, Error> {
        let indices = found.indices;
        let indices = if i32::try_from(longest).is_ok() {
            Indices::Narrow(Field::new(bytemuck::allocation::cast_vec(indices)))
        } else {
            let mut wide = memory::list("scores", indices.len())?;
            wide.extend(indices.into_iter().map(i64::from));
            Indices::Wide(Field::new(wide))
        };
        Ok(Selected {
            asked,
            k: Field::new(found.k),
            indptr: Field::new(found.indptr),
            indices,
            tail_mass_upper: Field::new(found.tail_mass_upper),
            tail_mass_lower: Field::new(found.tail_mass_lower),
            minimal: Field::new(found.minimal),
            status: Field::new(
                found.status.into_iter().map(|status: Status| status as u8).collect(),
            ),
            score_indptr,
        })
    }
}

#[pymethods]
impl Selected {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.asked.shape(py)
    }

    #[getter]
    fn eps<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArrayDyn<f64>>>> {
        self.asked.eps(py)
    }

    #[getter]
    fn k<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<i64>>> {
        self.k.rows(py, &self.asked.batch)
    }

    #[getter]
    fn indptr<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.indptr.flat(py)
    }

    #[getter]
    fn indices<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        match &self.indices {
            Indices::Narrow(indices) => indices.flat(py).into_any(),
            Indices::Wide(indices) => indices.flat(py).into_any(),
        }
    }

    #[getter]
    fn tail_mass_upper<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<f64>>> {
        self.tail_mass_upper.rows(py, &self.asked.batch)
    }

    #[getter]
    fn tail_mass_lower<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<f64>>> {
        self.tail_mass_lower.rows(py, &self.asked.batch)
    }

    #[getter]
    fn minimal<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<bool>>> {
        self.minimal.rows(py, &self.asked.batch)
    }

    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<u8>>> {
        self.status.rows(py, &self.asked.batch)
    }

    #[getter]
    fn score_indptr<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<i64>>> {
        self.score_indptr.as_ref().map(|starts| starts.bind(py).clone())
    }
}

/// What a search of an index found: a selection, and how it was reached.
#[pyclass(frozen, extends = Selected, module = "certk_rs._native")]
pub(super) struct Searched {
    scored: Field<i64>,
    rung: Field<u8>,
}

impl Searched {
    /// Of rows of shape `batch` over `n` keys.
    pub(super) fn new(
        found: SearchResult,
        batch: &[usize],
        n: usize,
        eps: Budgets<'_>,
    ) -> Result<PyClassInitializer<Self>, Error> {
        let asked = Asked::over(batch, Some(n), Some(eps));
        let rung = found.rung.into_iter().map(|rung| rung as u8).collect();
        let selected = Selected::of(found.selection, asked, n, None)?;
        let searched = Searched { scored: Field::new(found.scored), rung: Field::new(rung) };
        Ok(PyClassInitializer::from(selected).add_subclass(searched))
    }
}

#[pymethods]
impl Searched {
    #[getter]
    #[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
    fn scored<'py>(
        this: PyRef<'py, Self>,
        py: Python<'py>,
    ) -> PyResult<Bound<'py, PyArrayDyn<i64>>> {
        this.scored.rows(py, &this.as_super().asked.batch)
    }

    #[getter]
    #[allow(clippy::needless_pass_by_value)] // how PyO3 hands arguments over
    fn rung<'py>(this: PyRef<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<u8>>> {
        this.rung.rows(py, &this.as_super().asked.batch)
    }
}

/// What `certify` found.
#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct Certified {
    asked: Asked,
    k: Field<i64>,
    tail_mass_upper: Field<f64>,
    tail_mass_lower: Field<f64>,
    holds: Option<Field<bool>>,
    minimal: Option<Field<bool>>,
}

impl Certified {
    pub(super) fn new(found: Certificate, scores: &Scores<'_>, eps: Option<Budgets<'_>>) -> Self {
        Certified {
            asked: Asked::new(scores, eps),
            k: Field::new(found.k),
            tail_mass_upper: Field::new(found.tail_mass_upper),
            tail_mass_lower: Field::new(found.tail_mass_lower),
            holds: found.holds.map(Field::new),
            minimal: found.minimal.map(Field::new),
        }
    }
}

type Verdicts<'py> = Option<Bound<'py, PyArrayDyn<bool>>>;

#[pymethods]
impl Certified {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.asked.shape(py)
    }

    #[getter]
    fn eps<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArrayDyn<f64>>>> {
        self.asked.eps(py)
    }

    #[getter]
    fn k<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<i64>>> {
        self.k.rows(py, &self.asked.batch)
    }

    #[getter]
    fn tail_mass_upper<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<f64>>> {
        self.tail_mass_upper.rows(py, &self.asked.batch)
    }

    #[getter]
    fn tail_mass_lower<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArrayDyn<f64>>> {
        self.tail_mass_lower.rows(py, &self.asked.batch)
    }

    #[getter]
    fn holds<'py>(&self, py: Python<'py>) -> PyResult<Verdicts<'py>> {
        self.holds.as_ref().map(|flags| flags.rows(py, &self.asked.batch)).transpose()
    }

    #[getter]
    fn minimal<'py>(&self, py: Python<'py>) -> PyResult<Verdicts<'py>> {
        self.minimal.as_ref().map(|flags| flags.rows(py, &self.asked.batch)).transpose()
    }
}
