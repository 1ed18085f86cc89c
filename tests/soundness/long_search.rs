//! Searches over thousands of keys, for several rows together and for one: masses in f64, and how few keys are kept.

use certk_rs::{IndexOptions, KeyIndex, SearchOptions, Vectors};

use crate::exact::Random;

#[test]
fn few_keys_are_kept_and_no_more_is_lost_than_is_said() {
    let mut random = Random::new(48);
    for (n, dim, kind, sigma) in [
        (1100, 64, 0, 6.0),
        (2000, 40, 1, 5.0),
        (1500, 128, 2, 20.0),
        (1300, 64, 3, 4.0),
        (4096, 64, 0, 9.0),
        (1024, 16, 0, 2.0),
        (20_000, 128, 0, 3.0),
        (1000, 20, 0, 5.0),
        (4096, 64, 0, 0.5),
    ] {
        let mut keys: Vec<f32> = random.normals(n * dim, 1.0).iter().map(|&x| x as f32).collect();
        for (i, key) in keys.chunks_exact_mut(dim).enumerate() {
            match kind {
                // Some have no code, all lie together, or some lie together.
                1 if i % 97 == 5 => key.iter_mut().for_each(|entry| *entry *= 40.0),
                2 => key.iter_mut().for_each(|entry| *entry = 3.0 + *entry / 4.0),
                3 if i % 3 == 0 => key[0] += 9.0,
                _ => {}
            }
        }
        let queries: Vec<f32> = random.normals(4 * dim, 1.0).iter().map(|&x| x as f32).collect();
        let k = Vectors::new("k", &keys[..], &[n, dim]).unwrap();
        let index = KeyIndex::build(&k, &IndexOptions::new()).unwrap();
        let scale = sigma / (dim as f64).sqrt();
        let lengths = [n, n - 3, n - n % 16, 512.max(n / 2 + 1)].map(|length| length as i64);
        for (rows, eps) in
            [4, 1].into_iter().flat_map(|m| [0.1, 0.01, 1e-3, 1e-6].map(|eps| (m, eps)))
        {
            let q = Vectors::new("q", &queries[..rows * dim], &[rows, dim]).unwrap();
            let options = SearchOptions::new().scale(scale).lengths(&lengths[..rows]).threads(1);
            let found = index.search(&q, Some(&k), &[eps], &options).unwrap().selection;
            for (row, query) in queries.chunks_exact(dim).take(rows).enumerate() {
                let product = |key: &[f32]| -> f64 {
                    key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
                };
                let seen = keys.chunks_exact(dim).take(lengths[row] as usize);
                let scores: Vec<f64> = seen.map(|key| scale * product(key)).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let mut weights: Vec<f64> = scores.iter().map(|x| (x - top).exp()).collect();
                let whole: f64 = weights.iter().sum();
                let (mut sorted, mut tail) = (weights.clone(), 0.0);
                found.row(row).iter().for_each(|&key| weights[key as usize] = 0.0);
                let lost = weights.iter().sum::<f64>() / whole;
                let (lower, upper) = (found.tail_mass_lower[row], found.tail_mass_upper[row]);
                let at = format!("{n} {dim} {kind} {eps} {row} of {rows}: {lower} {lost} {upper}");
                assert!(lost >= lower * (1.0 - 1e-9) && lost <= upper * (1.0 + 1e-9), "{at}");
                assert!(upper <= eps, "{at}");
                sorted.sort_by(f64::total_cmp);
                let mut fits = |weight: &&f64| {
                    tail += **weight;
                    tail <= eps * whole
                };
                let least = scores.len() - sorted.iter().take_while(&mut fits).count();
                let most = least + least / 10 + 9;
                assert!(found.row(row).len() <= most, "{at}: {} > {most}", found.row(row).len());
            }
        }
    }
}
