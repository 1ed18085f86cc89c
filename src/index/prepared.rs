//! A query in the frame of codes, with what its own codes lose.

use super::gram::CodeError;
use crate::kernels::{Coarse, Step};

/// A query as codes are scored with, and what the scores are worth.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub(super) steps: Vec<Step>,
    pub(super) correction: i32,
    pub(super) factor: f32,
    pub(crate) code_error: CodeError,
    /// What scores of codes lack: the scale times the product of the query with the mean, within f64 roundings.
    pub(crate) offset: f64,
}

impl Prepared {
    pub(crate) fn coarse(&self) -> Coarse<'_> {
        Coarse { steps: &self.steps, correction: self.correction, factor: self.factor }
    }
}
