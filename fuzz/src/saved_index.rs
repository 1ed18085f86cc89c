//! Saved indexes that were damaged: they are refused, or answer without reading beyond anything.

use std::borrow::Cow;

use certk_rs::bindings::{Saved, Trust};
use certk_rs::half::bf16;
use certk_rs::{AttentionOptions, Budget, KeyIndex, Rule, SearchOptions, attention};

use super::search::Indexed;
use super::select::set_level;
use super::tape::Tape;

/// Other bits, other lengths.
fn wound<T: Copy>(tape: &mut Tape<'_>, list: &mut Cow<'_, [T]>, make: impl Fn(u64) -> T) {
    let list = list.to_mut();
    match tape.below(6) {
        0 => list.truncate(tape.below(list.len() + 1)),
        1 => {
            let more = make(tape.u64());
            list.extend(std::iter::repeat_n(more, 1 + tape.below(40)));
        }
        2 => list.clear(),
        _ => {
            for _ in 0..=tape.below(3) {
                if !list.is_empty() {
                    let at = tape.below(list.len());
                    list[at] = make(tape.u64());
                }
            }
        }
    }
}

pub fn run(input: &[u8]) {
    let mut tape = Tape::new(input);
    set_level(&mut tape);
    let case = Indexed::new(&mut tape, 200);
    let Ok(index) = case.index(&mut tape) else { return };
    let (mut n, mut dim) = (index.len(), index.dim());
    let mut saved: Vec<Saved<'_>> = index.save().map(Saved::owned).collect();
    let mut batch = index.batch_shape().to_vec();
    let wounds = tape.below(4);
    for _ in 0..wounds {
        let which = tape.below(saved.len());
        let Some(one) = saved.get_mut(which) else { break };
        match tape.below(12) {
            0 => wound(&mut tape, &mut one.lines, |bits| bits as u8),
            1 => wound(&mut tape, &mut one.scales, |bits| bf16::from_bits(bits as u16)),
            2 => wound(&mut tape, &mut one.radii, |bits| bf16::from_bits(bits as u16)),
            3 => wound(&mut tape, &mut one.uncoded, |bits| (bits % 300) as u32),
            4 => wound(&mut tape, &mut one.mean, |bits| f32::from_bits(bits as u32)),
            5 => wound(&mut tape, &mut one.gram, f64::from_bits),
            6 => one.numbers[tape.below(7)] = tape.f64(),
            7 => one.numbers[tape.below(7)] = tape.one_of(&[0.0, 1.0, -1.0, 2.0, 1e300, f64::NAN]),
            8 => n = if tape.rarely(4) { tape.u64() as usize } else { tape.below(300) },
            9 => dim = if tape.rarely(4) { tape.u64() as usize } else { tape.below(70) },
            10 => batch.push(tape.below(3)),
            _ => {
                saved.pop();
                if saved.is_empty() {
                    break;
                }
            }
        }
    }
    let trust = tape.one_of(&[Trust::Nothing, Trust::Scales]);
    let dtype = tape.one_of(&[index.dtype(), index.dtype(), index.dtype(), "float64", "float16"]);
    let lent = tape.rarely(2);
    let kept = saved.clone();
    let given: Vec<Saved<'_>> = if lent {
        kept.iter()
            .map(|one| Saved {
                lines: Cow::Borrowed(&one.lines),
                scales: Cow::Borrowed(&one.scales),
                radii: Cow::Borrowed(&one.radii),
                uncoded: Cow::Borrowed(&one.uncoded),
                mean: Cow::Borrowed(&one.mean),
                gram: Cow::Borrowed(&one.gram),
                spread: Cow::Borrowed(&one.spread),
                low: Cow::Borrowed(&one.low),
                low_gram: Cow::Borrowed(&one.low_gram),
                ..*one
            })
            .collect()
    } else {
        saved
    };
    batch.extend([n, dim]);
    let loaded = KeyIndex::load(&batch, dtype, given, trust);
    let Ok(mut loaded) = loaded else {
        assert!(wounds > 0 || dtype != index.dtype());
        return;
    };
    if wounds == 0 && dtype == index.dtype() {
        assert!(loaded == index, "what was saved is not what was loaded");
    }
    let (queries, keys) = (case.queries.vectors("q"), case.keys.vectors("keys"));
    let rule = tape.one_of(&[Rule::Mass, Rule::Mass, Rule::Gap, Rule::TopK(3)]);
    let options = SearchOptions::new().rule(rule).threads(1).causal(case.sight.causal);
    let options = options.lengths(case.sight.lengths.as_deref());
    // Answers of a damaged index may be of anything, but they have the form of answers.
    for keys in [Some(&keys), None] {
        if let Ok(found) = loaded.search(&queries, keys, &[0.05], &options) {
            for row in 0..found.selection.k.len() {
                let list = found.selection.row(row);
                assert!(list.iter().all(|key| (*key as usize) < loaded.len()));
            }
        }
    }
    let asked = AttentionOptions::new().even_if_slower(true).threads(1);
    let _ = attention(&queries, &keys, &keys, Budget::TailMass(&[0.1]), Some(&loaded), &asked);
    let _ = loaded.check(&keys);
    let snapshot = loaded.snapshot();
    if loaded.append(&keys).is_ok() {
        let _ = loaded.search(&queries, None, &[0.05], &options);
    }
    let _ = snapshot.search(&queries, None, &[0.05], &options);
}
