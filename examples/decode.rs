//! Decoding by an index: each step attends to few of the keys, says how far its output can be off, and adds a key:
//! `cargo run --release --example decode`.

use certk_rs::{
    AttentionOptions, Budget, Context, IndexOptions, KeyIndex, Vectors, Workspace, attention,
};

const DIM: usize = 64;

/// Numbers that look Gaussian.
fn numbers(count: usize, size: f32, seed: f64) -> Vec<f32> {
    let uniform = |i: usize, step: f64| (seed + i as f64 * step).fract().max(1e-12);
    (1..=count)
        .map(|i| {
            let (u, v) = (uniform(i, 0.618_033_988_75), uniform(i, 0.754_877_666_25));
            size * ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
        })
        .collect()
}

fn main() -> Result<(), certk_rs::Error> {
    let (prompt, steps) = (8192, 16);
    let mut keys = numbers(prompt * DIM, 1.0, 0.1);
    let mut values = numbers(prompt * DIM, 1.0, 0.2);
    let shape = |data: &[f32]| [data.len() / DIM, DIM];

    // What a step uses is kept for the next one, and can be given back.
    let workspace = Workspace::new();
    let context = Context::new().serial().workspace(&workspace);
    let mut index =
        KeyIndex::build(&Vectors::new("keys", &keys[..], &shape(&keys))?, &IndexOptions::new())?;
    for step in 0..steps {
        let query = numbers(DIM, 3.0, f64::from(step) / 7.0);
        let q = Vectors::new("q", &query[..], &[1, DIM])?;
        let (k, v) = (
            Vectors::new("keys", &keys[..], &shape(&keys))?,
            Vectors::new("values", &values[..], &shape(&values))?,
        );
        let options = AttentionOptions::default();
        let found = context
            .run(|| attention(&q, &k, &v, Budget::TailMass(&[0.05]), Some(&index), &options))?;
        let bound = found.error_bound(&q, &v, &options)?[0];
        println!(
            "step {step:2}: {:4} of {} keys scored, {:4} used; dropped mass at most {:.4}, output off by at most {bound:.4}",
            found.scored[0],
            index.len(),
            found.k[0],
            found.tail_mass_upper[0],
        );
        found.recycle();

        let (key, value) = (numbers(DIM, 1.0, f64::from(step)), numbers(DIM, 1.0, 0.5));
        index.append(&Vectors::new("keys", &key[..], &[1, DIM])?)?;
        keys.extend(key);
        values.extend(value);
    }
    println!("{} bytes wait in the workspace", workspace.bytes());
    workspace.shrink_to(0);
    Ok(())
}
