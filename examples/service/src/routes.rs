//! Routes: options come as a query, tensors as a safetensors body, and answers are JSON.

use std::slice;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::routing::{MethodFilter, MethodRouter, get, on};
use certk_rs::{
    Attention, AttentionOptions, Budget, Certificate, CertifyOptions, Keep, Options, Scores,
    SearchOptions, SearchResult, Selection, Vectors,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::Settings;
use crate::call::{App, Asked};
use crate::failure::{Failure, Result};
use crate::sessions::vectors;
use crate::tensors::tensors;

pub(crate) fn router(settings: &Settings) -> Router {
    let post = MethodFilter::POST;
    Router::new()
        .route("/health", get(|| async { "ok\n" }))
        .route("/select", answered(post, select))
        .route("/certify", answered(post, certify))
        .route("/sessions/{name}", answered(MethodFilter::PUT, put))
        .route("/sessions/{name}", answered(MethodFilter::DELETE, delete))
        .route("/sessions/{name}/append", answered(post, append))
        .route("/sessions/{name}/search", answered(post, search))
        .route("/sessions/{name}/attention", answered(post, attention))
        .fallback(|| async { Failure::new(StatusCode::NOT_FOUND, "no such route") })
        .layer(DefaultBodyLimit::max(settings.max_body))
        .with_state(Arc::new(App::new(settings)))
}

/// Answer a method of a route by a function, which runs under a context of its own.
fn answered<Q: DeserializeOwned + Send + 'static, R: Serialize + 'static>(
    method: MethodFilter,
    work: fn(&App, &Asked<Q>) -> Result<R>,
) -> MethodRouter<Arc<App>> {
    on(method, move |State(app): State<Arc<App>>, request: Request| app.answer(request, work))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfRows {
    eps: f64,
}

/// Select the smallest set of each row of scores `(..., n)` whose dropped mass is at most `eps`.
fn select(_: &App, asked: &Asked<OfRows>) -> Result<Selection> {
    let [tensor] = tensors(&asked.body, ["scores"])?;
    let scores = Scores::new(tensor.data()?, &tensor.shape)?;
    Ok(certk_rs::select(&scores, &[asked.query.eps], &Options::new())?)
}

/// Judge sets of any origin: row `i` keeps `indices[indptr[i]..indptr[i + 1]]`.
fn certify(_: &App, asked: &Asked<OfRows>) -> Result<Certificate> {
    let [tensor, indptr, indices] = tensors(&asked.body, ["scores", "indptr", "indices"])?;
    let keep = Keep::Indices { indptr: indptr.integers()?, indices: indices.integers()? };
    let scores = Scores::new(tensor.data()?, &tensor.shape)?;
    let options = CertifyOptions::new().eps(slice::from_ref(&asked.query.eps));
    Ok(certk_rs::certify(&scores, &keep, &options)?)
}

/// Make a session of keys `(n, heads, d)` and values `(n, heads, d_v)`.
fn put(app: &App, asked: &Asked<()>) -> Result<Value> {
    let tensors = tensors(&asked.body, ["keys", "values"])?;
    Ok(json!({ "keys": app.sessions.put(&asked.name, tensors)? }))
}

fn delete(app: &App, asked: &Asked<()>) -> Result<()> {
    app.sessions.delete(&asked.name)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Append {
    /// Number of keys before the append. With it, a request that may have come through can be sent again.
    at: Option<usize>,
}

fn append(app: &App, asked: &Asked<Append>) -> Result<Value> {
    let tensors = tensors(&asked.body, ["keys", "values"])?;
    Ok(json!({ "keys": app.sessions.append(&asked.name, asked.query.at, &tensors)? }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfQueries {
    eps: Option<f64>,
    out_tol: Option<f64>,
    scale: Option<f64>,
    #[serde(default)]
    causal: bool,
}

/// An answer, and how many keys the snapshot had that it is about.
#[derive(Serialize)]
struct Answer<T> {
    keys: usize,
    /// Of attention: each row of `out` is at most this far, in the Euclidean norm, from that over all its keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    error_bound: Option<Vec<f64>>,
    #[serde(flatten)]
    found: T,
}

/// Find the fewest keys of each query `(heads, m, d)` whose dropped mass is at most `eps`.
fn search(app: &App, asked: &Asked<OfQueries>) -> Result<Answer<SearchResult>> {
    let (query, now) = (&asked.query, app.sessions.now(&asked.name)?);
    let [queries] = tensors(&asked.body, ["queries"])?;
    let (Some(eps), None) = (query.eps, query.out_tol) else {
        return Err(Failure::input("the query: give eps, and no out_tol"));
    };
    let options = SearchOptions::new().scale(query.scale).causal(query.causal);
    let queries = Vectors::new("queries", queries.data()?, &queries.shape)?;
    let found = now.index.search(&queries, Some(&vectors(&now.keys)?), &[eps], &options)?;
    Ok(Answer { keys: now.keys.shape[0], error_bound: None, found })
}

/// Attend to a session; heads of queries `(heads, m, d)` are a multiple of its heads.
fn attention(app: &App, asked: &Asked<OfQueries>) -> Result<Answer<Attention>> {
    let (query, now) = (&asked.query, app.sessions.now(&asked.name)?);
    let [queries] = tensors(&asked.body, ["queries"])?;
    let budget = match (&query.eps, &query.out_tol) {
        (Some(eps), None) => Budget::TailMass(slice::from_ref(eps)),
        (None, Some(tolerance)) => Budget::Output(slice::from_ref(tolerance)),
        _ => return Err(Failure::input("the query: give either eps or out_tol")),
    };
    let options = AttentionOptions::new().scale(query.scale).causal(query.causal).ball(&now.ball);
    let queries = Vectors::new("queries", queries.data()?, &queries.shape)?;
    let (keys, values, index) = (vectors(&now.keys)?, vectors(&now.values)?, Some(&now.index));
    let found = certk_rs::attention(&queries, &keys, &values, budget, index, &options)?;
    let error_bound = found.error_bound(&queries, &values, &options)?;
    Ok(Answer { keys: now.keys.shape[0], error_bound: Some(error_bound), found })
}
