//! Scores of a few keys by both planes of their codes.

use half::bf16;

use super::super::prepared::Prepared;
use super::Codes;
use crate::kernels::{Simd, low_step};
use crate::runtime::reused::Reused;

/// Keys that are scored at a time.
const BLOCK: usize = 256;

impl Codes<'_> {
    /// Adds the scores of the low plane alone to those by codes of listed keys, ascending, that have a code: in nats, and
    /// exact but for the error that [`Prepared::fine_error`] has.
    pub(crate) fn add_low(&self, simd: Simd, query: &Prepared, list: &[u32], to: &mut [f64]) {
        let bits = self.content().low_bits();
        let mut numbers: Reused<i16> = query.numbers().collect();
        numbers.resize(self.frame.mean.len(), 0);
        let factor = f64::from(query.factor);
        let mut products = [0; BLOCK];
        let (mut list, mut to, mut first) = (list, to, 0usize);
        for part in self.chunks.parts() {
            let end = first + part.scales.len();
            let here = list.partition_point(|key| (*key as usize) < end);
            let (keys, behind) = list.split_at(here);
            let (scores, rest) = std::mem::take(&mut to).split_at_mut(here);
            for (keys, scores) in keys.chunks(BLOCK).zip(scores.chunks_mut(BLOCK)) {
                let products = &mut products[..keys.len()];
                simd.low_products((part.low, bits, first as u32), keys, &numbers, products);
                for ((score, product), key) in scores.iter_mut().zip(products).zip(keys) {
                    let scale: bf16 = part.scales[*key as usize - first];
                    let step = f64::from(low_step(scale.to_f32(), bits));
                    *score += f64::from(*product) * (step * factor);
                }
            }
            (list, to, first) = (behind, rest, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::codes::saved::{Saved, Trust};
    use crate::index::content::Content;
    use crate::index::key_index::KeyIndex;
    use crate::index::options::IndexOptions;
    use crate::index::query::Query;
    use crate::kernels::{Keys, LANES};
    use crate::rows::Vectors;

    const DIM: usize = 20;

    /// Numbers that look random, from -1 to 1.
    fn random(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
        };
        (0..count).map(|_| next() as f32).collect()
    }

    fn product(row: &[f32], query: &[f64]) -> f64 {
        row.iter().zip(query).map(|(k, q)| f64::from(*k) * q).sum()
    }

    /// Scores by both planes against exact ones: the largest share that an error has of what it may be, one by one and together.
    fn share(codes: &Codes<'_>, data: &[f32], query: &[f64], scale: f64) -> [f64; 2] {
        let (simd, n) = (Simd::current().unwrap(), codes.len());
        let prepared = codes.prepare(simd, query, scale);
        let error = prepared.fine_error.unwrap();
        let doubt = Query::new(query, scale, f64::from(codes.largest())).error;
        let mut scores = vec![0.0; n.next_multiple_of(LANES)];
        codes.scan(simd, [prepared.coarse()], [&mut scores], 1).unwrap();
        let coded: Vec<u32> =
            (0..n as u32).filter(|key| !codes.uncoded().any(|k| k == *key)).collect();
        // All at once, and some.
        let mut low = vec![0.0; coded.len()];
        codes.add_low(simd, &prepared, &coded, &mut low);
        for (from, by) in [(0, 3), (coded.len() / 2, 1), (1, 700)] {
            let (list, wanted): (Vec<u32>, Vec<f64>) =
                coded.iter().zip(&low).skip(from).step_by(by).map(|(k, l)| (*k, l + 1.0)).unzip();
            let mut some = vec![1.0; list.len()];
            codes.add_low(simd, &prepared, &list, &mut some);
            assert!(
                some.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-12 * b.abs().max(1.0))
            );
        }
        let (mut worst, mut squares) = (0.0f64, 0.0);
        for (key, low) in coded.iter().zip(&low) {
            let row = &data[*key as usize * query.len()..][..query.len()];
            let exact = product(row, query) * scale - prepared.offset;
            let off = (exact - f64::from(scores[*key as usize]) - low).abs();
            let reach = error.each + error.rho + doubt;
            assert!(off <= reach, "{key} of {n}: {off} > {reach}");
            worst = worst.max(off / reach);
            // What is no rounding.
            squares += (off - error.rho - doubt).max(0.0).powi(2);
        }
        assert!(squares.sqrt() <= error.total, "{n}: {} > {}", squares.sqrt(), error.total);
        [worst, squares.sqrt() / error.total]
    }

    fn codes_of(data: &[f32], dim: usize, bits: usize, rotate: bool) -> Codes<'static> {
        let content = if bits == 4 { Content::Keys12 } else { Content::Keys16 };
        let (simd, n, keys) =
            (Simd::current().unwrap(), data.len() / dim, Keys::new(data, dim, dim));
        let mut codes = Codes::new(content, dim, keys, n, Some(rotate));
        let room = codes.make_room(n, 1).unwrap();
        codes.append(simd, keys, (n, room), 1).unwrap();
        codes
    }

    #[test]
    fn what_both_planes_lose() {
        for bits in [4, 8] {
            for rotate in [false, true] {
                let mut worst = [0.0f64; 2];
                for seed in 1..120 {
                    let dim = [1, 2, 3, 16, 40, 64][seed as usize % 6];
                    let keys: Vec<f32> = random(40 * dim, seed).iter().map(|k| k * 90.0).collect();
                    let codes = codes_of(&keys, dim, bits, rotate);
                    let query: Vec<f64> = random(dim, seed + 1)
                        .iter()
                        .map(|&q| (q * 32_639.0).round().into())
                        .collect();
                    let found = share(&codes, &keys, &query, 1e-4);
                    // What is left is rounded once more, to be summed.
                    assert!(codes.grams().1.unwrap().bounds().0 > 1e-20);
                    worst = [worst[0].max(found[0]), worst[1].max(found[1])];
                }
                // Of one entry each is reached, and so are all together.
                assert!(worst[0] > 0.6 && worst[1] > 0.6, "{bits} {rotate} {worst:?}");
            }
        }
    }

    /// Keys whose low codes lose nothing: what is left are roundings, and what a query's numbers lose.
    #[test]
    fn what_scores_by_both_planes_are_rounded_by() {
        let mut worst = 0.0f64;
        for seed in 1..200 {
            let dim = [2, 4, 8, 32][seed as usize % 4];
            // The unit is 15, or 255, so that low codes are whole numbers; opposites make the mean 0.
            let (bits, unit) = if seed % 2 == 0 { (4, 15.0) } else { (8, 255.0) };
            let mut keys: Vec<f32> =
                random(20 * dim, seed).iter().map(|k| (k * 126.0 * unit).round()).collect();
            keys.chunks_exact_mut(dim).enumerate().for_each(|(i, key)| key[i % dim] = 127.0 * unit);
            let opposite: Vec<f32> = keys.iter().map(|k| -k).collect();
            keys.extend(opposite);
            let codes = codes_of(&keys, dim, bits, false);
            let (_, loss, _) = codes.grams().1.unwrap().bounds();
            assert!(loss < 1e-3, "{loss}");
            let mut query: Vec<f64> =
                random(dim, seed).iter().map(|&q| f64::from(q) * 1e-4).collect();
            // With numbers that are what they are, only roundings are left: two more.
            let mut whole: Vec<f64> = query.iter().map(|q| (q * 1e8).round()).collect();
            whole[0] = 32_639.0;
            let prepared = codes.prepare(Simd::current().unwrap(), &whole, 1.0);
            assert!(prepared.fine_error.unwrap().rho > 1.3 * prepared.code_error.rho);
            query[0] = 1.0;
            for scale in [1.0, 0.1, -0.3] {
                worst = worst.max(share(&codes, &keys, &query, scale)[0]);
            }
        }
        assert!(worst > 0.1, "{worst}");
    }

    #[test]
    fn what_moving_keys_loses_beside_both_planes() {
        for seed in 1..40 {
            let dim = [16, 64, 128][seed as usize % 3];
            let mut keys: Vec<f32> = random(30 * dim, seed).iter().map(|k| k * 1000.0).collect();
            keys.iter_mut().enumerate().for_each(|(i, k)| *k = *k / 3.0 + (i % dim) as f32 * 100.1);
            let query: Vec<f64> = random(dim, seed + 1).iter().map(|&q| q.into()).collect();
            for (bits, rotate) in [(4, false), (4, true), (8, false), (8, true)] {
                share(&codes_of(&keys, dim, bits, rotate), &keys, &query, 1e-3);
            }
        }
    }

    /// Keys of two heads that grow, shrink and are written, and what their index says of them.
    struct Kept {
        index: KeyIndex<'static>,
        heads: [Vec<f32>; 2],
    }

    impl Kept {
        fn len(&self) -> usize {
            self.heads[0].len() / DIM
        }

        fn with<R>(
            &mut self,
            heads: &[Vec<f32>],
            work: impl FnOnce(&mut KeyIndex<'static>, &Vectors<'_>) -> R,
        ) -> R {
            let (all, shape) = (heads.concat(), [2, heads[0].len() / DIM, DIM]);
            work(&mut self.index, &Vectors::new("keys", &all[..], &shape).unwrap())
        }

        fn grow(&mut self, count: usize, seed: u64) {
            let mut new = [random(count * DIM, seed), random(count * DIM, seed + 1)];
            new[1]
                .iter_mut()
                .take(DIM)
                .for_each(|entry| *entry *= if seed.is_multiple_of(3) { 50.0 } else { 1.0 });
            self.with(&new, KeyIndex::append).unwrap();
            self.heads.iter_mut().zip(&new).for_each(|(head, new)| head.extend(new));
        }

        fn judge(&self) {
            let query: Vec<f64> = random(DIM, 5).iter().map(|&q| (3.0 * q).into()).collect();
            assert_eq!(self.index.len(), self.len());
            for (head, keys) in self.heads.iter().enumerate() {
                // Nothing is left of keys that went.
                let low = self.index.head(head).save().low.into_owned();
                let row = low.len() / self.len().next_multiple_of(LANES);
                assert!(low[self.len() * row..].iter().all(|byte| *byte == 0));
                share(self.index.head(head), keys, &query, 0.7);
            }
        }
    }

    #[test]
    fn whatever_happens_to_keys_their_low_codes_are_theirs() {
        for (bits, first) in [(12, 50), (16, 50), (12, 3000), (16, 300)] {
            let heads = [random(first * DIM, 1), random(first * DIM, 2)];
            let (all, shape) = (heads.concat(), [2, first, DIM]);
            let keys = Vectors::new("keys", &all[..], &shape).unwrap();
            let index = KeyIndex::with_bits(&keys, bits, &IndexOptions::new()).unwrap();
            let mut kept = Kept { index, heads };
            kept.judge();
            for round in 0..12u64 {
                match round % 4 {
                    0 => kept.grow([1, 3, 700][round as usize / 4], round),
                    1 => {
                        let len = kept.len() - [1, 9, 20][round as usize / 4];
                        let heads = kept.heads.clone();
                        kept.with(&heads, |index, keys| index.truncate(len, keys)).unwrap();
                        kept.heads.iter_mut().for_each(|head| head.truncate(len * DIM));
                    }
                    2 => {
                        let gone = [vec![2, 17, 18, 33], vec![0, 1, 30, 31]];
                        let heads = kept.heads.clone();
                        let lists = gone.each_ref().map(|list| &list[..]);
                        kept.with(&heads, |index, keys| index.evict(&lists, keys)).unwrap();
                        for (head, gone) in kept.heads.iter_mut().zip(&gone) {
                            let stays = |key: &usize| !gone.contains(&(*key as u32));
                            let rows = (0..head.len() / DIM).filter(stays);
                            *head =
                                rows.flat_map(|key| head[key * DIM..][..DIM].to_vec()).collect();
                        }
                    }
                    _ => {
                        // A copy that grows apart changes nothing.
                        let mut other =
                            Kept { index: kept.index.clone(), heads: kept.heads.clone() };
                        other.grow(20, 9);
                        other.judge();
                    }
                }
                kept.judge();
            }
        }
    }

    #[test]
    fn parts_are_as_good_as_all_at_once() {
        for bits in [8, 12, 16] {
            let data = random(700 * DIM, 3);
            let build = |ends: &[usize]| {
                let options = IndexOptions::new().threads(2);
                let shape = [ends[0], DIM];
                let first = Vectors::new("keys", &data[..ends[0] * DIM], &shape).unwrap();
                let mut index = KeyIndex::with_bits(&first, bits, &options).unwrap();
                for ends in ends.windows(2) {
                    let shape = [ends[1] - ends[0], DIM];
                    let more = &data[ends[0] * DIM..ends[1] * DIM];
                    index.append(&Vectors::new("keys", more, &shape).unwrap()).unwrap();
                }
                index
            };
            let parts = [build(&[100, 700]), build(&[100, 101, 116, 117, 400, 700])];
            let [one, other] = parts.each_ref().map(|index| index.save().next().unwrap());
            assert!(
                (&one.lines, &one.scales, &one.radii)
                    == (&other.lines, &other.scales, &other.radii)
            );
            assert!(one.low == other.low && one.uncoded == other.uncoded && one.mean == other.mean);
            assert_eq!(one.low.is_empty(), bits == 8);
            let trace = |saved: &Saved<'_>| -> f64 { saved.low_gram.iter().step_by(33).sum() };
            assert!((trace(&one) / trace(&other) - 1.0).abs() < 0.01 || bits == 8);
        }
    }

    #[test]
    fn appends_that_fail_and_lent_indexes() {
        for bits in [12, 16] {
            let sizes = [(37, 3), (0, 5), (32, 40), (5, 700), (5, 5000), (4000, 1)];
            for (heads, (n, more)) in
                [1, 2].into_iter().flat_map(|heads| sizes.map(|size| (heads, size)))
            {
                let data = random(heads * (n + more) * DIM, 7);
                let (old, new) = data.split_at(heads * n * DIM);
                let keys = Vectors::new("keys", old, &[heads, n, DIM]).unwrap();
                let index = KeyIndex::with_bits(&keys, bits, &IndexOptions::new()).unwrap();
                let saved: Vec<Saved<'_>> = index.save().collect();
                let shape = [heads, n, DIM];
                let content = if bits == 12 { Content::Keys12 } else { Content::Keys16 };
                let mut lent =
                    KeyIndex::load_of(content, &shape, "float32", saved, Trust::Nothing).unwrap();
                let mut own = index.clone();
                assert!(lent == index && lent.bits() == bits);
                let mut bad = new.to_vec();
                *bad.last_mut().unwrap() = f32::NAN;
                let bad = Vectors::new("keys", &bad[..], &[heads, more, DIM]).unwrap();
                let good = Vectors::new("keys", new, &[heads, more, DIM]).unwrap();
                for _ in 0..2 {
                    assert!(lent.append(&bad).is_err() && own.append(&bad).is_err());
                    assert!(lent == index && own == index);
                }
                own.append(&good).unwrap();
                lent.append(&good).unwrap();
                assert!(lent == own && own != index);
                assert_eq!(lent.bytes(), own.bytes());
            }
        }
    }

    #[cfg(feature = "files")]
    #[test]
    fn files_of_both_planes() {
        for bits in [12, 16] {
            for (n, dim) in [(0, 3), (1, 1), (17, 20), (40, 8)] {
                let data = random(2 * n * dim, 8);
                let keys = Vectors::new("keys", &data[..], &[2, n, dim]).unwrap();
                let mut index = KeyIndex::with_bits(&keys, bits, &IndexOptions::new()).unwrap();
                index.append(&keys).unwrap();
                let mut file = Vec::new();
                index.write_to(&mut file).unwrap();
                assert_eq!(file.len(), index.file_bytes().unwrap());
                for read in [
                    KeyIndex::from_bytes(&file).unwrap(),
                    KeyIndex::from_trusted_bytes(&file).unwrap(),
                    KeyIndex::read_from(&file[..]).unwrap(),
                ] {
                    assert!(read == index && read.bits() == bits);
                    let mut again = Vec::new();
                    read.write_to(&mut again).unwrap();
                    assert!(again == file);
                }
                let step = (file.len() / 700).max(1);
                for at in (0..file.len()).step_by(step) {
                    let mut bytes = file.clone();
                    bytes[at] ^= 64;
                    assert!(KeyIndex::from_bytes(&bytes).is_err(), "{at}");
                    assert!(KeyIndex::read_from(&bytes[..]).is_err(), "{at}");
                    // This one takes more at its word.
                    if let Ok(index) = KeyIndex::from_trusted_bytes(&bytes) {
                        assert!(index.dim() == dim, "{at}");
                    }
                    assert!(KeyIndex::from_bytes(&file[..at]).is_err());
                    assert!(KeyIndex::from_trusted_bytes(&file[..at]).is_err());
                    assert!(KeyIndex::read_from(&file[..at]).is_err());
                }
                // As many bits as it does not have, in a name of the same length.
                let name = format!("of-{bits}-bits");
                let at = file.windows(name.len()).position(|part| part == name.as_bytes()).unwrap();
                file[at + 3..at + 5].copy_from_slice(if bits == 12 { b"16" } else { b"12" });
                assert!(n == 0 || KeyIndex::from_trusted_bytes(&file).is_err());
            }
        }
    }
}
