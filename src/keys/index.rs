//! An index over the keys of many heads.

use half::{bf16, f16};

use super::codes::Codes;
use crate::error::Error;
use crate::kernels::{Element, Keys, Simd};
use crate::scores::{Data, Vectors};
use crate::threads;

/// Keys as one byte an entry, with what is needed to bound what the bytes leave out.
///
/// The index owns codes only, `d + 4` bytes a key; the keys are lent to a call that scores some of them exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyIndex {
    /// The axes before those of a matrix of keys.
    pub(crate) batch: Vec<usize>,
    pub(crate) dim: usize,
    pub(crate) heads: Vec<Codes>,
}

/// How an index is built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexOptions {
    /// Whether keys are turned by a Hadamard matrix before they are rounded, which helps where few entries are large; `None`
    /// decides for each head by a sample.
    pub rotate: Option<bool>,
    /// How many threads; `None` for all available. The index does not depend on it.
    pub threads: Option<usize>,
}

/// Keys that an index can be built of.
pub(crate) trait Coded: Element<Scalar = f32> {
    fn of<'a>(data: &Data<'a>) -> Option<&'a [Self]>;
}

macro_rules! coded {
    ($($type:ty => $variant:ident),*) => {$(
        impl Coded for $type {
            fn of<'a>(data: &Data<'a>) -> Option<&'a [Self]> {
                match data {
                    Data::$variant(data) => Some(data),
                    _ => None,
                }
            }
        }
    )*};
}
coded!(f32 => F32, f16 => F16, bf16 => Bf16);

/// Runs generic code for the stored type of keys.
macro_rules! by_type {
    ($vectors:expr, $type:ident => $work:expr) => {
        match $vectors.data {
            Data::F32(_) => {
                type $type = f32;
                $work
            }
            Data::F16(_) => {
                type $type = f16;
                $work
            }
            Data::Bf16(_) => {
                type $type = bf16;
                $work
            }
            Data::F64(_) => Err($vectors.misfit(
                "keys in float64 cannot be indexed: convert them to float32, or attend without an index".into(),
            )),
        }
    };
}
pub(crate) use by_type;

/// One matrix of keys.
pub(crate) fn matrix<'a, E: Coded>(keys: &Vectors<'a>, head: usize) -> Keys<'a, E> {
    let (start, stride) = keys.matrix(head);
    let data = E::of(&keys.data).map_or(&[][..], |data| data.get(start..).unwrap_or(&[]));
    Keys::new(data, stride, keys.dim())
}

impl KeyIndex {
    /// Builds an index of keys of shape `(..., n, d)`, float32, float16 or bfloat16.
    ///
    /// # Errors
    /// [`Error::Shape`] for float64 or for more than 2^32 - 1 keys, [`Error::KeyNotFinite`], [`Error::Pool`],
    /// [`Error::Option`] for threads.
    pub fn build(keys: &Vectors<'_>, options: &IndexOptions) -> Result<Self, Error> {
        let _modes = threads::default_floats();
        let (n, dim) = (keys.len(), keys.dim());
        let rotate = options.rotate;
        let heads = by_type!(keys, E => {
            Ok((0..keys.heads())
                .map(|head| Codes::new(dim, matrix::<E>(keys, head), n, rotate))
                .collect())
        })?;
        let mut index = KeyIndex { batch: keys.batch().to_vec(), dim, heads };
        index.append(keys, options.threads)?;
        Ok(index)
    }

    /// Appends keys of shape `(..., m, d)` with the batch axes of the index, in time proportional to m. They are moved and
    /// rounded as those before, so that an index that is built of few keys and grows is looser than one built at once; its
    /// certificates are as sound. On an error the index is as it was.
    ///
    /// # Errors
    /// As [`KeyIndex::build`]; [`Error::Shape`] if the axes differ from those of the index.
    pub fn append(&mut self, keys: &Vectors<'_>, threads: Option<usize>) -> Result<(), Error> {
        if keys.batch() != self.batch || keys.dim() != self.dim {
            let mut shape: Vec<String> = self.batch.iter().map(ToString::to_string).collect();
            shape.extend(["m".into(), self.dim.to_string()]);
            return Err(
                keys.misfit(format!("the index takes keys of shape ({})", shape.join(", ")))
            );
        }
        let (n, count) = (self.len(), keys.len());
        if n + count >= u32::MAX as usize {
            return Err(keys.misfit("an index holds fewer than 2^32 keys".into()));
        }
        let simd = Simd::current()?;
        // What is not given to a pool runs here.
        let _modes = threads::default_floats();
        let threads = threads::count(threads, count * self.dim * self.heads.len() > 1 << 20)?;
        // Some heads may have grown before one fails.
        let before: Vec<Codes> = if self.heads.len() > 1 { self.heads.clone() } else { Vec::new() };
        for head in 0..self.heads.len() {
            let done = by_type!(keys, E => {
                self.heads[head].append(simd, matrix::<E>(keys, head), count, threads)
            })?;
            if let Err(bad) = done {
                if !before.is_empty() {
                    self.heads = before;
                }
                return Err(Error::KeyNotFinite {
                    argument: keys.argument(),
                    place: keys.place(head, bad.row, bad.entry),
                });
            }
        }
        Ok(())
    }

    /// The codes of a head.
    pub(crate) fn head(&self, head: usize) -> &Codes {
        &self.heads[head]
    }

    /// Keys of a head.
    pub fn len(&self) -> usize {
        self.heads.first().map_or(0, Codes::len)
    }

    /// Whether there are no keys.
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

    /// Bytes that grow with the number of keys.
    pub fn bytes(&self) -> usize {
        self.heads.iter().map(Codes::bytes).sum()
    }
}
