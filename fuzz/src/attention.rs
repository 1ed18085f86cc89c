//! Outputs of attention, each as near to the average as its bound says.

use certk_rs::{AttentionOptions, Budget, Error, Precision, ValueBall, attention};

use super::heads::Matrices;
use super::search::Indexed;
use super::select::{budget, same, set_level};
use super::tape::Tape;
use super::truth::Row;

pub fn run(input: &[u8]) {
    let mut tape = Tape::new(input);
    set_level(&mut tape);
    let case = Indexed::new(&mut tape, 300);
    let index = if tape.rarely(2) { case.index(&mut tape).ok() } else { None };
    let width = tape.one_of(&[1, 2, 3, 16, 17, 40]);
    let dtype = tape.below(4);
    let flat = case.keys.batch().is_empty();
    let values = Matrices::new(&mut tape, [case.keys.heads, case.keys.rows, width], dtype, flat);
    let known: Vec<Row> = (0..case.count()).map(|row| case.row(row)).collect();
    let sinks: Option<Vec<f64>> = tape.rarely(4).then(|| {
        let count = if tape.rarely(2) { case.queries.heads } else { 1 };
        (0..count).map(|_| tape.one_of(&[0.0, f64::NEG_INFINITY, 3.0, -50.0, 40.0])).collect()
    });
    let (q, k, v) = (case.queries.vectors("q"), case.keys.vectors("keys"), values.vectors("v"));
    let ball = if tape.rarely(3) { ValueBall::new(&v).ok() } else { None };
    let mut options = AttentionOptions::new()
        .scale(case.scale)
        .causal(case.sight.causal)
        .lengths(case.sight.lengths.as_deref())
        .sinks(sinks.as_deref())
        .ball(ball.as_ref())
        .threads(1);
    options.mask = case.sight.mask.as_ref().map(|(bytes, strides)| (&bytes[..], &strides[..]));
    options.precision = tape.one_of(&[
        Precision::F64,
        Precision::F64,
        Precision::F32,
        Precision::F16,
        Precision::Bf16,
    ]);
    options.even_if_slower = !tape.rarely(3);
    let eps = [budget(&mut tape, known.first())];
    let tolerance = [tape.one_of(&[0.1, 1e-3, 1.0, 1e-9, 0.0])];
    let by_mass = !tape.rarely(3);
    let asked = if by_mass { Budget::TailMass(&eps) } else { Budget::Output(&tolerance) };
    let found = attention(&q, &k, &v, asked, index.as_ref(), &options);
    let mut more = options.clone();
    more.threads = Some(3);
    assert!(same(&found, &attention(&q, &k, &v, asked, index.as_ref(), &more)));
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let odd = [&case.queries, &case.keys, &values].iter().any(|list| !list.is_finite());
            let most = |list: &Matrices| {
                list.stored.wide().iter().fold(0.0f64, |most, x| most.max(x.abs()))
            };
            let large = most(&case.queries) * most(&case.keys) > 1e14 || most(&values) > 1e4;
            let reason = match error {
                Error::Eps { .. } => !(0.0..1.0).contains(&eps[0]),
                Error::KeyNotFinite { .. } | Error::Value { .. } => odd,
                Error::Number { .. } => large,
                Error::Unreachable { .. } => !by_mass,
                _ => false,
            };
            assert!(reason, "{error:?}");
            return;
        }
    };
    let bounds = found.error_bound(&q, &v, &options).unwrap();
    let wide = values.stored.wide();
    for (i, row) in known.iter().enumerate() {
        let out = found.row(i);
        assert!(out.iter().all(|entry| entry.is_finite()));
        let shown = row.keys.iter().filter(|key| key.shown).count();
        assert!(found.k[i] >= 0 && found.k[i] <= shown as i64);
        assert!(bounds[i] >= 0.0);
        if shown == 0 {
            assert!(out.iter().all(|entry| *entry == 0.0) && found.k[i] == 0);
            continue;
        }
        let upper = found.tail_mass_upper[i];
        assert!((0.0..=1.0).contains(&upper) && (!by_mass || upper <= eps[0]));
        if !by_mass {
            assert!(found.within.as_ref().unwrap()[i] <= tolerance[0]);
        }
        if row.bad || !row.is_known() || bounds[i] == f64::INFINITY {
            continue;
        }
        let head = i / case.queries.rows / (case.queries.heads / values.heads);
        let from = head * values.rows * width;
        let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| {
            sinks[if sinks.len() == 1 { 0 } else { i / case.queries.rows }]
        });
        let Some(truth) = average(row, &case, i, &wide[from..], width, sink) else { continue };
        let off = out.iter().zip(&truth.mean).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
        let blur = truth.longest * (row.blur * 4.0 + 1e-9);
        assert!(off <= bounds[i] * (1.0 + 1e-9) + blur + 1e-290, "{off} > {}", bounds[i]);
        let log = found.log_mass[i];
        assert!(log.lower <= log.upper);
    }
}

struct Average {
    mean: Vec<f64>,
    /// The largest length of a value.
    longest: f64,
}

/// The average of all values that a row sees; nothing if one of them is not finite, or too large for this.
fn average(
    row: &Row,
    case: &Indexed,
    i: usize,
    values: &[f64],
    width: usize,
    sink: f64,
) -> Option<Average> {
    let scale = case.scale.unwrap_or(1.0 / (case.keys.dim as f64).sqrt());
    let top = (row.keys.iter().filter(|key| key.shown))
        .map(|key| scale * key.number)
        .fold(f64::NEG_INFINITY, f64::max);
    if top.abs() > 1e5 && sink > f64::NEG_INFINITY {
        return None;
    }
    let _ = i;
    let mut sums = vec![0.0; width];
    // The largest of both weighs 1.
    let (own, more) =
        if sink > top { ((top - sink).exp(), 1.0) } else { (1.0, (sink - top).exp()) };
    let (mut whole, mut longest) = (more, 0.0f64);
    for (j, value) in values.chunks_exact(width).take(row.keys.len()).enumerate() {
        if !row.keys[j].shown {
            continue;
        }
        let length = value.iter().map(|x| x * x).sum::<f64>().sqrt();
        if !(length < 1e100) {
            return None;
        }
        longest = longest.max(length);
        let weight = row.weights[j] * own;
        whole += weight;
        sums.iter_mut().zip(value).for_each(|(sum, x)| *sum += weight * x);
    }
    Some(Average { mean: sums.iter().map(|sum| sum / whole).collect(), longest })
}
