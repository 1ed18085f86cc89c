//! Default scale of attention.

/// Returns the f64 nearest to `d^-1/2`; infinite for 0.
///
/// Quotient and root round twice, and miss it by a unit for every fifth d, so integers decide. Floating-point modes
/// have no effect: the computed value is only a guess.
pub fn nearest_rsqrt(d: usize) -> f64 {
    let guess = 1.0 / (d as f64).sqrt();
    if d == 0 {
        return guess;
    }
    // x = m / 2^e with 2^52 <= m < 2^53, as 0 < x <= 1 is normal.
    let bits = guess.to_bits();
    let (m, e) = (bits & ((1 << 52) - 1) | 1 << 52, 1075 - (bits >> 52) as u32);
    // Half a unit below and above x, in such halves: x is nearest if (2m - 1)^2 d < 2^(2e + 2) < (2m + 1)^2 d. Neither
    // side is ever equal, since the odd square would have to be 1.
    let below = |odd: u64| {
        let square = u128::from(odd) * u128::from(odd);
        let (high, low) = (square >> 64, square & u128::from(u64::MAX));
        let high = high * d as u128 + ((low * d as u128) >> 64);
        high >> (2 * e + 2 - 64) == 0
    };
    let near = (m - 3).max(1)..=m + 3;
    let unit = |m: u64| m as f64 / 2f64.powi(e as i32);
    near.clone().find(|&m| below(2 * m - 1) && !below(2 * m + 1)).map_or(guess, unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the same by the integer root, independently of the search.
    fn by_root(d: u128) -> f64 {
        // 2^(s + 1) d^-1/2, rounded down, where 2^52 <= 2^s d^-1/2 < 2^53: half of it, rounded up, is the nearest.
        let s = if d == 1 { 52 } else { 53 + (d - 1).ilog2() / 2 };
        let doubled = ((1u128 << (2 * s + 2)) / d).isqrt();
        (doubled.div_ceil(2) as f64) / 2f64.powi(s as i32)
    }

    #[test]
    fn nearest_for_every_length() {
        let mut off = 0;
        for d in 1..=1usize << 16 {
            let got = nearest_rsqrt(d);
            assert_eq!(got, by_root(d as u128), "{d}");
            if d <= 1024 {
                off += usize::from(got != 1.0 / (d as f64).sqrt());
            }
        }
        // What this function is for: d = 128 is among them.
        assert_eq!(off, 218);
        assert!(nearest_rsqrt(128) != 1.0 / 128f64.sqrt());
    }

    #[test]
    fn at_the_ends() {
        assert_eq!(nearest_rsqrt(0), f64::INFINITY);
        for a in 0..32 {
            assert_eq!(nearest_rsqrt(1 << (2 * a)), 2f64.powi(-a));
        }
        // Next to powers of two, where the units change, and up to what a usize holds.
        for d in [(1 << 18) - 1, (1 << 18) + 1, (1 << 20) - 1] {
            assert_eq!(nearest_rsqrt(d), by_root(d as u128));
        }
        for d in [usize::MAX, usize::MAX / 2, (1 << 31) - 1] {
            assert!((nearest_rsqrt(d) * (d as f64).sqrt() - 1.0).abs() < 1e-15);
        }
    }
}
