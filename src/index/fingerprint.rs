//! Fingerprints, to check that keys are those an index was built of.
//!
//! A fingerprint is a sum over all keys of numbers that each depend on every bit of a key (XXH3) and on its position,
//! so keys may come in any portions and on any thread. An accidental change goes unnoticed with a chance of about
//! 2^-128. It is no defence against deliberate collisions.

use super::element::Coded;
use crate::numerics::random::{GOLDEN, stirred};
use xxhash_rust::xxh3::xxh3_128;

/// As `SplitMix64` has it: zero is stirred, too.
fn scramble(bits: u64) -> u64 {
    stirred(bits.wrapping_add(GOLDEN))
}

const SALTS: [u64; 2] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344];

/// Fingerprint of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Fingerprint(pub(crate) [u64; 2]);

impl Fingerprint {
    /// That of keys that are not known: no keys are likely to have it, nor it and more keys.
    pub(crate) const UNKNOWN: Self = Fingerprint(SALTS);

    /// Takes up a key at a position.
    pub(crate) fn add<E: Coded>(&mut self, position: usize, key: &[E]) {
        let bits = xxh3_128(bytemuck::cast_slice(key));
        let halves = [bits as u64, (bits >> 64) as u64];
        for ((sum, half), salt) in self.0.iter_mut().zip(halves).zip(SALTS) {
            *sum = sum.wrapping_add(scramble(half ^ scramble(position as u64 ^ salt)));
        }
    }

    /// Takes back a key at a position, and takes it up at another, if at any.
    pub(crate) fn replace<E: Coded>(&mut self, position: usize, by: Option<usize>, key: &[E]) {
        let bits = xxh3_128(bytemuck::cast_slice(key));
        let halves = [bits as u64, (bits >> 64) as u64];
        for ((sum, half), salt) in self.0.iter_mut().zip(halves).zip(SALTS) {
            let at = |position: usize| scramble(half ^ scramble(position as u64 ^ salt));
            *sum = sum.wrapping_sub(at(position)).wrapping_add(by.map_or(0, at));
        }
    }

    /// Takes up the keys of another.
    pub(crate) fn join(&mut self, other: Fingerprint) {
        for (sum, more) in self.0.iter_mut().zip(other.0) {
            *sum = sum.wrapping_add(more);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(keys: &[Vec<f32>]) -> Fingerprint {
        let mut fingerprint = Fingerprint::default();
        keys.iter().enumerate().for_each(|(i, key)| fingerprint.add(i, key));
        fingerprint
    }

    #[test]
    fn any_change_shows() {
        for dim in [1, 2, 15, 16, 17, 33, 64] {
            let keys: Vec<Vec<f32>> =
                (0..5).map(|i| (0..dim).map(|j| (i * dim + j) as f32).collect()).collect();
            let fingerprint = of(&keys);
            for i in 0..5 {
                for j in 0..dim {
                    let mut other = keys.clone();
                    other[i][j] = -other[i][j];
                    assert_ne!(of(&other), fingerprint);
                    // A second sign of the same state.
                    other[i][(j + 16) % dim] = -other[i][(j + 16) % dim] - 0.0;
                    assert!(of(&other) != fingerprint || other == keys);
                }
            }
            let mut other = keys.clone();
            other.swap(1, 3);
            assert_ne!(of(&other), fingerprint);
        }
    }

    #[test]
    fn keys_that_go_and_move() {
        let keys: Vec<Vec<f32>> = (0..7).map(|i| vec![i as f32; 20]).collect();
        let mut fingerprint = of(&keys);
        fingerprint.replace(6, None, &keys[6]);
        assert_eq!(fingerprint, of(&keys[..6]));
        fingerprint.replace(2, None, &keys[2]);
        (3..6).for_each(|key| fingerprint.replace(key, Some(key - 1), &keys[key]));
        assert_eq!(fingerprint, of(&[&keys[..2], &keys[3..6]].concat()));
    }

    #[test]
    fn portions_do_not_matter() {
        let keys: Vec<Vec<f32>> = (0..7).map(|i| vec![i as f32; 20]).collect();
        let (mut one, mut other) = (Fingerprint::default(), Fingerprint::default());
        keys[4..].iter().enumerate().for_each(|(i, key)| one.add(4 + i, key));
        keys[..4].iter().enumerate().for_each(|(i, key)| other.add(i, key));
        one.join(other);
        assert_eq!(one, of(&keys));
    }
}
