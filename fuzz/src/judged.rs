//! Answers of the service beside what is true: sets and outputs, as a file of tensors or as JSON.

use certk_rs::half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;

use super::asked::{Asked, Rows, Scores, Tensors};
use super::heads::scored;
use super::service::Told;
use super::truth::{Key, Row};

/// Named arrays as f64, which holds all of them.
enum Answer {
    Json(Value),
    File(Vec<(String, Vec<f64>)>, Option<u64>),
}

impl Answer {
    fn new(told: &Told) -> Self {
        if told.body.first() == Some(&b'{') {
            return Answer::Json(serde_json::from_slice(&told.body).unwrap());
        }
        let file = SafeTensors::deserialize(&told.body).unwrap();
        let (_, header) = SafeTensors::read_metadata(&told.body).unwrap();
        let version =
            header.metadata().as_ref().map(|about| about["version"].parse::<u64>().unwrap());
        let all = file.iter().map(|(name, tensor)| {
            let data = tensor.data();
            let numbers: Vec<f64> = match tensor.dtype() {
                Dtype::U8 | Dtype::BOOL => data.iter().map(|&x| x.into()).collect(),
                Dtype::F16 => each(data, |x| f16::from_le_bytes(x).into()),
                Dtype::BF16 => each(data, |x| bf16::from_le_bytes(x).into()),
                Dtype::U32 => each(data, |x| u32::from_le_bytes(x).into()),
                Dtype::F32 => each(data, |x| f32::from_le_bytes(x).into()),
                Dtype::I64 => each(data, |x| i64::from_le_bytes(x) as f64),
                Dtype::F64 => each(data, f64::from_le_bytes),
                other => panic!("{other}"),
            };
            (name.to_owned(), numbers)
        });
        Answer::File(all.collect(), version)
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        match self {
            Answer::Json(said) => {
                let number = |each: &Value| match each {
                    Value::Bool(yes) => f64::from(u8::from(*yes)),
                    // JSON has no infinity.
                    Value::Null => f64::INFINITY,
                    other => other.as_f64().unwrap(),
                };
                said[name].as_array().unwrap().iter().map(number).collect()
            }
            Answer::File(all, _) => all.iter().find(|(each, _)| each == name).unwrap().1.clone(),
        }
    }

    fn version(&self) -> Option<u64> {
        match self {
            Answer::Json(said) => said["version"].as_u64(),
            Answer::File(_, version) => *version,
        }
    }
}

fn each<const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    data.chunks_exact(N).map(|x| number(x.try_into().unwrap())).collect()
}

/// What the sets of an answer are asked for.
struct Wanted<'a> {
    eps: &'a dyn Fn(usize) -> Option<f64>,
    /// Whether a row may be over its budget.
    may_be_over: bool,
    /// Whether the smallest set is a number of best keys.
    plain: bool,
    /// Whether a row whose scores are no numbers may be kept as a whole.
    keeps_unknown: bool,
}

fn sets(answer: &Answer, known: &[Row], wanted: &Wanted<'_>) {
    let whole = |name: &str| -> Vec<usize> {
        answer.numbers(name).into_iter().map(|number| number as usize).collect()
    };
    let (k, indptr, indices) = (whole("k"), whole("indptr"), whole("indices"));
    let (lower, upper) = (answer.numbers("tail_mass_lower"), answer.numbers("tail_mass_upper"));
    let (minimal, certified) = (answer.numbers("minimal"), answer.numbers("certified"));
    assert_eq!((k.len(), indptr.len()), (known.len(), known.len() + 1));
    for (i, row) in known.iter().enumerate() {
        let list = &indices[indptr[i]..indptr[i + 1]];
        assert_eq!(list.len(), k[i]);
        assert!(list.windows(2).all(|pair| pair[0] < pair[1]));
        if row.bad {
            // Codes cannot tell scores beyond all numbers apart: then a search keeps all that it sees, and loses nothing.
            let seen = row.keys.iter().filter(|key| key.shown).count();
            assert!(wanted.keeps_unknown && list.len() == seen, "what is no score was taken");
            assert_eq!((lower[i], upper[i]), (0.0, 0.0));
            continue;
        }
        let mut kept = vec![false; row.keys.len()];
        for &key in list {
            assert!(row.keys[key].shown, "what is hidden was kept");
            kept[key] = true;
        }
        let (lower, upper, eps) = (lower[i], upper[i], (wanted.eps)(i));
        assert!((0.0..=1.0).contains(&lower) && lower <= upper && upper <= 1.0, "{lower} {upper}");
        let certified = certified[i] == 1.0;
        assert!(!certified || eps.is_none_or(|eps| upper <= eps));
        if row.count() == 0 {
            continue;
        }
        assert!(certified || wanted.may_be_over);
        if !row.is_known() {
            continue;
        }
        let lost = row.lost(|j| kept[j]);
        assert!(lost.least <= upper && lost.most >= lower, "{lower} {upper} {lost:?}");
        if let Some(eps) = eps.filter(|_| wanted.plain && minimal[i] == 1.0 && list.len() > 1) {
            let mut best = vec![false; row.keys.len()];
            row.ranked(|_| false).iter().take(list.len() - 1).for_each(|&j| best[j] = true);
            let least = row.lost(|j| best[j]);
            assert!(least.most >= eps, "{} keys lose {least:?} <= {eps}", list.len() - 1);
        }
    }
}

pub(crate) fn selected(of: &Scores, asked: &Asked, told: &Told) {
    let answer = Answer::new(told);
    if asked.spoiled {
        return;
    }
    let row = |numbers: &[f64]| {
        let keys = numbers.iter().map(|&number| Key { shown: true, number, bias: 0.0 }).collect();
        Row::new(keys, of.kind, of.scale, 0.0)
    };
    let known: Vec<Row> = of.numbers.chunks(of.n.max(1)).map(row).collect();
    let known = if of.n == 0 { Vec::new() } else { known };
    if of.n > 0 {
        let wanted = Wanted {
            eps: &|_| Some(of.eps),
            may_be_over: !of.plain,
            plain: of.plain,
            keeps_unknown: false,
        };
        sets(&answer, &known, &wanted);
    }
}

/// The rows of scores that queries have.
fn rows(held: &Tensors, of: &Rows) -> Vec<Row> {
    let scale = of.scale.unwrap_or(1.0 / (held.keys.dim as f64).sqrt());
    let one = |row| {
        let mut row = scored(&of.queries, &held.keys, &of.sight, scale, row);
        // A scale of its own is off by a rounding.
        row.blur *= 4.0;
        row
    };
    (0..of.queries.heads * of.queries.rows).map(one).collect()
}

fn budget(list: Option<&Vec<f64>>, row: usize) -> Option<f64> {
    list.map(|list| if list.len() == 1 { list[0] } else { list[row] })
}

pub(crate) fn searched(held: &Tensors, of: &Rows, asked: &Asked, told: &Told, version: u64) {
    let answer = Answer::new(told);
    assert_eq!(answer.version(), Some(version));
    if asked.spoiled {
        return;
    }
    let known = rows(held, of);
    let may_be_over = of.top.is_some() || asked.says("max_scored");
    let eps = |row| budget(of.eps.as_ref(), row);
    let plain = of.top.is_none();
    sets(&answer, &known, &Wanted { eps: &eps, may_be_over, plain, keeps_unknown: plain });
    let (k, certified) = (answer.numbers("k"), answer.numbers("certified"));
    for (i, row) in known.iter().enumerate() {
        if let Some(top) = of.top.filter(|_| certified[i] == 1.0 && row.count() > 0) {
            let shown = row.keys.iter().filter(|key| key.shown).count();
            assert_eq!(k[i] as usize, top.min(shown));
        }
    }
}

pub(crate) fn attended(held: &Tensors, of: &Rows, asked: &Asked, told: &Told, version: u64) {
    let answer = Answer::new(told);
    assert_eq!(answer.version(), Some(version));
    if asked.spoiled {
        return;
    }
    let values = held.values.as_ref().expect("there are no values");
    let (out, bound) = (answer.numbers("out"), answer.numbers("error_bound"));
    let (upper, k) = (answer.numbers("tail_mass_upper"), answer.numbers("k"));
    let known = rows(held, of);
    let (wide, width) = (values.stored.wide(), values.dim);
    assert_eq!(out.len(), known.len() * width);
    for (i, row) in known.iter().enumerate() {
        let out = &out[i * width..][..width];
        assert!(budget(of.eps.as_ref(), i).is_none_or(|eps| upper[i] <= eps));
        assert!((0.0..=1.0).contains(&upper[i]) && bound[i] >= 0.0);
        if row.count() == 0 {
            assert!(out.iter().all(|entry| *entry == 0.0) && k[i] == 0.0);
            continue;
        }
        if !row.is_known() || bound[i] == f64::INFINITY {
            continue;
        }
        let head = i / of.queries.rows / (of.queries.heads / values.heads);
        let mut mean = vec![0.0; width];
        let whole: f64 = row.weights.iter().sum();
        let mut longest = 0.0f64;
        for (j, weight) in row.weights.iter().enumerate() {
            let value = &wide[(head * values.rows + j) * width..][..width];
            longest = longest.max(value.iter().map(|x| x * x).sum::<f64>().sqrt());
            mean.iter_mut().zip(value).for_each(|(sum, x)| *sum += weight / whole * x);
        }
        if longest > 1e100 {
            continue;
        }
        let off = out.iter().zip(&mean).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
        let blur = longest * (row.blur * 4.0 + 1e-9);
        assert!(off <= bound[i] * (1.0 + 1e-9) + blur + 1e-290, "{off} > {}", bound[i]);
    }
}
