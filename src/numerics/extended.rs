//! Serialisation of numbers that may be infinite: as a word in human-readable formats without infinities, such as JSON.

use std::fmt;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
pub(crate) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if number.is_finite() || !serializer.is_human_readable() {
        return number.serialize(serializer);
    }
    serializer.serialize_str(if *number > 0.0 { "inf" } else { "-inf" })
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    if deserializer.is_human_readable() {
        deserializer.deserialize_any(Extended)
    } else {
        f64::deserialize(deserializer)
    }
}

struct Extended;

impl Visitor<'_> for Extended {
    type Value = f64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, \"inf\" or \"-inf\"")
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<f64, E> {
        Ok(number)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<f64, E> {
        Ok(number as f64)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<f64, E> {
        Ok(number as f64)
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<f64, E> {
        match word {
            "inf" => Ok(f64::INFINITY),
            "-inf" => Ok(f64::NEG_INFINITY),
            _ => Err(E::invalid_value(Unexpected::Str(word), &self)),
        }
    }
}
