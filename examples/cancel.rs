//! Calls that end when they are told to: `cargo run --release --example cancel`.

use std::thread;
use std::time::{Duration, Instant};

use certk_rs::{CancelToken, Context, Error, ErrorClass, Options, Scores, select};

fn main() {
    // Some seconds of work.
    let row: Vec<f32> = (0..1 << 22).map(|i| (i as f32 * 0.618).fract() * 20.0).collect();
    let work = || -> Result<(), Error> {
        loop {
            let scores = Scores::new(&row[..], &[1, row.len()])?;
            select(&scores, &[0.01], &Options::new())?.recycle();
        }
    };

    let token = CancelToken::new();
    let raised = thread::spawn({
        let token = token.clone();
        move || {
            thread::sleep(Duration::from_millis(50));
            token.cancel();
            Instant::now()
        }
    });
    let stopped = Context::new().cancel(&token).run(work).unwrap_err();
    let late = raised.join().map(|raised| raised.elapsed()).unwrap_or_default();
    println!("cancelled: {stopped}; {late:?} after it was told to stop");
    assert_eq!(stopped.class(), ErrorClass::Cancelled);

    let late = Context::new().timeout(Duration::from_millis(50)).run(work).unwrap_err();
    println!("out of time: {late}");

    // A limit on what a call may ask for is an error, and no end of the process.
    let limited = Context::new().memory_limit(1 << 20).run(work).unwrap_err();
    println!("out of memory: {limited}");
    assert_eq!(limited.class(), ErrorClass::Resource);
}
