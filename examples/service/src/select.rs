//! `POST /v1/select`: the smallest sets of keys whose dropped mass is proven to be within a budget.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::http::HeaderMap;
use axum::response::Response;
use certk_rs::{Kind, MaxKeep, Options, Scores, Selection, Status, select};
use safetensors::tensor::Dtype as Stored;
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::asked::{AboutNumbers, Asked};
use crate::bodies::Body;
use crate::compute::Watch;
use crate::failure::Failure;
use crate::tensors::{Answer, Dtype, Numbers, Shape, respond, wants_json};

/// What is asked: in the query beside a raw body, or all of it in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// What the numbers are stored in: f32 of raw ones, f64 of those in JSON.
    dtype: Option<Dtype>,
    /// Batch axes, then keys.
    shape: Shape,
    /// In JSON: row by row.
    #[serde(default)]
    scores: Vec<f64>,
    eps: f64,
    scale: Option<f64>,
    #[serde(default)]
    kind: Meaning,
    min_keep: Option<usize>,
    max_keep: Option<usize>,
    max_fraction: Option<f64>,
    keep_first: Option<usize>,
    keep_last: Option<usize>,
    block_size: Option<usize>,
    prove_minimal: Option<bool>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Meaning {
    #[default]
    Logits,
    LogProbs,
    Probs,
}

impl AboutNumbers for Wanted {
    fn dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    fn listed(&mut self) -> Vec<f64> {
        std::mem::take(&mut self.scores)
    }
}

impl Wanted {
    fn options(&self) -> Result<Options, Failure> {
        let max_keep = match (self.max_keep, self.max_fraction) {
            (Some(_), Some(_)) => {
                let problem = "max_keep and max_fraction exclude each other; pass one of them";
                return Err(Failure::input(problem));
            }
            (count, fraction) => count.map(MaxKeep::Count).or(fraction.map(MaxKeep::Fraction)),
        };
        Ok(Options::new()
            .max_keep(max_keep)
            .min_keep(self.min_keep.unwrap_or(1))
            .keep_first(self.keep_first.unwrap_or(0))
            .keep_last(self.keep_last.unwrap_or(0))
            .block_size(self.block_size.unwrap_or(1))
            .prove_minimal(self.prove_minimal.unwrap_or(false)))
    }

    fn select(&self, numbers: &Numbers) -> Result<Selected, Failure> {
        let kind = match self.kind {
            Meaning::Logits => Kind::Logits,
            Meaning::LogProbs => Kind::LogProbs,
            Meaning::Probs => Kind::Probs,
        };
        let scores = Scores::new(numbers.data(), &self.shape.0)?.kind(kind)?;
        let scores = scores.scale(self.scale.unwrap_or(1.0))?;
        Ok(Selected::new(select(&scores, &[self.eps], &self.options()?)?))
    }
}

/// A selection with its certificate: row `i` keeps `indices[indptr[i]..indptr[i + 1]]`.
#[derive(Debug, Serialize)]
pub(crate) struct Selected {
    k: Vec<i64>,
    indptr: Vec<i64>,
    indices: Vec<u32>,
    tail_mass_upper: Vec<f64>,
    tail_mass_lower: Vec<f64>,
    minimal: Vec<bool>,
    /// Whether a row is within its budget.
    certified: Vec<bool>,
}

impl Selected {
    pub(crate) fn new(found: Selection) -> Self {
        // A row that sees no key loses nothing.
        let certified = found.status.iter().map(|status| *status != Status::OverBudget).collect();
        Selected {
            k: found.k,
            indptr: found.indptr,
            indices: found.indices,
            tail_mass_upper: found.tail_mass_upper,
            tail_mass_lower: found.tail_mass_lower,
            minimal: found.minimal,
            certified,
        }
    }
}

impl Answer for Selected {
    fn tensors(&self) -> Vec<(&'static str, Stored, Vec<usize>, &[u8])> {
        let rows = vec![self.k.len()];
        let cast = bytemuck::cast_slice::<f64, u8>;
        vec![
            ("k", Stored::I64, rows.clone(), bytemuck::cast_slice(&self.k)),
            ("indptr", Stored::I64, vec![self.indptr.len()], bytemuck::cast_slice(&self.indptr)),
            ("indices", Stored::U32, vec![self.indices.len()], bytemuck::cast_slice(&self.indices)),
            ("tail_mass_upper", Stored::F64, rows.clone(), cast(&self.tail_mass_upper)),
            ("tail_mass_lower", Stored::F64, rows.clone(), cast(&self.tail_mass_lower)),
            ("minimal", Stored::BOOL, rows.clone(), bytemuck::cast_slice(&self.minimal)),
            ("certified", Stored::BOOL, rows, bytemuck::cast_slice(&self.certified)),
        ]
    }
}

pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let asked = Asked::new(&headers, query, body);
    let (json, timeout) = (asked.json, app.timeout(&headers)?);
    let work = move |_: &Watch| {
        let (wanted, numbers) = asked.read::<Wanted>()?;
        wanted.select(&numbers)
    };
    let found = app.compute.run(timeout, work).await?;
    respond(&found, wants_json(&headers, json))
}
