//! What a session holds at one time: it never changes, and readers keep it as long as they need it.

use std::sync::Arc;

use append_only_bytes::BytesSlice;
use certk_rs::{Data, IndexOptions, KeyIndex, ValueBall, Vectors};

use super::grown::Grown;
use super::memory::Charge;
use super::tensors::{Brought, Layout};
use crate::compute::Watch;
use crate::failure::Failure;

/// Keys, values and their index as they were when they had this number.
pub(crate) struct Version {
    /// Grows with every change, and is given once: what a crash took back has had another.
    pub(crate) number: u64,
    pub(super) layout: Layout,
    /// Keys of a head.
    pub(crate) n: usize,
    pub(super) heads: Vec<Head>,
    pub(super) charge: Arc<Charge>,
}

/// What is known of a session without its numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outline {
    pub(super) number: u64,
    pub(super) layout: Layout,
    pub(super) n: usize,
}

/// One head.
pub(super) struct Head {
    pub(super) keys: BytesSlice,
    pub(super) values: BytesSlice,
    pub(super) index: KeyIndex<'static>,
    pub(super) ball: Option<ValueBall>,
}

/// Where the next keys and values of a session go.
pub(crate) struct Pen {
    heads: Vec<(Grown, Grown)>,
    charge: Arc<Charge>,
}

/// Bytes that are copied before a watch is asked.
const PORTION: usize = 1 << 20;

/// Room for so many keys and some that come later.
pub(super) fn roomy(n: usize) -> usize {
    n.saturating_add(n / 4).saturating_add(64)
}

/// Bytes of a session with room for so many keys, index included, about.
pub(super) fn bytes(layout: &Layout, room: usize) -> usize {
    let width = layout.dim.next_multiple_of(8);
    let each = (layout.key() + layout.value() + width + 8).saturating_mul(room);
    let once = width.saturating_mul(8).saturating_mul(width + 8).saturating_add(4096);
    each.saturating_add(once).saturating_mul(layout.heads)
}

/// A number for a version after this one: the time, so that it is new even if the service forgot some versions in a crash.
pub(super) fn next(last: u64) -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_micros() as u64).max(last + 1)
}

fn misplaced() -> Failure {
    Failure::bug("numbers lie at an odd address")
}

impl Layout {
    fn data<'a>(&self, bytes: &'a [u8]) -> Result<Data<'a>, Failure> {
        self.dtype.numbers(bytes).ok_or_else(misplaced)
    }

    /// A head's keys or values as the crate takes them.
    fn vectors<'a>(
        &self,
        name: &'static str,
        bytes: &'a [u8],
        width: usize,
    ) -> Result<Vectors<'a>, Failure> {
        let n = bytes.len() / (width * self.dtype.size());
        Ok(Vectors::new(name, self.data(bytes)?, &[1, n, width])?)
    }
}

impl Head {
    /// The index and the ball of what is there.
    fn build(layout: &Layout, keys: BytesSlice, values: BytesSlice) -> Result<Self, Failure> {
        let built = {
            let keys = layout.vectors("keys", keys.as_bytes(), layout.dim)?;
            KeyIndex::build(&keys, &IndexOptions::new())?
        };
        let ball = match layout.values {
            None => None,
            Some(width) => {
                let values = layout.vectors("values", values.as_bytes(), width)?;
                Some(ValueBall::new(&values)?)
            }
        };
        Ok(Head { keys, values, index: built, ball })
    }
}

impl Version {
    /// A head's keys.
    pub(super) fn keys(&self, head: usize) -> Result<Vectors<'_>, Failure> {
        let layout = &self.layout;
        layout.vectors("keys", self.heads[head].keys.as_bytes(), layout.dim)
    }

    /// A head's values, if there are values.
    pub(super) fn values(&self, head: usize) -> Result<Option<Vectors<'_>>, Failure> {
        let Some(width) = self.layout.values else { return Ok(None) };
        self.layout.vectors("values", self.heads[head].values.as_bytes(), width).map(Some)
    }

    pub(super) fn outline(&self) -> Outline {
        Outline { number: self.number, layout: self.layout, n: self.n }
    }

    /// Bytes charged for it, and for room that it shares with versions before and after it.
    pub(crate) fn bytes(&self) -> usize {
        self.charge.bytes
    }

    /// The version after this one, with more keys that `pen` has room for. On an error nothing has changed.
    pub(super) fn append(&self, pen: &mut Pen, more: &Brought) -> Result<Self, Failure> {
        let layout = self.layout;
        // The index first: it may be stopped, and what it shares with that of this version is left as it was.
        let mut grown = Vec::with_capacity(self.heads.len());
        for (i, head) in self.heads.iter().enumerate() {
            let (mut index, mut ball) = (head.index.snapshot(), head.ball.clone());
            index.append(&layout.vectors("keys", more.keys(i), layout.dim)?)?;
            if let (Some(ball), Some(width)) = (&mut ball, layout.values) {
                ball.append(&layout.vectors("values", more.values(i), width)?)?;
            }
            grown.push((index, ball));
        }
        let heads = grown.into_iter().zip(&mut pen.heads).enumerate();
        let heads = heads.map(|(i, ((index, ball), (keys, values)))| {
            keys.push(more.keys(i));
            values.push(more.values(i));
            Head { keys: keys.so_far(), values: values.so_far(), index, ball }
        });
        Ok(Version {
            number: next(self.number),
            layout,
            n: self.n + more.n,
            heads: heads.collect(),
            charge: Arc::clone(&pen.charge),
        })
    }
}

impl Pen {
    /// Whether the next keys after those of a version may go here.
    pub(super) fn has_room(&self, of: &Version, more: usize) -> bool {
        let layout = &of.layout;
        Arc::ptr_eq(&self.charge, &of.charge)
            && self.heads.iter().all(|(keys, values)| {
                keys.so_far().len() == of.n * layout.key()
                    && keys.left() >= more.saturating_mul(layout.key())
                    && values.left() >= more.saturating_mul(layout.value())
            })
    }

    /// Memory with room for so many keys, which were charged for.
    pub(super) fn new(layout: &Layout, room: usize, charge: Charge) -> Self {
        let one =
            |_| (Grown::with_room(room * layout.key()), Grown::with_room(room * layout.value()));
        Pen { heads: (0..layout.heads).map(one).collect(), charge: Arc::new(charge) }
    }

    /// Where a head's keys and values go.
    pub(super) fn head(&mut self, head: usize) -> (&mut Grown, &mut Grown) {
        let (keys, values) = &mut self.heads[head];
        (keys, values)
    }

    /// Copies what was brought.
    pub(super) fn fill(&mut self, brought: &Brought, watch: &Watch) -> Result<(), Failure> {
        for head in 0..self.heads.len() {
            let (keys, values) = self.head(head);
            copy(brought.keys(head), keys, watch)?;
            copy(brought.values(head), values, watch)?;
        }
        Ok(())
    }

    /// Copies those keys and values of a version that lie in some ranges.
    pub(super) fn take(
        &mut self,
        of: &Version,
        ranges: &[std::ops::Range<usize>],
        watch: &Watch,
    ) -> Result<(), Failure> {
        let (key, value) = (of.layout.key(), of.layout.value());
        for (i, head) in of.heads.iter().enumerate() {
            let (keys, values) = self.head(i);
            for range in ranges {
                copy(&head.keys.as_bytes()[range.start * key..range.end * key], keys, watch)?;
                let some = range.start * value..range.end * value;
                copy(&head.values.as_bytes()[some], values, watch)?;
            }
        }
        Ok(())
    }

    /// A version of all that was written, with an index that is built of it.
    pub(super) fn version(
        &self,
        layout: Layout,
        n: usize,
        number: u64,
        watch: &Watch,
    ) -> Result<Version, Failure> {
        let mut heads = Vec::with_capacity(layout.heads);
        for (keys, values) in &self.heads {
            watch.check()?;
            heads.push(Head::build(&layout, keys.so_far(), values.so_far())?);
        }
        Ok(Version { number, layout, n, heads, charge: Arc::clone(&self.charge) })
    }
}

fn copy(from: &[u8], to: &mut Grown, watch: &Watch) -> Result<(), Failure> {
    for portion in from.chunks(PORTION) {
        watch.check()?;
        to.push(portion);
    }
    Ok(())
}
