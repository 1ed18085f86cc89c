//! Counter-based random numbers keyed by (seed, row).
//!
//! The generator is `ChaCha` with twelve rounds, as in `rand_chacha`. The seed, little-endian, is the first eight of
//! the 32 bytes of the key (the rest is zero), and the row is the stream. So a row's draws depend on neither threads
//! nor the order of rows.

#[cfg(feature = "montecarlo")]
use rand_chacha::{
    ChaCha12Rng,
    rand_core::{Rng, SeedableRng},
};

/// An odd number whose multiples are spread evenly.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes bits, so that each bit of the result depends on all: the last step of `SplitMix64`.
pub(crate) fn stirred(mut bits: u64) -> u64 {
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(feature = "montecarlo")]
/// Random numbers of one row.
#[derive(Debug, Clone)]
pub(crate) struct Random(ChaCha12Rng);

#[cfg(feature = "montecarlo")]
impl Random {
    pub(crate) fn new(seed: u64, row: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let mut generator = ChaCha12Rng::from_seed(key);
        generator.set_stream(row);
        Random(generator)
    }

    /// Returns a uniform integer below `end > 0`, by rejection: every one is exactly equally likely.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        let unused = (end - 1).leading_zeros();
        loop {
            let number = self.0.next_u64().checked_shr(unused).unwrap_or(0);
            if number < end {
                return number;
            }
        }
    }
}

#[cfg(all(test, feature = "montecarlo"))]
mod tests {
    use super::*;

    #[test]
    fn seeds_and_rows_have_their_own_numbers() {
        let draw = |seed, row| {
            let mut random = Random::new(seed, row);
            [0; 4].map(|_| random.below(1 << 40))
        };
        assert_eq!(draw(7, 3), draw(7, 3));
        assert_ne!(draw(7, 3), draw(7, 4));
        assert_ne!(draw(7, 3), draw(8, 3));
    }

    #[test]
    fn integers_below_an_end_are_uniform() {
        let mut random = Random::new(0, 0);
        assert_eq!(random.below(1), 0);
        let mut counts = [0_u32; 5];
        for _ in 0..50_000 {
            counts[random.below(5) as usize] += 1;
        }
        // Five standard deviations of a binomial with 50000 trials are below 450.
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 450), "{counts:?}");
        let mut large = Random::new(1, 0);
        assert!((0..100).all(|_| large.below(u64::MAX) < u64::MAX));
    }
}
