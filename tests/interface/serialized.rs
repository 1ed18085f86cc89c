//! Results and options through a format that people read, and back: bit for bit.

use certk_rs::{
    Attention, AttentionOptions, Budget, Certificate, CertifyOptions, IndexOptions, Keep, KeyIndex,
    LogMass, MaxKeep, Options, Precision, Scores, SearchOptions, SearchResult, Selection, Vectors,
    attention, certify, select,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

fn back<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T) {
    let text = serde_json::to_string(value).unwrap();
    assert!(
        serde_json::from_str::<T>(&text).unwrap() == *value,
        "{}",
        &text[..text.len().min(200)]
    );
}

#[test]
fn results_come_back_as_they_were() {
    let numbers: Vec<f32> =
        (1..=4096).map(|i| 4.0 * ((i as f32 * 0.618_034).fract() - 0.5)).collect();
    let scores = Scores::new(&numbers, &[8, 512]).unwrap();
    let found = select(&scores, &[0.013], &Options::new()).unwrap();
    back::<Selection>(&found);
    back::<Certificate>(
        &certify(&scores, &Keep::from(&found), &CertifyOptions::new().independent(true)).unwrap(),
    );
    let keys = Vectors::new("k", &numbers, &[256, 16]).unwrap();
    let index = KeyIndex::build(&keys, &IndexOptions::new()).unwrap();
    let found = index.search(&keys, Some(&keys), &[0.1], &SearchOptions::new()).unwrap();
    back::<SearchResult>(&found);
    for precision in [Precision::F64, Precision::F32, Precision::F16, Precision::Bf16] {
        let options = AttentionOptions::new().precision(precision);
        let budget = Budget::TailMass(&[0.1]);
        back::<Attention>(&attention(&keys, &keys, &keys, budget, None, &options).unwrap());
    }
}

#[test]
fn options_that_are_left_out_have_their_defaults() {
    back(&Options::new().max_keep(MaxKeep::Fraction(0.1)).keep_last(3));
    let read: Options = serde_json::from_str(r#"{"keep_first": 4}"#).unwrap();
    assert_eq!(read, Options::new().keep_first(4));
}

#[test]
fn numbers_that_are_infinite_have_words() {
    for mass in [LogMass::NONE, LogMass::UNKNOWN, LogMass::new(-1.5, 2.0)] {
        back(&mass);
    }
    assert!(serde_json::from_str::<LogMass>(r#"{"lower": "low", "upper": 1}"#).is_err());
}
