//! `KeyIndex`.

use std::io::{self, Read, Write};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use half::bf16;
use numpy::ndarray::Axis;
use numpy::{Element, PyArray1, PyReadonlyArray1, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use super::arguments;
use super::arrays::{Budgets, Bytes, Stored, contiguous};
use super::errors::{CertkError, Raise, detached, guarded};
use super::results::{Field, Flat, PerRow, Searched, result};
use certk_rs::bindings::{Saved, Trust, check_memory, default_floats, list, product, with_threads};
use certk_rs::{
    self as core, Error, IndexOptions, LogMass, RecallOptions, Rule, SearchOptions, Vectors,
};

pub(super) fn vectors<'a>(stored: &'a Stored<'_>, argument: &'static str) -> PyResult<Vectors<'a>> {
    stored.vectors(argument)
}

/// Message for an index or a ball that can no longer be used.
pub(super) const HALF_CHANGED: &str =
    "an earlier call that failed has left this object half changed; build it anew";

/// Most bytes that are asked of a Python file at a time.
const PORTION: usize = 1 << 20;

#[pyclass(frozen, module = "certk_rs._native")]
pub(super) struct KeyIndex(RwLock<core::KeyIndex<'static>>);

/// Per head: codes, scales, radii, keys without a code, mean, Gram matrix, numbers, fingerprint; as in `keys::Saved`.
type Parts<'py> = (
    Bound<'py, PyArray1<u8>>,
    Bound<'py, PyArray1<u16>>,
    Bound<'py, PyArray1<u16>>,
    Bound<'py, PyArray1<u32>>,
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<u64>>,
);

/// The same, borrowed.
type Lent<'py> = (
    PyReadonlyArray1<'py, u8>,
    PyReadonlyArray1<'py, u16>,
    PyReadonlyArray1<'py, u16>,
    PyReadonlyArray1<'py, u32>,
    PyReadonlyArray1<'py, f32>,
    PyReadonlyArray1<'py, f64>,
    PyReadonlyArray1<'py, f64>,
    PyReadonlyArray1<'py, u64>,
);

/// Lower and upper ends of intervals.
type Ends<'py> = (Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>);

impl KeyIndex {
    /// Locks the index for reading. Call it only with the interpreter released: a search that holds the index waits for
    /// the interpreter between portions.
    ///
    /// # Panics
    /// If an earlier call failed unexpectedly while it changed the index.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, core::KeyIndex<'static>> {
        self.0.read().expect(HALF_CHANGED)
    }

    /// Locks the index for writing. Call it as [`KeyIndex::read`].
    pub(super) fn write(&self) -> RwLockWriteGuard<'_, core::KeyIndex<'static>> {
        self.0.write().expect(HALF_CHANGED)
    }

    /// Reads the index, with the interpreter released.
    fn look<R: Send>(
        &self,
        py: Python<'_>,
        what: impl FnOnce(&core::KeyIndex<'static>) -> R + Send,
    ) -> PyResult<R> {
        py.detach(|| guarded(|| what(&self.read())))
    }
}

/// An index as arrays that are lent to a call, each with a row per head, in the order of [`Parts`]. Unsigned integers
/// and `bf16` are passed as signed integers of the same bits. Keys without a code end at the first -1, which is no
/// `u32` key.
#[derive(FromPyObject)]
pub(super) struct Tables<'py>(
    PyReadonlyArrayDyn<'py, u8>,
    PyReadonlyArrayDyn<'py, i16>,
    PyReadonlyArrayDyn<'py, i16>,
    PyReadonlyArrayDyn<'py, i32>,
    PyReadonlyArrayDyn<'py, f32>,
    PyReadonlyArrayDyn<'py, f64>,
    PyReadonlyArrayDyn<'py, f64>,
    PyReadonlyArrayDyn<'py, i64>,
);

/// Returns the rows of an array: one array in C order along its last axis, else a matrix of strided rows.
fn rows<'a, T: Element>(
    array: &'a PyReadonlyArrayDyn<'_, T>,
    heads: usize,
) -> PyResult<Vec<&'a [T]>> {
    let wrong = || CertkError::new_err("an index has a part whose rows are not those of its heads");
    let (&length, axes) = array.shape().split_last().ok_or_else(wrong)?;
    if product("index", axes).raise()? != heads {
        return Err(wrong());
    }
    if length == 0 {
        return Ok(vec![&[]; heads]);
    }
    if let Ok(all) = array.as_slice() {
        return Ok(all.chunks_exact(length).collect());
    }
    let [_] = axes else { return Err(wrong()) };
    let row = |row| array.as_array().index_axis_move(Axis(0), row).to_slice().ok_or_else(wrong);
    (0..heads).map(row).collect()
}

impl Tables<'_> {
    /// Returns the index of keys of that shape, in no more time than a query takes per head. Nothing is copied, and
    /// scales are not checked.
    pub(super) fn index(&self, shape: &[usize], dtype: &str) -> PyResult<core::KeyIndex<'_>> {
        let wrong = |_| CertkError::new_err("an index has a part of another length");
        let count = product("index", &shape[..shape.len().saturating_sub(2)]).raise()?;
        let (lines, bare) = (rows(&self.0, count)?, rows(&self.3, count)?);
        let (scales, radii) = (rows(&self.1, count)?, rows(&self.2, count)?);
        let (mean, gram) = (rows(&self.4, count)?, rows(&self.5, count)?);
        let (numbers, fingerprint) = (rows(&self.6, count)?, rows(&self.7, count)?);
        let head = |head: usize| -> PyResult<Saved<'_>> {
            let bare = bytemuck::cast_slice(bare[head]);
            let listed = bare.iter().position(|key| *key == u32::MAX).unwrap_or(bare.len());
            Ok(Saved {
                lines: lines[head].into(),
                scales: bytemuck::cast_slice(scales[head]).into(),
                radii: bytemuck::cast_slice(radii[head]).into(),
                uncoded: bare[..listed].into(),
                mean: mean[head].into(),
                gram: gram[head].into(),
                numbers: numbers[head].try_into().map_err(wrong)?,
                fingerprint: bytemuck::cast_slice(fingerprint[head]).try_into().map_err(wrong)?,
                ..Saved::default()
            })
        };
        let heads = (0..count).map(head).collect::<PyResult<Vec<_>>>()?;
        core::KeyIndex::load(shape, dtype, heads, Trust::Scales).raise()
    }
}

/// Binary file of Python, and the exception that ended reading or writing it.
pub(super) struct PyFile {
    file: Py<PyAny>,
    raised: Option<PyErr>,
}

impl PyFile {
    /// Lends a file to `work`, with the interpreter released between its portions.
    pub(super) fn lend<R: Send>(
        file: Bound<'_, PyAny>,
        work: impl Send + FnOnce(&mut Self) -> Result<R, Error>,
    ) -> PyResult<R> {
        let py = file.py();
        let mut lent = PyFile { file: file.unbind(), raised: None };
        let done = detached(py, || work(&mut lent));
        lent.raised.map_or(done, Err)
    }

    fn call<R>(&mut self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>) -> io::Result<R> {
        Python::attach(|py| work(self.file.bind(py))).map_err(|error| {
            self.raised = Some(error);
            io::ErrorKind::Other.into()
        })
    }
}

impl Read for PyFile {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let most = to.len().min(PORTION);
        self.call(|file| {
            let read = file.call_method1("read", (most,))?;
            let read = read.cast::<PyBytes>()?.as_bytes();
            let count = read.len().min(most);
            to[..count].copy_from_slice(&read[..count]);
            Ok(count)
        })
    }
}

impl Write for PyFile {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        let written: usize = self
            .call(|file| file.call_method1("write", (PyBytes::new(file.py(), part),))?.extract())?;
        // A file that claims more than it was given would else cause a panic.
        Ok(written.min(part.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the meaning of a name.
fn named<T: Copy>(argument: &str, value: &Bound<'_, PyAny>, names: &[(&str, T)]) -> PyResult<T> {
    let given = value.cast::<PyString>().ok().and_then(|name| name.to_str().ok());
    if let Some((_, meaning)) = names.iter().find(|(name, _)| given == Some(name)) {
        Ok(*meaning)
    } else {
        let known: Vec<String> = names.iter().map(|(name, _)| format!("{name:?}")).collect();
        Err(CertkError::new_err(format!(
            "{argument} is {}; pass {}",
            value.repr()?,
            known.join(", ")
        )))
    }
}

/// Scale, rule, k, `max_scored`, threads; then causal, lengths, mask.
#[derive(FromPyObject)]
pub(super) struct How<'py>(
    Option<Bound<'py, PyAny>>,
    Bound<'py, PyAny>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    Bound<'py, PyAny>,
    Option<PyReadonlyArray1<'py, i64>>,
    Option<Bound<'py, PyAny>>,
);

impl How<'_> {
    /// Lends the borrowed options to `work`.
    fn with<R>(&self, work: impl FnOnce(SearchOptions<'_>) -> PyResult<R>) -> PyResult<R> {
        let rules = [("mass", Rule::Mass), ("gap", Rule::Gap), ("top_k", Rule::TopK(0))];
        let rule = match (named("rule", &self.1, &rules)?, self.2.as_ref()) {
            (Rule::TopK(_), Some(k)) => Rule::TopK(arguments::count("k", k, 1)?),
            (Rule::TopK(_), None) => {
                return Err(CertkError::new_err("rule is \"top_k\" without k; pass k="));
            }
            (rule, None) => rule,
            (_, Some(k)) => {
                return Err(CertkError::new_err(format!(
                    "k is {}, but this rule finds k itself; pass rule=\"top_k\", or no k",
                    k.repr()?
                )));
            }
        };
        let How(scale, _, _, most, threads, causal, lengths, mask) = self;
        let number = |scale| arguments::real("scale", scale);
        let count = |most| arguments::count("max_scored", most, 0);
        let mask = mask.as_ref().map(Bytes::new).transpose()?;
        let mask = mask.as_ref().map(|mask| mask.data("mask")).transpose()?;
        let lengths = lengths.as_ref().map(|lengths| contiguous(lengths, "lengths")).transpose()?;
        let options = SearchOptions::new()
            .scale(scale.as_ref().map(number).transpose()?)
            .rule(rule)
            .max_scored(most.as_ref().map(count).transpose()?)
            .causal(arguments::flag("causal", causal)?)
            .lengths(lengths)
            .threads(arguments::threads(threads.as_ref())?);
        work(match &mask {
            Some((bytes, strides)) => options.mask(bytes, strides),
            None => options,
        })
    }
}

/// Scale, lengths, mask, threads.
#[derive(FromPyObject)]
pub(super) struct Weighing<'py>(
    Option<Bound<'py, PyAny>>,
    Option<PyReadonlyArray1<'py, i64>>,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
);

impl Weighing<'_> {
    /// Lends the borrowed options to `work`.
    fn with<R>(&self, work: impl FnOnce(RecallOptions<'_>) -> PyResult<R>) -> PyResult<R> {
        let Weighing(scale, lengths, mask, threads) = self;
        let mask = mask.as_ref().map(Bytes::new).transpose()?;
        let mask = mask.as_ref().map(|mask| mask.data("mask")).transpose()?;
        let number = |scale| arguments::real("scale", scale);
        let lengths = lengths.as_ref().map(|lengths| contiguous(lengths, "lengths")).transpose()?;
        let options = RecallOptions::new()
            .scale(scale.as_ref().map(number).transpose()?)
            .lengths(lengths)
            .threads(arguments::threads(threads.as_ref())?);
        work(match &mask {
            Some((bytes, strides)) => options.mask(bytes, strides),
            None => options,
        })
    }
}

/// Returns the lower and the upper ends.
pub(super) fn ends(masses: &[LogMass]) -> PyResult<(Vec<f64>, Vec<f64>)> {
    let (mut lower, mut upper) =
        (list("q", masses.len()).raise()?, list("q", masses.len()).raise()?);
    lower.extend(masses.iter().map(|mass| mass.lower));
    upper.extend(masses.iter().map(|mass| mass.upper));
    Ok((lower, upper))
}

result! {
    /// Result of `recall`.
    #[pyclass(frozen, module = "certk_rs._native")]
    Recalled {
        lost_upper: PerRow<f64>,
        indptr: Flat<i64>,
        indices: Flat<i64>,
        tail_mass_upper: PerRow<f64>,
        tail_mass_lower: PerRow<f64>,
        log_mass_lower: PerRow<f64>,
        log_mass_upper: PerRow<f64>,
    }
}

#[pymethods]
impl KeyIndex {
    #[staticmethod]
    fn build(
        py: Python<'_>,
        keys: Stored<'_>,
        bits: u32,
        rotate: Option<&Bound<'_, PyAny>>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let _modes = default_floats();
        let rotate = rotate.map(|rotate| arguments::flag("rotate", rotate)).transpose()?;
        let keys = vectors(&keys, "keys")?;
        let options = IndexOptions::new().rotate(rotate).threads(arguments::threads(threads)?);
        let index = detached(py, || core::KeyIndex::with_bits(&keys, bits, &options))?;
        Ok(KeyIndex(RwLock::new(index)))
    }

    fn append(
        &self,
        py: Python<'_>,
        keys: Stored<'_>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _modes = default_floats();
        let keys = vectors(&keys, "keys")?;
        let threads = arguments::threads(threads)?;
        detached(py, || with_threads(threads, || self.write().append(&keys)))
    }

    fn search<'py>(
        &self,
        py: Python<'py>,
        q: Stored<'py>,
        keys: Option<Stored<'py>>,
        eps: Option<Budgets<'py>>,
        batch: Vec<usize>,
        how: How<'py>,
    ) -> PyResult<Bound<'py, Searched>> {
        let _modes = default_floats();
        let queries = vectors(&q, "q")?;
        let keys = keys.as_ref().map(|keys| vectors(keys, "keys")).transpose()?;
        let budgets = eps.as_ref().map(Budgets::slice).transpose()?.unwrap_or(&[]);
        let (found, n) = how.with(|options| {
            if eps.is_none() && !matches!(options.rule, Rule::TopK(_)) {
                let problem = "eps is None; pass a budget (only rule=\"top_k\" goes without)";
                return Err(CertkError::new_err(problem));
            }
            detached(py, || {
                let index = self.read();
                let found = index.search(&queries, keys.as_ref(), budgets, &options)?;
                // There may be more afterwards.
                Ok((found, index.len()))
            })
        })?;
        // A tail mass is at most 1, so there is no budget.
        let eps = eps.unwrap_or(Budgets::All([1.0]));
        Bound::new(py, Searched::new(found, &batch, n, &eps).raise()?)
    }

    /// `how` is scale, lengths, mask, threads.
    fn log_mass<'py>(
        &self,
        py: Python<'py>,
        q: Stored<'py>,
        how: Weighing<'py>,
    ) -> PyResult<Ends<'py>> {
        let _modes = default_floats();
        let queries = vectors(&q, "q")?;
        let found =
            how.with(|options| detached(py, || self.read().log_mass(&queries, &options)))?;
        let (lower, upper) = ends(&found)?;
        Ok((PyArray1::from_vec(py, lower), PyArray1::from_vec(py, upper)))
    }

    /// `beside` are the ends of the masses kept elsewhere; `how` as in `log_mass`.
    fn recall<'py>(
        &self,
        py: Python<'py>,
        q: Stored<'py>,
        beside: (PyReadonlyArray1<'py, f64>, PyReadonlyArray1<'py, f64>),
        eps: Budgets<'py>,
        batch: Vec<usize>,
        how: Weighing<'py>,
    ) -> PyResult<Recalled> {
        let _modes = default_floats();
        let queries = vectors(&q, "q")?;
        let (lower, upper) = (contiguous(&beside.0, "beside")?, contiguous(&beside.1, "beside")?);
        let budgets = eps.slice()?;
        let beside: Vec<LogMass> =
            lower.iter().zip(upper).map(|(&lower, &upper)| LogMass::new(lower, upper)).collect();
        let found = how.with(|options| {
            detached(py, || self.read().recall(&queries, &beside, budgets, &options))
        })?;
        let (lower, upper) = ends(&found.log_mass)?;
        Ok(Recalled {
            batch,
            lost_upper: found.lost_upper.into(),
            indptr: found.indptr.into(),
            indices: found.indices.into_iter().map(i64::from).collect::<Vec<_>>().into(),
            tail_mass_upper: found.tail_mass_upper.into(),
            tail_mass_lower: found.tail_mass_lower.into(),
            log_mass_lower: lower.into(),
            log_mass_upper: upper.into(),
        })
    }

    fn check(
        &self,
        py: Python<'_>,
        keys: Stored<'_>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _modes = default_floats();
        let keys = vectors(&keys, "keys")?;
        let threads = arguments::threads(threads)?;
        detached(py, || with_threads(threads, || self.read().check(&keys)))
    }

    fn write_to(&self, py: Python<'_>, file: Bound<'_, PyAny>) -> PyResult<()> {
        let _modes = default_floats();
        // Others may append meanwhile.
        let snapshot = self.look(py, core::KeyIndex::snapshot)?;
        PyFile::lend(file, |file| snapshot.write_to(file))
    }

    #[staticmethod]
    fn read_from(file: Bound<'_, PyAny>) -> PyResult<Self> {
        let _modes = default_floats();
        let index = PyFile::lend(file, |file| core::KeyIndex::read_from(file))?;
        Ok(KeyIndex(RwLock::new(index)))
    }

    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Vec<Parts<'py>>> {
        let _modes = default_floats();
        let bits =
            |numbers: &[bf16]| PyArray1::from_slice(py, bytemuck::cast_slice::<bf16, u16>(numbers));
        let one = |saved: Saved<'_>| {
            (
                PyArray1::from_slice(py, &saved.lines),
                bits(&saved.scales),
                bits(&saved.radii),
                PyArray1::from_slice(py, &saved.uncoded),
                PyArray1::from_slice(py, &saved.mean),
                PyArray1::from_slice(py, &saved.gram),
                PyArray1::from_slice(py, &saved.numbers),
                PyArray1::from_slice(py, &saved.fingerprint),
            )
        };
        // A copy, for making arrays.
        self.look(py, |index| check_memory("an index", index.bytes(), 2))?.raise()?;
        let saved: Vec<Saved<'static>> =
            self.look(py, |index| index.save().map(Saved::owned).collect())?;
        Ok(saved.into_iter().map(one).collect())
    }

    #[staticmethod]
    fn of_parts(shape: Vec<usize>, dtype: &str, heads: Vec<Lent<'_>>) -> PyResult<Self> {
        let _modes = default_floats();
        let mut saved = Vec::with_capacity(heads.len());
        for (lines, scales, radii, bare, mean, gram, numbers, fingerprint) in &heads {
            let bits = |array| -> PyResult<Vec<bf16>> {
                Ok(contiguous(array, "an index")?
                    .iter()
                    .map(|&bits| bf16::from_bits(bits))
                    .collect())
            };
            let wrong = |_| CertkError::new_err("an index has a part of another length");
            let bytes =
                lines.len() + 2 * (scales.len() + radii.len()) + 4 * (bare.len() + mean.len());
            check_memory("an index", bytes + 8 * gram.len(), 1).raise()?;
            saved.push(Saved {
                lines: contiguous(lines, "an index")?.to_vec().into(),
                scales: bits(scales)?.into(),
                radii: bits(radii)?.into(),
                uncoded: contiguous(bare, "an index")?.to_vec().into(),
                mean: contiguous(mean, "an index")?.to_vec().into(),
                gram: contiguous(gram, "an index")?.to_vec().into(),
                numbers: contiguous(numbers, "an index")?.try_into().map_err(wrong)?,
                fingerprint: contiguous(fingerprint, "an index")?.try_into().map_err(wrong)?,
                ..Saved::default()
            });
        }
        let index = core::KeyIndex::load(&shape, dtype, saved, Trust::Nothing).raise()?;
        Ok(KeyIndex(RwLock::new(index)))
    }

    fn crop(&self, py: Python<'_>, len: usize) -> PyResult<()> {
        detached(py, || self.write().crop(len))
    }

    fn take(&self, py: Python<'_>, entries: Vec<usize>) -> PyResult<Self> {
        let taken = detached(py, || self.read().take(&entries))?;
        Ok(KeyIndex(RwLock::new(taken)))
    }

    /// Returns of each head the positions of keys without a code.
    fn uncoded<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyArray1<u32>>>> {
        let heads = self.look(py, |index| {
            let heads = index.batch_shape().iter().product();
            (0..heads).map(|head| index.uncoded(head).collect()).collect::<Vec<Vec<u32>>>()
        })?;
        Ok(heads.into_iter().map(|head| PyArray1::from_vec(py, head)).collect())
    }

    #[getter]
    fn bits(&self, py: Python<'_>) -> PyResult<u32> {
        self.look(py, core::KeyIndex::bits)
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        let shape = self.look(py, |index| {
            let last = [index.len(), index.dim()];
            index.batch_shape().iter().copied().chain(last).collect::<Vec<_>>()
        })?;
        pyo3::types::PyTuple::new(py, shape)
    }

    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.look(py, core::KeyIndex::dtype)
    }

    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.look(py, core::KeyIndex::bytes)
    }
}
