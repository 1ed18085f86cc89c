//! Indexes that grow, shrink, are evicted from, copied and stored, in any order: what they say of their keys is true, and about as
//! tight as what an index says that is built of the same keys at once.

use std::sync::mpsc::channel;

use certk_rs::{
    Context, IndexOptions, KeyIndex, RecallOptions, SearchOptions, SearchResult, Vectors,
};

use crate::exact::{Random, Real, flags, product, reals, tail, weights};

const DIM: usize = 12;
/// Said in every call: the scale of its own is rounded otherwise than `1 / sqrt(DIM)` here.
const SCALE: f64 = 0.3;

fn narrow(numbers: Vec<f64>) -> Vec<f32> {
    numbers.into_iter().map(|number| number as f32).collect()
}

fn vectors<'a>(data: &'a [f32], shape: &'a [usize]) -> Vectors<'a> {
    Vectors::new("keys", data, shape).unwrap()
}

/// An index, another of the same history that nobody copies, and the keys of each of its heads.
struct Kept {
    index: KeyIndex<'static>,
    alone: KeyIndex<'static>,
    heads: [Vec<f32>; 2],
}

impl Kept {
    fn new(heads: &[Vec<f32>]) -> Self {
        let shape = [2, heads[0].len() / DIM, DIM];
        let options = IndexOptions::new().threads(1);
        let index = KeyIndex::build(&vectors(&heads.concat(), &shape), &options).unwrap();
        Kept { alone: index.clone(), index, heads: [heads[0].clone(), heads[1].clone()] }
    }

    fn len(&self) -> usize {
        self.heads[0].len() / DIM
    }

    fn all(&self) -> Vec<f32> {
        self.heads.concat()
    }

    fn append(&mut self, new: &[Vec<f32>], threads: usize) {
        let both = new.concat();
        let shape = [2, both.len() / 2 / DIM, DIM];
        let context = Context::new().threads(threads);
        context.run(|| self.index.append(&vectors(&both, &shape))).unwrap();
        self.alone.append(&vectors(&both, &shape)).unwrap();
        self.heads.iter_mut().zip(new).for_each(|(head, new)| head.extend(new));
    }

    fn truncate(&mut self, len: usize) {
        let (all, shape) = (self.all(), [2, self.len(), DIM]);
        self.index.truncate(len, &vectors(&all, &shape)).unwrap();
        self.alone.truncate(len, &vectors(&all, &shape)).unwrap();
        self.heads.iter_mut().for_each(|head| head.truncate(len * DIM));
    }

    /// The same positions of both heads, or others of each.
    fn evict(&mut self, gone: &[Vec<u32>]) {
        let (all, shape) = (self.all(), [2, self.len(), DIM]);
        let lists: Vec<&[u32]> = gone.iter().map(Vec::as_slice).collect();
        self.index.evict(&lists, &vectors(&all, &shape)).unwrap();
        self.alone.evict(&lists, &vectors(&all, &shape)).unwrap();
        for (head, keys) in self.heads.iter_mut().enumerate() {
            let gone = &gone[head.min(gone.len() - 1)];
            let stays = |(i, _): &(usize, &[f32])| !gone.contains(&(*i as u32));
            *keys = keys
                .chunks(DIM)
                .enumerate()
                .filter(stays)
                .flat_map(|(_, key)| key.to_vec())
                .collect();
        }
    }

    /// Checks that the answers of the index are true of exactly these keys.
    fn judge(&self, queries: &[f32]) {
        let (all, n) = (self.all(), self.len());
        let (shape, rows) = ([2, n, DIM], [2, 1, DIM]);
        let keys = vectors(&all, &shape);
        assert_eq!(self.index.len(), n);
        self.index.check(&keys).unwrap();
        let queries_of = vectors(queries, &rows);
        let options = SearchOptions::new().scale(SCALE).threads(1);
        let found = self.index.search(&queries_of, Some(&keys), &[0.05], &options).unwrap();
        let masses = self
            .index
            .log_mass(&queries_of, &RecallOptions::new().scale(SCALE).threads(1))
            .unwrap();
        for (row, head) in self.heads.iter().enumerate() {
            let query = reals(&queries[row * DIM..][..DIM]);
            let scores: Vec<Real> =
                head.chunks_exact(DIM).map(|key| product(SCALE, &query, &reals(key))).collect();
            let kept = flags(n, found.selection.row(row).iter().map(|&key| key as usize));
            let lost = tail(&weights(&scores), |key| kept[key]);
            let set = &found.selection;
            let (lower, upper) = (set.tail_mass_lower[row], set.tail_mass_upper[row]);
            assert!(lost.at_most(upper), "{row} of {n}: {upper} < {}", lost.down());
            assert!(lost.at_least(lower), "{row} of {n}: {lower} > {}", lost.down());
            let exact = log_mass(head, &queries[row * DIM..][..DIM]);
            let slack = 1e-9 * exact.abs().max(1.0);
            assert!(masses[row].lower <= exact + slack && exact - slack <= masses[row].upper);
        }
    }

    /// Returns the widths of the intervals of the log-mass that the codes alone give.
    fn widths(index: &KeyIndex<'_>, queries: &[f32]) -> Vec<f64> {
        let rows = [2, queries.len() / 2 / DIM, DIM];
        let masses = index.log_mass(&vectors(queries, &rows), &RecallOptions::new()).unwrap();
        masses.iter().map(|mass| mass.upper - mass.lower).collect()
    }
}

/// In f64, whose roundings are far below the slack that is given.
fn log_mass(keys: &[f32], query: &[f32]) -> f64 {
    let score = |key: &[f32]| {
        key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>() * SCALE
    };
    let scores: Vec<f64> = keys.chunks_exact(DIM).map(score).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    top + scores.iter().map(|score| (score - top).exp()).sum::<f64>().ln()
}

#[test]
fn whatever_happens_to_an_index() {
    let mut random = Random::new(81);
    for round in 0..16 {
        let queries = narrow(random.normals(2 * DIM, 2.0));
        let news = |random: &mut Random, count: usize| -> Vec<Vec<f32>> {
            // Few keys of another size ask for codes of their own, or for none.
            let size = [1.0, 1.0, 1e-6, 40.0, 1e4][random.below(5)];
            (0..2).map(|_| narrow(random.normals(count * DIM, size))).collect()
        };
        let mut kept = Kept::new(&news(&mut random, 1 + 60 * (round % 2)));
        let mut copies: Vec<(KeyIndex<'static>, KeyIndex<'static>)> = Vec::new();
        for step in 0..50 {
            let n = kept.len();
            match random.below(10) {
                0..=4 => {
                    // Rarely more than a chunk that is filled up holds.
                    let count = [1, 1, 2, 15, 16, 17, 70][random.below(7)];
                    let count = if (round, step / 5) == (3, 4) { 2500 } else { count };
                    let new = news(&mut random, count);
                    kept.append(&new, 1 + step % 2);
                }
                5 => kept.truncate(random.below(n + 1)),
                6 if n > 0 => kept.truncate(n - 1),
                6 | 7 if n > 0 => {
                    let count = 1 + random.below(n.min(40));
                    let mut one = || {
                        // In any order.
                        let mut some: Vec<u32> = Vec::new();
                        while some.len() < count {
                            let key = random.below(n) as u32;
                            if !some.contains(&key) {
                                some.push(key);
                            }
                        }
                        some
                    };
                    let gone = if step % 2 == 0 { vec![one()] } else { vec![one(), one()] };
                    kept.evict(&gone);
                }
                8 => {
                    // Another of the same bits, that shares nothing.
                    let mut file = Vec::new();
                    kept.index.write_to(&mut file).unwrap();
                    copies.push((kept.index.snapshot(), KeyIndex::read_from(&file[..]).unwrap()));
                    if step % 3 == 0 {
                        kept.index = KeyIndex::read_from(&file[..]).unwrap();
                    }
                }
                _ => {}
            }
            if kept.len() > 0 && step % 3 == 0 {
                kept.judge(&queries);
            }
        }
        assert!(kept.index == kept.alone);
        for (copy, same) in copies {
            assert!(copy == same);
        }
    }
}

/// A window that slides says about as much as an index that is built of what it holds.
#[test]
fn what_is_gone_is_forgotten() {
    let mut random = Random::new(82);
    let n = 600;
    for way in ["evict", "truncate", "stored"] {
        let draw = |random: &mut Random, count: usize, size: f64| -> Vec<Vec<f32>> {
            (0..2).map(|_| narrow(random.normals(count * DIM, size))).collect()
        };
        // Those that go first lose much more than those that stay.
        let (mut kept, shape) = (Kept::new(&draw(&mut random, n, 30.0)), [2, n, DIM]);
        for step in 0..40 {
            let new = draw(&mut random, 60, 1.0);
            kept.append(&new, 1);
            if way == "truncate" {
                // Drafts that are taken back again and again.
                kept.truncate(kept.len() - 60);
                kept.append(&new, 1);
            }
            kept.evict(&[(0..60).collect()]);
            if way == "stored" {
                let mut file = Vec::new();
                kept.index.write_to(&mut file).unwrap();
                kept.index = KeyIndex::read_from(&file[..]).unwrap();
            }
            if step >= 10 {
                let queries = narrow(random.normals(2 * 8 * DIM, 1.0));
                let fresh =
                    KeyIndex::build(&vectors(&kept.all(), &shape), &IndexOptions::new()).unwrap();
                let (wide, narrow) =
                    (Kept::widths(&kept.index, &queries), Kept::widths(&fresh, &queries));
                let (wide, narrow): (f64, f64) = (wide.iter().sum(), narrow.iter().sum());
                // The square root of two, for twice the squares, and the noise of frames.
                assert!(wide < 1.7 * narrow, "{way}, {step}: {wide} {narrow}");
            }
        }
        kept.judge(&narrow(random.normals(2 * DIM, 2.0)));
    }
}

#[test]
fn what_cannot_be_done_changes_nothing() {
    let mut random = Random::new(83);
    let data = narrow(random.normals(2 * 40 * DIM, 1.0));
    let shape = [2, 40, DIM];
    let keys = vectors(&data, &shape);
    let mut index = KeyIndex::build(&keys, &IndexOptions::new()).unwrap();
    let before = index.clone();
    let message = |result: Result<(), certk_rs::Error>| result.unwrap_err().to_string();
    assert!(message(index.truncate(41, &keys)).starts_with("len is 41"));
    let none = Context::new().threads(0);
    assert!(message(none.run(|| index.truncate(5, &keys))).starts_with("threads is 0"));
    let short = [2, 39, DIM];
    let fewer = vectors(&data[..2 * 39 * DIM], &short);
    assert!(message(index.truncate(5, &fewer)).contains("shape"));
    assert!(message(index.evict(&[&[40]], &keys)).starts_with("positions is 40"));
    assert!(message(index.evict(&[&[4, 5, 4]], &keys)).contains("listed twice"));
    assert!(message(index.evict(&[&[4], &[5, 6]], &keys)).contains("positions has 2"));
    assert!(message(index.evict(&[&[4], &[5], &[6]], &keys)).contains("positions has 3"));
    assert!(message(index.evict(&[], &keys)).contains("positions"));
    index.evict(&[&[]], &keys).unwrap();
    index.truncate(40, &keys).unwrap();
    assert!(index == before);
    // Other keys are noticed at the latest by a check: they are taken out of a fingerprint that they are not in.
    let other: Vec<f32> = data.iter().map(|entry| entry + 1.0).collect();
    index.truncate(30, &vectors(&other, &shape)).unwrap();
    let first: Vec<f32> =
        data.chunks(40 * DIM).flat_map(|head| head[..30 * DIM].to_vec()).collect();
    assert!(index.check(&vectors(&first, &[2, 30, DIM])).is_err());
}

/// A writer appends while readers on other threads search the snapshots that they were given.
#[test]
fn snapshots_of_readers_stay_while_a_writer_goes_on() {
    let mut random = Random::new(72);
    let queries = narrow(random.normals(2 * DIM, 2.0));
    let draw = |random: &mut Random, count: usize| -> Vec<Vec<f32>> {
        (0..2).map(|_| narrow(random.normals(count * DIM, 1.0))).collect()
    };
    let mut kept = Kept::new(&draw(&mut random, 5000));
    let first = kept.all();
    let ask = |index: &KeyIndex<'_>, keys: &[f32]| {
        let (shape, rows) = ([2, keys.len() / 2 / DIM, DIM], [2, 1, DIM]);
        let (keys, options) = (vectors(keys, &shape), SearchOptions::new().threads(1));
        index.check(&keys).unwrap();
        index.search(&vectors(&queries, &rows), Some(&keys), &[0.05], &options).unwrap()
    };
    let expected = ask(&kept.index, &first);
    std::thread::scope(|scope| {
        let (send, receive) = channel::<(KeyIndex<'static>, Vec<f32>)>();
        let reader = scope.spawn(|| {
            let said = receive.into_iter().map(|(snapshot, keys)| ask(&snapshot, &keys));
            said.collect::<Vec<SearchResult>>()
        });
        for _ in 0..50 {
            send.send((kept.index.snapshot(), kept.all())).unwrap();
            kept.append(&draw(&mut random, 20), 1);
        }
        drop(send);
        let said = reader.join().unwrap();
        assert!(said.len() == 50 && said[0] == expected);
        let held = |said: &SearchResult| said.selection.tail_mass_upper.iter().all(|u| *u <= 0.05);
        assert!(said.iter().all(held));
    });
    assert!(kept.len() == 6000 && kept.index == kept.alone);
}
