//! Runs of the fuzz targets over the kept seeds and over random inputs, by any compiler and in little time.

use std::path::Path;

use certk_fuzz::TARGETS;

/// So many random inputs for each target.
const RANDOM: u64 = 10_000;

/// Bytes that look random, of a length up to 1500 that is mostly short: small numbers among them, as decisions are made of these.
fn random(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let most = [30, 200, 1500][(next() % 3) as usize];
    let length = next() % most;
    (0..length).map(|_| if next() % 3 == 0 { next() % 8 } else { next() } as u8).collect()
}

/// Runs an input; says which it was if that panics.
fn run((name, target): (&str, fn(&[u8])), what: &str, input: &[u8]) {
    if std::panic::catch_unwind(|| target(input)).is_err() {
        panic!("{name}: {what}");
    }
}

#[test]
fn inputs_of_the_corpus() {
    for target in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target.0);
        let mut count = 0;
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            run(target, &path.display().to_string(), &std::fs::read(&path).unwrap());
            count += 1;
        }
        assert!(count > 0, "{} is empty", folder.display());
    }
}

#[test]
fn inputs_that_are_random() {
    for target in TARGETS {
        let begun = std::time::Instant::now();
        for seed in 0..RANDOM {
            run(target, &format!("random input {seed}"), &random(seed));
        }
        println!("{}: {RANDOM} inputs, {:.1} s", target.0, begun.elapsed().as_secs_f64());
    }
}
