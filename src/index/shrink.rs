//! An index of fewer keys.

use super::element::{for_coded_dtype, matrix};
use super::key_index::{KeyIndex, worth_sharing};
use crate::error::{Error, Place};
use crate::kernels::Simd;
use crate::rows::Vectors;
use crate::runtime::memory::list;
use crate::runtime::threads;
use half::{bf16, f16};

impl KeyIndex<'_> {
    /// Keeps the first `len` keys of every head, as speculative decoding takes tokens back. `keys` are all those that are indexed now:
    /// those that go are taken out of the fingerprint.
    ///
    /// It takes time proportional to what goes. Certificates are as sound as before and at first a little looser: what is known of all
    /// keys together still has those that went in it. Once that is half of it, the keys that stay are encoded anew. On an error
    /// the index is as it was; so are snapshots in any case.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let keys = Vectors::new("keys", &data[..], &[50, 4])?;
    /// let mut index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// index.truncate(45, &keys)?;
    /// index.check(&Vectors::new("keys", &data[..45 * 4], &[45, 4])?)?;
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`] if there are fewer keys, or for the threads of the context; [`Error::Shape`] and [`Error::OtherKeys`] for keys that are not
    /// the index's own by shape or type; [`Error::NoMemory`].
    pub fn truncate(&mut self, len: usize, keys: &Vectors<'_>) -> Result<(), Error> {
        self.fits(keys)?;
        self.has_as_many(len)?;
        if len == self.len() {
            return Ok(());
        }
        let _modes = threads::default_floats();
        let (simd, threads) = (Simd::current()?, self.threads()?);
        let mut cuts = list(keys.argument(), self.heads.len())?;
        for (head, codes) in self.heads.iter().enumerate() {
            let cut = for_coded_dtype!(keys, E => codes.prepare_cut(simd, matrix::<E>(keys, head), len, threads));
            cuts.push(cut.map_err(|error| self.of_head(error, head))?);
        }
        for (codes, cut) in self.heads.iter_mut().zip(cuts) {
            codes.cut(cut);
        }
        self.n = len;
        Ok(())
    }

    /// Keeps the first `len` keys of every head, without being given any, for who holds none. It does not know afterwards of which
    /// keys it is: [`KeyIndex::check`] refuses all. Certificates loosen as [`KeyIndex::truncate`] has it, and keys are not encoded
    /// anew.
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// # let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// # let keys = Vectors::new("keys", &data[..], &[50, 4])?;
    /// let mut index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// index.crop(45)?;
    /// assert_eq!(index.len(), 45);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`] if there are fewer keys, [`Error::NoMemory`].
    pub fn crop(&mut self, len: usize) -> Result<(), Error> {
        self.has_as_many(len)?;
        let mut spares = list("keys", self.heads.len())?;
        for codes in &self.heads {
            spares.push(codes.spare()?);
        }
        if len < self.len() {
            let pairs = self.heads.iter_mut().zip(spares);
            pairs.for_each(|(codes, spare)| codes.crop(len, spare));
            self.n = len;
        }
        Ok(())
    }

    /// Returns an index of some entries of the first axis, in any order and as often as wanted, as beams of a search go on from
    /// others. Codes are shared, not copied, as by [`KeyIndex::snapshot`].
    ///
    /// ```
    /// # use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let data: Vec<f32> = (0..2 * 50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let keys = Vectors::new("keys", &data[..], &[2, 50, 4])?;
    /// let index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// assert_eq!(index.take(&[1, 1, 0])?.batch_shape(), [3]);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`] for an entry that is not there, or an index of one head without such an axis; [`Error::NoMemory`].
    pub fn take(&self, entries: &[usize]) -> Result<Self, Error> {
        let axis = self.batch.first().copied().unwrap_or(0);
        if let Some(wrong) = entries.iter().find(|entry| **entry >= axis) {
            let problem = "the first axis of the index has no such entry";
            return Err(Error::Option { argument: "entries", value: wrong.to_string(), problem });
        }
        let each = self.heads.len() / axis.max(1);
        let mut heads = list("entries", entries.len().saturating_mul(each))?;
        for entry in entries {
            heads.extend_from_slice(&self.heads[entry * each..][..each]);
        }
        let mut batch = self.batch.clone();
        if let Some(first) = batch.first_mut() {
            *first = entries.len();
        }
        let KeyIndex { content, n, dim, stored, .. } = *self;
        Ok(KeyIndex { content, batch, n, dim, heads, stored })
    }

    /// # Errors
    /// [`Error::Option`] if there are fewer keys.
    fn has_as_many(&self, len: usize) -> Result<(), Error> {
        if len <= self.len() {
            return Ok(());
        }
        let problem =
            "the index holds fewer keys; it can be truncated to as many as it has at most";
        Err(Error::Option { argument: "len", value: len.to_string(), problem })
    }

    /// Takes out keys by position, as caches evict them; those behind move up and keep their order. `positions` is one list for
    /// all heads, or as many lists as there are heads, all of one length, in any order. `keys` are all those that are indexed now.
    ///
    /// It takes time proportional to the keys from the first on that goes. What it does to certificates, to snapshots and on an
    /// error is as [`KeyIndex::truncate`] has it.
    ///
    /// ```
    /// use certk_rs::{IndexOptions, KeyIndex, Vectors};
    /// let data: Vec<f32> = (0..50 * 4).map(|i| (i * i % 23) as f32 / 8.0).collect();
    /// let keys = Vectors::new("keys", &data[..], &[50, 4])?;
    /// let mut index = KeyIndex::build(&keys, &IndexOptions::new())?;
    /// index.evict(&[&[3, 49, 7]], &keys)?;
    /// assert_eq!(index.len(), 47);
    /// # Ok::<(), certk_rs::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Option`] for a position that no key has or that is listed twice, [`Error::Length`] for lists that are not as many,
    /// or not as long, as there must be; and those of [`KeyIndex::truncate`].
    pub fn evict(&mut self, positions: &[&[u32]], keys: &Vectors<'_>) -> Result<(), Error> {
        self.fits(keys)?;
        let gone = self.listed(positions)?;
        let count = gone.first().map_or(0, Vec::len);
        if count == 0 {
            return Ok(());
        }
        let _modes = threads::default_floats();
        let (simd, threads) = (Simd::current()?, self.threads()?);
        let one = |head: usize| {
            let (codes, gone) = (&self.heads[head], &gone[head.min(gone.len() - 1)]);
            for_coded_dtype!(keys, E => codes.without(simd, matrix::<E>(keys, head), gone, 1))
                .map_err(|error| self.of_head(error, head))
        };
        let fewer = threads::map(threads, 0..self.heads.len(), 1, one)?;
        self.heads = fewer.into_iter().collect::<Result<_, _>>()?;
        self.n -= count;
        Ok(())
    }

    /// Positions that go, ascending: one list, or one per head.
    fn listed(&self, positions: &[&[u32]]) -> Result<Vec<Vec<u32>>, Error> {
        let (heads, n) = (self.heads.len(), self.len());
        let length =
            |got, expected, remedy| Error::Length { argument: "positions", got, expected, remedy };
        let wrong = |position: u32, problem| Error::Option {
            argument: "positions",
            value: position.to_string(),
            problem,
        };
        if positions.len() != 1 && positions.len() != heads {
            return Err(length(
                positions.len(),
                heads,
                "pass one list for all heads, or one per head",
            ));
        }
        let mut all = list("positions", positions.len())?;
        for positions in positions {
            let mut gone = list("positions", positions.len())?;
            gone.extend_from_slice(positions);
            gone.sort_unstable();
            if let Some(last) = gone.last().filter(|last| **last as usize >= n) {
                let problem =
                    "the index has no such position; they run from 0 to one less than it has keys";
                return Err(wrong(*last, problem));
            }
            if let Some(pair) = gone.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(wrong(
                    pair[0],
                    "it is listed twice; list every position that goes once",
                ));
            }
            if let Some(first) = all.first().map(Vec::len).filter(|first| *first != gone.len()) {
                return Err(length(
                    gone.len(),
                    first,
                    "take as many keys out of every head: an index holds equally many",
                ));
            }
            all.push(gone);
        }
        Ok(all)
    }

    fn threads(&self) -> Result<usize, Error> {
        threads::count(None, worth_sharing(self.len(), self.dim, self.heads.len()))
    }

    /// An error that names the head.
    fn of_head(&self, error: Error, head: usize) -> Error {
        match error {
            Error::OtherKeys { argument, problem, .. } => {
                Error::OtherKeys { argument, place: Place::unravel(&self.batch, head), problem }
            }
            other => other,
        }
    }
}
