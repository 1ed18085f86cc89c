//! Snapshots of an index that grows: each goes on to answer as it did, with the bits of an index that nobody copied.

use std::sync::mpsc::channel;

use certk_rs::{Context, IndexOptions, KeyIndex, SearchOptions, SearchResult, Vectors};

use crate::exact::{Random, Real, flags, product, reals, tail, weights};

const DIM: usize = 24;

fn narrow(numbers: Vec<f64>) -> Vec<f32> {
    numbers.into_iter().map(|number| number as f32).collect()
}

fn vectors<'a>(data: &'a [f32], shape: &'a [usize]) -> Vectors<'a> {
    Vectors::new("keys", data, shape).unwrap()
}

/// Checks an index of two heads against its keys. Returns its answer to one query for each head.
fn ask(index: &KeyIndex<'_>, heads: &[Vec<f32>; 2], queries: &[f32]) -> SearchResult {
    let n = index.len();
    let keys: Vec<f32> = heads.iter().flat_map(|head| &head[..n * DIM]).copied().collect();
    let (shape, rows) = ([2, n, DIM], [2, 1, DIM]);
    let keys = vectors(&keys, &shape);
    index.check(&keys).unwrap();
    let options = SearchOptions::new().threads(1);
    index.search(&vectors(queries, &rows), Some(&keys), &[0.05], &options).unwrap()
}

#[test]
fn snapshots_stay_what_they_were() {
    let mut random = Random::new(71);
    for round in 0..12 {
        let queries = narrow(random.normals(2 * DIM, 2.0));
        let mut heads = [Vec::new(), Vec::new()];
        let mut history = Vec::new();
        let mut index: Option<KeyIndex<'static>> = None;
        let mut snapshots: Vec<(KeyIndex<'static>, SearchResult, usize)> = Vec::new();
        for step in 0..30 {
            // Single keys, parts of groups, and more than a chunk that is filled up holds.
            let more = [1, 1, 7, 16, 40, 300, 2500][random.below(if step == 20 { 7 } else { 6 })];
            let size = [1.0, 1.0, 30.0][random.below(3)];
            let new: Vec<Vec<f32>> =
                (0..2).map(|_| narrow(random.normals(more * DIM, size))).collect();
            let both = new.concat();
            let shape = [2, more, DIM];
            let keys = vectors(&both, &shape);
            if let Some(index) = &mut index {
                Context::new().threads(1 + round % 2).run(|| index.append(&keys)).unwrap();
            } else {
                index = Some(KeyIndex::build(&keys, &IndexOptions::new().threads(1)).unwrap());
            }
            heads.iter_mut().zip(new).for_each(|(head, new)| head.extend(new));
            history.push(both);
            if random.below(2) == 0 {
                let snapshot = index.as_ref().unwrap().snapshot();
                let said = ask(&snapshot, &heads, &queries);
                snapshots.push((snapshot, said, history.len()));
            }
        }
        for (snapshot, said, steps) in &snapshots {
            // The same history, copied by nobody.
            let mut alone: Option<KeyIndex<'static>> = None;
            for both in &history[..*steps] {
                let shape = [2, both.len() / 2 / DIM, DIM];
                let keys = vectors(both, &shape);
                match &mut alone {
                    Some(index) => index.append(&keys).unwrap(),
                    None => alone = Some(KeyIndex::build(&keys, &IndexOptions::new()).unwrap()),
                }
            }
            assert!(alone.unwrap() == *snapshot);
            assert_eq!(ask(snapshot, &heads, &queries), *said);
            let n = snapshot.len();
            for (row, head) in heads.iter().enumerate() {
                let query = reals(&queries[row * DIM..][..DIM]);
                let scale = 1.0 / (DIM as f64).sqrt();
                let keys = head.chunks_exact(DIM).take(n);
                let scores: Vec<Real> =
                    keys.map(|key| product(scale, &query, &reals(key))).collect();
                let kept = flags(n, said.selection.row(row).iter().map(|&key| key as usize));
                let lost = tail(&weights(&scores), |key| kept[key]);
                assert!(lost.at_most(said.selection.tail_mass_upper[row]));
                assert!(lost.at_least(said.selection.tail_mass_lower[row]));
            }
        }
    }
}

/// A writer appends while readers on other threads search what they were given.
#[test]
fn readers_keep_what_a_writer_goes_on_from() {
    let mut random = Random::new(72);
    let n = 6000;
    let heads = [narrow(random.normals(n * DIM, 1.0)), narrow(random.normals(n * DIM, 1.0))];
    let queries = narrow(random.normals(2 * DIM, 2.0));
    let part = |from: usize, to: usize| -> Vec<f32> {
        heads.iter().flat_map(|head| &head[from * DIM..to * DIM]).copied().collect()
    };
    let first = part(0, 5000);
    let mut index =
        KeyIndex::build(&vectors(&first, &[2, 5000, DIM]), &IndexOptions::new()).unwrap();
    let expected = ask(&index, &heads, &queries);
    std::thread::scope(|scope| {
        let (send, receive) = channel::<KeyIndex<'static>>();
        let reader = scope.spawn(|| {
            let mut seen = 0;
            for snapshot in receive {
                let said = ask(&snapshot, &heads, &queries);
                assert!(said.selection.tail_mass_upper.iter().all(|upper| *upper <= 0.05));
                assert!(snapshot.len() > 5000 || said == expected);
                seen += 1;
            }
            seen
        });
        for at in (5000..n).step_by(20) {
            send.send(index.snapshot()).unwrap();
            let new = part(at, at + 20);
            index.append(&vectors(&new, &[2, 20, DIM])).unwrap();
        }
        drop(send);
        assert_eq!(reader.join().unwrap(), 50);
    });
    assert_eq!(index.len(), n);
}
