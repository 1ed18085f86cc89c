//! A table of rejected inputs, by subject: the variant, and a message that names the argument and the place.

use certk_rs::bounds::{self, Blocks, Cuts};
use certk_rs::{
    AttentionOptions, Budget, CertifyOptions, Context, Data, Error, IndexOptions, Keep, KeyIndex,
    Kind, Mask, MaxKeep, Options, OutputOptions, Rule, Scores, SearchOptions, ValueBall, Values,
    Vectors, attention, certify, force_simd_level, keep_set, montecarlo, output_error, select,
    select_output,
};

/// Checks that results are errors of a variant, with messages that begin so.
macro_rules! refused {
    ($($variant:ident, $begins:expr, $found:expr;)+) => {$(
        let error = $found.err().unwrap_or_else(|| panic!("{} is taken", $begins));
        assert!(matches!(error, Error::$variant { .. }), "{error:?}");
        assert!(error.to_string().starts_with(&$begins[..]), "{error}, not {}", $begins);
    )+};
}

/// Two rows.
fn rows(data: &[f32]) -> Scores<'_> {
    Scores::new(data, &[2, data.len() / 2]).unwrap()
}

fn selected(scores: &Scores<'_>) -> Result<(), Error> {
    select(scores, &[0.1], &Options::new()).map(drop)
}

#[test]
fn scores_and_masks() {
    let bad = [0.0, 1.0, 2.0, f32::NAN, 4.0, f32::INFINITY];
    let infinite = [f32::INFINITY, 1.0, 2.0, 3.0];
    let huge = [1e308, 1e308, 1e308, 0.0];
    let total = Scores::new(&huge[..], &[2, 2]).unwrap().kind(Kind::Probs).unwrap();
    let zeros = [0.0f32; 4];
    let biased = |bias| rows(&zeros).mask(Mask::Additive(Data::F32(bias)), &[2]).unwrap();
    refused! {
        ScoreNan, "scores[1, 0] is NaN", selected(&rows(&bad));
        ScoreInfinite, "scores[1, 1] is +inf", selected(&rows(&[0.0, 1.0, 2.0, f32::INFINITY]));
        // Before a scale reverses it.
        ScoreInfinite, "scores[0, 0] is +inf", selected(&rows(&infinite).scale(-1.0).unwrap());
        ProbabilityTotal, "scores[0] sums to more", selected(&total);
        Shape, "mask has shape", rows(&zeros).mask(Mask::Allowed(&[1; 3]), &[2]);
        MaskValue, "mask[1, 1] is NaN", selected(&biased(&[0.0, 0.0, 0.0, f32::NAN]));
        MaskedScore, "scores[1, 1] times scale plus mask", selected(&biased(&[0.0, 0.0, 1e30, 2e30]));
    }
    for value in [-0.5, f32::NAN, f32::INFINITY] {
        let data = [0.5, 0.5, 0.25, value];
        let begins = format!("scores[1, 1] is {value}, which is not a probability");
        refused! { Probability, begins, selected(&rows(&data).kind(Kind::Probs).unwrap()); }
    }
    // What is masked is so whatever the scale.
    let data = [f32::NEG_INFINITY, 1.0, 2.0, f32::NEG_INFINITY];
    let scores = rows(&data).scale(-1.0).unwrap();
    let found = select(&scores, &[0.1], &Options::new()).unwrap();
    assert_eq!((found.row(0), found.row(1)), (&[1][..], &[0][..]));
}

#[test]
fn budgets_scales_and_kinds() {
    let data = [0.0f32; 4];
    let scores = rows(&data);
    let options = Options::new();
    for eps in [1.0, -1e-9, f64::NAN, f64::INFINITY] {
        refused! {
            Eps, "eps is ", select(&scores, &[eps], &options);
            Eps, "eps[1] is ", select(&scores, &[0.1, eps], &options);
        }
    }
    let scaled = || rows(&data).scale(0.5).unwrap();
    let probs = || rows(&data).kind(Kind::Probs).unwrap();
    let bias = Mask::Additive(Data::F32(&data));
    // The order of the calls makes no difference.
    refused! {
        Length, "eps has 3 entries but 2", select(&scores, &[0.1; 3], &options);
        Scale, "scale is NaN", rows(&data).scale(f64::NAN);
        Scale, "scale is inf", rows(&data).scale(f64::INFINITY);
        ScaleWithProbs, "scale is 0.5", probs().scale(0.5);
        ScaleWithProbs, "scale is 0.5", scaled().kind(Kind::Probs);
        MaskWithProbs, "mask is additive", probs().mask(bias, &[2]);
        MaskWithProbs, "mask is additive", rows(&data).mask(bias, &[2]).unwrap().kind(Kind::Probs);
        RadiusWithProbs, "radius is given", probs().radius(&[0.1]);
        RadiusWithProbs, "radius is given", rows(&data).radius(&[0.1]).unwrap().kind(Kind::Probs);
        Radius, "radius[1] is -1", rows(&data).radius(&[0.1, -1.0]);
        Level, "SIMD level \"sse9\"", force_simd_level(Some("sse9"));
    }
}

#[test]
fn lengths_and_ragged_rows() {
    let data = [0.0f32; 4];
    let row = Scores::new(&data[..], &[4]).unwrap();
    let ragged = || Scores::ragged(&data[..], &[0, 4]).unwrap();
    refused! {
        RowLength, "lengths[1] is 3; it must lie between 0 and n = 2", rows(&data).lengths(&[2, 3]);
        Length, "lengths has 5", rows(&data).lengths(&[1; 5]);
        Shape, "scores has shape [4]", row.causal_offset(0);
        Conflict, "", ragged().causal_offset(0);
        Conflict, "", ragged().lengths(&[1]);
        Conflict, "", ragged().mask(Mask::Allowed(&[1; 4]), &[]);
        Conflict, "indptr cannot be combined", keep_set(&ragged(), &[0.1], &Options::new());
        Indptr, "indptr[1] is 5", Scores::ragged(&data[..], &[0, 5]);
    }
}

#[test]
fn options_of_a_selection() {
    let data = [0.0f32, 1.0, 2.0, 3.0];
    let (scores, four) = (rows(&data), Scores::new(&data[..], &[4]).unwrap());
    let (long, short) =
        (rows(&data).lengths(&[2, 1]).unwrap(), rows(&data).lengths(&[1, 2]).unwrap());
    let refuse = |options: Options| select(&scores, &[0.1], &options);
    let new = Options::new;
    let forced = || new().keep_first(1).keep_last(1).max_keep(MaxKeep::Count(1));
    // A fraction is judged row by row, as far as a row has keys.
    let half = |least| new().min_keep(least).max_keep(MaxKeep::Fraction(0.5));
    let blocks = new().block_size(2).min_keep(3).max_keep(MaxKeep::Count(3));
    refused! {
        Option, "block_size is 0", refuse(new().block_size(0));
        Option, "max_keep is ", refuse(new().max_keep(MaxKeep::Count(0)));
        Option, "max_keep is ", refuse(new().max_keep(MaxKeep::Fraction(1.5)));
        Option, "max_keep is ", refuse(new().max_keep(MaxKeep::Fraction(f64::NAN)));
        Option, "max_keep is ", refuse(new().min_keep(2).max_keep(MaxKeep::Count(1)));
        Option, "threads is 0", refuse(new().threads(0));
        ForcedOverMax, "keep_first and keep_last force 2 keys into row [0], more than max_keep = 1",
            refuse(forced());
        ForcedOverMax, "keep_first and keep_last", keep_set(&scores, &[0.1], &forced());
        BlockOverMax, "block_size is 2, but max_keep = 1",
            refuse(new().block_size(2).max_keep(MaxKeep::Count(1)));
        MinOverMax, "min_keep is 2, but max_keep allows 1 keys of row [0]",
            select(&long, &[0.1], &half(2));
        MinOverMax, "min_keep is 2, but max_keep allows 1 keys of row [1]",
            select(&short, &[0.1], &half(9));
        MinOverMax, "min_keep is 3, but max_keep allows 2", select(&four, &[0.1], &blocks);
        Conflict, "", keep_set(&scores, &[0.1], &new().block_size(2));
        Conflict, "", keep_set(&scores, &[0.1], &new().min_keep(2));
    }
}

#[test]
fn kept_sets() {
    let data = [0.0f32; 6];
    let scores = rows(&data);
    let judge = |indptr: &[i64], indices: &[i64]| {
        certify(&scores, &Keep::Indices { indptr, indices }, &CertifyOptions::new())
    };
    let short = Keep::Mask { kept: &[1; 5], strides: &[3] };
    refused! {
        KeepRange, "keep: index 3 in row [1] is out of range", judge(&[0, 1, 2], &[0, 3]);
        KeepRange, "keep: index -1 in row [1]", judge(&[0, 1, 2], &[0, -1]);
        KeepTwice, "keep: index 1 stands twice in row [1]", judge(&[0, 0, 2], &[1, 1]);
        Length, "keep has 1 entries but 2", judge(&[0, 1], &[0]);
        Indptr, "indptr[0] is 1", judge(&[1, 1, 1], &[0]);
        Indptr, "indptr[2] is 0", judge(&[0, 1, 0], &[0]);
        Indptr, "indptr[2] is 3", judge(&[0, 1, 3], &[0, 1]);
        Shape, "keep has shape", certify(&scores, &short, &CertifyOptions::new());
    }
}

#[test]
fn numbers_of_the_theory() {
    for value in [-1e-300, 1.5, f64::NAN] {
        refused! { TailMass, "tail_mass is ", bounds::kl_from_tail_mass(value); }
    }
    for value in [-1.0, f64::NAN] {
        refused! { Divergence, "kl is ", bounds::tail_mass_from_kl(value); }
    }
    refused! {
        KeptCount, "k is 4 for the row, which has n = 3", bounds::required_gap(3, 4, 0.1);
        Eps, "eps is 1", bounds::required_gap(3, 2, 1.0);
    }
}

#[test]
fn ranks_and_cuts() {
    let data = [0.0, 1.0, 2.0, 0.0, 1.0, f32::NEG_INFINITY];
    let scores = rows(&data);
    for (k, begins) in [
        (&[3][..], "k is 3 for row [1], which has n = 2"),
        (&[4], "k is 4 for row [0], which has n = 3"),
        (&[1, -1], "k is -1 for row [1]"),
    ] {
        refused! {
            KeptCount, begins, bounds::score_gap(&scores, k);
            KeptCount, begins, bounds::single_gap(&scores, k);
            KeptCount, begins, bounds::multi_gap(&scores, k, Cuts::Best(2));
            KeptCount, begins, bounds::best_cuts(&scores, k, 2);
        }
    }
    for (cuts, at) in [(&[0][..], 0), (&[i64::MIN], 0), (&[1, 1], 1), (&[3, 1], 1), (&[1, 2], 1)] {
        let begins = format!("cuts[{at}] is {}", cuts[at]);
        refused! { Cut, begins, bounds::multi_gap(&scores, &[2, 1], Cuts::At(cuts)); }
    }
    let rule = bounds::GapRule::MultiGap { cuts: 1 };
    refused! {
        Length, "k has 3 entries but 2", bounds::single_gap(&scores, &[1, 1, 1]);
        Eps, "eps is 1", bounds::smallest_k(&scores, &[1.0], rule);
    }
}

#[test]
fn blocks() {
    let refuse = |size: i64, upper: f64, lower: f64| {
        Blocks::new(&[1, 2], &[1, size], &[0.0, upper], &[0.0, lower], &[1, 0]).map(drop)
    };
    refused! {
        Block, "sizes[0, 1] is -1", refuse(-1, 0.0, 0.0);
        Block, "sizes[0, 1] is ", refuse(i64::MAX, 0.0, 0.0);
        Block, "upper[0, 1] is NaN", refuse(1, f64::NAN, 0.0);
        Block, "lower[0, 1] is NaN", refuse(1, 0.0, f64::NAN);
        Block, "lower[0, 1] is 1", refuse(1, 0.0, 1.0);
        Block, "lower[0, 1] is inf", refuse(1, f64::INFINITY, f64::INFINITY);
        Length, "upper has 1 entries but 2",
            Blocks::new(&[2], &[1, 1], &[0.0], &[0.0; 2], &[1, 0]).map(drop);
        Shape, "sizes has shape []", Blocks::new(&[], &[], &[], &[], &[]).map(drop);
    }
}

#[test]
fn values_and_budgets_on_the_output() {
    let (data, mut out) = ([0.0f32; 4], [0.0; 8]);
    let scores = rows(&data);
    let (keep, options) = (Keep::Mask { kept: &[1, 0, 1, 0], strides: &[2] }, OutputOptions::new());
    for bad in [f64::NAN, f64::INFINITY] {
        out[7] = bad;
        let values = Values::new(&out[..], &[2, 2, 2]).unwrap();
        refused! {
            Value, "values[1, 1, 1] is ", output_error(&scores, &values, &keep, &options);
            Value, "values[1, 1, 1] is ", select_output(&scores, &values, &[0.1], &options);
        }
    }
    out[7] = 0.0;
    let values = Values::new(&out[..], &[2, 2, 2]).unwrap();
    for tol in [-1.0, f64::NAN, f64::INFINITY] {
        refused! {
            Tolerance, "out_tol[1] is ", select_output(&scores, &values, &[0.1, tol], &options);
        }
    }
    let misfit = Values::new(&out[..], &[4, 2, 1]).unwrap();
    refused! { Shape, "values has shape", output_error(&scores, &misfit, &keep, &options); }
}

#[test]
fn keys_and_searches() {
    let mut data: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
    let half: Vec<half::f16> = data.iter().map(|&entry| half::f16::from_f32(entry)).collect();
    let own = data.clone();
    let keys = Vectors::new("keys", &own[..], &[2, 5, 4]).unwrap();
    let index = KeyIndex::build(&keys, &IndexOptions::default()).unwrap();
    index.check(&keys).unwrap();
    data[39] = -data[39];
    let changed = Vectors::new("keys", &data[..], &[2, 5, 4]).unwrap();
    let other = Vectors::new("keys", &half[..], &[2, 5, 4]).unwrap();
    let queries = Vectors::new("q", &data[..8], &[2, 1, 4]).unwrap();
    let options = SearchOptions::new();
    let (huge, gap) = ([1e30f64; 8], options.rule(Rule::Gap));
    let far = Vectors::new("q", &huge[..], &[2, 1, 4]).unwrap();
    let search = |q: &Vectors<'_>, eps: &[f64], options: SearchOptions<'_>| {
        index.search(q, Some(&keys), eps, &options)
    };
    refused! {
        OtherKeys, "keys[1] ", index.check(&changed);
        OtherKeys, "keys ", index.search(&queries, Some(&other), &[0.1], &options);
        KeysNeeded, "", index.search(&queries, None, &[0.1], &gap);
        Length, "eps has 0", search(&queries, &[], options);
        Option, "k is 0", search(&queries, &[], options.rule(Rule::TopK(0)));
        Number, "q[0, 0] is ", search(&far, &[0.1], gap);
    }
    assert_eq!(search(&queries, &[], options.rule(Rule::TopK(3))).unwrap().selection.k, [3, 3]);
    let found = search(&far, &[0.1], options).unwrap().selection;
    assert_eq!((found.k[0], found.tail_mass_upper[0]), (5, 0.0));
}

#[test]
fn empty_arrays_are_no_errors() {
    for shape in [[0, 3], [3, 0], [0, 0]] {
        let scores = Scores::new(&[] as &[f32], &shape).unwrap();
        let found = select(&scores, &[0.1], &Options::new()).unwrap();
        assert_eq!((found.k.len(), found.indices.len()), (shape[0], 0));
        assert!(keep_set(&scores, &[0.1], &Options::new()).unwrap().indices.is_empty());
    }
    // No row has a budget of its own here, nor a radius.
    let scores = Scores::new(&[] as &[f32], &[0, 3]).unwrap().radius(&[]).unwrap();
    let found = Context::new().serial().run(|| select(&scores, &[], &Options::new())).unwrap();
    assert_eq!(found.indptr, [0]);
}

/// So many rows of no scores that no memory holds an answer for each, in an array that takes none itself.
const ROWS: usize = usize::MAX / 64;

fn too_much<T: std::fmt::Debug>(found: &Result<T, Error>) {
    assert!(matches!(found, Err(Error::NoMemory { .. })), "{found:?}");
}

#[test]
fn rows_beyond_memory_are_refused_at_once() {
    let scores = Scores::new(&[] as &[f32], &[ROWS, 0]).unwrap();
    let (none, options) = (&[0][..], Options::new());
    let keep = Keep::Mask { kept: &[], strides: &[0] };
    too_much(&select(&scores, &[0.1], &options));
    too_much(&select(&scores, &[0.1], &options.clone().threads(Some(1))));
    too_much(&Context::new().serial().run(|| select(&scores, &[0.1], &options)));
    for independent in [false, true] {
        too_much(&certify(
            &scores,
            &keep,
            &CertifyOptions::new().eps(&[0.1]).independent(independent),
        ));
    }
    too_much(&keep_set(&scores, &[0.1], &options));
    too_much(&bounds::score_gap(&scores, none));
    too_much(&bounds::single_gap(&scores, none));
    too_much(&bounds::multi_gap(&scores, none, Cuts::Best(2)));
    too_much(&bounds::best_cuts(&scores, none, 2));
    too_much(&bounds::smallest_k(&scores, &[0.1], bounds::GapRule::Threshold));
    let blocks = Blocks::new(&[ROWS, 0], &[], &[], &[], &[]).unwrap();
    too_much(&bounds::blockwise(&blocks));
    let values = Values::new(&[] as &[f32], &[0, 3]).unwrap();
    too_much(&output_error(&scores, &values, &keep, &OutputOptions::new()));
    too_much(&select_output(&scores, &values, &[0.1], &OutputOptions::new()));
    let own = Values::new(&[] as &[f32], &[ROWS, 0, 3]).unwrap();
    too_much(&select_output(&scores, &own, &[0.1], &OutputOptions::new()));
    let options = montecarlo::TailOptions::new(0.1, 2).seed(1);
    too_much(&montecarlo::tail_mass(&scores, &keep, None, &options));
    too_much(&montecarlo::tail_mass(&scores, &keep, Some(&scores), &options));
}

#[test]
fn heads_and_vectors_beyond_memory_are_refused_at_once() {
    fn no(shape: &[usize]) -> Vectors<'static> {
        Vectors::new("k", &[] as &[f32], shape).unwrap()
    }
    let build = |keys: &Vectors<'_>| KeyIndex::build(keys, &IndexOptions::default());
    let data = [0.5f32, 1.0, -1.0, 0.25];
    let keys = Vectors::new("k", &data[..], &[2, 2]).unwrap();
    let heads = ROWS / 4;
    too_much(&build(&no(&[heads, 0, 4])));
    let index = build(&keys).unwrap();
    let search = SearchOptions::default();
    too_much(&index.search(&no(&[heads, 0, 2]), Some(&keys), &[0.1], &search));
    let attend = |q: &Vectors<'_>, k: &Vectors<'_>, v: &Vectors<'_>, budget: Budget<'_>| {
        attention(q, k, v, budget, None, &AttentionOptions::default())
    };
    let (eps, tolerance) = (Budget::TailMass(&[0.1]), Budget::Output(&[0.1]));
    let many = no(&[heads, 0, 4]);
    too_much(&attend(&many, &many, &many, eps));
    for budget in [eps, tolerance] {
        too_much(&attend(&no(&[0, 4]), &no(&[0, 4]), &no(&[0, heads]), budget));
    }
    too_much(&ValueBall::new(&many));
    too_much(&ValueBall::new(&no(&[0, heads])));
}

#[test]
fn vectors_that_lie_across_are_asked_about() {
    // An index keeps a d x d matrix for each head.
    let wide = Vectors::new("keys", &[] as &[f32], &[0, ROWS]).unwrap();
    let error = KeyIndex::build(&wide, &IndexOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Shape { argument: "keys", .. }), "{error}");
    assert!(error.to_string().contains("pass the transpose"), "{error}");
    let data: Vec<f32> = (0..400).map(|i| (i as f32).sin()).collect();
    let keys = Vectors::new("keys", &data[..], &[2, 200]).unwrap();
    assert!(KeyIndex::build(&keys, &IndexOptions::default()).is_ok());
    let scores = Scores::new(&[] as &[f32], &[1, 0]).unwrap();
    let values = Values::new(&[] as &[f32], &[0, ROWS]).unwrap();
    let keep = Keep::Mask { kept: &[], strides: &[0] };
    let error = output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap_err();
    assert!(error.to_string().contains("pass the transpose"), "{error}");
}

#[test]
fn shapes_whose_products_overflow_are_errors() {
    let half = 1usize << (usize::BITS / 2);
    let none: &[f32] = &[];
    for shape in [&[half, half][..], &[half, half, 0], &[0, half, half, 0]] {
        let refused = |found: Result<(), Error>, name: &str| match found {
            Err(Error::Shape { argument, .. }) => assert_eq!(argument, name, "{shape:?}"),
            other => panic!("{shape:?}: {other:?}"),
        };
        refused(Scores::new(none, shape).map(drop), "scores");
        refused(Scores::strided(none, shape, &vec![0; shape.len() - 1]).map(drop), "scores");
        let with = |last: usize| [shape, &[last]].concat();
        refused(Vectors::new("q", none, &with(1)).map(drop), "q");
        refused(Values::new(none, &with(1)).map(drop), "values");
    }
    let refused = Blocks::new(&[half, half], &[], &[], &[], &[]).unwrap_err();
    assert!(matches!(refused, Error::Shape { argument: "sizes", .. }), "{refused}");
    // Shorter than its shape says: no more is allocated than was given.
    let refused = Blocks::new(&[1 << 20, 1 << 10], &[1], &[0.0], &[0.0], &[1]).unwrap_err();
    assert!(matches!(refused, Error::Length { argument: "sizes", .. }), "{refused}");
}

#[test]
fn many_empty_rows_are_answered() {
    let scores = Scores::new(&[] as &[f32], &[300_000, 0]).unwrap();
    let found = select(&scores, &[0.1], &Options::new()).unwrap();
    assert_eq!((found.k.len(), found.indptr.len()), (300_000, 300_001));
    assert!(found.minimal.iter().all(|minimal| *minimal));
}
