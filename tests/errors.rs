//! One test per rejected input: the variant, and a message that names the argument and the place.

use certk_rs::{
    Data, Error, Keep, Kind, Mask, MaxKeep, Options, Place, Scores, Workspace, certify,
    force_simd_level, keep_set, select,
};

fn rows(data: &[f32]) -> Scores<'_> {
    Scores::new(data, &[2, data.len() / 2]).unwrap()
}

fn refused(scores: &Scores<'_>, eps: &[f64], options: &Options) -> Error {
    select(scores, eps, options).expect_err("the input is bad")
}

fn at(place: &[usize]) -> Place {
    Place(place.to_vec())
}

#[test]
fn scores_are_judged_where_they_are() {
    let options = Options::new();
    let data = [0.0, 1.0, 2.0, f32::NAN, 4.0, f32::INFINITY];
    let error = refused(&rows(&data), &[0.1], &options);
    assert_eq!(error, Error::ScoreNan { place: at(&[1, 0]) });
    assert!(error.to_string().starts_with("scores[1, 0] is NaN"));
    let data = [0.0, 1.0, 2.0, 3.0, 4.0, f32::INFINITY];
    assert_eq!(
        refused(&rows(&data), &[0.1], &options),
        Error::ScoreInfinite { place: at(&[1, 2]) }
    );
    for value in [-0.5, f32::NAN, f32::INFINITY] {
        let data = [0.5, 0.5, 0.25, value];
        let error = refused(&rows(&data).kind(Kind::Probs).unwrap(), &[0.1], &options);
        assert!(matches!(error, Error::Probability { place, .. } if place == at(&[1, 1])));
    }
    let data = [1e308, 1e308, 1e308, 0.0];
    let scores = Scores::new(&data[..], &[2, 2]).unwrap().kind(Kind::Probs).unwrap();
    assert_eq!(refused(&scores, &[0.1], &options), Error::ProbabilityTotal { place: at(&[0]) });
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
        Err(Error::RowLength { place, value: 3, n: 2 }) if place == at(&[1])
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
        Error::ForcedOverMax { place, forced: 2, max_keep: 1 } if place == at(&[0])
    ));
    assert!(matches!(keep_set(&scores, &[0.1], &forced), Err(Error::ForcedOverMax { .. })));
    let blocks = Options::new().block_size(2).max_keep(MaxKeep::Count(1));
    assert!(matches!(refuse(blocks), Error::BlockOverMax { block_size: 2, max_keep: 1, .. }));
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
        certify(&scores, &keep, None, false, None).expect_err("the kept set is bad")
    };
    assert!(matches!(judge(&[0, 1, 2], &[0, 3]), Error::KeepRange { value: 3, n: 3, .. }));
    assert!(matches!(judge(&[0, 1, 2], &[0, -1]), Error::KeepRange { value: -1, .. }));
    assert!(matches!(
        judge(&[0, 0, 2], &[1, 1]),
        Error::KeepTwice { place, value: 1 } if place == at(&[1])
    ));
    assert!(matches!(judge(&[0, 1], &[0]), Error::Length { argument: "keep", .. }));
    assert!(matches!(judge(&[1, 1, 1], &[0]), Error::Indptr { position: 0, .. }));
    assert!(matches!(judge(&[0, 1, 0], &[0]), Error::Indptr { position: 2, .. }));
    assert!(matches!(judge(&[0, 1, 3], &[0, 1]), Error::Indptr { position: 2, .. }));
    let keep = Keep::Mask { kept: &[1; 5], strides: &[3] };
    let error = certify(&scores, &keep, None, false, None).expect_err("too short");
    assert!(matches!(error, Error::Shape { argument: "keep", .. }));
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
        Error::ScoreInfinite { place } if place == at(&[0, 0])
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
    let found = Workspace::new().select(&scores, &[], &Options::new()).unwrap();
    assert_eq!(found.indptr, [0]);
}
