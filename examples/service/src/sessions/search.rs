//! `POST /v1/sessions/{name}/search`: the fewest keys of each query whose dropped mass is proven to be within a budget.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Path, RawQuery, State};
use axum::http::HeaderMap;
use axum::response::Response;
use certk_rs::{Rule, Rung, SearchOptions, SearchResult, Status};
use safetensors::tensor::Dtype as Stored;
use serde::{Deserialize, Serialize};

use super::routes::{current, expect};
use super::rows::{PerRow, Rows, of_head};
use super::version::Version;
use crate::app::App;
use crate::asked::{AboutNumbers, Asked};
use crate::bodies::Body;
use crate::compute::Watch;
use crate::failure::Failure;
use crate::tensors::{Answer, Dtype, Numbers, Shape, respond, wants_json};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    dtype: Option<Dtype>,
    shape: Shape,
    /// In JSON.
    #[serde(default)]
    queries: Vec<f64>,
    eps: Option<PerRow>,
    #[serde(default)]
    rule: Ends,
    /// How many, if the top k are wanted.
    k: Option<usize>,
    scale: Option<f64>,
    #[serde(default)]
    causal: bool,
    lengths: Option<Shape>,
    max_scored: Option<usize>,
    if_version: Option<u64>,
}

/// What ends a search.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Ends {
    #[default]
    Mass,
    Gap,
    TopK,
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
    fn rule(&self) -> Result<Rule, Failure> {
        match (self.rule, self.k) {
            (Ends::Mass, None) => Ok(Rule::Mass),
            (Ends::Gap, None) => Ok(Rule::Gap),
            (Ends::TopK, Some(k)) => Ok(Rule::TopK(k)),
            (Ends::TopK, None) => Err(Failure::input("rule=topk needs k")),
            (_, Some(_)) => Err(Failure::input("k goes with rule=topk; leave it out")),
        }
    }

    fn search(&self, of: &Version, numbers: &Numbers) -> Result<Found, Failure> {
        let rows = Rows::new(of, numbers, &self.shape, self.lengths.as_ref())?;
        let rule = self.rule()?;
        if self.eps.is_none() && !matches!(rule, Rule::TopK(_)) {
            return Err(Failure::input("eps is needed"));
        }
        let options = SearchOptions::new()
            .rule(rule)
            .scale(self.scale)
            .causal(self.causal)
            .max_scored(self.max_scored);
        let mut found = Found::new(of, [rows.heads, rows.m]);
        for (i, head) in of.heads.iter().enumerate() {
            let eps = match &self.eps {
                Some(eps) => rows.budgets("eps", eps, i)?,
                None => &[],
            };
            let options = options.lengths(rows.lengths(i));
            let keys = of.keys(i)?;
            // Each query has the keys of one head: those of a group stand one after another.
            let queries = rows.queries(i)?;
            let part = head.index.search(&queries, Some(&keys), eps, &options);
            found.push(part.map_err(of_head(i))?);
        }
        Ok(found)
    }
}

/// Sets with their certificates: row `i` keeps `indices[indptr[i]..indptr[i + 1]]`.
#[derive(Debug, Default, Serialize)]
struct Found {
    /// Of the session that all of this is about.
    version: u64,
    /// How many keys each head had.
    keys: usize,
    /// Heads, and queries of each; rows are in this order.
    rows: [usize; 2],
    k: Vec<i64>,
    indptr: Vec<i64>,
    indices: Vec<u32>,
    tail_mass_upper: Vec<f64>,
    tail_mass_lower: Vec<f64>,
    minimal: Vec<bool>,
    certified: Vec<bool>,
    /// Keys that were scored exactly.
    scored: Vec<i64>,
    /// 0: by codes alone; 1: some keys were scored; 2: all were.
    rung: Vec<u8>,
}

/// Which way a row was answered, as a number.
pub(super) fn rung(rung: Rung) -> u8 {
    rung as u8
}

impl Found {
    fn new(of: &Version, rows: [usize; 2]) -> Self {
        Found { version: of.number, keys: of.n, rows, indptr: vec![0], ..Self::default() }
    }

    fn push(&mut self, part: SearchResult) {
        let before = self.indices.len() as i64;
        let selection = part.selection;
        self.indptr.extend(selection.indptr.iter().skip(1).map(|end| end + before));
        self.indices.extend(selection.indices);
        self.k.extend(selection.k);
        self.tail_mass_upper.extend(selection.tail_mass_upper);
        self.tail_mass_lower.extend(selection.tail_mass_lower);
        self.minimal.extend(selection.minimal);
        self.certified.extend(selection.status.iter().map(|status| *status != Status::OverBudget));
        self.scored.extend(part.scored);
        self.rung.extend(part.rung.into_iter().map(rung));
    }
}

/// What is said of all of an answer.
pub(super) fn about(version: u64, keys: usize) -> HashMap<String, String> {
    let about = [("version".into(), version.to_string()), ("keys".into(), keys.to_string())];
    HashMap::from(about)
}

impl Answer for Found {
    fn tensors(&self) -> Vec<(&'static str, Stored, Vec<usize>, &[u8])> {
        let rows = self.rows.to_vec();
        let cast = bytemuck::cast_slice::<f64, u8>;
        let long = bytemuck::cast_slice::<i64, u8>;
        vec![
            ("k", Stored::I64, rows.clone(), long(&self.k)),
            ("indptr", Stored::I64, vec![self.indptr.len()], long(&self.indptr)),
            ("indices", Stored::U32, vec![self.indices.len()], bytemuck::cast_slice(&self.indices)),
            ("tail_mass_upper", Stored::F64, rows.clone(), cast(&self.tail_mass_upper)),
            ("tail_mass_lower", Stored::F64, rows.clone(), cast(&self.tail_mass_lower)),
            ("minimal", Stored::BOOL, rows.clone(), bytemuck::cast_slice(&self.minimal)),
            ("certified", Stored::BOOL, rows.clone(), bytemuck::cast_slice(&self.certified)),
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
        wanted.search(&version, &numbers)
    };
    let found = app.compute.run_until(deadline, work).await?;
    respond(&found, wants_json(&headers, json))
}
