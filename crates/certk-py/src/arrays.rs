//! NumPy arrays as borrowed rows.

use std::cell::OnceCell;

use half::{bf16, f16};
use numpy::ndarray::ArrayViewD;
use numpy::{Element, PyArray1, PyReadonlyArray1, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyString, PyTuple};

use super::arguments;
use super::errors::{CertkError, Raise};
use certk_rs::bindings::{default_floats, list, whole_bytes, with_bits};
use certk_rs::{Data, Keep, Kind, Precision, Ragged, Scores, Values, Vectors};

/// A borrowed array of one of the supported dtypes. Half precisions are stored as their 16 bits.
enum Array<'py> {
    F32(PyReadonlyArrayDyn<'py, f32>),
    F64(PyReadonlyArrayDyn<'py, f64>),
    F16(PyReadonlyArrayDyn<'py, u16>),
    Bf16(PyReadonlyArrayDyn<'py, u16>),
}

/// Rows of a borrowed array, or of its pages.
pub(super) struct Stored<'py> {
    array: Array<'py>,
    /// Numbers of pages, those of each sequence one behind the other, and how many rows each sequence has.
    pages: Option<(Vec<u32>, Vec<usize>)>,
}

fn layout<T: Element>(array: &PyReadonlyArrayDyn<'_, T>, argument: &str) -> PyErr {
    CertkError::new_err(format!(
        "{argument} has strides {:?} (bytes): the last axis must be contiguous and no stride negative or between items; \
         copy it with numpy.ascontiguousarray",
        array.strides()
    ))
}

/// Returns a view of an array whose rows are contiguous.
fn view<'a, T: Element>(
    array: &'a PyReadonlyArrayDyn<'_, T>,
    argument: &str,
) -> PyResult<ArrayViewD<'a, T>> {
    let item = size_of::<T>().cast_signed();
    // Axes of length one, and all axes of an empty array, may carry any stride.
    let matters = |axis: usize| array.shape()[axis] > 1 && !array.is_empty();
    let strides = array.strides();
    let last = strides.len().saturating_sub(1);
    let good = |(axis, &stride): (usize, &isize)| {
        !matters(axis)
            || if axis == last { stride == item } else { stride >= 0 && stride % item == 0 }
    };
    if strides.iter().enumerate().all(good) {
        return Ok(array.as_array());
    }
    Err(layout(array, argument))
}

/// Runs work on a view of the stored array.
macro_rules! with_view {
    ($stored:expr, $argument:expr, $view:ident => $work:expr) => {
        match &$stored.array {
            Array::F32(array) => {
                let $view = view(array, $argument)?;
                $work.raise()
            }
            Array::F64(array) => {
                let $view = view(array, $argument)?;
                $work.raise()
            }
            Array::F16(array) => {
                let $view = with_bits::<f16>(view(array, $argument)?);
                $work.raise()
            }
            Array::Bf16(array) => {
                let $view = with_bits::<bf16>(view(array, $argument)?);
                $work.raise()
            }
        }
    };
}

/// Converts `(array, dtype)`: an array with the name of its numbers' type; or `(array, dtype, table, counts)` with the
/// pages of sequences.
impl<'py> FromPyObject<'_, 'py> for Stored<'py> {
    type Error = PyErr;

    fn extract(stored: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let parts = stored.cast::<PyTuple>()?;
        let (array, dtype) = (parts.get_borrowed_item(0)?, parts.get_borrowed_item(1)?);
        let plain = Stored::new(&array, dtype.cast::<PyString>()?.to_str()?)?;
        if parts.len() == 2 {
            return Ok(plain);
        }
        let table: PyReadonlyArray1<'py, u32> = parts.get_borrowed_item(2)?.extract()?;
        let pages =
            (contiguous(&table, "block_table")?.to_vec(), parts.get_borrowed_item(3)?.extract()?);
        Ok(Stored { pages: Some(pages), ..plain })
    }
}

impl<'py> Stored<'py> {
    fn new(array: &Bound<'py, PyAny>, dtype: &str) -> PyResult<Self> {
        let array = match dtype {
            "float32" => Array::F32(array.extract()?),
            "float64" => Array::F64(array.extract()?),
            "float16" => Array::F16(array.extract()?),
            "bfloat16" => Array::Bf16(array.extract()?),
            _ => {
                return Err(CertkError::new_err(format!(
                    "dtype {dtype} is not supported; use float16, bfloat16, float32 or float64"
                )));
            }
        };
        Ok(Stored { array, pages: None })
    }

    /// Returns the name of the dtype.
    pub(super) fn dtype(&self) -> &'static str {
        match self.array {
            Array::F32(_) => "float32",
            Array::F64(_) => "float64",
            Array::F16(_) => "float16",
            Array::Bf16(_) => "bfloat16",
        }
    }

    /// Returns the type of the numbers.
    pub(super) fn precision(&self) -> Precision {
        match self.array {
            Array::F64(_) => Precision::F64,
            Array::F32(_) => Precision::F32,
            Array::F16(_) => Precision::F16,
            Array::Bf16(_) => Precision::Bf16,
        }
    }

    pub(super) fn shape(&self) -> &[usize] {
        match &self.array {
            Array::F32(array) => array.shape(),
            Array::F64(array) => array.shape(),
            Array::F16(array) | Array::Bf16(array) => array.shape(),
        }
    }

    /// Returns the data of an array in C order.
    pub(super) fn data<'a>(&'a self, argument: &str) -> PyResult<Data<'a>> {
        Ok(match &self.array {
            Array::F32(array) => Data::F32(flat(array, argument)?),
            Array::F64(array) => Data::F64(flat(array, argument)?),
            Array::F16(array) => {
                Data::F16(bytemuck::cast_slice::<u16, f16>(flat(array, argument)?))
            }
            Array::Bf16(array) => {
                Data::Bf16(bytemuck::cast_slice::<u16, bf16>(flat(array, argument)?))
            }
        })
    }

    /// Returns the rows as scores.
    fn scores(&self) -> PyResult<Scores<'_>> {
        with_view!(self, "scores", view => Scores::of(view))
    }

    /// Returns the rows as vectors: those of the only sequence, if they lie in pages.
    pub(super) fn vectors(&self, argument: &'static str) -> PyResult<Vectors<'_>> {
        let vectors = with_view!(self, argument, view => Vectors::of(argument, view))?;
        match &self.pages {
            None => Ok(vectors),
            Some((table, counts)) => vectors.paged(table, counts[0]).raise(),
        }
    }

    /// Returns the rows of all sequences in pages.
    pub(super) fn paged(&self, argument: &'static str) -> PyResult<Option<Ragged<'_>>> {
        let Some((table, counts)) = &self.pages else { return Ok(None) };
        let vectors = with_view!(self, argument, view => Vectors::of(argument, view))?;
        Ragged::paged(vectors, table, counts).map(Some).raise()
    }

    /// Returns the rows as values.
    pub(super) fn values(&self) -> PyResult<Values<'_>> {
        with_view!(self, "values", view => Values::of(view))
    }

    /// Masks scores by the rows, as numbers to add.
    fn mask<'a>(&'a self, scores: Scores<'a>) -> PyResult<Scores<'a>> {
        with_view!(self, "mask", view => scores.mask_of(view))
    }
}

/// A boolean array, read as bytes: NumPy does not promise that a true byte is 1.
pub(super) struct Bytes<'py> {
    array: PyReadonlyArrayDyn<'py, u8>,
    /// Copy of the rows side by side, if there are gaps between them.
    copied: OnceCell<Vec<u8>>,
}

impl<'py> Bytes<'py> {
    pub(super) fn new(array: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = array.call_method1("view", ("uint8",))?.extract()?;
        Ok(Bytes { array, copied: OnceCell::new() })
    }

    /// Returns the bytes without gaps, and the strides of the axes but the last: 0 where rows repeat.
    pub(super) fn data(&self, argument: &'static str) -> PyResult<(&[u8], Vec<usize>)> {
        whole_bytes(argument, view(&self.array, argument)?, &self.copied).raise()
    }
}

enum MaskArray<'py> {
    Allowed(Bytes<'py>),
    Additive(Stored<'py>),
}

/// Converts `(array, dtype)`.
impl<'py> FromPyObject<'_, 'py> for MaskArray<'py> {
    type Error = PyErr;

    fn extract(mask: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let pair = mask.cast::<PyTuple>()?;
        let (array, dtype) = (pair.get_borrowed_item(0)?, pair.get_borrowed_item(1)?);
        Ok(match dtype.cast::<PyString>()?.to_str()? {
            "bool" => MaskArray::Allowed(Bytes::new(&array)?),
            dtype => MaskArray::Additive(Stored::new(&array, dtype)?),
        })
    }
}

/// Rows of scores with the options for reading them, borrowed from Python.
pub(super) struct Rows<'py> {
    scores: Stored<'py>,
    kind: Kind,
    scale: f64,
    mask: Option<MaskArray<'py>>,
    lengths: Option<PyReadonlyArray1<'py, i64>>,
    indptr: Option<PyReadonlyArray1<'py, i64>>,
    causal_offset: Option<i64>,
    radius: Option<PyReadonlyArray1<'py, f64>>,
}

/// Converts `(scores, kind, scale, mask, lengths, indptr, causal_offset)` from `_arrays.rows`. An option of rows is
/// declared in these two places only. Scores and mask are arrays with their dtypes.
impl<'py> FromPyObject<'_, 'py> for Rows<'py> {
    type Error = PyErr;

    fn extract(rows: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let _modes = default_floats();
        let rows = rows.cast::<PyTuple>()?;
        let at = |i: usize| rows.get_borrowed_item(i);
        let given = |i: usize| Ok::<_, PyErr>(Some(at(i)?).filter(|value| !value.is_none()));
        let (kind, scale) = (at(1)?, at(2)?);
        let mask = given(3)?.map(Borrowed::extract).transpose()?;
        let causal_offset = given(6)?
            .map(|offset| arguments::integer("causal_offset", &offset, -(1 << 62)))
            .transpose()?;
        Ok(Rows {
            scores: at(0)?.extract()?,
            kind: arguments::kind(&kind)?,
            scale: arguments::real("scale", &scale)?,
            mask,
            lengths: given(4)?.map(Borrowed::extract).transpose()?,
            indptr: given(5)?.map(Borrowed::extract).transpose()?,
            causal_offset,
            radius: None,
        })
    }
}

impl<'py> Rows<'py> {
    /// Sets the radius of the real scores.
    pub(super) fn within(mut self, radius: Option<PyReadonlyArray1<'py, f64>>) -> Self {
        self.radius = radius;
        self
    }

    /// Returns scores in natural-log units, without options; ragged if there are row starts.
    pub(super) fn plain(scores: Stored<'py>, indptr: Option<PyReadonlyArray1<'py, i64>>) -> Self {
        Rows {
            scores,
            kind: Kind::Logits,
            scale: 1.0,
            mask: None,
            lengths: None,
            indptr,
            causal_offset: None,
            radius: None,
        }
    }

    pub(super) fn indptr(&self) -> Option<&PyReadonlyArray1<'py, i64>> {
        self.indptr.as_ref()
    }

    /// Returns the start of each ragged row.
    pub(super) fn starts(&self) -> Option<Py<PyArray1<i64>>> {
        self.indptr.as_ref().map(|indptr| indptr.as_unbound().clone_ref(indptr.py()))
    }

    /// Returns the rows, checked.
    pub(super) fn scores(&self) -> PyResult<Scores<'_>> {
        let mut scores = match &self.indptr {
            Some(indptr) => {
                Scores::ragged(self.scores.data("scores")?, contiguous(indptr, "indptr")?)
                    .raise()?
            }
            None => self.scores.scores()?,
        };
        scores = scores.kind(self.kind).raise()?.scale(self.scale).raise()?;
        scores = match &self.mask {
            None => scores,
            Some(MaskArray::Allowed(mask)) => scores.mask_of(view(&mask.array, "mask")?).raise()?,
            Some(MaskArray::Additive(mask)) => mask.mask(scores)?,
        };
        if let Some(lengths) = &self.lengths {
            scores = scores.lengths(contiguous(lengths, "lengths")?).raise()?;
        }
        if let Some(offset) = self.causal_offset {
            scores = scores.causal_offset(offset).raise()?;
        }
        if let Some(radius) = &self.radius {
            scores = scores.radius(contiguous(radius, "radius")?).raise()?;
        }
        Ok(scores)
    }
}

/// Budgets: a number for all rows, or an array of shape () or of the batch shape.
pub(super) enum Budgets<'py> {
    All([f64; 1]),
    Each(PyReadonlyArrayDyn<'py, f64>),
}

impl<'py> FromPyObject<'_, 'py> for Budgets<'py> {
    type Error = PyErr;

    fn extract(eps: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(match eps.cast::<PyFloat>() {
            Ok(number) => Budgets::All([number.value()]),
            Err(_) => Budgets::Each(eps.extract()?),
        })
    }
}

impl Budgets<'_> {
    pub(super) fn slice(&self) -> PyResult<&[f64]> {
        match self {
            Budgets::All(number) => Ok(number),
            Budgets::Each(array) => flat(array, "eps"),
        }
    }
}

/// A kept set, borrowed from Python.
pub(super) enum KeepArray<'py> {
    Mask(Bytes<'py>),
    Indices(PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, i64>),
}

/// Converts `(mask, indptr, indices)` from `_arrays.kept`, with either the first or the last two present.
impl<'py> FromPyObject<'_, 'py> for KeepArray<'py> {
    type Error = PyErr;

    fn extract(keep: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (mask, indptr, indices) = keep.extract::<(Option<Bound<'py, PyAny>>, _, _)>()?;
        match (mask, indptr, indices) {
            (Some(mask), None, None) => Ok(KeepArray::Mask(Bytes::new(&mask)?)),
            (None, Some(indptr), Some(indices)) => Ok(KeepArray::Indices(indptr, indices)),
            _ => Err(CertkError::new_err("keep must be given once, as a mask or as indices")),
        }
    }
}

impl KeepArray<'_> {
    /// Returns the borrowed set; `strides` receives those of a mask.
    pub(super) fn keep<'a>(&'a self, strides: &'a mut Vec<usize>) -> PyResult<Keep<'a>> {
        Ok(match self {
            KeepArray::Mask(mask) => {
                let (kept, mask_strides) = mask.data("keep")?;
                *strides = mask_strides;
                Keep::Mask { kept, strides }
            }
            KeepArray::Indices(indptr, indices) => Keep::Indices {
                indptr: contiguous(indptr, "keep")?,
                indices: contiguous(indices, "keep")?,
            },
        })
    }
}

/// Returns an array as a slice in C order.
pub(super) fn flat<'a, T: Element>(
    array: &'a PyReadonlyArrayDyn<'_, T>,
    argument: &str,
) -> PyResult<&'a [T]> {
    // An empty array counts as contiguous with any strides, but not for NumPy's slices.
    let slice = array.is_c_contiguous().then(|| array.as_slice().ok()).flatten();
    slice.ok_or_else(|| not_contiguous(argument))
}

/// Returns a new array of the entries of an iterator.
pub(super) fn column<'py, T: Element>(
    py: Python<'py>,
    argument: &'static str,
    entries: impl ExactSizeIterator<Item = T>,
) -> PyResult<Bound<'py, PyArray1<T>>> {
    let mut column = list(argument, entries.len()).raise()?;
    column.extend(entries);
    Ok(PyArray1::from_vec(py, column))
}

/// Returns a one-dimensional array as a slice.
pub(super) fn contiguous<'a, T: Element>(
    array: &'a PyReadonlyArray1<'_, T>,
    argument: &str,
) -> PyResult<&'a [T]> {
    array.as_slice().map_err(|_| not_contiguous(argument))
}

pub(super) fn not_contiguous(argument: &str) -> PyErr {
    CertkError::new_err(format!(
        "{argument} must be contiguous; copy it with numpy.ascontiguousarray"
    ))
}
