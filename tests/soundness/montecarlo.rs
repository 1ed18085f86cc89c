//! Failure rates of confidence bounds, by trying every sample, and tail masses from many seeds.

use certk_rs::montecarlo::{Confidence, Method, TailOptions, mean_bounds, tail_mass};
use certk_rs::{Keep, Scores};

use crate::exact::{Random, flags, reals, tail, weights};

const METHODS: [Method; 3] = [Method::Hoeffding, Method::Bernstein, Method::Betting];

/// All sequences of zeros and ones, each with its probability: the bounds fail with at most the one that they say.
#[test]
fn bounds_fail_as_seldom_as_they_say() {
    const DRAWS: usize = 10;
    for method in METHODS {
        for delta in [0.05, 0.3, 0.6] {
            for population in [None, Some(11), Some(40)] {
                let confidence = Confidence::new(method, delta, DRAWS).population(population);
                let bounds: Vec<(f64, f64)> = (0..1u32 << DRAWS)
                    .map(|bits| {
                        let values: Vec<f64> =
                            (0..DRAWS).map(|i| f64::from(bits >> i & 1)).collect();
                        mean_bounds(&values, &confidence).unwrap()
                    })
                    .collect();
                let size = population.unwrap_or(40);
                for ones in 0..=size {
                    let mean = ones as f64 / size as f64;
                    let (mut above, mut below, mut informed) = (0.0, 0.0, false);
                    for (bits, (lower, upper)) in (0u32..).zip(&bounds) {
                        let (mut chance, mut seen) = (1.0, 0.0);
                        for i in 0..DRAWS {
                            let share = if population.is_some() {
                                (ones as f64 - seen) / (size - i) as f64
                            } else {
                                mean
                            };
                            let share = share.clamp(0.0, 1.0);
                            let one = bits >> i & 1 == 1;
                            chance *= if one { share } else { 1.0 - share };
                            seen += f64::from(u8::from(one));
                        }
                        // A mean of floats may be rounded.
                        above += if *upper < mean * (1.0 - 1e-15) { chance } else { 0.0 };
                        below += if *lower > mean * (1.0 + 1e-15) { chance } else { 0.0 };
                        informed |= *upper < 1.0;
                    }
                    let at = format!("{method:?} {delta} {population:?} {mean}");
                    assert!(above <= delta + 1e-9 && below <= delta + 1e-9, "{at} {above} {below}");
                    assert!(informed, "{at}");
                }
            }
        }
    }
}

/// Intervals from three hundred seeds, by both ways of drawing.
#[test]
fn tail_masses_of_many_seeds() {
    const SEEDS: u64 = 300;
    let mut random = Random::new(71);
    let n = 1200;
    let row: Vec<f32> = random.normals(n, 1.0).iter().map(|&x| x as f32).collect();
    let upper: Vec<f32> = row.iter().map(|x| x + 0.8 * random.uniform() as f32).collect();
    let (scores, bounds) = (Scores::new(&row, &[n]).unwrap(), Scores::new(&upper, &[n]).unwrap());
    let kept = flags(n, 0..100);
    let truth = tail(&weights(&reals(&row)), |i| kept[i]);
    let indices: Vec<i64> = (0..100).collect();
    let keep = Keep::Indices { indptr: &[0, 100], indices: &indices };
    for upper_bounds in [None, Some(&bounds)] {
        for method in METHODS {
            let (mut above, mut below, mut width) = (0, 0, 0.0);
            for seed in 0..SEEDS {
                let (delta, draws) = (0.2, 150);
                let options = TailOptions::new(delta, draws).method(method).seed(seed).threads(1);
                let found = tail_mass(&scores, &keep, upper_bounds, &options).unwrap();
                above += u32::from(!truth.at_most(found.upper[0]));
                below += u32::from(!truth.at_least(found.lower[0]));
                width += (found.upper[0] - found.lower[0]) / SEEDS as f64;
            }
            // Three deviations of a count above its mean.
            let most = (0.2 * SEEDS as f64 + 3.0 * (0.16 * SEEDS as f64).sqrt()) as u32;
            assert!(above <= most && below <= most, "{method:?} {above} {below}");
            assert!(width < 0.5, "{method:?} {width}");
        }
    }
}
