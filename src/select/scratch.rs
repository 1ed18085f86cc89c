//! Scratch reused from row to row, so that a warm call allocates nothing per row.

use half::{bf16, f16};

use crate::error::Error;
use crate::kernels::{BATCH, BatchScratch, Bracket, Element, InDouble, LANES};
use crate::runtime::memory::room;
use crate::runtime::recycled::held;
use crate::runtime::workspace::Scratch;

/// Scratch of one thread. A row needs a copy of its scores (in its own dtype, and in f64 if it is decided in f64), and
/// the scores and weights of the search bracket, usually a small part of the row. If the bracket is the whole row, in
/// f64 after f32, that is about 80 bytes per key.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    pub(crate) f32: Vec<f32>,
    pub(crate) f64: Vec<f64>,
    pub(crate) f16: Vec<f16>,
    pub(crate) bf16: Vec<bf16>,
    pub(crate) keep: Vec<u8>,
    /// Bytes of the entries that an additive mask admits.
    pub(crate) admitted: Vec<u8>,
    /// Positions of the scores of a masked row.
    pub(crate) positions: Vec<u32>,
    pub(crate) scratch32: SearchScratch<f32>,
    pub(crate) scratch64: SearchScratch<f64>,
    pub(crate) forced: Forced,
    pub(crate) listed: [Vec<u32>; BATCH],
    dense32: [Vec<f32>; BATCH],
    dense64: [Vec<f64>; BATCH],
    short32: ShortRowsScratch<f32, f32>,
    short64: ShortRowsScratch<f64, f64>,
    short16: ShortRowsScratch<f16, f32>,
    shortb16: ShortRowsScratch<bf16, f32>,
}

/// Forced positions, ascending.
#[derive(Debug, Default)]
pub(crate) struct Forced {
    pub(crate) first: Vec<u32>,
    pub(crate) last: Vec<u32>,
}

impl Scratch for Workspace {
    fn bytes(&self) -> usize {
        let Workspace {
            f32,
            f64,
            f16,
            bf16,
            keep,
            admitted,
            positions,
            scratch32,
            scratch64,
            forced,
            listed,
            dense32,
            dense64,
            short32,
            short64,
            short16,
            shortb16,
        } = self;
        held(f32)
            + held(f64)
            + held(f16)
            + held(bf16)
            + held(keep)
            + held(admitted)
            + held(positions)
            + scratch32.bytes()
            + scratch64.bytes()
            + held(&forced.first)
            + held(&forced.last)
            + listed.iter().map(held).sum::<usize>()
            + dense32.iter().map(held).sum::<usize>()
            + dense64.iter().map(held).sum::<usize>()
            + short32.bytes()
            + short64.bytes()
            + short16.bytes()
            + shortb16.bytes()
    }
}

/// Scratch of the search, reused from row to row.
#[derive(Debug, Default)]
pub(crate) struct SearchScratch<S> {
    pub(super) bracket: Bracket<S>,
    /// Scores that equal a candidate for the boundary.
    pub(super) equal: Bracket<S>,
    /// Brackets of the chunks of a row on several threads.
    pub(super) parts: Vec<Bracket<S>>,
    /// Keys and weights of a short row or a sample.
    pub(super) scores: Vec<S>,
    pub(super) weights: Vec<S>,
}

impl<S> SearchScratch<S> {
    fn bytes(&self) -> usize {
        let SearchScratch { bracket, equal, parts, scores, weights } = self;
        let brackets = [bracket, equal].into_iter().chain(parts).map(Bracket::bytes);
        brackets.sum::<usize>() + held(scores) + held(weights) + held(parts)
    }
}

/// Scratch of a batch.
#[derive(Debug, Default)]
pub(crate) struct ShortRowsScratch<E, S> {
    pub(super) scores: Vec<E>,
    pub(super) weights: Vec<S>,
    pub(super) inside: Vec<S>,
    pub(super) inside_weights: Vec<S>,
}

impl<E, S> ShortRowsScratch<E, S> {
    fn bytes(&self) -> usize {
        let ShortRowsScratch { scores, weights, inside, inside_weights } = self;
        held(scores) + held(weights) + held(inside) + held(inside_weights)
    }
}

impl<E: Element> ShortRowsScratch<E, E::Scalar> {
    pub(super) fn room(
        &mut self,
        stride: usize,
        rows: usize,
        write: *const u32,
    ) -> BatchScratch<'_, E> {
        let zero = E::Scalar::default();
        BatchScratch {
            stride,
            scores: padded(&mut self.scores, rows * stride, E::MASKED),
            weights: padded(&mut self.weights, rows * stride, zero),
            inside: padded(&mut self.inside, rows * stride, zero),
            inside_weights: padded(&mut self.inside_weights, rows * stride, zero),
            write,
        }
    }
}

/// Makes room for [`padded`] and [`padded_for`], which cannot report an error.
///
/// # Errors
/// [`Error::NoMemory`].
pub(crate) fn grow<T>(buffer: &mut Vec<T>, len: usize) -> Result<(), Error> {
    let most = len.saturating_add(LANES + (PAGE + LINE) / size_of::<T>());
    room("scores", buffer, most.saturating_sub(buffer.len()))
}

const LINE: usize = 64;
const PAGE: usize = 4096;

/// Returns whole groups of lanes for at least `len` items, aligned to a cache line, with unspecified content.
pub(crate) fn padded<T: Copy>(buffer: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    padded_for(&[], buffer, len, fill)
}

/// Returns the same for a copy of `from`, half a page away from it within a page. Stores whose addresses agree with
/// later loads in the lower twelve bits delay those loads.
pub(crate) fn padded_for<'a, T: Copy>(
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

/// Scratch buffers of an element type.
pub(crate) trait PerDtype: InDouble {
    fn scores(workspace: &mut Workspace) -> &mut Vec<Self>;
    fn scratch(workspace: &mut Workspace) -> &mut SearchScratch<Self::Scalar>;
    fn short(workspace: &mut Workspace) -> &mut ShortRowsScratch<Self, Self::Scalar>;
    /// Rows of admitted scores.
    fn dense(workspace: &mut Workspace) -> &mut [Vec<Self::Scalar>; BATCH];
}

macro_rules! buffers {
    ($($type:ident: $scratch:ident $short:ident $dense:ident),*) => {$(
        impl PerDtype for $type {
            fn scores(workspace: &mut Workspace) -> &mut Vec<Self> {
                &mut workspace.$type
            }
            fn scratch(workspace: &mut Workspace) -> &mut SearchScratch<Self::Scalar> {
                &mut workspace.$scratch
            }
            fn short(workspace: &mut Workspace) -> &mut ShortRowsScratch<Self, Self::Scalar> {
                &mut workspace.$short
            }
            fn dense(workspace: &mut Workspace) -> &mut [Vec<Self::Scalar>; BATCH] {
                &mut workspace.$dense
            }
        }
    )*};
}
buffers!(
    f32: scratch32 short32 dense32,
    f64: scratch64 short64 dense64,
    f16: scratch32 short16 dense32,
    bf16: scratch32 shortb16 dense32
);
