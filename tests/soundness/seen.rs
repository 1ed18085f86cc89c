//! Searches of rows that see a part of the keys, against the exact softmax over that part.

use certk_rs::{IndexOptions, KeyIndex, Over, Rule, SearchOptions, SearchResult, Status, Vectors};

use crate::exact::{Random, Real, flags, least_tail, product, ranked, reals, tail, weights};

/// Keys and queries of a search, and the keys that each row sees.
struct Asked<'a> {
    keys: &'a [f32],
    queries: &'a [f32],
    dim: usize,
    scale: f64,
    seen: Vec<Vec<usize>>,
}

impl Asked<'_> {
    /// Judges each row; how many kept fewer keys than they see.
    fn judge(&self, found: &SearchResult, eps: &[f64], options: &SearchOptions<'_>) -> usize {
        let set = &found.selection;
        let mut fewer = 0;
        for (row, seen) in self.seen.iter().enumerate() {
            let query = reals(&self.queries[row * self.dim..][..self.dim]);
            let score = |&key: &usize| {
                product(self.scale, &query, &reals(&self.keys[key * self.dim..][..self.dim]))
            };
            let scores: Vec<Real> = seen.iter().map(score).collect();
            let weights = weights(&scores);
            let place = |key: &u32| seen.binary_search(&(*key as usize));
            let places: Vec<usize> =
                set.row(row).iter().map(|key| place(key).expect("kept, but not seen")).collect();
            let (lower, upper) = (set.tail_mass_lower[row], set.tail_mass_upper[row]);
            assert_eq!(set.k[row] as usize, places.len());
            assert!(found.scored[row] as usize <= seen.len());
            assert!(found.scored[row] as usize <= options.max_scored.unwrap_or(usize::MAX));
            if seen.is_empty() {
                assert_eq!((set.status[row], lower, upper), (Status::Empty, 0.0, 0.0));
                assert!(set.minimal[row]);
                continue;
            }
            let kept = flags(seen.len(), places.iter().copied());
            let lost = tail(&weights, |i| kept[i]);
            assert!(lost.at_most(upper), "{options:?} row {row}: {upper} < {}", lost.down());
            assert!(lost.at_least(lower), "{options:?} row {row}: {lower} > {}", lost.down());
            let eps = eps[row % eps.len()];
            let certified = set.status[row] == Status::Certified;
            assert!(!certified || upper <= eps);
            if let Rule::TopK(most) = options.rule
                && certified
            {
                assert!(kept == flags(seen.len(), ranked(&scores).into_iter().take(most)));
            }
            if options.max_scored.is_none() && !matches!(options.rule, Rule::TopK(_)) {
                assert!(certified, "{options:?} row {row}: {upper} > {eps}");
            }
            if set.minimal[row] && places.len() > 1 {
                assert!(
                    !least_tail(&weights, places.len() - 1).at_most(eps),
                    "{options:?} row {row}"
                );
            }
            fewer += usize::from(places.len() < seen.len());
        }
        fewer
    }
}

#[test]
fn every_rule_over_what_rows_see() {
    let mut random = Random::new(61);
    let (mut fewer, mut empty) = ([0; 9], 0);
    for round in 0..36 {
        let (n, dim, m) = ([5, 40, 90, 170][round % 4], [2, 5, 24][round % 3], 1 + random.below(6));
        let mut keys: Vec<f32> = random.normals(n * dim, 1.0).iter().map(|&x| x as f32).collect();
        if round % 2 == 1 {
            // Clusters, whose cells are tight, and a key that has no code.
            for run in keys.chunks_mut(16 * dim) {
                let to: Vec<f32> = run[..dim].to_vec();
                for key in run.chunks_mut(dim) {
                    key.iter_mut().zip(&to).for_each(|(k, to)| *k = to + 0.05 * *k);
                }
            }
            let far = random.below(n);
            keys[far * dim..][..dim].iter_mut().for_each(|k| *k *= 60.0);
        }
        let queries: Vec<f32> = random.normals(m * dim, 1.5).iter().map(|&x| x as f32).collect();
        let k = Vectors::new("k", &keys[..], &[n, dim]).unwrap();
        let q = Vectors::new("q", &queries[..], &[m, dim]).unwrap();
        let index = KeyIndex::build(&k, &IndexOptions::new().threads(1)).unwrap();
        let causal = round % 3 == 0;
        let lengths: Option<Vec<i64>> =
            (round % 4 < 2).then(|| (0..m).map(|_| random.below(n + 1) as i64).collect());
        // Sparse, dense, and runs of sixteen that are hidden as a whole; any byte but 0 is seen.
        let share = [0.05, 0.5, 0.9][round / 2 % 3];
        let mut mask: Vec<u8> = (0..m * n)
            .map(|_| if random.uniform() < share { 1 + random.below(255) as u8 } else { 0 })
            .collect();
        mask.chunks_mut(n).for_each(|row| row[..n.min(16)].fill(0));
        let (masked, strides) = (round % 5 != 0, [n]);
        let seen: Vec<Vec<usize>> = (0..m)
            .map(|row| {
                let length = lengths.as_ref().map_or(n, |lengths| lengths[row] as usize);
                let limit = if causal { (row + 1 + n).saturating_sub(m) } else { n };
                (0..length.min(limit)).filter(|key| !masked || mask[row * n + key] != 0).collect()
            })
            .collect();
        empty += seen.iter().filter(|seen| seen.is_empty()).count();
        let scale = [0.8, -0.5][round / 3 % 2];
        let asked = Asked { keys: &keys, queries: &queries, dim, scale, seen };
        let eps: Vec<f64> = (0..m).map(|row| [0.4, 0.05, 1e-3, 0.0][row % 4]).collect();
        let rules = [Rule::Mass, Rule::Gap, Rule::TopK(1 + random.below(n))];
        for (o, over) in [Over::Codes, Over::Cells, Over::Both].into_iter().enumerate() {
            for (r, rule) in rules.into_iter().enumerate() {
                for max_scored in [None, Some(random.below(n)), Some(3)] {
                    let mut options = SearchOptions::new()
                        .scale(scale)
                        .rule(rule)
                        .over(over)
                        .max_scored(max_scored)
                        .causal(causal)
                        .lengths(lengths.as_deref())
                        .threads(1);
                    if masked {
                        options = options.mask(&mask, &strides);
                    }
                    let found = index.search(&q, Some(&k), &eps, &options).unwrap();
                    fewer[o * 3 + r] += asked.judge(&found, &eps, &options);
                    if (over, rule, max_scored) == (Over::Codes, Rule::Mass, None)
                        && let Ok(found) = index.search(&q, None, &eps, &options)
                    {
                        asked.judge(&found, &eps, &options);
                    }
                }
            }
        }
    }
    assert!(fewer.iter().all(|&count| count > 40) && empty > 5, "{fewer:?} {empty}");
}

/// Keys that a row does not see have no part in its answer, even one that would outweigh all others.
#[test]
fn hidden_keys_change_nothing() {
    let mut random = Random::new(62);
    let (n, dim) = (200, 16);
    let mut keys: Vec<f32> = random.normals(n * dim, 1.0).iter().map(|&x| x as f32).collect();
    let query: Vec<f32> = random.normals(dim, 2.0).iter().map(|&x| x as f32).collect();
    // One key that is seen by none and best by far.
    let hidden = 77;
    keys[hidden * dim..][..dim].copy_from_slice(&query);
    let mut mask = vec![1; n];
    mask[hidden] = 0;
    let seen = vec![(0..n).filter(|&key| key != hidden).collect()];
    let asked = Asked { keys: &keys, queries: &query, dim, scale: 1.0, seen };
    let k = Vectors::new("k", &keys[..], &[n, dim]).unwrap();
    let q = Vectors::new("q", &query[..], &[1, dim]).unwrap();
    let index = KeyIndex::build(&k, &IndexOptions::new()).unwrap();
    for over in [Over::Codes, Over::Cells, Over::Both] {
        for rule in [Rule::Mass, Rule::Gap, Rule::TopK(5)] {
            let options = SearchOptions::new().scale(1.0).rule(rule).over(over).mask(&mask, &[0]);
            let found = index.search(&q, Some(&k), &[0.05], &options).unwrap();
            asked.judge(&found, &[0.05], &options);
        }
    }
}
