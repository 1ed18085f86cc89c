//! Searches over an index against exact scores: masses, sizes, and the true best keys.

use certk_rs::{IndexOptions, KeyIndex, Rule, Rung, SearchOptions, SearchResult, Status, Vectors};

use crate::exact::{Random, Real, flags, least_tail, product, ranked, reals, tail, weights};

struct Keys {
    keys: Vec<f32>,
    dim: usize,
}

impl Keys {
    fn normal(random: &mut Random, n: usize, dim: usize, size: f64) -> Self {
        let keys = random.normals(n * dim, size).iter().map(|&x| x as f32).collect();
        Keys { keys, dim }
    }

    fn len(&self) -> usize {
        self.keys.len() / self.dim
    }

    /// A query with the real scores of all keys.
    fn ask<'q>(&self, query: &'q [f32], scale: f64) -> Asked<'q> {
        let wide = reals(query);
        let keys = self.keys.chunks_exact(self.dim);
        let scores: Vec<Real> = keys.map(|key| product(scale, &wide, &reals(key))).collect();
        let weights = weights(&scores);
        Asked { query, scores, weights }
    }

    fn index(&self, rotate: Option<bool>) -> KeyIndex<'static> {
        // Built of some, then appended to.
        let first = self.len().div_ceil(2);
        let (old, new) = self.keys.split_at(first * self.dim);
        let old = Vectors::new("k", old, &[first, self.dim]).unwrap();
        let options = IndexOptions::new().rotate(rotate).threads(1);
        let mut index = KeyIndex::build(&old, &options).unwrap();
        let new = Vectors::new("k", new, &[self.len() - first, self.dim]).unwrap();
        index.append(&new).unwrap();
        index
    }

    /// Searches for one query, also without the keys, if they are not needed.
    fn search(
        &self,
        index: &KeyIndex<'_>,
        asked: &Asked<'_>,
        eps: &[f64],
        options: &SearchOptions<'_>,
    ) -> SearchResult {
        let q = Vectors::new("q", asked.query, &[1, self.dim]).unwrap();
        let k = Vectors::new("k", &self.keys[..], &[self.len(), self.dim]).unwrap();
        if options.rule == Rule::Mass
            && let Ok(found) = index.search(&q, None, eps, options)
        {
            // What codes alone decide is as true.
            asked.judge(&found, eps, options);
        }
        index.search(&q, Some(&k), eps, options).unwrap()
    }
}

/// A query, and what is true of it.
struct Asked<'q> {
    query: &'q [f32],
    scores: Vec<Real>,
    weights: Vec<Real>,
}

impl Asked<'_> {
    /// Judges an answer; whether it was proven to be as small as any.
    fn judge(&self, found: &SearchResult, eps: &[f64], options: &SearchOptions<'_>) -> bool {
        let (n, weights) = (self.scores.len(), &self.weights);
        let set = &found.selection;
        let kept = flags(n, set.row(0).iter().map(|&i| i as usize));
        let lost = tail(weights, |i| kept[i]);
        let (lower, upper) = (set.tail_mass_lower[0], set.tail_mass_upper[0]);
        assert!(lost.at_most(upper), "{options:?} {eps:?}: {upper} < {}", lost.down());
        assert!(lost.at_least(lower), "{options:?} {eps:?}: {lower} > {}", lost.down());
        let certified = set.status[0] == Status::Certified;
        let eps = eps.first().copied().unwrap_or(1.0);
        assert!(!certified || upper <= eps);
        let k = set.k[0] as usize;
        assert_eq!(k, set.row(0).len());
        if let Rule::TopK(most) = options.rule
            && certified
        {
            // Compared as they are: weights far apart may both be 0.
            let best = flags(n, ranked(&self.scores).into_iter().take(most));
            assert!(kept == best, "{options:?}: not the best {most}");
        }
        if set.minimal[0] && k > 1 {
            let fewer = least_tail(weights, k - 1);
            assert!(!fewer.at_most(eps), "{options:?} {eps}: {} of {n} would do", k - 1);
            return true;
        }
        false
    }
}

#[test]
fn every_rule_over_codes() {
    let mut random = Random::new(41);
    let (mut proven, mut few) = (0, 0);
    for round in 0..48 {
        let (n, dim) = ([3, 20, 70, 200][round % 4], [1, 2, 5, 24][round / 4 % 4]);
        let mut keys = Keys::normal(&mut random, n, dim, 1.0);
        match round % 3 {
            // Clusters.
            1 => {
                for run in keys.keys.chunks_mut(16 * dim) {
                    let to: Vec<f32> = run[..dim].to_vec();
                    for key in run.chunks_mut(dim) {
                        key.iter_mut().zip(&to).for_each(|(k, to)| *k = to + 0.05 * *k);
                    }
                }
            }
            // A few that lose much, and have no code.
            2 => keys.keys[..dim].iter_mut().for_each(|k| *k *= 50.0),
            _ => {}
        }
        let index = keys.index([None, Some(true), Some(false)][round % 3]);
        let size = [0.5, 2.0, 6.0][round / 2 % 3];
        let query: Vec<f32> = random.normals(dim, size).iter().map(|&x| x as f32).collect();
        for scale in [1.0 / (dim as f64).sqrt(), -0.7] {
            let asked = keys.ask(&query, scale);
            for eps in [0.6, 0.3, 0.05, 1e-3] {
                let rules = [Rule::Mass, Rule::Gap, Rule::TopK(1 + random.below(n))];
                for (rule, most) in
                    rules.into_iter().flat_map(|rule| [None, Some(5), Some(40)].map(|m| (rule, m)))
                {
                    let options =
                        SearchOptions::new().scale(scale).rule(rule).max_scored(most).threads(1);
                    let found = keys.search(&index, &asked, &[eps], &options);
                    few += usize::from(found.rung[0] != Rung::Dense);
                    proven += usize::from(asked.judge(&found, &[eps], &options));
                }
            }
        }
    }
    assert!(proven > 50 && few > 150, "{proven} {few}");
}

/// Rows of few keys and scores so far apart that codes are off by whole nats: their bounds have little to spare.
#[test]
fn coarse_codes_of_a_few_keys() {
    let mut random = Random::new(42);
    for round in 0..1500 {
        let (n, dim) = (2 + random.below(16), 1 + random.below(6));
        let keys = Keys::normal(&mut random, n, dim, 1.0);
        let index = keys.index(Some(round % 2 == 0));
        let size = 10f64.powf(3.0 * random.uniform());
        let query: Vec<f32> = random.normals(dim, size).iter().map(|&x| x as f32).collect();
        let eps = [0.7, 0.4, 0.1, 1e-3, 1e-9][round % 5];
        let scale = [1.0, -1.0][round / 2 % 2];
        let asked = keys.ask(&query, scale);
        let most = (round % 3 == 0).then(|| random.below(4));
        for rule in [Rule::Mass, Rule::TopK(1 + random.below(n))] {
            let options = SearchOptions::new().scale(scale).rule(rule).max_scored(most).threads(1);
            let found = keys.search(&index, &asked, &[eps], &options);
            asked.judge(&found, &[eps], &options);
        }
    }
}

/// Products that are equal or nearly so, summed in different orders: rounding must not decide which keys are best.
#[test]
fn the_true_best_where_rounding_hides_them() {
    let mut random = Random::new(44);
    let mut hidden = 0;
    for round in 0..200 {
        let (n, dim) = (20 + random.below(60), 3 + random.below(40));
        // One vector whose entries differ much in size, in different orders, against a query of equal entries.
        let entries: Vec<f32> = (0..dim)
            .map(|_| (random.normal() * 10f64.powf(random.uniform() * 5.0)) as f32)
            .collect();
        let mut keys = Vec::with_capacity(n * dim);
        for _ in 0..n {
            let mut key = entries.clone();
            for i in (1..dim).rev() {
                key.swap(i, random.below(i + 1));
            }
            // Some are larger or smaller by the last digit of a small entry.
            if random.below(3) == 0 {
                let i = (0..dim).min_by(|&a, &b| key[a].abs().total_cmp(&key[b].abs())).unwrap();
                key[i] = if random.below(2) == 0 { key[i].next_up() } else { key[i].next_down() };
            }
            keys.extend(key);
        }
        let keys = Keys { keys, dim };
        let query = vec![[1.0f32, 0.3][round % 2]; dim];
        let scale = [0.1, -0.1, 1.0][round % 3];
        let asked = keys.ask(&query, scale);
        let computed: Vec<f64> = keys
            .keys
            .chunks(dim)
            .map(|key| key.iter().zip(&query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum())
            .collect();
        let k = 1 + random.below(n - 1);
        let mut by_sums: Vec<usize> = (0..n).collect();
        by_sums.sort_by(|&a, &b| {
            (scale * computed[b]).total_cmp(&(scale * computed[a])).then(a.cmp(&b))
        });
        let best = flags(n, ranked(&asked.scores).into_iter().take(k));
        hidden += usize::from(by_sums[..k].iter().any(|&i| !best[i]));
        let index = keys.index(None);
        let options = SearchOptions::new().scale(scale).rule(Rule::TopK(k));
        let found = keys.search(&index, &asked, &[], &options);
        assert_eq!(found.selection.status[0], Status::Certified);
        asked.judge(&found, &[], &options);
    }
    assert!(hidden > 50, "{hidden}");
}

/// Budgets next to what the best keys lose, scores of 1e9 that f64 hardly tells apart, and a scale of 0.
#[test]
fn budgets_at_the_edge_and_large_scores() {
    let mut random = Random::new(45);
    for round in 0..60 {
        let (n, dim) = (10 + random.below(40), 2 + random.below(6));
        let mut keys = Keys::normal(&mut random, n, dim, 1.0);
        let mut query: Vec<f32> = random.normals(dim, 1.0).iter().map(|&x| x as f32).collect();
        if round % 2 == 1 {
            // Scores of 1e9 that differ by a few nats.
            query[0] = 3e4;
            query[1] = -3e4;
            for key in keys.keys.chunks_mut(dim) {
                (key[0], key[1]) = (3e4, 3e4 + (random.normal() / 16.0) as f32);
            }
        }
        let scale = [1.0, 0.0, -1.0][round % 3];
        let asked = keys.ask(&query, scale);
        let lost = least_tail(&asked.weights, 1 + random.below(n - 1));
        let index = keys.index(None);
        let near = lost.down();
        for eps in [near.next_down(), near, lost.up(), near * (1.0 + 1e-9), near * (1.0 - 1e-7)] {
            // Without a budget all keys stay, also those that weigh nothing here.
            if eps <= 0.0 || eps >= 1.0 {
                continue;
            }
            for rule in [Rule::Mass, Rule::Gap] {
                let options = SearchOptions::new().scale(scale).rule(rule).threads(1);
                let found = keys.search(&index, &asked, &[eps], &options);
                asked.judge(&found, &[eps], &options);
            }
        }
    }
}

/// Scores of 1e9, and codes so coarse that all near keys are scored, which leaves nothing open: what is dropped of those is
/// known as well as the products, and no better.
#[test]
fn masses_of_large_scores_that_were_scored() {
    let mut random = Random::new(47);
    let mut rescored = 0;
    for _ in 0..300 {
        let (n, dim) = (30 + random.below(30), 5);
        let size = 1e9 * (1.0 + random.uniform() as f32);
        let mut keys = Vec::new();
        for i in 0..n {
            // Steps between codes follow the second entry, which the query does not see.
            let wide = 100.0 * [1.0, -1.0][i % 2] * (1.0 + random.uniform());
            let away = if i % 5 == 0 { 0.0 } else { 300.0 };
            let rest = random.normals(3, 0.5);
            keys.extend([size, wide as f32]);
            keys.extend(rest.iter().map(|&x| (x - away) as f32));
        }
        let keys = Keys { keys, dim };
        let query = [1.0 + random.uniform() as f32, 0.0, 2.0, 1.7, 1.3];
        let asked = keys.ask(&query, 1.0);
        let index = keys.index(Some(false));
        for eps in [0.5, 0.2, 0.05] {
            let options = SearchOptions::new().scale(1.0).threads(1);
            let found = keys.search(&index, &asked, &[eps], &options);
            asked.judge(&found, &[eps], &options);
            let scored = found.scored[0] > found.selection.k[0] && found.rung[0] == Rung::Rescored;
            rescored += usize::from(scored);
        }
    }
    assert!(rescored > 100, "{rescored}");
}
