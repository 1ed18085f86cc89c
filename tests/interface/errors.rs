//! One test per rejected input: the variant, and a message that names the argument and the place.

use certk_rs::bounds::{self, Blocks, Cuts};
use certk_rs::{
    AttentionOptions, Budget, CertifyOptions, Context, Data, Error, IndexOptions, Keep, KeyIndex,
    Kind, Mask, MaxKeep, Options, OutputOptions, Place, Rule, Scores, SearchOptions, ValueBall,
    Values, Vectors, attention, certify, force_simd_level, keep_set, montecarlo, output_error,
    select, select_output,
};

fn rows(data: &[f32]) -> Scores<'_> {
    Scores::new(data, &[2, data.len() / 2]).unwrap()
}

fn refused(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Error {
    select(scores, eps, options).expect_err("the input is bad")
}

fn at(place: &[usize]) -> Place {
    Place::from(place.to_vec())
}

#[test]
fn scores_are_judged_where_they_are() {
    let options = Options::new();
    let data = [0.0, 1.0, 2.0, f32::NAN, 4.0, f32::INFINITY];
    let error = refused(&rows(&data), &[0.1], &options);
    assert!(matches!(&error, Error::ScoreNan { place, .. } if *place == at(&[1, 0])));
    assert!(error.to_string().starts_with("scores[1, 0] is NaN"));
    let data = [0.0, 1.0, 2.0, 3.0, 4.0, f32::INFINITY];
    assert!(matches!(
        refused(&rows(&data), &[0.1], &options),
        Error::ScoreInfinite { place, .. } if place == at(&[1, 2])
    ));
    for value in [-0.5, f32::NAN, f32::INFINITY] {
        let data = [0.5, 0.5, 0.25, value];
        let error = refused(&rows(&data).kind(Kind::Probs).unwrap(), &[0.1], &options);
        assert!(matches!(error, Error::Probability { place, .. } if place == at(&[1, 1])));
    }
    let data = [1e308, 1e308, 1e308, 0.0];
    let scores = Scores::new(&data[..], &[2, 2]).unwrap().kind(Kind::Probs).unwrap();
    let error = refused(&scores, &[0.1], &options);
    assert!(matches!(error, Error::ProbabilityTotal { place, .. } if place == at(&[0])));
}

#[test]
fn budgets_lie_in_the_half_open_unit_interval() {
    let data = [0.0f32; 4];
    for eps in [1.0, -1e-9, f64::NAN, f64::INFINITY] {
        let error = refused(&rows(&data), &[eps], &Options::new());
        assert!(matches!(error, Error::Eps { place, .. } if place == at(&[])));
        let error = refused(&rows(&data), &[0.1, eps], &Options::new());
        assert!(matches!(error, Error::Eps { place, .. } if place == at(&[1])));
    }
    assert!(matches!(
        refused(&rows(&data), &[0.1; 3], &Options::new()),
        Error::Length { argument: "eps", got: 3, expected: 2, .. }
    ));
}

#[test]
fn scales_and_kinds() {
    let data = [0.0f32; 4];
    for scale in [f64::NAN, f64::INFINITY] {
        assert!(matches!(rows(&data).scale(scale), Err(Error::Scale { .. })));
    }
    let probs = || rows(&data).kind(Kind::Probs).unwrap();
    assert!(matches!(probs().scale(0.5), Err(Error::ScaleWithProbs { .. })));
    let bias = [0.0f32; 4];
    let additive = Mask::Additive(Data::F32(&bias));
    assert!(matches!(probs().mask(additive, &[2]), Err(Error::MaskWithProbs)));
    assert!(matches!(probs().radius(&[0.1]), Err(Error::RadiusWithProbs)));
    assert!(matches!(rows(&data).radius(&[0.1, -1.0]), Err(Error::Radius { .. })));
    // The order of the calls makes no difference.
    let scaled = rows(&data).scale(0.5).unwrap();
    assert!(matches!(scaled.kind(Kind::Probs), Err(Error::ScaleWithProbs { .. })));
    let masked = rows(&data).mask(additive, &[2]).unwrap();
    assert!(matches!(masked.kind(Kind::Probs), Err(Error::MaskWithProbs)));
    let inexact = rows(&data).radius(&[0.1]).unwrap();
    assert!(matches!(inexact.kind(Kind::Probs), Err(Error::RadiusWithProbs)));
}

#[test]
fn masks() {
    let data = [0.0f32; 4];
    let allowed = [1u8; 3];
    let mask = Mask::Allowed(&allowed);
    assert!(matches!(rows(&data).mask(mask, &[2]), Err(Error::Shape { argument: "mask", .. })));
    let bias = [0.0, 0.0, 0.0, f32::NAN];
    let scores = rows(&data).mask(Mask::Additive(Data::F32(&bias)), &[2]).unwrap();
    let error = refused(&scores, &[0.1], &Options::new());
    assert!(matches!(error, Error::MaskValue { place, .. } if place == at(&[1, 1])));
    let bias = [0.0, 0.0, 1e30, 2e30];
    let scores = rows(&data).mask(Mask::Additive(Data::F32(&bias)), &[2]).unwrap();
    let error = refused(&scores, &[0.1], &Options::new());
    assert!(matches!(error, Error::MaskedScore { place, .. } if place == at(&[1, 1])));
}

#[test]
fn lengths_and_causality() {
    let data = [0.0f32; 4];
    assert!(matches!(
        rows(&data).lengths(&[2, 3]),
        Err(Error::RowLength { place, value: 3, n: 2, .. }) if place == at(&[1])
    ));
    assert!(matches!(rows(&data).lengths(&[1; 5]), Err(Error::Length { argument: "lengths", .. })));
    let row = Scores::new(&data[..], &[4]).unwrap();
    assert!(matches!(row.causal_offset(0), Err(Error::Shape { .. })));
    let ragged = || Scores::ragged(&data[..], &[0, 4]).unwrap();
    assert!(matches!(ragged().causal_offset(0), Err(Error::Conflict { .. })));
    assert!(matches!(ragged().lengths(&[1]), Err(Error::Conflict { .. })));
    let allowed = [1u8; 4];
    assert!(matches!(ragged().mask(Mask::Allowed(&allowed), &[]), Err(Error::Conflict { .. })));
    assert!(matches!(Scores::ragged(&data[..], &[0, 5]), Err(Error::Indptr { position: 1, .. })));
    assert!(matches!(
        keep_set(&ragged(), &[0.1], &Options::new()),
        Err(Error::Conflict { first: "indptr", .. })
    ));
}

#[test]
fn options() {
    let data = [0.0f32, 1.0, 2.0, 3.0];
    let scores = rows(&data);
    let refuse = |options: Options| refused(&scores, &[0.1], &options);
    let named =
        |error: Error, name| matches!(error, Error::Option { argument, .. } if argument == name);
    assert!(named(refuse(Options::new().block_size(0)), "block_size"));
    assert!(named(refuse(Options::new().max_keep(MaxKeep::Count(0))), "max_keep"));
    assert!(named(refuse(Options::new().max_keep(MaxKeep::Fraction(1.5))), "max_keep"));
    assert!(named(refuse(Options::new().max_keep(MaxKeep::Fraction(f64::NAN))), "max_keep"));
    assert!(named(refuse(Options::new().min_keep(2).max_keep(MaxKeep::Count(1))), "max_keep"));
    assert!(named(refuse(Options::new().threads(0)), "threads"));
    let forced = Options::new().keep_first(1).keep_last(1).max_keep(MaxKeep::Count(1));
    assert!(matches!(
        refuse(forced.clone()),
        Error::ForcedOverMax { place, forced: 2, max_keep: 1, .. } if place == at(&[0])
    ));
    assert!(matches!(keep_set(&scores, &[0.1], &forced), Err(Error::ForcedOverMax { .. })));
    let blocks = Options::new().block_size(2).max_keep(MaxKeep::Count(1));
    assert!(matches!(refuse(blocks), Error::BlockOverMax { block_size: 2, max_keep: 1, .. }));
    // A fraction is judged row by row, as far as a row has keys.
    let half = |least| Options::new().min_keep(least).max_keep(MaxKeep::Fraction(0.5));
    let lengths = [2, 1];
    let ragged = rows(&data).lengths(&lengths).unwrap();
    assert!(matches!(
        refused(&ragged, &[0.1], &half(2)),
        Error::MinOverMax { place, min_keep: 2, most: 1, .. } if place == at(&[0])
    ));
    let lengths = [1, 2];
    let ragged = rows(&data).lengths(&lengths).unwrap();
    assert!(matches!(
        refused(&ragged, &[0.1], &half(9)),
        Error::MinOverMax { place, min_keep: 2, most: 1, .. } if place == at(&[1])
    ));
    let blocks = Options::new().block_size(2).min_keep(3).max_keep(MaxKeep::Count(3));
    let four = Scores::new(&data[..], &[4]).unwrap();
    assert!(matches!(
        refused(&four, &[0.1], &blocks),
        Error::MinOverMax { min_keep: 3, most: 2, .. }
    ));
    for bad in [Options::new().block_size(2), Options::new().min_keep(2)] {
        assert!(matches!(keep_set(&scores, &[0.1], &bad), Err(Error::Conflict { .. })));
    }
}

#[test]
fn kept_sets() {
    let data = [0.0f32; 6];
    let scores = rows(&data);
    let judge = |indptr: &[i64], indices: &[i64]| {
        let keep = Keep::Indices { indptr, indices };
        certify(&scores, &keep, &CertifyOptions::new()).expect_err("the kept set is bad")
    };
    assert!(matches!(judge(&[0, 1, 2], &[0, 3]), Error::KeepRange { value: 3, n: 3, .. }));
    assert!(matches!(judge(&[0, 1, 2], &[0, -1]), Error::KeepRange { value: -1, .. }));
    assert!(matches!(
        judge(&[0, 0, 2], &[1, 1]),
        Error::KeepTwice { place, value: 1, .. } if place == at(&[1])
    ));
    assert!(matches!(judge(&[0, 1], &[0]), Error::Length { argument: "keep", .. }));
    assert!(matches!(judge(&[1, 1, 1], &[0]), Error::Indptr { position: 0, .. }));
    assert!(matches!(judge(&[0, 1, 0], &[0]), Error::Indptr { position: 2, .. }));
    assert!(matches!(judge(&[0, 1, 3], &[0, 1]), Error::Indptr { position: 2, .. }));
    let keep = Keep::Mask { kept: &[1; 5], strides: &[3] };
    let error = certify(&scores, &keep, &CertifyOptions::new()).expect_err("too short");
    assert!(matches!(error, Error::Shape { argument: "keep", .. }));
}

#[test]
fn numbers_of_the_theory() {
    for value in [-1e-300, 1.5, f64::NAN] {
        assert!(matches!(
            bounds::kl_from_tail_mass(value),
            Err(Error::TailMass { place, .. }) if place == at(&[])
        ));
    }
    for value in [-1.0, f64::NAN] {
        assert!(matches!(
            bounds::tail_mass_from_kl(value),
            Err(Error::Divergence { place, .. }) if place == at(&[])
        ));
    }
    assert!(matches!(
        bounds::required_gap(3, 4, 0.1),
        Err(Error::KeptCount { place, value: 4, n: 3, .. }) if place == at(&[])
    ));
    assert!(matches!(bounds::required_gap(3, 2, 1.0), Err(Error::Eps { .. })));
}

#[test]
fn ranks_and_cuts() {
    let data = [0.0, 1.0, 2.0, 0.0, 1.0, f32::NEG_INFINITY];
    let scores = rows(&data);
    for (k, place, value, n) in [(&[3][..], 1, 3, 2), (&[4], 0, 4, 3), (&[1, -1], 1, -1, 2)] {
        let error = bounds::score_gap(&scores, k).unwrap_err();
        assert!(
            matches!(&error, Error::KeptCount { place: p, value: v, n: m, .. }
                if (p, *v, *m) == (&at(&[place]), value, n)),
            "{error}"
        );
        assert_eq!(bounds::single_gap(&scores, k), Err(error.clone()));
        assert_eq!(bounds::multi_gap(&scores, k, Cuts::Best(2)), Err(error.clone()));
        assert_eq!(bounds::best_cuts(&scores, k, 2), Err(error));
    }
    let wrong = bounds::single_gap(&scores, &[1, 1, 1]);
    assert!(matches!(wrong, Err(Error::Length { argument: "k", got: 3, expected: 2, .. })));
    for (cuts, position) in [(&[0][..], 0), (&[i64::MIN], 0), (&[1, 1], 1), (&[1, 2], 1)] {
        let error = bounds::multi_gap(&scores, &[2, 1], Cuts::At(cuts)).unwrap_err();
        assert!(matches!(error, Error::Cut { position: p, .. } if p == position), "{cuts:?}");
        assert!(error.to_string().starts_with(&format!("cuts[{position}] is {}", cuts[position])));
    }
    let rule = bounds::GapRule::MultiGap { cuts: 1 };
    assert!(matches!(bounds::smallest_k(&scores, &[1.0], rule), Err(Error::Eps { .. })));
}

#[test]
fn blocks() {
    let refused = |sizes: [i64; 2], upper: [f64; 2], lower: [f64; 2]| {
        Blocks::new(&[1, 2], &sizes, &upper, &lower, &[1, 0]).map(|_| ()).unwrap_err()
    };
    for (error, name) in [
        (refused([1, -1], [0.0; 2], [0.0; 2]), "sizes"),
        (refused([1, i64::MAX], [0.0; 2], [0.0; 2]), "sizes"),
        (refused([1; 2], [0.0, f64::NAN], [0.0; 2]), "upper"),
        (refused([1; 2], [0.0; 2], [0.0, f64::NAN]), "lower"),
        (refused([1; 2], [0.0; 2], [0.0, 1.0]), "lower"),
    ] {
        let Error::Block { argument, place, .. } = &error else { panic!("{error}") };
        assert_eq!((*argument, place), (name, &at(&[0, 1])));
        assert!(error.to_string().starts_with(&format!("{name}[0, 1] is ")));
    }
    let short = Blocks::new(&[2], &[1, 1], &[0.0], &[0.0; 2], &[1, 0]).map(|_| ());
    assert!(matches!(short, Err(Error::Length { argument: "upper", got: 1, expected: 2, .. })));
    let bare = Blocks::new(&[], &[], &[], &[], &[]).map(|_| ());
    assert!(matches!(bare, Err(Error::Shape { argument: "sizes", .. })));
}

#[test]
fn values_and_budgets_on_the_output() {
    let (data, mut out) = ([0.0f32; 4], [0.0; 8]);
    let scores = rows(&data);
    let keep = Keep::Mask { kept: &[1, 0, 1, 0], strides: &[2] };
    for bad in [f64::NAN, f64::INFINITY] {
        out[7] = bad;
        let values = Values::new(&out[..], &[2, 2, 2]).unwrap();
        let error = output_error(&scores, &values, &keep, &OutputOptions::new()).unwrap_err();
        assert!(matches!(&error, Error::Value { place, .. } if *place == at(&[1, 1, 1])));
        assert!(error.to_string().starts_with("values[1, 1, 1] is "));
        assert!(matches!(
            select_output(&scores, &values, &[0.1], &OutputOptions::new()),
            Err(Error::Value { place, .. }) if place == at(&[1, 1, 1])
        ));
    }
    out[7] = 0.0;
    let values = Values::new(&out[..], &[2, 2, 2]).unwrap();
    for tol in [-1.0, f64::NAN, f64::INFINITY] {
        let error =
            select_output(&scores, &values, &[0.1, tol], &OutputOptions::new()).unwrap_err();
        assert!(matches!(&error, Error::Tolerance { place, .. } if *place == at(&[1])));
        assert!(error.to_string().starts_with("out_tol[1] is "));
    }
    let misfit = Values::new(&out[..], &[4, 2, 1]).unwrap();
    assert!(matches!(
        output_error(&scores, &misfit, &keep, &OutputOptions::new()),
        Err(Error::Shape { argument: "values", .. })
    ));
}

#[test]
fn keys_that_an_index_was_not_built_of() {
    let mut data: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
    let index = {
        let keys = Vectors::new("keys", &data[..], &[2, 5, 4]).unwrap();
        let index = KeyIndex::build(&keys, &IndexOptions::default()).unwrap();
        index.check(&keys).unwrap();
        index
    };
    let half: Vec<half::f16> = data.iter().map(|&entry| half::f16::from_f32(entry)).collect();
    data[39] = -data[39];
    let changed = Vectors::new("keys", &data[..], &[2, 5, 4]).unwrap();
    assert!(matches!(
        index.check(&changed),
        Err(Error::OtherKeys { argument: "keys", place, .. }) if place == at(&[1])
    ));
    let other = Vectors::new("keys", &half[..], &[2, 5, 4]).unwrap();
    let queries = Vectors::new("q", &data[..8], &[2, 1, 4]).unwrap();
    let found = index.search(&queries, Some(&other), &[0.1], &SearchOptions::default());
    assert!(matches!(found, Err(Error::OtherKeys { place, .. }) if place == at(&[])));
}

#[test]
fn searches_that_cannot_be() {
    let data: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
    let keys = Vectors::new("keys", &data[..], &[10, 4]).unwrap();
    let index = KeyIndex::build(&keys, &IndexOptions::default()).unwrap();
    let queries = Vectors::new("q", &data[..8], &[2, 4]).unwrap();
    let search = |rule, eps: &[f64], keys: Option<&Vectors<'_>>| {
        index.search(&queries, keys, eps, &SearchOptions::new().rule(rule))
    };
    assert!(matches!(search(Rule::Gap, &[0.1], None), Err(Error::KeysNeeded)));
    assert!(matches!(search(Rule::Mass, &[], Some(&keys)), Err(Error::Length { .. })));
    assert!(matches!(
        search(Rule::TopK(0), &[], Some(&keys)),
        Err(Error::Option { argument: "k", .. })
    ));
    let found = search(Rule::TopK(3), &[], Some(&keys)).unwrap();
    assert_eq!(found.selection.k, [3, 3]);
    let huge = [1e30f64; 4];
    let queries = Vectors::new("q", &huge[..], &[1, 4]).unwrap();
    let options = SearchOptions::new().rule(Rule::Gap);
    assert!(matches!(
        index.search(&queries, Some(&keys), &[0.1], &options),
        Err(Error::Number { argument: "q", place, .. }) if place == at(&[0])
    ));
    let found = index.search(&queries, Some(&keys), &[0.1], &SearchOptions::default()).unwrap();
    assert_eq!((found.selection.k[0], found.selection.tail_mass_upper[0]), (10, 0.0));
}

#[test]
fn levels_are_named() {
    let error = force_simd_level(Some("sse9")).expect_err("no such level");
    assert!(matches!(error, Error::Level { .. }));
    assert!(error.to_string().contains("sse9"));
}

#[test]
fn infinities_are_judged_before_the_scale_reverses_them() {
    let data = [f32::NEG_INFINITY, 1.0, 2.0, f32::NEG_INFINITY];
    let scores = rows(&data).scale(-1.0).unwrap();
    let found = select(&scores, &[0.1], &Options::new()).unwrap();
    assert_eq!((found.row(0), found.row(1)), (&[1][..], &[0][..]));
    let data = [f32::INFINITY, 1.0, 2.0, 3.0];
    let scores = rows(&data).scale(-1.0).unwrap();
    assert!(matches!(
        refused(&scores, &[0.1], &Options::new()),
        Error::ScoreInfinite { place, .. } if place == at(&[0, 0])
    ));
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
