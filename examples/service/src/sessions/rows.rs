//! The queries of a call, head by head.

use std::fmt;

use certk_rs::Vectors;
use serde::de::{SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

use super::tensors::finite;
use super::version::Version;
use crate::failure::Failure;
use crate::tensors::{Dtype, Numbers, Shape};

/// Queries `(heads, m, d)`; heads are a multiple of those of the keys.
pub(super) struct Rows<'a> {
    numbers: &'a Numbers,
    dtype: Dtype,
    pub(super) heads: usize,
    pub(super) m: usize,
    dim: usize,
    /// Heads of queries for each head of keys.
    group: usize,
    lengths: Vec<i64>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(
        of: &Version,
        numbers: &'a Numbers,
        shape: &Shape,
        lengths: Option<&Shape>,
    ) -> Result<Self, Failure> {
        let shape = &shape.0[..];
        let misfit =
            |problem: String| Err(Failure::input(format!("queries of shape {shape:?}: {problem}")));
        let &[heads, m, dim] = shape else {
            return misfit("they need the axes heads, m, d".into());
        };
        let (need, kv_heads) = (of.layout.dim, of.layout.heads);
        if dim != need {
            return misfit(format!("the keys have {need} entries"));
        }
        if heads == 0 || !heads.is_multiple_of(kv_heads) {
            return misfit(format!("the session has {kv_heads} heads; pass a multiple of them"));
        }
        finite("queries", shape, numbers.dtype(), numbers)?;
        let lengths: Vec<i64> =
            lengths.map(|all| all.0.iter().map(|&n| n as i64).collect()).unwrap_or_default();
        if !matches!(lengths.len(), 0 | 1) && lengths.len() != heads * m {
            let problem = "lengths: pass one for all rows, or one per row";
            return Err(Failure::input(problem));
        }
        let (dtype, group) = (numbers.dtype(), heads / kv_heads);
        Ok(Rows { numbers, dtype, heads, m, dim, group, lengths })
    }

    /// Rows of one head of keys.
    fn each(&self) -> usize {
        self.group * self.m
    }

    /// The queries of a head of keys.
    pub(super) fn queries(&self, head: usize) -> Result<Vectors<'a>, Failure> {
        let bytes = self.each() * self.dim * self.dtype.size();
        let part = &self.numbers.bytes()[head * bytes..][..bytes];
        let data = self.dtype.numbers(part).ok_or_else(|| Failure::bug("an odd address"))?;
        Ok(Vectors::new("queries", data, &[self.group, self.m, self.dim])?)
    }

    /// How many keys its rows see.
    pub(super) fn lengths(&self, head: usize) -> Option<&[i64]> {
        self.part(&self.lengths, head)
    }

    /// What belongs to its rows; one for all stays one.
    pub(super) fn part<'b, T>(&self, all: &'b [T], head: usize) -> Option<&'b [T]> {
        match all.len() {
            0 => None,
            1 => Some(all),
            _ => Some(&all[head * self.each()..][..self.each()]),
        }
    }

    /// Budgets: one for all rows, or one per row.
    pub(super) fn budgets<'b>(
        &self,
        name: &str,
        all: &'b PerRow,
        head: usize,
    ) -> Result<&'b [f64], Failure> {
        let all = &all.0[..];
        if all.len() != 1 && all.len() != self.heads * self.m {
            return Err(Failure::input(format!("{name}: pass one for all rows, or one per row")));
        }
        Ok(self.part(all, head).unwrap_or_default())
    }
}

/// Says of which head an error speaks.
pub(super) fn of_head(head: usize) -> impl Fn(certk_rs::Error) -> Failure {
    move |error| {
        let mut failure = Failure::from(error);
        failure.message = format!("at head {head} of the keys: {}", failure.message);
        failure
    }
}

/// One number for all rows, or one per row: `0.1` or `0.1,0.2` in a query, `0.1` or `[0.1, 0.2]` in JSON.
#[derive(Debug, Clone)]
pub(super) struct PerRow(pub(super) Vec<f64>);

impl<'de> Deserialize<'de> for PerRow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers;
        impl<'de> Visitor<'de> for Numbers {
            type Value = PerRow;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, or one per row, such as 0.1,0.2")
            }

            fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<PerRow, E> {
                Ok(PerRow(vec![number]))
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<PerRow, E> {
                Ok(PerRow(vec![number as f64]))
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<PerRow, E> {
                Ok(PerRow(vec![number as f64]))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<PerRow, E> {
                let numbers = text.split(',').map(|number| number.trim().parse());
                let numbers: Result<_, _> = numbers.collect();
                numbers.map(PerRow).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PerRow, A::Error> {
                let mut numbers = Vec::new();
                while let Some(number) = seq.next_element()? {
                    numbers.push(number);
                }
                Ok(PerRow(numbers))
            }
        }
        deserializer.deserialize_any(Numbers)
    }
}
