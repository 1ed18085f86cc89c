//! The vectors of `tests/vectors/rows.json` (see the README there): answers of exact arithmetic.

use certk_rs::{
    CertifyOptions, Keep, Kind, Mask, MaxKeep, Options, Scores, Status, certify, select,
};
use half::{bf16, f16};
use serde_json::Value;

use crate::stored::Stored;

/// Returns the numbers of a dtype whose bits are given in hexadecimal digits, one after another.
fn parsed(dtype: &str, hex: &str) -> Stored {
    let words = |digits: usize| {
        let words = hex.as_bytes().chunks(digits).map(|word| std::str::from_utf8(word).unwrap());
        words.map(|word| u64::from_str_radix(word, 16).unwrap())
    };
    match dtype {
        "float32" => Stored::F32(words(8).map(|w| f32::from_bits(w as u32)).collect()),
        "float64" => Stored::F64(words(16).map(f64::from_bits).collect()),
        "float16" => Stored::F16(words(4).map(|w| f16::from_bits(w as u16)).collect()),
        "bfloat16" => Stored::Bf16(words(4).map(|w| bf16::from_bits(w as u16)).collect()),
        other => panic!("dtype {other}"),
    }
}

fn float(value: &Value) -> f64 {
    f64::from_bits(u64::from_str_radix(value.as_str().unwrap(), 16).unwrap())
}

fn count(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn positions(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect()
}

/// Returns `true` if a reported interval holds the true mass, which lies between two neighbouring floats.
fn holds_mass(mass: &Value, lower: f64, upper: f64) -> bool {
    lower <= float(&mass["bits"][0]) && float(&mass["bits"][1]) <= upper
}

fn check(vector: &Value) {
    let name = vector["name"].as_str().unwrap();
    let numbers = parsed(vector["dtype"].as_str().unwrap(), vector["scores"].as_str().unwrap());
    let kind = match vector["kind"].as_str().unwrap() {
        "logits" => Kind::Logits,
        "logprobs" => Kind::LogProbs,
        _ => Kind::Probs,
    };
    let n = count(&vector["n"]);
    let scale = float(&vector["scale"]);
    let mask = vector["mask"].as_object().map(|mask| {
        let dtype = mask["dtype"].as_str().unwrap();
        let key = mask.keys().find(|key| *key != "dtype").unwrap();
        let digits = mask[key].as_str().unwrap();
        if dtype == "bool" {
            (Some(digits.bytes().map(|digit| digit - b'0').collect::<Vec<u8>>()), None)
        } else {
            (None, Some(parsed(dtype, digits)))
        }
    });
    let lengths = vector["length"].as_i64().map(|length| [length]);
    let mut scores =
        Scores::new(numbers.data(), &[1, n]).unwrap().kind(kind).unwrap().scale(scale).unwrap();
    match &mask {
        Some((Some(bytes), _)) => scores = scores.mask(Mask::Allowed(bytes), &[n]).unwrap(),
        Some((_, Some(bias))) => {
            scores = scores.mask(Mask::Additive(bias.data()), &[n]).unwrap();
        }
        _ => {}
    }
    if let Some(lengths) = &lengths {
        scores = scores.lengths(lengths).unwrap();
    }
    let options = Options::new()
        .min_keep(count(&vector["min_keep"]))
        .max_keep(vector["max_keep"].as_u64().map(|most| MaxKeep::Count(most as usize)))
        .keep_first(count(&vector["keep_first"]))
        .keep_last(count(&vector["keep_last"]))
        .block_size(count(&vector["block_size"]));
    let eps = [float(&vector["eps"])];
    let expect = &vector["expect"];
    let (least, most) = (count(&expect["k_min"]), count(&expect["k_most"]));
    let best: Vec<u32> =
        positions(&expect["indices"]).iter().map(|&i| u32::try_from(i).unwrap()).collect();

    // With the kernels and without.
    let certified = |keep: &Keep<'_>, independent: bool| {
        let options = CertifyOptions::new().eps(&eps).independent(independent).threads(1);
        certify(&scores, keep, &options).unwrap()
    };
    for options in [options.clone(), options.prove_minimal(true)] {
        let found = select(&scores, &eps, &options).unwrap();
        let status = match expect["status"].as_str().unwrap() {
            "CERTIFIED" => Status::Certified,
            "OVER_BUDGET" => Status::OverBudget,
            _ => Status::Empty,
        };
        assert_eq!(found.status[0], status, "{name}");
        let k = found.row(0).len();
        assert_eq!(found.k[0], i64::try_from(k).unwrap());
        assert!((least..=most).contains(&k), "{name}: {least} <= {k} <= {most}");
        assert!(!found.minimal[0] || k == least, "{name}: claims to be minimal");
        if k == least {
            assert_eq!(found.row(0), best, "{name}");
            let (lower, upper) = (found.tail_mass_lower[0], found.tail_mass_upper[0]);
            assert!(
                holds_mass(&expect["tail_mass"], lower, upper),
                "{name}: [{lower:e}, {upper:e}]"
            );
        }
        // What select certifies, certify certifies.
        let indices: Vec<i64> = found.indices.iter().map(|&i| i64::from(i)).collect();
        let keep = Keep::Indices { indptr: &found.indptr, indices: &indices };
        for independent in [false, true] {
            let judged = certified(&keep, independent);
            let holds = judged.holds.unwrap()[0];
            assert_eq!(holds, status != Status::OverBudget, "{name}, independent {independent}");
        }
    }

    let given = positions(&expect["given"]["indices"]);
    let indptr = [0, given.len() as i64];
    let keep = Keep::Indices { indptr: &indptr, indices: &given };
    for independent in [false, true] {
        let judged = certified(&keep, independent);
        let (lower, upper) = (judged.tail_mass_lower[0], judged.tail_mass_upper[0]);
        let mass = &expect["given"]["tail_mass"];
        assert!(holds_mass(mass, lower, upper), "{name}, given: [{lower:e}, {upper:e}]");
    }
}

#[test]
fn vectors_hold() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/rows.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let vectors = file["vectors"].as_array().unwrap();
    assert!(vectors.len() > 50);
    vectors.iter().for_each(check);
}
