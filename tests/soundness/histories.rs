//! Indexes that grow, shrink, are evicted from, copied and stored, in any order: what they say of their keys is true, and about as
//! tight as what an index says that is built of the same keys at once.

use certk_rs::{Context, IndexOptions, KeyIndex, Over, RecallOptions, SearchOptions, Vectors};

use crate::exact::{Random, Real, flags, product, reals, tail, weights};

const DIM: usize = 12;

fn narrow(numbers: Vec<f64>) -> Vec<f32> {
    numbers.into_iter().map(|number| number as f32).collect()
}

fn vectors<'a>(data: &'a [f32], shape: &'a [usize]) -> Vectors<'a> {
    Vectors::new("keys", data, shape).unwrap()
}

/// An index, and the keys of each of its heads.
struct Kept {
    index: KeyIndex<'static>,
    heads: [Vec<f32>; 2],
}

impl Kept {
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
        self.heads.iter_mut().zip(new).for_each(|(head, new)| head.extend(new));
    }

    fn truncate(&mut self, len: usize) {
        let (all, shape) = (self.all(), [2, self.len(), DIM]);
        self.index.truncate(len, &vectors(&all, &shape)).unwrap();
        self.heads.iter_mut().for_each(|head| head.truncate(len * DIM));
    }

    /// The same positions of both heads, or others of each.
    fn evict(&mut self, gone: &[Vec<u32>]) {
        let (all, shape) = (self.all(), [2, self.len(), DIM]);
        let lists: Vec<&[u32]> = gone.iter().map(Vec::as_slice).collect();
        self.index.evict(&lists, &vectors(&all, &shape)).unwrap();
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
    fn judge(&self, queries: &[f32], over: Over) {
        let (all, n) = (self.all(), self.len());
        let (shape, rows) = ([2, n, DIM], [2, 1, DIM]);
        let keys = vectors(&all, &shape);
        assert_eq!(self.index.len(), n);
        self.index.check(&keys).unwrap();
        let queries_of = vectors(queries, &rows);
        let options = SearchOptions::new().over(over).threads(1);
        let found = self.index.search(&queries_of, Some(&keys), &[0.05], &options).unwrap();
        let masses = self.index.log_mass(&queries_of, &RecallOptions::new().threads(1)).unwrap();
        for (row, head) in self.heads.iter().enumerate() {
            let query = reals(&queries[row * DIM..][..DIM]);
            let scale = 1.0 / (DIM as f64).sqrt();
            let scores: Vec<Real> =
                head.chunks_exact(DIM).map(|key| product(scale, &query, &reals(key))).collect();
            let kept = flags(n, found.selection.row(row).iter().map(|&key| key as usize));
            let lost = tail(&weights(&scores), |key| kept[key]);
            assert!(lost.at_most(found.selection.tail_mass_upper[row]));
            assert!(lost.at_least(found.selection.tail_mass_lower[row]));
            let exact = log_mass(head, &queries[row * DIM..][..DIM], scale);
            let slack = 1e-9 * exact.abs().max(1.0);
            assert!(masses[row].lower <= exact + slack && exact - slack <= masses[row].upper);
        }
    }

    /// Queries along one key of each head, of several that matter.
    fn towards(&self, random: &mut Random) -> Vec<f32> {
        let key = |head: &Vec<f32>, at: usize| head[at * DIM..][..DIM].to_vec();
        let one = |head: &Vec<f32>, random: &mut Random| key(head, random.below(self.len()));
        self.heads.iter().flat_map(|head| one(head, random)).map(|entry| entry / 3.0).collect()
    }

    /// Over everything that it can be searched over.
    fn judge_everywhere(&self, random: &mut Random) {
        for over in [Over::Cells, Over::Both, Over::Codes, Over::Cells] {
            self.judge(&self.towards(random), over);
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
fn log_mass(keys: &[f32], query: &[f32], scale: f64) -> f64 {
    let score = |key: &[f32]| {
        key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum::<f64>() * scale
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
        let first = news(&mut random, 1 + 60 * (round % 2));
        let shape = [2, first[0].len() / DIM, DIM];
        let index =
            KeyIndex::build(&vectors(&first.concat(), &shape), &IndexOptions::new().threads(1))
                .unwrap();
        let mut kept = Kept { index, heads: [first[0].clone(), first[1].clone()] };
        let mut copies: Vec<(KeyIndex<'static>, KeyIndex<'static>)> = Vec::new();
        for step in 0..50 {
            let n = kept.len();
            match random.below(10) {
                0..=4 => {
                    let count = [1, 1, 2, 15, 16, 17, 70][random.below(7)];
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
                kept.judge(&queries, [Over::Codes, Over::Both][step % 2]);
            }
        }
        for (copy, same) in copies {
            assert!(copy == same);
        }
    }
}

/// Keys of which some neighbours lie together, so that cells are tight: before and after each step the index is searched over codes,
/// cells and both, towards keys that each of the steps has moved.
#[test]
fn cells_are_of_the_keys_that_there_are() {
    let mut random = Random::new(84);
    for round in 0..6 {
        let clusters = |random: &mut Random, count: usize| -> Vec<Vec<f32>> {
            (0..2)
                .map(|_| {
                    let runs: Vec<Vec<f64>> =
                        (0..count.div_ceil(16)).map(|_| random.normals(DIM, 4.0)).collect();
                    let key = |key: usize, random: &mut Random| -> Vec<f32> {
                        let noise = random.normals(DIM, 0.05);
                        narrow(runs[key / 16].iter().zip(noise).map(|(a, b)| a + b).collect())
                    };
                    (0..count).flat_map(|at| key(at, random)).collect()
                })
                .collect()
        };
        let first = clusters(&mut random, 70);
        let shape = [2, 70, DIM];
        let index =
            KeyIndex::build(&vectors(&first.concat(), &shape), &IndexOptions::new().threads(1))
                .unwrap();
        let mut kept = Kept { index, heads: [first[0].clone(), first[1].clone()] };
        for step in 0..6 {
            let other = kept.index.snapshot();
            let before = kept.all();
            kept.judge_everywhere(&mut random);
            let n = kept.len() as u32;
            match (step + round) % 6 {
                // Those behind move up, by less than a cell and by more; in both heads, or in each by other keys.
                0 => kept.evict(&[(3..8).collect()]),
                1 => kept.evict(&[(0..20).collect(), (n - 20..n).collect()]),
                2 => kept.append(&clusters(&mut random, 37), 1),
                3 => {
                    // As many go as come, so that nothing tells by its length.
                    kept.truncate(kept.len() - 24);
                    kept.append(&clusters(&mut random, 24), 1);
                }
                4 => kept.evict(&[vec![0, 17, 18, n - 1], vec![5, 6, 40, 41]]),
                _ => {
                    kept.truncate(kept.len() - 9);
                }
            }
            kept.judge_everywhere(&mut random);
            // A copy from before has what there was, with cells of its own.
            let there = [before[..before.len() / 2].to_vec(), before[before.len() / 2..].to_vec()];
            let there = Kept { index: other, heads: there };
            there.judge(&there.towards(&mut random), Over::Cells);
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
        let first = draw(&mut random, n, 30.0);
        let shape = [2, n, DIM];
        let index =
            KeyIndex::build(&vectors(&first.concat(), &shape), &IndexOptions::new()).unwrap();
        let mut kept = Kept { index, heads: [first[0].clone(), first[1].clone()] };
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
        kept.judge(&narrow(random.normals(2 * DIM, 2.0)), Over::Codes);
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
