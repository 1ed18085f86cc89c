//! What tests share: a service without a network, and attention by brute force in f64.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode};
use clap::Parser;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tower::ServiceExt;

use crate::app::{App, router};
use crate::settings::Settings;

pub(super) fn app(arguments: &[&str]) -> (Arc<App>, Router) {
    let arguments =
        ["service", "--compute-threads", "2"].into_iter().chain(arguments.iter().copied());
    let app = App::new(Settings::parse_from(arguments)).unwrap();
    let router = router(&app);
    (app, router)
}

pub(super) async fn answer(router: &Router, request: Request<Body>) -> (StatusCode, Vec<u8>) {
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status();
    (status, to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec())
}

/// Waits until something is so. That it never is shows after a minute, however busy the machine.
pub(crate) async fn until(so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is not so after a minute");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(super) fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).body(body.into()).unwrap()
}

pub(super) fn json_post(path: &str, body: &Value) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(body.to_string().into()).unwrap()
}

pub(super) fn numbers(count: usize) -> Vec<f32> {
    (1..=count).map(|i| 9.0 * ((i as f32 * 0.618_034).fract() - 0.5)).collect()
}

pub(super) fn ask(method: Method, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::empty()).unwrap()
}

/// What a route says in JSON.
pub(super) async fn json_of(router: &Router, request: Request<Body>) -> (StatusCode, Value) {
    let (status, body) = answer(router, request).await;
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// Keys `(heads, n, d)` and values `(heads, n, d_v)`.
#[derive(Clone)]
pub(super) struct Tensors {
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) width: usize,
    pub(super) keys: Vec<Vec<f32>>,
    pub(super) values: Vec<Vec<f32>>,
}

impl Tensors {
    pub(super) fn new(seed: u64, heads: usize, n: usize, dim: usize, width: usize) -> Self {
        let rows = |salt: u64, width: usize| {
            let one = |head: usize| normal(n * width, seed * 1009 + salt * 31 + head as u64);
            (0..heads).map(one).collect()
        };
        Tensors { heads, dim, width, keys: rows(1, dim), values: rows(2, width) }
    }

    pub(super) fn n(&self) -> usize {
        self.keys[0].len() / self.dim
    }

    pub(super) fn append(&mut self, more: &Self) {
        for (to, from) in self.keys.iter_mut().zip(&more.keys) {
            to.extend(from);
        }
        for (to, from) in self.values.iter_mut().zip(&more.values) {
            to.extend(from);
        }
    }

    /// Only those positions.
    pub(super) fn only(&mut self, positions: impl Fn(usize) -> bool) {
        let only = |rows: &mut Vec<f32>, width: usize| {
            let chosen = rows.chunks(width).enumerate().filter(|(at, _)| positions(*at));
            *rows = chosen.flat_map(|(_, row)| row.to_vec()).collect();
        };
        self.keys.iter_mut().for_each(|rows| only(rows, self.dim));
        self.values.iter_mut().for_each(|rows| only(rows, self.width));
    }

    pub(super) fn safetensors(&self) -> Vec<u8> {
        let (keys, values) = (self.keys.concat(), self.values.concat());
        let view = |data, width| {
            let shape = vec![self.heads, self.n(), width];
            TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(data)).unwrap()
        };
        let mut views = vec![("keys", view(&keys, self.dim))];
        if self.width > 0 {
            views.push(("values", view(&values, self.width)));
        }
        safetensors::serialize(views, None).unwrap()
    }

    /// The softmax over all keys of a query of a head, in f64.
    pub(super) fn weights(&self, head: usize, query: &[f32], sees: usize) -> Vec<f64> {
        let product = |key: &[f32]| -> f64 {
            key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
        };
        let scale = 1.0 / (self.dim as f64).sqrt();
        let keys = self.keys[head].chunks(self.dim).take(sees);
        let scores: Vec<f64> = keys.map(|key| scale * product(key)).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect()
    }

    /// The real output.
    pub(super) fn output(&self, head: usize, query: &[f32], sees: usize) -> Vec<f64> {
        let mut out = vec![0.0; self.width];
        let weights = self.weights(head, query, sees);
        for (weight, value) in weights.iter().zip(self.values[head].chunks(self.width)) {
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * f64::from(*v));
        }
        out
    }
}

/// Numbers that look normal.
pub(super) fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5
    };
    (0..count).map(|_| ((0..12).map(|_| uniform()).sum::<f64>()) as f32).collect()
}

/// An answer as a safetensors file, read.
pub(super) struct Answer {
    pub(super) version: u64,
    pub(super) keys: usize,
    tensors: HashMap<String, (Vec<usize>, Vec<u8>)>,
}

impl Answer {
    pub(super) fn read(body: &[u8]) -> Self {
        let file = SafeTensors::deserialize(body).unwrap();
        let (_, header) = SafeTensors::read_metadata(body).unwrap();
        let about = header.metadata().clone().unwrap();
        let tensors = file.iter().map(|(name, tensor)| {
            (name.to_owned(), (tensor.shape().to_vec(), tensor.data().to_vec()))
        });
        Answer {
            version: about["version"].parse().unwrap(),
            keys: about["keys"].parse().unwrap(),
            tensors: tensors.collect(),
        }
    }

    pub(super) fn shape(&self, name: &str) -> &[usize] {
        &self.tensors[name].0
    }

    pub(super) fn numbers<T: bytemuck::AnyBitPattern>(&self, name: &str) -> Vec<T> {
        let bytes = &self.tensors[name].1;
        bytes.chunks(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// That each row's certificate holds, by brute force; returns how many keys were scored.
    pub(super) fn check_sets(&self, of: &Tensors, queries: &[f32], eps: f64, causal: bool) -> i64 {
        assert_eq!(self.keys, of.n());
        let &[heads, m] = self.shape("k") else { panic!() };
        let (indptr, indices) = (self.numbers::<u64>("indptr"), self.numbers::<u32>("indices"));
        let (upper, lower) =
            (self.numbers::<f64>("tail_mass_upper"), self.numbers::<f64>("tail_mass_lower"));
        let certified = self.numbers::<u8>("certified");
        for (row, query) in queries.chunks(of.dim).enumerate() {
            let sees = if causal { (row % m + 1 + of.n()).saturating_sub(m) } else { of.n() };
            let head = row / m / (heads / of.heads);
            let mut weights = of.weights(head, query, sees);
            let kept = &indices[indptr[row] as usize..indptr[row + 1] as usize];
            assert_eq!(kept.len() as i64, self.numbers::<i64>("k")[row]);
            for &key in kept {
                weights[key as usize] = 0.0;
            }
            let lost: f64 = weights.iter().sum();
            assert!(lost <= upper[row] + 1e-12 && lost >= lower[row] - 1e-12, "{lost}");
            assert!(certified[row] == 0 || upper[row] <= eps);
        }
        self.numbers::<i64>("scored").iter().sum()
    }

    /// That each output is as near to the real one as its bound says.
    pub(super) fn check_outputs(&self, of: &Tensors, queries: &[f32], out: &[f64], causal: bool) {
        assert_eq!(self.keys, of.n());
        let &[heads, m, width] = self.shape("out") else { panic!() };
        let bounds = self.numbers::<f64>("error_bound");
        for (row, query) in queries.chunks(of.dim).enumerate() {
            let sees = if causal { (row % m + 1 + of.n()).saturating_sub(m) } else { of.n() };
            let real = of.output(row / m / (heads / of.heads), query, sees);
            let off = out[row * width..][..width].iter().zip(&real);
            let off = off.map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
            assert!(off <= bounds[row] + 1e-12, "{off} {}", bounds[row]);
        }
    }
}
