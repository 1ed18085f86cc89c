//! Scratch reused from row to row, so that a warm call allocates nothing per row.

use half::{bf16, f16};

use crate::error::Error;
use crate::kernels::{BATCH, BatchScratch, Bracket, Element, InDouble, LANES, RANKED};
use crate::runtime::held::{Held, held};
use crate::runtime::memory::room;

/// Scratch of one thread. A row needs a copy of its scores (in its own dtype, and in f64 if it is decided in f64), and
/// the scores and weights of the search bracket, usually a small part of the row. If the bracket is the whole row, in
/// f64 after f32, that is about 80 bytes per key.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    pub(super) row: RowScratch,
    pub(super) short: ShortRows,
}
held!(Workspace { row, short });

/// Scratch of one row.
#[derive(Debug, Default)]
pub(super) struct RowScratch {
    pub(super) read: ReadScratch,
    pub(super) search: Searches,
    pub(super) forced: Forced,
    /// Bytes of a kept set given by a caller.
    pub(super) keep: Vec<u8>,
}
held!(RowScratch { read, search, forced, keep });

/// Scratch of one row while it is read.
#[derive(Debug, Default)]
pub(super) struct ReadScratch {
    pub(super) copies: Copies,
    /// Bytes of the entries that an additive mask admits.
    pub(super) admitted: Vec<u8>,
    /// Positions of the scores of a masked row.
    pub(super) positions: Vec<u32>,
}
held!(ReadScratch { copies, admitted, positions });

/// Copies of a row's scores.
#[derive(Debug, Default)]
pub(super) struct Copies {
    f32: Vec<f32>,
    pub(super) f64: Vec<f64>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
}
held!(Copies { f32, f64, f16, bf16 });

/// Scratch of the search in either precision.
#[derive(Debug, Default)]
pub(super) struct Searches {
    f32: SearchScratch<f32>,
    pub(super) f64: SearchScratch<f64>,
}
held!(Searches { f32, f64 });

/// Scratch of the search.
#[derive(Debug, Default)]
pub(super) struct SearchScratch<S> {
    pub(super) bracket: Bracket<S>,
    /// Scores that equal a candidate for the boundary.
    pub(super) equal: Bracket<S>,
    /// Brackets of the chunks of a row on several threads.
    pub(super) parts: Vec<Bracket<S>>,
    /// Keys and weights of a short row or a sample.
    pub(super) scores: Vec<S>,
    pub(super) weights: Vec<S>,
}

impl<S> Held for SearchScratch<S> {
    fn held(&self) -> usize {
        let SearchScratch { bracket, equal, parts, scores, weights } = self;
        let brackets = [bracket, equal].into_iter().chain(parts).map(Bracket::held);
        brackets.sum::<usize>() + scores.held() + weights.held() + parts.held()
    }
}

/// Forced positions, ascending.
#[derive(Debug, Default)]
pub(super) struct Forced {
    pub(super) first: Vec<u32>,
    pub(super) last: Vec<u32>,
}
held!(Forced { first, last });

/// Scratch of batches of short rows.
#[derive(Debug, Default)]
pub(super) struct ShortRows {
    f32: Batch<f32, f32>,
    f64: Batch<f64, f64>,
    f16: Batch<f16, f32>,
    bf16: Batch<bf16, f32>,
}
held!(ShortRows { f32, f64, f16, bf16 });

/// Scratch of batches of one dtype.
#[derive(Debug, Default)]
pub(super) struct Batch<E, S> {
    /// Admitted scores of masked rows, and their positions.
    pub(super) admitted: [Vec<S>; BATCH],
    pub(super) positions: [Vec<u32>; BATCH],
    /// Rooms for whole rows, and for the admitted scores.
    pub(super) whole: BatchRoom<E, S>,
    pub(super) masked: BatchRoom<S, S>,
}
held!(Batch<E, S> { admitted, positions, whole, masked });

#[derive(Debug, Default)]
pub(super) struct BatchRoom<E, S> {
    scores: Vec<E>,
    weights: Vec<S>,
    inside: Vec<S>,
    inside_weights: Vec<S>,
}
held!(BatchRoom<E, S> { scores, weights, inside, inside_weights });

impl<E: Element> BatchRoom<E, E::Scalar> {
    /// Returns room for `rows` rows of at most `longest` scores.
    pub(super) fn of(&mut self, rows: usize, longest: usize) -> BatchScratch<'_, E> {
        let stride = longest.next_multiple_of(LANES) + 2 * RANKED;
        let (all, zero) = (rows * stride, E::Scalar::default());
        BatchScratch {
            stride,
            scores: padded(&mut self.scores, all, E::MASKED),
            weights: padded(&mut self.weights, all, zero),
            inside: padded(&mut self.inside, all, zero),
            inside_weights: padded(&mut self.inside_weights, all, zero),
        }
    }
}

/// Makes room for [`padded`] and [`padded_for`], which cannot report an error.
///
/// # Errors
/// [`Error::NoMemory`].
pub(super) fn grow<T>(buffer: &mut Vec<T>, len: usize) -> Result<(), Error> {
    let most = len.saturating_add(LANES + (PAGE + LINE) / size_of::<T>());
    room("scores", buffer, most.saturating_sub(buffer.len()))
}

const LINE: usize = 64;
const PAGE: usize = 4096;

/// Returns whole groups of lanes for at least `len` items, aligned to a cache line, with unspecified content.
pub(super) fn padded<T: Copy>(buffer: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    padded_for(&[], buffer, len, fill)
}

/// Returns the same for a copy of `from`, half a page away from it within a page. Stores whose addresses agree with
/// later loads in the lower twelve bits delay those loads.
pub(super) fn padded_for<'a, T: Copy>(
    from: &[T],
    buffer: &'a mut Vec<T>,
    len: usize,
    fill: T,
) -> &'a mut [T] {
    let room = len.next_multiple_of(LANES);
    let spare = (PAGE + LINE) / size_of::<T>();
    if buffer.len() < room + spare {
        buffer.resize(room + spare, fill);
    }
    let line = buffer.as_ptr().align_offset(LINE).min(LINE / size_of::<T>());
    let start = buffer.as_ptr().addr() + line * size_of::<T>();
    let away = if from.is_empty() {
        0
    } else {
        (from.as_ptr().addr() + PAGE / 2).wrapping_sub(start) % PAGE / LINE * LINE
    };
    let skip = line + away / size_of::<T>();
    &mut buffer[skip..skip + room]
}

/// Type of a row's scores in scratch.
pub(super) trait Buffered: InDouble {
    fn buffer(copies: &mut Copies) -> &mut Vec<Self>;
}

/// Type that rows are stored in.
pub(super) trait PerDtype: Buffered + InDouble<Scalar: Computed> {
    fn batch(short: &mut ShortRows) -> &mut Batch<Self, Self::Scalar>;
}

/// Type that weights are computed in.
pub(super) trait Computed: Buffered + InDouble<Scalar = Self> {
    fn scratch(searches: &mut Searches) -> &mut SearchScratch<Self>;
}

macro_rules! stored {
    ($($type:ident)*) => {$(
        impl Buffered for $type {
            fn buffer(copies: &mut Copies) -> &mut Vec<Self> {
                &mut copies.$type
            }
        }
        impl PerDtype for $type {
            fn batch(short: &mut ShortRows) -> &mut Batch<Self, Self::Scalar> {
                &mut short.$type
            }
        }
    )*};
}
stored!(f32 f64 f16 bf16);

macro_rules! computed {
    ($($type:ident)*) => {$(
        impl Computed for $type {
            fn scratch(searches: &mut Searches) -> &mut SearchScratch<Self> {
                &mut searches.$type
            }
        }
    )*};
}
computed!(f32 f64);
