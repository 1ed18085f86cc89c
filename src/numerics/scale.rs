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
