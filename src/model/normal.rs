//! The standard normal law, accurate in both tails.
//!
//! The survival function is `erfc` of `libm` (below one unit in the last place), with the rounding of its argument put
//! right: far out, `erfc(x / sqrt 2)` turns an error of its argument into `x^2` times as much. The quantile is algorithm
//! AS 241 (Wichura, Applied Statistics 37, 1988, PPND16).

use libm::{erfc, exp, log, log1p, sqrt};

/// 1 / sqrt 2 in two parts.
const ROOT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;
const ROOT_HALF_LOW: f64 = -4.833_646_656_726_457e-17;
const TWO_OVER_ROOT_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI;
/// ln sqrt(2 pi)
const LN_ROOT_TWO_PI: f64 = 0.918_938_533_204_672_7;
/// From here on the continued fraction of the hazard rate is used.
const FAR: f64 = 12.0;

/// `P(Z > x)` for a standard normal `Z`; relative error below 1e-14 for x <= 37, where it is about 6e-300.
///
/// NaN gives NaN; it falls into the subnormal numbers at 37.5 and to 0 beyond 38.6.
///
/// ```
/// use certk_rs::model::survival;
/// assert_eq!(survival(0.0), 0.5);
/// assert!((survival(1.96) - 0.025).abs() < 1e-4);
/// ```
pub fn survival(x: f64) -> f64 {
    if x.is_infinite() {
        return if x > 0.0 { 0.0 } else { 1.0 };
    }
    let y = x * ROOT_HALF;
    let low = x.mul_add(ROOT_HALF, -y) + x * ROOT_HALF_LOW;
    let value = 0.5 * erfc(y);
    // d erfc(y) = -2/sqrt(pi) e^(-y^2) dy. Where erfc has underflowed nothing is left to put right.
    value - 0.5 * TWO_OVER_ROOT_PI * exp(-y * y) * low
}

/// `phi(x) / P(Z > x)`, the hazard rate; relative error below 1e-13 for |x| <= 1e150.
pub(super) fn hazard(x: f64) -> f64 {
    if x < FAR {
        return exp(-0.5 * x * x - LN_ROOT_TWO_PI) / survival(x);
    }
    // Laplace: P(Z > x) = phi(x) / (x + 1/(x + 2/(x + 3/...))).
    (1..=40).rev().fold(x, |tail, i| x + f64::from(i) / tail)
}

/// `ln P(Z > x)`; relative error below 1e-13 also where `survival` underflows.
pub(super) fn log_survival(x: f64) -> f64 {
    if x < 0.0 {
        log1p(-survival(-x))
    } else if x < FAR {
        log(survival(x))
    } else {
        -0.5 * x * x - LN_ROOT_TWO_PI - log(hazard(x))
    }
}

/// `x` with `P(Z <= x) = p`; relative error below 1e-14 for p from 1e-300 to 1 - 2^-53.
///
/// -inf at 0, +inf at 1, NaN outside [0, 1].
///
/// ```
/// use certk_rs::model::{quantile, survival};
/// assert_eq!(quantile(0.5), 0.0);
/// assert!((quantile(survival(1.5)) + 1.5).abs() < 1e-13);
/// ```
pub fn quantile(p: f64) -> f64 {
    if !(0.0..=1.0).contains(&p) {
        return f64::NAN;
    }
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        return q * ratio(0.180_625 - q * q, &CENTRE);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    if tail == 0.0 {
        return f64::INFINITY.copysign(q);
    }
    let r = sqrt(-log(tail));
    let size = if r <= 5.0 { ratio(r - 1.6, &MIDDLE) } else { ratio(r - 5.0, &FAR_OUT) };
    size.copysign(q)
}

/// Coefficients of a numerator and a denominator, lowest power first.
type Ratio = ([f64; 8], [f64; 8]);

fn ratio(x: f64, (top, bottom): &Ratio) -> f64 {
    let value = |c: &[f64; 8]| c.iter().rev().fold(0.0f64, |sum, c| sum.mul_add(x, *c));
    value(top) / value(bottom)
}

#[rustfmt::skip]
const CENTRE: Ratio = (
    [3.387_132_872_796_366_5, 133.141_667_891_784_38, 1_971.590_950_306_551_3, 13_731.693_765_509_46,
     45_921.953_931_549_87, 67_265.770_927_008_7, 33_430.575_583_588_13, 2_509.080_928_730_122_7],
    [1.0, 42.313_330_701_600_91, 687.187_007_492_057_9, 5_394.196_021_424_751,
     21_213.794_301_586_597, 39_307.895_800_092_71, 28_729.085_735_721_943, 5_226.495_278_852_854],
);
#[rustfmt::skip]
const MIDDLE: Ratio = (
    [1.423_437_110_749_683_5, 4.630_337_846_156_546, 5.769_497_221_460_691, 3.647_848_324_763_204_5,
     1.270_458_252_452_368_4, 0.241_780_725_177_450_6, 0.022_723_844_989_269_184, 7.745_450_142_783_414e-4],
    [1.0, 2.053_191_626_637_759, 1.676_384_830_183_803_8, 0.689_767_334_985_1,
     0.148_103_976_427_480_08, 0.015_198_666_563_616_457, 5.475_938_084_995_345e-4, 1.050_750_071_644_416_9e-9],
);
#[rustfmt::skip]
const FAR_OUT: Ratio = (
    [6.657_904_643_501_103, 5.463_784_911_164_114, 1.784_826_539_917_291_3, 0.296_560_571_828_504_87,
     0.026_532_189_526_576_124, 0.001_242_660_947_388_078_4, 2.711_555_568_743_487_6e-5, 2.010_334_399_292_288_1e-7],
    [1.0, 0.599_832_206_555_888, 0.136_929_880_922_735_8, 0.014_875_361_290_850_615,
     7.868_691_311_456_133e-4, 1.846_318_317_510_054_8e-5, 1.421_511_758_316_446e-7, 2.044_263_103_389_939_8e-15],
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values_in_both_tails() {
        // mpmath, 40 digits.
        for (x, want) in [
            (0.0, 0.5),
            (1.0, 0.158_655_253_931_457_05),
            (-3.0, 0.998_650_101_968_369_9),
            (10.0, 7.619_853_024_160_527e-24),
            (37.0, 5.725_571_222_524_577e-300),
        ] {
            assert!((survival(x) / want - 1.0f64).abs() < 1e-14, "{x}");
        }
        assert_eq!((survival(f64::INFINITY), survival(f64::NEG_INFINITY)), (0.0, 1.0));
        assert!(survival(f64::NAN).is_nan());
    }

    #[test]
    fn quantile_inverts_survival() {
        for x in [-37.0, -9.0, -2.5, -1.0, -1e-3, 0.0, 0.3, 1.5, 5.0] {
            let p = if x > 0.0 { 1.0 - survival(x) } else { survival(-x) };
            assert!((quantile(p) - x).abs() <= 1e-9f64.min(1e-16 / survival(x)) + 1e-14 * x.abs());
        }
        assert_eq!(quantile(0.0), f64::NEG_INFINITY);
        assert_eq!(quantile(1.0), f64::INFINITY);
        assert!(quantile(-0.1).is_nan() && quantile(1.5).is_nan());
    }

    #[test]
    fn both_forms_meet_where_they_change() {
        let (below, above) = (hazard(FAR - 1e-9), hazard(FAR));
        assert!((above / below - 1.0).abs() < 1e-9);
        assert!((log_survival(FAR) / survival(FAR).ln() - 1.0).abs() < 1e-14);
    }
}
