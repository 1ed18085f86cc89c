//! The expected minimal k of a row of `n` iid normal scores, by simulation.
//!
//! No row is stored or sorted. In descending order the uniform variates of a row are `S_i / S_(n+1)`, partial sums of
//! exponential variates (Renyi), so the largest scores come first, one by one. Past the first [`SINGLE`] of them, runs of a
//! sixty-fourth of their rank are taken together: one gamma variate steps over a run, whose members are uniform between
//! its ends, and their mean weight is that of two Gauss points. What a run hides (the scatter of its members between its own ends)
//! changes k by far less than one standard error. Draws are keyed by (seed, row), so that threads do not change them.

use crate::error::{Error, Place};
use crate::numerics::certified_sums;
use crate::numerics::random::{GOLDEN, stirred};
use crate::runtime::threads;

use super::gaussian::{check_eps, check_sigma};
use super::normal::quantile;

/// Order statistics drawn one by one.
const SINGLE: u64 = 1024;
/// Beyond them a run is this part of its rank.
const PART: u64 = 64;
/// Draws that a plan may cost, over all of its rows.
const DRAWS: usize = 1 << 22;
const ROWS: std::ops::RangeInclusive<usize> = 256..=16384;
/// Rows between two checks for an interrupt.
const PORTION: usize = 512;

/// The mean of the minimal k over rows of iid normal scores.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Expected {
    /// The estimated mean of k.
    pub k: f64,
    /// Its standard error: the sample standard deviation over rows, divided by the square root of their number; 0 where k is
    /// known exactly.
    pub standard_error: f64,
    /// How many rows were simulated; 0 where k is known exactly.
    pub rows: usize,
}

/// Estimates the mean, over rows of `n` iid `N(mu, sigma^2)` scores, of the smallest k whose top-k set drops at most `eps`.
///
/// An estimate with a standard error, not a bound. The same seed gives the same answer on any number of threads. Exact for
/// `n = 1` and `sigma = 0`.
///
/// ```
/// use certk_rs::model::{expected_k, keep_fraction};
/// let found = expected_k(1000, 2.0, 0.1, 0, None)?;
/// assert!(found.standard_error < 0.01 * found.k);
/// assert!((found.k / 1000.0 - keep_fraction(2.0, 0.1)?).abs() < 0.01); // of infinitely many keys
/// assert_eq!(expected_k(1000, 0.0, 0.25, 0, None)?.k, 750.0);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Number`] for `n = 0` or above 2^53, a `sigma` that is negative or not finite, or an `eps` outside (0, 1);
/// [`Error::Option`] for a bad number of threads.
pub fn expected_k(
    n: u64,
    sigma: f64,
    eps: f64,
    seed: u64,
    threads: Option<usize>,
) -> Result<Expected, Error> {
    let _modes = threads::default_floats();
    if n == 0 || n > 1 << 53 {
        let problem = "pass a number of keys between 1 and 2^53";
        return Err(Error::Number {
            argument: "n",
            place: Place(vec![]),
            value: n as f64,
            problem,
        });
    }
    check_sigma(sigma)?;
    check_eps(eps)?;
    let threads = threads::count(threads, n > 16)?;
    if n == 1 || sigma == 0.0 {
        let k = n - certified_sums::equal_weights_droppable(n, eps).min(n - 1);
        return Ok(Expected { k: k as f64, standard_error: 0.0, rows: 0 });
    }
    let runs = Runs::new(n);
    let rows = (DRAWS / runs.sizes.len()).clamp(*ROWS.start(), *ROWS.end());
    let mut all: Vec<f64> = Vec::with_capacity(rows);
    let one = |row: usize| Ok(runs.minimal_k(sigma, eps, &mut Draws::new(seed, row as u64)));
    threads::in_portions(threads, rows, (PORTION, 8), one, |k| all.push(k))?;
    let count = rows as f64;
    let k = all.iter().copied().collect::<certified_sums::Compensated>().value() / count;
    let squares: certified_sums::Compensated = all.iter().map(|x| (x - k) * (x - k)).collect();
    let variance = squares.value() / (count - 1.0);
    Ok(Expected { k, standard_error: libm::sqrt(variance / count), rows })
}

/// How a row's order statistics are taken together, from the largest score down.
struct Runs {
    sizes: Vec<u64>,
}

impl Runs {
    fn new(n: u64) -> Self {
        let mut sizes = vec![1; n.min(SINGLE) as usize];
        let mut done = n.min(SINGLE);
        while done < n {
            let size = (done / PART).min(n - done);
            sizes.push(size);
            done += size;
        }
        Runs { sizes }
    }

    /// The minimal k of one simulated row.
    fn minimal_k(&self, sigma: f64, eps: f64, draws: &mut Draws) -> f64 {
        // Where each run ends, in units of exponential spacings, and the variate beyond the last score.
        let mut ends = Vec::with_capacity(self.sizes.len());
        let mut sum = 0.0;
        for &size in &self.sizes {
            sum += if size == 1 { draws.exponential() } else { draws.gamma(size as f64) };
            ends.push(sum);
        }
        let total = sum + draws.exponential();
        let score = |end: f64| -sigma * quantile(end / total);
        let largest = score(ends[0]);
        let weight = |end: f64| libm::exp(score(end) - largest);
        let mut start = 0.0;
        let mut masses = ends;
        for (mass, &size) in masses.iter_mut().zip(&self.sizes) {
            let end = *mass;
            *mass = if size == 1 {
                weight(end)
            } else {
                // Gauss points of the interval, 1/2 -+ 1/sqrt 12.
                let (centre, half) = (0.5 * (start + end), 0.5 * (end - start));
                let offset = half * 0.577_350_269_189_625_8;
                0.5 * size as f64 * (weight(centre - offset) + weight(centre + offset))
            };
            start = end;
        }
        let whole: f64 = masses.iter().rev().sum();
        let budget = eps * whole;
        let (mut tail, mut kept) = (0.0, self.sizes.iter().sum::<u64>() as f64);
        for (&mass, &size) in masses.iter().zip(&self.sizes).rev() {
            if tail + mass > budget {
                if size > 1 {
                    kept -= ((budget - tail) / mass * size as f64).floor();
                }
                break;
            }
            tail += mass;
            kept -= size as f64;
        }
        kept.max(1.0)
    }
}

/// Random numbers keyed by (seed, row): the finaliser of `SplitMix64` over a counter.
struct Draws {
    state: u64,
}

impl Draws {
    fn new(seed: u64, row: u64) -> Self {
        Draws { state: stirred(stirred(seed.wrapping_add(GOLDEN)) ^ row.wrapping_mul(GOLDEN)) }
    }

    /// Uniform on the odd multiples of 2^-54 in (0, 1).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(GOLDEN);
        let bits = stirred(self.state) >> 11;
        (bits as f64 + 0.5) * (1.0 / 9_007_199_254_740_992.0)
    }

    fn exponential(&mut self) -> f64 {
        -libm::log(self.uniform())
    }

    /// A gamma variate of shape >= 1 (Marsaglia and Tsang, ACM TOMS 26, 2000).
    fn gamma(&mut self, shape: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / libm::sqrt(9.0 * d);
        loop {
            let x = quantile(self.uniform());
            let v = 1.0 + c * x;
            if v > 0.0 {
                let v = v * v * v;
                if libm::log(self.uniform()) < 0.5 * x * x + d - d * v + d * libm::log(v) {
                    return d * v;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_every_rank_once() {
        for n in [1, 2, 1023, 1024, 1025, 1039, 1040, 1041, 100_000, 1 << 40] {
            let runs = Runs::new(n);
            assert_eq!(runs.sizes.iter().sum::<u64>(), n);
            assert!(runs.sizes.iter().all(|size| *size > 0));
        }
    }

    #[test]
    fn threads_do_not_change_the_answer() {
        let one = expected_k(5000, 3.0, 0.01, 7, Some(1)).unwrap();
        assert_eq!(one, expected_k(5000, 3.0, 0.01, 7, Some(3)).unwrap());
        assert_ne!(one, expected_k(5000, 3.0, 0.01, 8, Some(1)).unwrap());
    }

    #[test]
    fn variates_have_their_moments() {
        let mut draws = Draws::new(1, 2);
        let m = 100_000;
        for shape in [1.0, 16.0, 1000.0] {
            let values: Vec<f64> = (0..m).map(|_| draws.gamma(shape)).collect();
            let mean = values.iter().sum::<f64>() / f64::from(m);
            let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(m);
            assert!((mean / shape - 1.0).abs() < 5.0 / libm::sqrt(shape * f64::from(m)));
            assert!((variance / shape - 1.0).abs() < 0.05);
        }
    }

    #[test]
    fn rows_without_randomness_are_exact() {
        for (n, sigma, eps, k) in [(1, 9.0, 0.5, 1.0), (4, 0.0, 0.25, 3.0), (10, 0.0, 0.999, 1.0)] {
            let want = Expected { k, standard_error: 0.0, rows: 0 };
            assert_eq!(expected_k(n, sigma, eps, 0, None).unwrap(), want);
        }
        assert!(expected_k(0, 1.0, 0.1, 0, None).is_err());
    }
}
