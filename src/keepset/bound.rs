//! Largest number of keys that a mixed row can drop, without a sort.

/// Crossing of the sum of the smallest values with a limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Crossing {
    /// Number of the smallest values that the limit holds.
    pub(super) dropped: usize,
    /// First value beyond, or the largest one.
    pub(super) threshold: f32,
}

/// Shift to the bits that select a value's bucket: the exponent and three of the mantissa.
const SHIFT: u32 = 20;

/// Takes the smallest of the finite non-negative values as long as their sum is at most `limit`.
///
/// The deciding sum has at most `n` non-negative f64 terms: its relative error is below `n` 2^-52.
pub(super) fn crossing(values: &[f32], limit: f64) -> Crossing {
    let mut sums = vec![0.0; (f32::INFINITY.to_bits() >> SHIFT) as usize + 1];
    let mut counts = vec![0usize; sums.len()];
    let last = sums.len() - 1;
    for &value in values {
        // Infinity marks a key that does not compete, and has the last bucket to itself.
        let bucket = (value.to_bits() >> SHIFT) as usize;
        sums[bucket] += f64::from(value);
        counts[bucket] += 1;
    }
    let (mut lost, mut dropped, mut threshold) = (0.0, 0, 0.0);
    for bucket in 0..last {
        if counts[bucket] == 0 {
            continue;
        }
        if lost + sums[bucket] <= limit {
            lost += sums[bucket];
            dropped += counts[bucket];
            threshold = f32::from_bits(((bucket as u32 + 1) << SHIFT) - 1);
            continue;
        }
        let mut within: Vec<u32> = (values.iter().map(|value| value.to_bits()))
            .filter(|bits| (bits >> SHIFT) as usize == bucket)
            .collect();
        within.sort_unstable();
        for bits in within {
            threshold = f32::from_bits(bits);
            if lost + f64::from(threshold) > limit {
                break;
            }
            lost += f64::from(threshold);
            dropped += 1;
        }
        break;
    }
    Crossing { dropped, threshold }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossings_are_those_of_the_sorted_values() {
        for seed in 0..200u32 {
            let n = 1 + seed as usize * 3;
            let mut values: Vec<f32> = (0..n)
                .map(|i| {
                    let u = ((i as f32 + seed as f32) * 0.618_034).fract();
                    if i % 11 == 3 { f32::INFINITY } else { u.powi(1 + (seed % 9) as i32) }
                })
                .collect();
            let finite = values.iter().filter(|v| v.is_finite());
            let sum: f64 = finite.map(|v| f64::from(*v)).sum();
            let limit = sum * f64::from(seed % 13) / 11.0;
            let got = crossing(&values, limit);
            values.sort_by(f32::total_cmp);
            let (mut lost, mut dropped) = (0.0, 0);
            while dropped < n
                && values[dropped].is_finite()
                && lost + f64::from(values[dropped]) <= limit
            {
                lost += f64::from(values[dropped]);
                dropped += 1;
            }
            // The order of summation may decide where the sum equals the limit to the last bit.
            assert!(got.dropped.abs_diff(dropped) <= usize::from(seed % 13 == 11), "{seed}");
            if dropped < n && values[dropped].is_finite() {
                assert_eq!(got.threshold, values[dropped]);
            }
        }
    }

    #[test]
    fn nothing_and_everything() {
        assert_eq!(crossing(&[], 1.0), Crossing { dropped: 0, threshold: 0.0 });
        assert_eq!(crossing(&[2.0, 3.0], 1.0), Crossing { dropped: 0, threshold: 2.0 });
        assert_eq!(crossing(&[0.0, 0.0, f32::INFINITY], 0.0).dropped, 2);
        assert_eq!(crossing(&[1.0, 3.0], 4.0).dropped, 2);
        assert_eq!(crossing(&[1e-45, f32::MAX], f64::MAX).dropped, 2);
    }
}
