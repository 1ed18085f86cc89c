//! `POST /v1/sessions/{name}/attention`: attention over a session's keys and values that loses no more than it may.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Path, RawQuery, State};
use axum::http::HeaderMap;
use axum::response::Response;
use certk_rs::{AttentionOptions, Budget, Precision, attention};
use safetensors::tensor::Dtype as Stored;
use serde::{Deserialize, Serialize};

use super::routes::{current, expect};
use super::rows::{PerRow, Rows, of_head};
use super::search::{about, rung};
use super::version::Version;
use crate::app::App;
use crate::asked::{AboutNumbers, Asked};
use crate::bodies::Body;
use crate::compute::Watch;
use crate::failure::Failure;
use crate::tensors::{Answer, Dtype, Numbers, Shape, respond, stored_bytes, wants_json};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    dtype: Option<Dtype>,
    shape: Shape,
    /// In JSON.
    #[serde(default)]
    queries: Vec<f64>,
    eps: Option<PerRow>,
    out_tol: Option<PerRow>,
    scale: Option<f64>,
    #[serde(default)]
    causal: bool,
    lengths: Option<Shape>,
    /// What the output is rounded to; that of the queries unless it is said.
    precision: Option<Dtype>,
    #[serde(default)]
    even_if_slower: bool,
    if_version: Option<u64>,
}

impl AboutNumbers for Wanted {
    fn dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    fn listed(&mut self) -> Vec<f64> {
        std::mem::take(&mut self.queries)
    }
}

impl Wanted {
    fn attend(&self, of: &Version, numbers: &Numbers) -> Result<Attended, Failure> {
        let rows = Rows::new(of, numbers, &self.shape, self.lengths.as_ref())?;
        let dtype = self.precision.unwrap_or(numbers.dtype());
        let mut all = Attended::new(of, [rows.heads, rows.m], dtype);
        for (i, head) in of.heads.iter().enumerate() {
            let Some(values) = of.values(i)? else {
                return Err(Failure::input("the session has no values; PUT it with values"));
            };
            let keys = of.keys(i)?;
            let budget = match (&self.eps, &self.out_tol) {
                (Some(eps), None) => Budget::TailMass(rows.budgets("eps", eps, i)?),
                (None, Some(tolerance)) => Budget::Output(rows.budgets("out_tol", tolerance, i)?),
                _ => return Err(Failure::input("pass either eps or out_tol")),
            };
            let precision = match dtype {
                Dtype::F64 => Precision::F64,
                Dtype::F32 => Precision::F32,
                Dtype::F16 => Precision::F16,
                Dtype::Bf16 => Precision::Bf16,
            };
            let options = AttentionOptions::new()
                .scale(self.scale)
                .causal(self.causal)
                .lengths(rows.lengths(i))
                .precision(precision)
                .ball(head.ball.as_ref())
                .even_if_slower(self.even_if_slower);
            let queries = rows.queries(i)?;
            let mut part = attention(&queries, &keys, &values, budget, Some(&head.index), &options)
                .map_err(of_head(i))?;
            let bound = match part.within.take() {
                Some(bound) => bound,
                None => part.error_bound(&queries, &values, &options).map_err(of_head(i))?,
            };
            all.out.extend(part.out.to_f64());
            all.tail_mass_upper.extend(part.tail_mass_upper);
            all.error_bound.extend(bound);
            all.k.extend(part.k);
            all.scored.extend(part.scored);
            all.rung.extend(part.rung.into_iter().map(rung));
        }
        all.stored = stored_bytes(&all.out, dtype);
        Ok(all)
    }
}

/// Outputs, and what is proven of them.
#[derive(Debug, Serialize)]
struct Attended {
    /// Of the session that all of this is about.
    version: u64,
    /// How many keys each head had.
    keys: usize,
    /// Heads, queries of each, entries of an output.
    shape: [usize; 3],
    /// Exactly what the precision asked for can hold.
    out: Vec<f64>,
    tail_mass_upper: Vec<f64>,
    /// The Euclidean norm of each row of `out` less the real attention over all its keys is at most this.
    error_bound: Vec<f64>,
    k: Vec<i64>,
    scored: Vec<i64>,
    rung: Vec<u8>,
    #[serde(skip)]
    dtype: Dtype,
    #[serde(skip)]
    stored: Vec<u8>,
}

impl Attended {
    fn new(of: &Version, [heads, m]: [usize; 2], dtype: Dtype) -> Self {
        Attended {
            version: of.number,
            keys: of.n,
            shape: [heads, m, of.layout.values.unwrap_or(0)],
            out: Vec::new(),
            tail_mass_upper: Vec::new(),
            error_bound: Vec::new(),
            k: Vec::new(),
            scored: Vec::new(),
            rung: Vec::new(),
            dtype,
            stored: Vec::new(),
        }
    }
}

impl Answer for Attended {
    fn tensors(&self) -> Vec<(&'static str, Stored, Vec<usize>, &[u8])> {
        let rows = self.shape[..2].to_vec();
        let cast = bytemuck::cast_slice::<f64, u8>;
        let long = bytemuck::cast_slice::<i64, u8>;
        vec![
            ("out", self.dtype.stored(), self.shape.to_vec(), &self.stored),
            ("tail_mass_upper", Stored::F64, rows.clone(), cast(&self.tail_mass_upper)),
            ("error_bound", Stored::F64, rows.clone(), cast(&self.error_bound)),
            ("k", Stored::I64, rows.clone(), long(&self.k)),
            ("scored", Stored::I64, rows.clone(), long(&self.scored)),
            ("rung", Stored::U8, rows, &self.rung),
        ]
    }

    fn about(&self) -> Option<HashMap<String, String>> {
        Some(about(self.version, self.keys))
    }
}

pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Failure> {
    let deadline = Instant::now() + app.timeout(&headers)?;
    let asked = Asked::new(&headers, query, body);
    let json = asked.json;
    let version = current(&app, &name, deadline).await?;
    let work = move |_: &Watch| {
        let (wanted, numbers) = asked.read::<Wanted>()?;
        expect(wanted.if_version, &version)?;
        wanted.attend(&version, &numbers)
    };
    let found = app.compute.run_until(deadline, work).await?;
    respond(&found, wants_json(&headers, json))
}
