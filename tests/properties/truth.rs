//! Lost masses, in f64 with a wide margin.

/// Sums of some thousand terms in f64 are better than this by far.
const MARGIN: f64 = 1e-11;

/// Weights of visible scores that sum to 1; a hidden one weighs nothing.
pub(crate) fn weights(scores: impl Iterator<Item = Option<f64>>) -> Vec<f64> {
    let scores: Vec<f64> = scores.map(|score| score.unwrap_or(f64::NEG_INFINITY)).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY {
        return vec![0.0; scores.len()];
    }
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let whole: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / whole).collect()
}

/// That a set loses what is said of it.
pub(crate) fn check(weights: &[f64], kept: &[u32], lower: f64, upper: f64) {
    let mut rest = weights.to_vec();
    for &key in kept {
        rest[key as usize] = 0.0;
    }
    let lost: f64 = rest.iter().sum();
    assert!((0.0..=1.0).contains(&lower) && lower <= upper && upper <= 1.0, "{lower} {upper}");
    assert!(lost >= lower - MARGIN && lost <= upper + MARGIN, "{lost} is not in {lower}..{upper}");
}

/// That no set of fewer keys would do.
pub(crate) fn check_minimal(weights: &[f64], kept: usize, eps: f64) {
    let mut sorted = weights.to_vec();
    sorted.sort_by(f64::total_cmp);
    let fewer = sorted.len() - kept.saturating_sub(1);
    let lost: f64 = sorted[..fewer].iter().sum();
    assert!(kept <= 1 || lost >= eps - MARGIN, "{} keys lose {lost} <= {eps}", kept - 1);
}
