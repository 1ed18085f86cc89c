//! An index over the keys of many heads.

use half::{bf16, f16};

use super::chunks::{Room, TASK};
use super::codes::saved::{Saved, Trust};
use super::codes::{Codes, Refused};
use super::content::Content;
use super::element::{Coded, for_coded_dtype, matrix};
use super::fingerprint::Fingerprint;
use super::options::IndexOptions;
use super::spread::Tops;
use crate::error::{Error, Place};
use crate::kernels::{Keys, LANES, STEP, Simd, Triangle};
use crate::rows::Vectors;
use crate::runtime::ambient;
use crate::runtime::memory::product;
use crate::runtime::memory::{check_memory, check_memory_square, list};
use crate::runtime::threads;

/// Room for an append in every head, and the heads as they are if it may be stopped.
pub(super) struct Ready<'a> {
    simd: Simd,
    threads: usize,
    rooms: Vec<Room>,
    before: Option<Vec<Codes<'a>>>,
}

/// Keys as one byte an entry, with what is needed to bound what the bytes leave out.
///
/// An index that is built, or appended to, owns its codes: `KeyIndex<'static>`.
///
/// The index owns codes only, `d + 4` bytes a key (d in whole fours); the keys are lent to a call that scores some of them
/// exactly, and must be those that it was built of: [`KeyIndex::check`] tells.
///
/// ```
/// use certk_rs::{IndexOptions, KeyIndex, SearchOptions, Vectors};
/// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
/// let keys = Vectors::new("keys", &data, &[50, 4])?;
/// let index = KeyIndex::build(&keys, &IndexOptions::new())?;
/// let query = Vectors::new("q", &data[..4], &[1, 4])?;
/// let found = index.search(&query, Some(&keys), &[0.05], &SearchOptions::new())?;
/// assert!(found.selection.tail_mass_upper[0] <= 0.05 && found.selection.k[0] < 50);
/// # Ok::<(), certk_rs::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct KeyIndex<'a> {
    /// A [`ValueIndex`](super::ValueIndex) has one of values.
    pub(super) content: Content,
    /// The axes before those of a matrix of keys.
    pub(crate) batch: Vec<usize>,
    /// Keys of a head, also where there are no heads.
    pub(super) n: usize,
    pub(crate) dim: usize,
    pub(crate) heads: Vec<Codes<'a>>,
    /// Storage type of the keys.
    pub(super) stored: &'static str,
}

/// Keys whose fingerprint is taken by one task.
const PORTION: usize = 1 << 12;

/// Returns `true` if that many entries of keys are worth several threads.
pub(super) fn worth_sharing(n: usize, dim: usize, heads: usize) -> bool {
    n.saturating_mul(dim).saturating_mul(heads) > 1 << 17
}

/// That all entries of a head's keys are finite.
fn finite<E: Coded>(
    simd: Simd,
    keys: &Vectors<'_>,
    matrix: Keys<'_, E>,
    head: usize,
) -> Result<(), Error> {
    let origin = vec![0.0; keys.dim().next_multiple_of(LANES)];
    let mut all = true;
    for from in (0..keys.len()).step_by(PORTION) {
        ambient::check()?;
        let count = PORTION.min(keys.len() - from);
        all &= simd.farthest(matrix.behind(from), count, &origin).is_finite();
    }
    if all {
        return Ok(());
    }
    let mut wide = Vec::new();
    (0..keys.len()).try_for_each(|row| keys.finite(head, row, &mut wide))
}

impl<'a> KeyIndex<'a> {
    /// Builds an index of keys of shape `(..., n, d)`, float32, float16 or bfloat16.
    ///
    /// ```
    /// use certk_rs::{Error, IndexOptions, KeyIndex, Vectors};
    /// let data = [0.5_f32; 2 * 50 * 4];
    /// let index = KeyIndex::build(&Vectors::new("keys", &data, &[2, 50, 4])?, &IndexOptions::new())?;
    /// assert_eq!((index.batch_shape(), index.len(), index.dim()), (&[2][..], 50, 4));
    /// let wrong = KeyIndex::build(&Vectors::new("keys", &[0.0_f64; 4], &[1, 4])?, &IndexOptions::new());
    /// assert!(matches!(wrong, Err(Error::Shape { argument: "keys", .. })));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for float64 or for more than 2^32 - 1 keys, [`Error::NoMemory`], [`Error::KeyNotFinite`],
    /// [`Error::Option`] for threads.
    pub fn build(keys: &Vectors<'_>, options: &IndexOptions) -> Result<Self, Error> {
        Self::build_of(Content::Keys, keys, options)
    }

    /// Builds an index that takes 8, 12 or 16 bits an entry. What is beyond 8 is a low plane, which is read for the few keys of a
    /// row that are too heavy for one byte: it proves as much as exact keys do, or nearly, at an eighth or a quarter of the bytes
    /// of f32.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let index = KeyIndex::with_bits(&Vectors::new("keys", &data, &[50, 4])?, 12, &IndexOptions::new())?;
    /// assert_eq!(index.bits(), 12);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::build`]; [`Error::Option`] for other bits.
    pub fn with_bits(keys: &Vectors<'_>, bits: u32, options: &IndexOptions) -> Result<Self, Error> {
        let content = match bits {
            8 => Content::Keys,
            12 => Content::Keys12,
            16 => Content::Keys16,
            _ => {
                let (value, problem) = (bits.to_string(), "codes of keys take 8, 12 or 16");
                return Err(Error::Option { argument: "key_bits", value, problem });
            }
        };
        Self::build_of(content, keys, options)
    }

    /// Returns the bits of an entry's code: 8, or 12 or 16 with a low plane.
    pub fn bits(&self) -> u32 {
        8 + self.content.low_bits() as u32
    }

    /// Builds an index of keys or of values.
    pub(super) fn build_of(
        content: Content,
        keys: &Vectors<'_>,
        options: &IndexOptions,
    ) -> Result<Self, Error> {
        let _modes = threads::default_floats();
        let (n, dim) = (keys.len(), keys.dim());
        let each = size_of::<Codes>().saturating_add(n.saturating_mul(dim.next_multiple_of(STEP)));
        check_memory(keys.argument(), keys.heads(), each)?;
        check_memory(keys.argument(), n.saturating_mul(keys.heads()), 5)?;
        // Of each head the sum of the outer products of what codes lose, and those of the parts that are encoded together.
        let pool = threads::count(options.threads, worth_sharing(n, dim, keys.heads()))?;
        let matrices = match keys.heads() {
            0 => 0,
            heads => heads.saturating_add(Codes::together(pool)),
        };
        check_memory_square(
            keys.argument(),
            keys.shape(),
            matrices.saturating_mul(content.matrices() * size_of::<f64>()),
        )?;
        let rotate = options.rotate;
        let (heads, stored) = for_coded_dtype!(keys, E => {
            let head = |head| match content {
                content if content.of_values() => Codes::plain(content, dim, matrix::<E>(keys, head), n),
                content => Codes::new(content, dim, matrix::<E>(keys, head), n, rotate),
            };
            Ok((threads::map(pool, 0..keys.heads(), 1, head)?, E::NAME))
        })?;
        let mut index =
            KeyIndex { content, batch: keys.batch().to_vec(), n: 0, dim, heads, stored };
        index.grow(keys, options.threads)?;
        Ok(index)
    }

    /// Appends keys of shape `(..., m, d)` with the batch axes of the index, in time proportional to m. They are moved and
    /// rounded as those before, so that an index that is built of few keys and grows is looser than one built at once; its
    /// certificates are as sound. On an error the index is as it was.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let mut index =
    ///     KeyIndex::build(&Vectors::new("keys", &data[..40 * 4], &[40, 4])?, &IndexOptions::new())?;
    /// index.append(&Vectors::new("keys", &data[40 * 4..], &[10, 4])?)?;
    /// assert_eq!(index.len(), 50);
    /// index.check(&Vectors::new("keys", &data, &[50, 4])?)?;
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KeyIndex::build`]; [`Error::Shape`] if the axes differ from those of the index.
    pub fn append(&mut self, keys: &Vectors<'_>) -> Result<(), Error> {
        // What can fail must fail before the first of several heads has grown.
        self.admit(keys, self.heads.len() > 1)?;
        self.grow(keys, None)
    }

    /// Judges keys that are to be appended, their entries too if that is asked for.
    pub(super) fn admit(&self, keys: &Vectors<'_>, entries: bool) -> Result<(), Error> {
        if keys.batch() != self.batch || keys.dim() != self.dim {
            let mut shape: Vec<String> = self.batch.iter().map(ToString::to_string).collect();
            shape.extend(["m".into(), self.dim.to_string()]);
            let (name, shape) = (self.content.name(), shape.join(", "));
            return Err(keys.misfit(format!("the index takes {name} of shape ({shape})")));
        }
        let stored = for_coded_dtype!(keys, E => Ok(E::NAME))?;
        if stored != self.stored {
            let have = self.stored;
            return Err(
                keys.misfit(format!("they are {stored}, the index holds {have}: convert them"))
            );
        }
        if entries {
            let _modes = threads::default_floats();
            let simd = Simd::current()?;
            for head in 0..self.heads.len() {
                for_coded_dtype!(keys, E => finite(simd, keys, matrix::<E>(keys, head), head))?;
            }
        }
        Ok(())
    }

    /// Appends keys that fit.
    fn grow(&mut self, keys: &Vectors<'_>, threads: Option<usize>) -> Result<(), Error> {
        let ready = self.ready(keys, threads)?;
        self.take_in(keys, ready)
    }

    /// Makes room for keys that fit. What follows can only be stopped, if they are more than a task.
    pub(super) fn ready(
        &mut self,
        keys: &Vectors<'_>,
        threads: Option<usize>,
    ) -> Result<Ready<'a>, Error> {
        let (n, count) = (self.len(), keys.len());
        if n.saturating_add(count) >= u32::MAX as usize {
            return Err(keys.misfit("an index holds fewer than 2^32 keys".into()));
        }
        let simd = Simd::current()?;
        let threads = threads::count(threads, worth_sharing(count, self.dim, self.heads.len()))?;
        ambient::check()?;
        // What is stopped among many keys goes back to copies; few are not stopped.
        let before = (count > TASK).then(|| self.heads.clone());
        let mut rooms = list("keys", self.heads.len())?;
        for codes in &mut self.heads {
            rooms.push(codes.make_room(count, threads)?);
        }
        Ok(Ready { simd, threads, rooms, before })
    }

    /// Appends keys for which there is room.
    pub(super) fn take_in(&mut self, keys: &Vectors<'_>, ready: Ready<'a>) -> Result<(), Error> {
        // What is not given to a pool runs here.
        let _modes = threads::default_floats();
        let (count, Ready { simd, threads, rooms, before }) = (keys.len(), ready);
        let grown = if count > TASK {
            self.encode(simd, keys, rooms, threads)
        } else {
            ambient::uninterrupted(|| self.encode(simd, keys, rooms, threads))
        };
        if let (Err(_), Some(before)) = (&grown, before) {
            self.heads = before;
        }
        grown?;
        self.n += count;
        Ok(())
    }

    /// Encodes keys behind those of every head; on an error some heads may have grown.
    fn encode(
        &mut self,
        simd: Simd,
        keys: &Vectors<'_>,
        rooms: Vec<Room>,
        threads: usize,
    ) -> Result<(), Error> {
        let count = keys.len();
        let one = |(head, (codes, room)): (usize, (&mut Codes<'a>, Room)), threads| {
            let done = for_coded_dtype!(keys, E => Ok(codes.append(simd, matrix::<E>(keys, head), (count, room), threads)))?;
            done.map_err(|refused| match refused {
                Refused::Stopped(error) => error,
                Refused::NotFinite { row, entry } => Error::KeyNotFinite {
                    argument: keys.argument(),
                    place: keys.place(head, row, entry),
                },
            })
        };
        // All threads do a head each as often as there are enough; they share those that are left.
        let whole = self.heads.len() / threads * threads;
        let mut heads = self.heads.iter_mut().zip(rooms).enumerate();
        let many: Vec<_> = heads.by_ref().take(if threads > 1 { whole } else { 0 }).collect();
        for done in threads::map(threads, many, 1, |head| one(head, 1))? {
            done?;
        }
        heads.try_for_each(|head| one(head, threads))
    }

    /// The index as it is now, for readers on other threads: it stays so while this one grows or shrinks, and neither waits for
    /// the other. Codes are shared, not copied (as `clone` does it, too): what is written afterwards copies of each head at most
    /// a chunk of 2048 keys and a matrix of d x d numbers, once for each snapshot. Memory that a snapshot needs stays until it
    /// goes.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let mut index =
    ///     KeyIndex::build(&Vectors::new("keys", &data[..40 * 4], &[40, 4])?, &IndexOptions::new())?;
    /// let snapshot = index.snapshot();
    /// let reader = std::thread::spawn(move || snapshot.len());
    /// index.append(&Vectors::new("keys", &data[40 * 4..], &[10, 4])?)?;
    /// assert_eq!((reader.join().unwrap(), index.len()), (40, 50));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> Self {
        self.clone()
    }

    /// Returns `true` if these are, bit for bit, the keys that the index was built of, by a fingerprint of 128 bits
    /// taken then. It detects accidental changes; it is no defence against deliberate collisions.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data, &[50, 4])?;
    /// # let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// index.check(&keys)?;
    /// let mut others = data.clone();
    /// others[7] += 1.0;
    /// let wrong = index.check(&Vectors::new("keys", &others, &[50, 4])?);
    /// assert!(matches!(wrong, Err(certk_rs::Error::OtherKeys { .. })));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OtherKeys`] if they are not; [`Error::Shape`], [`Error::Option`].
    pub fn check(&self, keys: &Vectors<'_>) -> Result<(), Error> {
        self.fits(keys)?;
        let threads = threads::count(None, worth_sharing(keys.len(), self.dim, self.heads.len()))?;
        for (head, codes) in self.heads.iter().enumerate() {
            let prints = for_coded_dtype!(keys, E => {
                let keys = matrix::<E>(keys, head);
                let fingerprint = |part: usize| {
                    let mut fingerprint = Fingerprint::default();
                    let from = part * PORTION;
                    for key in from..codes.len().min(from + PORTION) {
                        fingerprint.add(key, keys.row(key));
                    }
                    fingerprint
                };
                threads::map(threads, 0..codes.len().div_ceil(PORTION), 1, fingerprint)
            })?;
            let mut all = Fingerprint::default();
            for fingerprint in prints {
                all.join(fingerprint);
            }
            if all != codes.fingerprint() {
                let place = Place::unravel(&self.batch, head);
                let problem = "changed since they were indexed, or are others".into();
                return Err(Error::OtherKeys { argument: keys.argument(), place, problem });
            }
        }
        Ok(())
    }

    /// Judges the shape and the type of keys that are lent.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::OtherKeys`].
    pub(crate) fn fits(&self, keys: &Vectors<'_>) -> Result<(), Error> {
        if keys.batch() != self.batch || keys.len() != self.len() || keys.dim() != self.dim {
            let mut shape = self.batch.clone();
            shape.extend([self.len(), self.dim]);
            return Err(keys.misfit(format!(
                "the index was built of {} of shape {shape:?}; pass those, build it of these, or append what is new",
                self.content.name()
            )));
        }
        let stored = for_coded_dtype!(keys, E => Ok(E::NAME))?;
        if stored != self.stored {
            let problem = format!("are {stored}, but were {} when they were indexed", self.stored);
            let (argument, place) = (keys.argument(), Place(vec![]));
            return Err(Error::OtherKeys { argument, place, problem });
        }
        Ok(())
    }

    /// Each head as it is written to a file: for bindings, as what it gives is.
    #[doc(hidden)]
    pub fn save(&self) -> impl Iterator<Item = Saved<'_>> {
        self.heads.iter().map(Codes::save)
    }

    /// Of each head what is known of eigenvalues; zeros of keys.
    pub(super) fn tops(&self) -> Vec<Tops> {
        self.heads.iter().map(Codes::tops).collect()
    }

    /// An index from what was written.
    ///
    /// # Errors
    /// [`Error::Damaged`] if that cannot have been an index; [`Error::Option`] for an unknown type of keys.
    #[doc(hidden)]
    pub fn load(
        shape: &[usize],
        stored: &str,
        heads: Vec<Saved<'a>>,
        trust: Trust,
    ) -> Result<Self, Error> {
        Self::load_of(Content::Keys, shape, stored, heads, trust)
    }

    /// An index of keys or of values from what was written.
    pub(super) fn load_of(
        content: Content,
        shape: &[usize],
        stored: &str,
        heads: Vec<Saved<'a>>,
        trust: Trust,
    ) -> Result<Self, Error> {
        let _modes = threads::default_floats();
        let damaged = |problem, head| Error::Damaged { problem, head };
        let &[ref batch @ .., n, dim] = shape else { return Err(damaged("the shape", 0)) };
        let known = [f32::NAME, f16::NAME, bf16::NAME];
        let Some(stored) = known.into_iter().find(|name| *name == stored) else {
            let problem = "an index holds float32, float16 or bfloat16";
            return Err(Error::Option { argument: "dtype", value: stored.into(), problem });
        };
        let fits = product("shape", batch)? == heads.len();
        if !fits || dim == 0 || dim > 1 << 20 || n >= u32::MAX as usize {
            return Err(damaged("the shape", 0));
        }
        let load = |(head, saved)| {
            Codes::load(content, (n, dim), saved, trust).map_err(|part| damaged(part, head))
        };
        let heads = heads.into_iter().enumerate().map(load).collect::<Result<_, _>>()?;
        Ok(KeyIndex { content, batch: batch.to_vec(), n, dim, heads, stored })
    }

    /// Returns the positions of a head's keys that have no code, ascending: those that codes would lose too much of.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let mut data: Vec<f32> = (0..100 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// data[17 * 4] = 1e6;
    /// let index = KeyIndex::build(&Vectors::new("keys", &data, &[100, 4])?, &IndexOptions::new())?;
    /// assert!(index.uncoded(0).eq([17]));
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Panics
    /// If there is no such head.
    pub fn uncoded(&self, head: usize) -> impl Iterator<Item = u32> {
        self.heads[head].uncoded()
    }

    /// Returns the storage type of the keys: float32, float16 or bfloat16.
    pub fn dtype(&self) -> &'static str {
        self.stored
    }

    /// The codes of a head.
    pub(crate) fn head(&self, head: usize) -> &Codes<'a> {
        &self.heads[head]
    }

    /// Keys of a head.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Returns `true` if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries of a key.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The axes before those of a matrix of keys.
    pub fn batch_shape(&self) -> &[usize] {
        &self.batch
    }

    /// Bytes of memory that it takes, about.
    pub fn bytes(&self) -> usize {
        let width = self.dim.next_multiple_of(LANES);
        let codes: usize = self.heads.iter().map(Codes::bytes).sum();
        let each = 8 * (self.content.matrices() * Triangle::packed(width) + 4 * width);
        codes.saturating_add(self.heads.len().saturating_mul(each))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that look random, (heads, n, d).
    fn entries(heads: usize, n: usize, dim: usize) -> Vec<f32> {
        (0..heads * n * dim).map(|i| ((i * 2_654_435_761) % 1013) as f32 / 506.0 - 1.0).collect()
    }

    #[test]
    fn a_failed_append_leaves_an_index_equal_to_its_copy() {
        for (heads, n, more) in [(1, 37, 3), (1, 0, 5), (1, 32, 40), (1, 5, 5000), (3, 21, 30)] {
            let dim = 20;
            let data = entries(heads, n, dim);
            let shape = [heads, n, dim];
            let keys = Vectors::new("keys", &data[..], &shape).unwrap();
            let mut index = KeyIndex::build(&keys, &IndexOptions::default()).unwrap();
            let before = index.clone();
            let good = entries(heads, more, dim);
            let mut bad = good.clone();
            *bad.last_mut().unwrap() = f32::NAN;
            let refused = |index: &mut KeyIndex<'_>, data: &[f32], shape: &[usize]| {
                let keys = Vectors::new("keys", data, shape).unwrap();
                threads::with_threads(Some(2), || index.append(&keys)).unwrap_err()
            };
            let error = refused(&mut index, &bad, &[heads, more, dim]);
            assert!(matches!(error, Error::KeyNotFinite { .. }), "{error}");
            assert_eq!(index, before);
            let error = refused(&mut index, &good, &[heads, more * 2, dim / 2]);
            assert!(matches!(error, Error::Shape { .. }), "{error}");
            assert_eq!(index, before);
            let keys = Vectors::new("keys", &good[..], &[heads, more, dim]).unwrap();
            assert!(threads::with_threads(Some(0), || index.append(&keys)).is_err());
            assert_eq!(index, before);
            let mut fresh = before.clone();
            fresh.append(&keys).unwrap();
            index.append(&keys).unwrap();
            assert_eq!(index, fresh);
        }
    }

    /// Memory that somebody else holds is not copied when keys are appended, but for a group that was begun.
    #[test]
    fn a_lent_index_grows_like_one_of_its_own() {
        for (n, more) in [(0, 5), (5, 3), (16, 1), (37, 40), (4000, 5000), (4112, 1)] {
            let (heads, dim) = (2, 20);
            let data = entries(heads, n + more, dim);
            let part = |from: usize, to: usize| -> Vec<f32> {
                let head = |head: &[f32]| head[from * dim..to * dim].to_vec();
                data.chunks_exact((n + more) * dim).flat_map(head).collect()
            };
            let (old, new) = (part(0, n), part(n, n + more));
            let shape = [heads, n, dim];
            let keys = Vectors::new("keys", &old[..], &shape).unwrap();
            let mut index = KeyIndex::build(&keys, &IndexOptions::default()).unwrap();
            let built = index.clone();
            let saved: Vec<Saved<'_>> = built.save().collect();
            let places = |saved: &[Saved<'_>]| {
                saved.iter().map(|head| head.lines.as_ptr()).collect::<Vec<_>>()
            };
            let stored = places(&saved);
            let mut lent = KeyIndex::load(&shape, "float32", saved, Trust::Nothing).unwrap();
            // Nothing was copied.
            assert_eq!(places(&lent.save().collect::<Vec<_>>()), stored);
            assert_eq!(lent, index);
            let snapshot = lent.snapshot();
            let shape = [heads, more, dim];
            let keys = Vectors::new("keys", &new[..], &shape).unwrap();
            index.append(&keys).unwrap();
            lent.append(&keys).unwrap();
            assert_eq!(lent, index);
            assert_eq!(snapshot, built);
            // Several chunks are written as one.
            let saved: Vec<Saved<'_>> = lent.save().collect();
            assert!(saved.iter().zip(index.save()).all(|(a, b)| *a == b));
            assert_eq!(lent.bytes(), index.bytes());
        }
    }
}
