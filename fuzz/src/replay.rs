//! Runs of every target over its seeds and over random inputs, by any compiler and in little time.

use std::path::Path;

use super::{TARGETS, Target, levels};

/// Returns the number of random inputs for each target: 2000, or `CERTK_FUZZ_INPUTS`; few under an emulator.
fn inputs() -> u64 {
    let few = if std::env::var_os("CERTK_EMULATED").is_some() { 30 } else { 2000 };
    std::env::var("CERTK_FUZZ_INPUTS").map_or(few, |count| count.parse().unwrap())
}

/// Returns up to 1500 bytes that look random. Mostly they are few, and many are small: decisions are made of these.
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

/// Runs an input, and names it if that panics.
fn run((name, target): Target, what: &str, input: &[u8]) {
    if std::panic::catch_unwind(|| target(input)).is_err() {
        panic!("{name}: {what}");
    }
}

#[test]
fn inputs_of_the_corpus() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"));
    let seeds = [crates.join("seeds"), crates.join("fuzz/seeds")];
    let seeds = seeds.iter().find(|folder| folder.is_dir()).expect("a folder of seeds");
    let _alone = levels::alone();
    for target in TARGETS {
        let mut count = 0;
        for entry in std::fs::read_dir(seeds.join(target.0)).unwrap() {
            let path = entry.unwrap().path();
            run(target, &path.display().to_string(), &std::fs::read(&path).unwrap());
            count += 1;
        }
        assert!(count > 0, "{} has no seeds", target.0);
    }
}

#[test]
fn inputs_that_are_random() {
    let _alone = levels::alone();
    for target in TARGETS {
        let begun = std::time::Instant::now();
        (0..inputs()).for_each(|seed| run(target, &format!("random input {seed}"), &random(seed)));
        println!("{}: {} inputs, {:.1} s", target.0, inputs(), begun.elapsed().as_secs_f64());
    }
}
