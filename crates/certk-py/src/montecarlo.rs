//! Monte-Carlo tail masses, and their confidence bounds.

use numpy::{PyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::arguments::{self, count, flag, integer, real};
use super::arrays::{Budgets, KeepArray, Rows, Stored};
use super::errors::{CertkError, Raise, detached};
use super::results::Estimated;
use certk_rs::Error;
use certk_rs::bindings::{self, default_floats};
use certk_rs::montecarlo::{self as core, Confidence, Method, TailOptions};

type Ends<'py> = (Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>);

fn method(name: &Bound<'_, PyAny>) -> PyResult<Method> {
    match name.cast::<PyString>() {
        Ok(name) => name.to_str()?.parse::<Method>().raise(),
        Err(_) => name.repr()?.to_string().parse::<Method>().raise(),
    }
}

/// Delta, draws, method, seed, eps, whether delta is for all rows, threads.
#[derive(FromPyObject)]
pub(super) struct Options<'py>(
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Option<Budgets<'py>>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
);

impl Options<'_> {
    pub(super) fn read(&self) -> PyResult<TailOptions> {
        let eps = match &self.4 {
            None => None,
            Some(eps) => Some(bindings::copied("eps", eps.slice()?).raise()?),
        };
        Ok(TailOptions::new(real("delta", &self.0)?, count("draws", &self.1, 1)?)
            .method(method(&self.2)?)
            .seed(integer("seed", &self.3, 0)?.unsigned_abs())
            .eps(eps)
            .all_rows(flag("all_rows", &self.5)?)
            .threads(arguments::threads(self.6.as_ref())?))
    }
}

#[pyfunction]
pub(super) fn tail_mass<'py>(
    py: Python<'py>,
    rows: Rows<'py>,
    keep: KeepArray<'py>,
    bounds: Option<Stored<'py>>,
    options: Options<'py>,
) -> PyResult<Estimated> {
    let _modes = default_floats();
    let bounds = bounds.map(|bounds| Rows::plain(bounds, rows.indptr().cloned()));
    let scores = rows.scores()?;
    let bounds = bounds.as_ref().map(Rows::scores).transpose()?;
    let mut strides = Vec::new();
    let keep = keep.keep(&mut strides)?;
    let options = options.read()?;
    let found = detached(py, || core::tail_mass(&scores, &keep, bounds.as_ref(), &options))?;
    Ok(Estimated::new(found, scores.batch_shape().to_vec()))
}

#[pyfunction]
pub(super) fn mean_bounds<'py>(
    py: Python<'py>,
    values: PyReadonlyArray2<'py, f64>,
    population: Option<&Bound<'py, PyAny>>,
    delta: &Bound<'py, PyAny>,
    method_name: &Bound<'py, PyAny>,
    horizon: &Bound<'py, PyAny>,
) -> PyResult<Ends<'py>> {
    let _modes = default_floats();
    let population = population.map(|value| count("population", value, 1)).transpose()?;
    let (method, delta) = (method(method_name)?, real("delta", delta)?);
    let confidence =
        Confidence::new(method, delta, count("horizon", horizon, 1)?).population(population);
    let (samples, draws) = (values.shape()[0], values.shape()[1]);
    let values = values.as_slice().map_err(|_| {
        CertkError::new_err("values must be contiguous; copy it with numpy.ascontiguousarray")
    })?;
    let (lower, upper): (Vec<f64>, Vec<f64>) = py
        .detach(|| {
            (0..samples)
                .map(|i| core::mean_bounds(&values[i * draws..(i + 1) * draws], &confidence))
                .collect::<Result<Vec<_>, Error>>()
                .map(|bounds| bounds.into_iter().unzip())
        })
        .raise()?;
    Ok((PyArray1::from_vec(py, lower), PyArray1::from_vec(py, upper)))
}
