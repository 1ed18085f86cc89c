//! Tail masses from draws: one test per rejected input, and that draws do not depend on threads.

use certk_rs::montecarlo::{Method, TailOptions, tail_mass};
use certk_rs::{CertifyOptions, Error, Keep, Kind, Scores, certify};

const FIRST: Keep<'static> = Keep::Indices { indptr: &[0, 1], indices: &[0] };

fn options(draws: usize) -> TailOptions {
    let method = Method::Betting;
    TailOptions::new(0.01, draws).method(method).seed(1)
}

#[test]
fn more_draws_than_items_are_refused() {
    let scores = Scores::new(&[1.0_f32, 0.5, 0.25][..], &[3]).unwrap();
    let error = tail_mass(&scores, &FIRST, None, &options(3)).unwrap_err();
    assert!(matches!(&error, Error::Draws { place, draws: 3, items: 2, .. } if place.0.is_empty()));
    assert!(error.to_string().starts_with("draws is 3"));
    assert!(tail_mass(&scores, &FIRST, None, &options(2)).is_ok());
}

#[test]
fn bounds_are_judged_where_they_are() {
    let scores = Scores::new(&[1.0_f32, 0.5, 0.25][..], &[3]).unwrap();
    let bounds = Scores::new(&[1.0_f64, 0.5, f64::INFINITY][..], &[3]).unwrap();
    let error = tail_mass(&scores, &FIRST, Some(&bounds), &options(3)).unwrap_err();
    assert!(
        matches!(&error, Error::UpperBound { place, value: f64::INFINITY, .. } if place.0 == [2])
    );
    let bounds = Scores::new(&[1.0_f64, 0.25, f64::NEG_INFINITY][..], &[3]).unwrap();
    let error = tail_mass(&scores, &FIRST, Some(&bounds), &options(3)).unwrap_err();
    assert!(matches!(
        &error,
        Error::UpperBoundBroken { place, score: 0.5, bound: 0.25, .. } if place.0 == [1]
    ));
    let bounds = Scores::new(&[1.0_f64, 0.25][..], &[2]).unwrap();
    let error = tail_mass(&scores, &FIRST, Some(&bounds), &options(3)).unwrap_err();
    assert!(matches!(error, Error::Length { argument: "upper_bounds", got: 2, expected: 3, .. }));
}

#[test]
fn draws_do_not_depend_on_threads() {
    let data: Vec<f32> = (0..300_000_u32).map(|i| (i % 977) as f32 / 200.0).collect();
    let upper: Vec<f32> = data.iter().map(|score| score + 0.125).collect();
    let (scores, bounds) =
        (Scores::new(&data, &[300_000]).unwrap(), Scores::new(&upper, &[300_000]).unwrap());
    let found = tail_mass(&scores, &FIRST, Some(&bounds), &options(500).threads(1)).unwrap();
    for threads in [2, 3] {
        let options = options(500).threads(threads);
        assert_eq!(found, tail_mass(&scores, &FIRST, Some(&bounds), &options).unwrap());
    }
    let truth = certify(&scores, &FIRST, &CertifyOptions::new()).unwrap();
    assert!(found.lower[0] <= truth.tail_mass_upper[0]);
    assert!(found.upper[0] >= truth.tail_mass_lower[0]);
}

#[test]
fn options_on_bounds_are_not_passed_over() {
    let scores = Scores::new(&[1.0_f32, 0.5, 0.25][..], &[3]).unwrap();
    let bounds = Scores::new(&[2.0_f64, 1.0, 0.5][..], &[3]).unwrap();
    let lengths = [3];
    let others = [
        bounds.clone().scale(0.5).unwrap(),
        bounds.clone().kind(Kind::Probs).unwrap(),
        bounds.clone().lengths(&lengths).unwrap(),
        bounds.clone().mask(&[true, true, false][..], &[]).unwrap(),
        bounds.clone().radius(&[0.5]).unwrap(),
    ];
    for bounds in &others {
        let error = tail_mass(&scores, &FIRST, Some(bounds), &options(3)).unwrap_err();
        assert!(matches!(error, Error::Conflict { first: "upper_bounds", .. }), "{error}");
    }
    assert!(tail_mass(&scores, &FIRST, Some(&bounds), &options(3)).is_ok());
}

/// Real scores may lie anywhere within the radius: the tail's all above, the kept one's below.
#[test]
fn a_radius_widens_what_bounds_promise() {
    let data = [0.0_f64; 9];
    let scores = Scores::new(&data[..], &[9]).unwrap().radius(&[0.5]).unwrap();
    let bounds = Scores::new(&data[..], &[9]).unwrap();
    for bounds in [None, Some(&bounds)] {
        let found = tail_mass(&scores, &FIRST, bounds, &options(8)).unwrap();
        for shift in [1.0_f64, -1.0] {
            let odds = 8.0 * shift.exp();
            let real = odds / (1.0 + odds);
            assert!(found.lower[0] <= real && real <= found.upper[0], "{found:?}");
        }
    }
}
