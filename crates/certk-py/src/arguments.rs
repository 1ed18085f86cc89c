//! Conversion and checks of single arguments: integers, real numbers, flags and names.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString};

use super::errors::CertkError;
use certk_rs::{Effort, Kind, MaxKeep};

/// Returns an integer of any type, at least `least`; booleans are refused.
pub(super) fn integer(name: &str, value: &Bound<'_, PyAny>, least: i64) -> PyResult<i64> {
    let value =
        if value.is_exact_instance_of::<PyInt>() { value.clone() } else { index(name, value)? };
    match value.extract::<i64>() {
        Ok(number) if number >= least => Ok(number),
        _ => Err(CertkError::new_err(format!(
            "{name} is {}; pass an integer of at least {least} that fits int64",
            value.str()?
        ))),
    }
}

/// Returns `operator.index` of a value.
fn index<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let refused = |shown| CertkError::new_err(format!("{name} is {shown}; pass an integer"));
    if is_bool(value)? || !value.hasattr("__index__")? {
        return Err(refused(shown(value)?));
    }
    match value.call_method0("__index__") {
        Ok(index) if index.is_instance_of::<PyInt>() => Ok(index),
        Err(error) if !error.is_instance_of::<PyTypeError>(value.py()) => Err(error),
        _ => Err(refused(shown(value)?)),
    }
}

/// Returns a count, at least `least`.
pub(super) fn count(name: &str, value: &Bound<'_, PyAny>, least: u32) -> PyResult<usize> {
    let number = integer(name, value, least.into())?.unsigned_abs();
    // A count beyond `usize` is as good as the largest.
    Ok(usize::try_from(number).unwrap_or(usize::MAX))
}

/// Returns the number of threads, or `None` for all.
pub(super) fn threads(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<usize>> {
    value.map(|value| count("threads", value, 1)).transpose()
}

/// Returns a real number that f64 holds exactly.
pub(super) fn real(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    if let Ok(number) = value.cast_exact::<PyFloat>() {
        return Ok(number.value());
    }
    let mut number = None;
    if !is_bool(value)?
        && (value.is_instance_of::<PyInt>()
            || value.is_instance_of::<PyFloat>()
            || is_numpy(value, "integer")?
            || is_numpy(value, "floating")?)
    {
        number = value.extract::<f64>().ok();
    }
    match number {
        Some(number) if number.is_nan() || value.eq(number)? => Ok(number),
        _ => Err(CertkError::new_err(format!(
            "{name} is {}; pass a number that float64 holds exactly",
            shown(value)?
        ))),
    }
}

/// Returns a boolean.
pub(super) fn flag(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    if is_bool(value)? {
        return value.is_truthy();
    }
    Err(CertkError::new_err(format!("{name} is {}; pass True or False", shown(value)?)))
}

/// Returns `max_keep`: an integer is a count, a float in (0, 1] a fraction of the keys.
pub(super) fn limit(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<MaxKeep>> {
    let Some(value) = value else {
        return Ok(None);
    };
    let whole = value.is_exact_instance_of::<PyInt>();
    if whole || !(value.is_instance_of::<PyFloat>() || is_numpy(value, "floating")?) {
        return Ok(Some(MaxKeep::Count(count("max_keep", value, 1)?)));
    }
    let fraction = real("max_keep", value)?;
    if fraction > 0.0 && fraction <= 1.0 {
        return Ok(Some(MaxKeep::Fraction(fraction)));
    }
    Err(CertkError::new_err(format!(
        "max_keep is {}; pass a fraction in (0, 1], or an int for a count of keys",
        PyFloat::new(value.py(), fraction).str()?
    )))
}

/// Returns the meaning of the stored numbers.
pub(super) fn kind(value: &Bound<'_, PyAny>) -> PyResult<Kind> {
    let Ok(name) = value.cast::<PyString>() else {
        return Err(CertkError::new_err(format!(
            "kind is {}; pass \"logits\", \"logprobs\" or \"probs\"",
            value.repr()?
        )));
    };
    match name.to_str()? {
        "logits" => Ok(Kind::Logits),
        "logprobs" => Ok(Kind::LogProbs),
        "probs" => Ok(Kind::Probs),
        other => Err(CertkError::new_err(format!(
            "kind is {other:?}; use \"logits\", \"logprobs\" or \"probs\""
        ))),
    }
}

/// Returns how far a search goes.
pub(super) fn effort(value: &Bound<'_, PyAny>) -> PyResult<Effort> {
    match value.extract::<&str>() {
        Ok("fast") => Ok(Effort::Fast),
        Ok("default") => Ok(Effort::Default),
        Ok("thorough") => Ok(Effort::Thorough),
        _ => Err(CertkError::new_err(format!(
            "effort is {}; pass \"fast\", \"default\" or \"thorough\"",
            value.repr()?
        ))),
    }
}

fn is_bool(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(value.is_instance_of::<PyBool>()
        || !value.is_exact_instance_of::<PyInt>() && is_numpy(value, "bool_")?)
}

/// Returns `true` if a value is an instance of this NumPy class.
fn is_numpy(value: &Bound<'_, PyAny>, class: &str) -> PyResult<bool> {
    value.is_instance(&value.py().import("numpy")?.getattr(class)?)
}

/// Returns a short, one-line representation of a bad argument.
fn shown(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let picture = value.repr()?.to_string();
    let line = picture.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= 60 {
        return Ok(line);
    }
    Ok(format!("a {}", value.get_type().fully_qualified_name()?))
}
