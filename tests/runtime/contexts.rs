//! Calls under a host that ends them, lends them its pool or limits their memory.

use std::time::{Duration, Instant};

use certk_rs::{
    AttentionOptions, Budget, CancelToken, CertifyOptions, Context, Error, IndexOptions, Keep,
    KeyIndex, Options, OutputOptions, Rule, Scores, SearchOptions, ValueBall, ValueIndex, Values,
    Vectors, attention, bindings, bounds, certify, keep_set, montecarlo, output_error, select,
    select_output,
};
use cpu_time::ProcessTime;

use crate::{alone, emulated, gaussian};

/// A call that may be made again.
type Work<'w> = &'w dyn Fn() -> Result<(), Error>;

/// The same, with what it finds in words.
type Call<'c> = &'c dyn Fn() -> Result<String, Error>;

/// Between the two readings around the raising of a flag, at most.
const NEAR: Duration = Duration::from_micros(500);

/// Returns the most work after a call is told to stop, the number of stops measured, and the time of a whole call.
///
/// Work is counted in the time of all processors, since time on a clock would also tell of other processes. They still
/// slow a processor down, by its caches and its memory: a stop that is later than it may be is tried again at the same
/// moment, and the soonest of three counts. A stretch of a call that does not look at the flag is late each time.
fn overtime(work: Work<'_>, allowed: Duration) -> (Duration, usize, Duration) {
    let moments = if emulated() { 2 } else { 6 };
    let begun = Instant::now();
    work().unwrap();
    let whole = begun.elapsed();
    let (mut worst, mut stopped) = (Duration::ZERO, 0);
    let mut moment = 0;
    // A call that is short may be over before a thread is awake.
    while moment < moments || stopped == 0 && moment < 20 * moments {
        let mut soonest = None;
        for _ in 0..3 {
            soonest =
                stop(work, whole * (moment % moments) / moments).into_iter().chain(soonest).min();
            if soonest.is_none_or(|after| after <= allowed) {
                break;
            }
        }
        if let Some(after) = soonest {
            worst = worst.max(after);
            stopped += 1;
        }
        moment += 1;
    }
    (worst, stopped, whole)
}

/// Stops a call after some time, and returns its work afterwards; `None` if it was over or nothing is known.
fn stop(work: Work<'_>, moment: Duration) -> Option<Duration> {
    let token = CancelToken::new();
    let context = Context::new().cancel(&token);
    let (found, after, (before, raised)) = std::thread::scope(|scope| {
        let stops = scope.spawn(|| {
            std::thread::sleep(moment);
            let before = ProcessTime::now();
            token.cancel();
            (before, ProcessTime::now())
        });
        let found = context.run(work);
        let after = ProcessTime::now();
        (found, after, stops.join().unwrap())
    });
    match found {
        Ok(()) => None,
        // Where others took the processor from the thread that raises the flag, nothing is known.
        Err(Error::Interrupted) => {
            (raised.duration_since(before) < NEAR).then(|| after.duration_since(before))
        }
        Err(other) => panic!("{other}"),
    }
}

/// Every function that may take long, on inputs that make it so.
fn long_calls(what: &mut dyn FnMut(&str, Work<'_>)) {
    let n = if emulated() { 1 << 16 } else { 1 << 22 };
    let long = gaussian(n, 2.0);
    let wide: Vec<f64> = long.iter().map(|&score| f64::from(score)).collect();
    let flat: Vec<f32> = long.iter().map(|score| score / 1e6).collect();
    let row = Scores::new(&long[..], &[1, n]).unwrap();
    let row64 = Scores::new(&wide[..], &[1, n]).unwrap();
    let even = Scores::new(&flat[..], &[1, n]).unwrap();
    let rows = Scores::new(&long[..], &[n / 4096, 4096]).unwrap();
    let options = Options::new();
    for (name, scores) in
        [("row", &row), ("row of f64", &row64), ("flat row", &even), ("rows", &rows)]
    {
        what(&format!("select {name}"), &|| select(scores, &[0.01], &options).map(drop));
        let serial = Options::new().threads(Some(1));
        what(&format!("select {name}, one thread"), &|| select(scores, &[0.01], &serial).map(drop));
    }
    let blocks = Options::new().block_size(16);
    what("select blocks", &|| select(&row, &[0.01], &blocks).map(drop));
    let forced = Options::new().keep_first(100).keep_last(1000);
    what("select forced", &|| select(&row, &[0.01], &forced).map(drop));
    let lengths = [n as i64 - 3];
    let masked = row.clone().lengths(&lengths).unwrap().scale(0.37).unwrap();
    what("select scaled", &|| select(&masked, &[0.01], &options).map(drop));
    let found = select(&row, &[0.01], &options).unwrap();
    let indices: Vec<i64> = found.indices.iter().map(|&i| i64::from(i)).collect();
    let keep = Keep::Indices { indptr: &found.indptr, indices: &indices };
    for independent in [false, true] {
        what(&format!("certify, independent {independent}"), &|| {
            certify(&row, &keep, &CertifyOptions::new().eps(&[0.01]).independent(independent))
                .map(drop)
        });
    }
    what("keep_set", &|| {
        let rows = Scores::new(&long[..n >> 1], &[n >> 14, 1 << 13]).unwrap();
        keep_set(&rows, &[0.05], &options).map(drop)
    });
    let dim = 64;
    let m = n / dim;
    let vectors = Vectors::new("keys", &long[..m * dim], &[m, dim]).unwrap();
    let queries = Vectors::new("q", &long[..n >> 4], &[n >> 10, dim]).unwrap();
    what("index", &|| KeyIndex::build(&vectors, &IndexOptions::default()).map(drop));
    let index = KeyIndex::build(&vectors, &IndexOptions::default()).unwrap();
    what("check", &|| index.check(&vectors));
    for rule in [Rule::Mass, Rule::Gap, Rule::TopK(100)] {
        let mut options = SearchOptions::default();
        options.rule = rule;
        // One gap proves little about such keys: nearly all of them are kept, for every query.
        let few = Vectors::new("q", &long[..n >> 9], &[n >> 15, dim]).unwrap();
        let queries = if rule == Rule::Gap { &few } else { &queries };
        what(&format!("search {rule:?}"), &|| {
            index.search(queries, Some(&vectors), &[0.05], &options).map(drop)
        });
    }
    let values = Vectors::new("v", &long[..m * dim], &[m, dim]).unwrap();
    let how = AttentionOptions::default();
    for (name, index) in [("dense", None), ("by index", Some(&index))] {
        for (rows, queries) in
            [("many", &queries), ("few", &Vectors::new("q", &long[..dim], &[1, dim]).unwrap())]
        {
            what(&format!("attention {name} {rows}"), &|| {
                let budget = Budget::TailMass(&[0.05]);
                attention(queries, &vectors, &values, budget, index, &how).map(drop)
            });
        }
    }
    let coded = ValueIndex::build(&values).unwrap();
    let query = Vectors::new("q", &flat[..8 * dim], &[8, dim]).unwrap();
    what("attention by codes", &|| {
        let (budget, how) =
            (Budget::TailMass(&[0.05]), AttentionOptions::new().value_index(&coded));
        attention(&query, &vectors, &values, budget, Some(&index), &how).map(drop)
    });
    let few = n / 4;
    let some = Scores::new(&long[..few], &[1, few]).unwrap();
    let values = Values::new(&long[..few * 4], &[few, 4]).unwrap();
    what("output_error", &|| {
        let found = select(&some, &[0.01], &options)?;
        let indices: Vec<i64> = found.indices.iter().map(|&i| i64::from(i)).collect();
        let keep = Keep::Indices { indptr: &found.indptr, indices: &indices };
        output_error(&some, &values, &keep, &OutputOptions::new()).map(drop)
    });
    what("select_output", &|| {
        select_output(&some, &values, &[0.1], &OutputOptions::new()).map(drop)
    });
    what("smallest_k", &|| bounds::smallest_k(&row, &[0.01], bounds::GapRule::SingleGap).map(drop));
    let drawing =
        montecarlo::TailOptions::new(1e-3, few / 16).method(montecarlo::Method::Hoeffding).seed(1);
    what("tail_mass", &|| montecarlo::tail_mass(&row, &keep, None, &drawing).map(drop));
}

#[test]
fn long_calls_end_soon_after_they_are_told_to() {
    let _alone = alone();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
    let mut late = Vec::new();
    long_calls(&mut |name, work| {
        let allowed = Duration::from_millis(10) * threads;
        let (worst, stopped, whole) = overtime(work, allowed);
        println!("{name}: {worst:?} of work afterwards at most, {stopped} times");
        if worst > allowed && !emulated() {
            late.push(format!("{name}: {worst:?}"));
        }
        // What is over sooner than it must end may end by itself, before a thread on a busy machine is awake.
        if stopped == 0 && whole > Duration::from_millis(10) {
            late.push(format!("{name} was never stopped"));
        }
    });
    assert!(late.is_empty(), "{late:#?}");
}

/// A call that is allowed a few bytes and would need many more ends with an error that says so; none takes them.
#[test]
fn no_call_asks_for_more_memory_than_it_is_allowed() {
    let _alone = alone();
    let n = 1 << 16;
    let data = gaussian(n, 1.0);
    let even = vec![0.0f32; n];
    let row = Scores::new(&data[..], &[1, n]).unwrap();
    let equal = Scores::new(&even[..], &[1, n]).unwrap();
    let rows = Scores::new(&even[..], &[16, n / 16]).unwrap();
    let vectors = Vectors::new("k", &data[..], &[n / 16, 16]).unwrap();
    let query = Vectors::new("q", &data[..16], &[1, 16]).unwrap();
    let index = KeyIndex::build(&vectors, &IndexOptions::default()).unwrap();
    let values = Values::new(&data[..], &[n, 1]).unwrap();
    let budget = Budget::TailMass(&[0.01]);
    let (options, search) = (Options::new(), SearchOptions::default());
    let all: Vec<i64> = (0..n as i64 - 1).collect();
    let indptr = [0, n as i64 - 1];
    let keep = Keep::Indices { indptr: &indptr, indices: &all };
    let how = AttentionOptions::default();
    let calls: [(&str, Work<'_>); 9] = [
        ("select a row", &|| select(&row, &[0.01], &options).map(drop)),
        ("select equal scores", &|| select(&equal, &[0.1], &options).map(drop)),
        ("select rows", &|| select(&rows, &[0.1], &options).map(drop)),
        ("certify", &|| certify(&row, &keep, &CertifyOptions::new().eps(&[0.1])).map(drop)),
        ("keep_set", &|| keep_set(&rows, &[0.05], &options).map(drop)),
        ("build", &|| KeyIndex::build(&vectors, &IndexOptions::default()).map(drop)),
        ("search", &|| index.search(&query, Some(&vectors), &[0.01], &search).map(drop)),
        ("attention", &|| attention(&query, &vectors, &vectors, budget, None, &how).map(drop)),
        ("select_output", &|| {
            select_output(&row, &values, &[0.1], &OutputOptions::new()).map(drop)
        }),
    ];
    for (name, call) in calls {
        // Memory that calls before left is not asked for again: each has none.
        let workspace = || certk_rs::Workspace::new();
        let few = Context::new().serial().workspace(&workspace()).memory_limit(1000);
        let found = few.run(call);
        assert!(matches!(found, Err(Error::NoMemory { .. })), "{name}: {found:?}");
        let many = Context::new().serial().workspace(&workspace()).memory_limit(1 << 30);
        assert_eq!(many.run(call), Ok(()), "{name}");
    }
}

/// Calls that have no option of their own take the number of threads from the context: none changes what they find, and a number
/// that cannot be is an error of each.
#[test]
fn a_context_says_how_many_threads_calls_use() {
    let _alone = alone();
    let (n, dim) = (1 << 12, 64);
    let data = gaussian(2 * n * dim, 1.0);
    let rows = Scores::new(&data[..1 << 16], &[64, 1 << 10]).unwrap();
    let keys = Vectors::new("keys", &data[..n * dim], &[n, dim]).unwrap();
    let more = Vectors::new("keys", &data[n * dim..], &[n, dim]).unwrap();
    let values = Vectors::new("v", &data[..n * dim], &[8, n / 8, dim]).unwrap();
    let queries = Vectors::new("q", &data[..64 * dim], &[64, dim]).unwrap();
    let count = 1 << 16;
    let (upper, lower) = (&gaussian(count, 1.0)[..], &vec![-9.0; count][..]);
    let upper: Vec<f64> = upper.iter().map(|&score| f64::from(score)).collect();
    let (sizes, kept) = (vec![3; count], [1u8, 0].repeat(count / 2));
    let blocks = bounds::Blocks::new(&[64, count / 64], &sizes, &upper, lower, &kept).unwrap();
    let index = KeyIndex::build(&keys, &IndexOptions::new()).unwrap();
    let changed = |change: &dyn Fn(&mut KeyIndex<'static>) -> Result<(), Error>| {
        let mut index = index.clone();
        change(&mut index).map(|()| format!("{index:?}"))
    };
    let gap = bounds::GapRule::SingleGap;
    let calls: [(&str, Call<'_>); 12] = [
        ("select", &|| Ok(format!("{:?}", select(&rows, &[0.1], &Options::new())?))),
        ("score_gap", &|| Ok(format!("{:?}", bounds::score_gap(&rows, &[9])?))),
        ("single_gap", &|| Ok(format!("{:?}", bounds::single_gap(&rows, &[9])?))),
        ("multi_gap", &|| {
            Ok(format!("{:?}", bounds::multi_gap(&rows, &[9], bounds::Cuts::Best(2))?))
        }),
        ("best_cuts", &|| Ok(format!("{:?}", bounds::best_cuts(&rows, &[9], 2)?))),
        ("smallest_k", &|| Ok(format!("{:?}", bounds::smallest_k(&rows, &[0.1], gap)?))),
        ("blockwise", &|| Ok(format!("{:?}", bounds::blockwise(&blocks)?))),
        ("append", &|| changed(&|index| index.append(&more))),
        ("truncate", &|| changed(&|index| index.truncate(n / 2, &keys))),
        ("evict", &|| changed(&|index| index.evict(&[&[7, 70, 700]], &keys))),
        ("check", &|| Ok(format!("{:?}", index.check(&keys)?))),
        ("ball", &|| Ok(format!("{:?}", ValueBall::new(&values)?))),
    ];
    for (name, call) in calls {
        let found = call().unwrap();
        for threads in [1, 2, 5] {
            assert!(Context::new().threads(threads).run(call).as_ref() == Ok(&found), "{name}");
        }
        for wrong in [0, 4097] {
            let refused = Context::new().threads(wrong).run(call).unwrap_err().to_string();
            assert!(refused.starts_with(&format!("threads is {wrong}")), "{name}: {refused}");
        }
    }
    let products = |threads: usize| {
        let mut to = vec![0.0; 64 * n];
        let found = Context::new()
            .threads(threads)
            .run(|| bindings::products(&queries, &keys, None, &mut to));
        found.map(|reach| (reach, to))
    };
    assert_eq!(products(1), products(3));
    assert!(products(0).is_err());
    // The number that a call names comes first.
    let named = || select(&rows, &[0.1], &Options::new().threads(2));
    assert!(Context::new().threads(0).run(named).is_ok());
}

/// An append that is stopped among the heads of an empty index leaves none of them ahead of the others.
#[test]
fn a_stopped_append_leaves_no_key_in_any_head() {
    let _alone = alone();
    let (heads, n, few, dim) = (4, 20_000, 8, 32);
    let data = gaussian(heads * n * dim, 1.0);
    let of = |count| Vectors::new("keys", &data[..heads * count * dim], &[heads, count, dim]);
    let (none, some, many) = (of(0).unwrap(), of(few).unwrap(), of(n).unwrap());
    let mut stopped = 0;
    for micros in (0..40).map(|step| step * 1000) {
        let mut index = KeyIndex::build(&none, &IndexOptions::new()).unwrap();
        let timed = Context::new().serial().timeout(Duration::from_micros(micros));
        if timed.run(|| index.append(&many)).is_err() {
            index.append(&some).unwrap();
            index.check(&some).unwrap();
            stopped += 1;
        }
    }
    assert!(stopped > 1, "{stopped}");
}
