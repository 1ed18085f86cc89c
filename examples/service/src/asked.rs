//! What a request says: in the query beside a raw body, or all of it in JSON.

use axum::extract::Query;
use axum::http::HeaderMap;
use serde::de::DeserializeOwned;

use crate::bodies::Body;
use crate::failure::Failure;
use crate::tensors::{Dtype, Numbers, is_json};

/// A request as it came in.
pub(crate) struct Asked {
    pub(crate) json: bool,
    query: Option<String>,
    pub(crate) body: Body,
}

/// What is asked about one array of numbers.
pub(crate) trait AboutNumbers: DeserializeOwned {
    /// What the numbers are stored in.
    fn dtype(&self) -> Option<Dtype>;
    /// The numbers themselves, in JSON.
    fn listed(&mut self) -> Vec<f64>;
}

impl Asked {
    pub(crate) fn new(headers: &HeaderMap, query: Option<String>, body: Body) -> Self {
        Asked { json: is_json(headers), query, body }
    }

    /// What the query says.
    pub(crate) fn query<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        let uri = format!("/?{}", self.query.as_deref().unwrap_or_default());
        let uri = uri.parse().map_err(|_| Failure::input("the query cannot be read"))?;
        let Query(asked) = Query::<T>::try_from_uri(&uri)
            .map_err(|error| Failure::input(format!("the query: {}", error.body_text())))?;
        Ok(asked)
    }

    /// What a body in JSON says.
    pub(crate) fn body<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        if !self.json {
            return Err(Failure::input("the body must be JSON: content-type: application/json"));
        }
        serde_json::from_slice(&self.body.bytes).map_err(|error| {
            // It may repeat all that was sent.
            let problem: String = error.to_string().chars().take(300).collect();
            Failure::input(format!("the body: {problem}"))
        })
    }

    /// What is asked, and the numbers that it is about: f64 in JSON, f32 if they are raw, unless it says otherwise.
    pub(crate) fn read<T: AboutNumbers>(&self) -> Result<(T, Numbers), Failure> {
        if self.json {
            let mut asked: T = self.body()?;
            let numbers = asked.listed();
            let numbers = Numbers::of_json(&numbers, asked.dtype().unwrap_or(Dtype::F64));
            return Ok((asked, numbers));
        }
        let asked: T = self.query()?;
        let numbers = Numbers::new(self.body.bytes.clone(), asked.dtype().unwrap_or_default())?;
        Ok((asked, numbers))
    }
}
