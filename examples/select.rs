//! Keys that matter in rows of scores, and the mass lost without the others: `cargo run --release --example select`.

use certk_rs::{CertifyOptions, Keep, Options, Scores, certify, select};

fn main() -> Result<(), certk_rs::Error> {
    // Two rows of scores, in natural-log units: their weights are e to these, over their sum.
    let data = [4.0_f32, 0.0, 3.0, -2.0, 1.0, -5.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0];
    let scores = Scores::new(&data[..], &[2, 6])?;
    let selection = select(&scores, &[0.1], &Options::new())?;
    for row in 0..2 {
        println!(
            "row {row}: keys {:?}; what the others weigh lies in [{:.6}, {:.6}]; no fewer would do: {}",
            selection.row(row),
            selection.tail_mass_lower[row],
            selection.tail_mass_upper[row],
            selection.minimal[row],
        );
    }

    // Another set, judged by code that shares nothing with the search for the best one.
    let kept = [1_u8, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1];
    let keep = Keep::Mask { kept: &kept, strides: &[6] };
    let certificate =
        certify(&scores, &keep, &CertifyOptions::new().eps(&[0.1]).independent(true))?;
    println!("a set of somebody else's: within a tenth? {:?}", certificate.holds);
    Ok(())
}
