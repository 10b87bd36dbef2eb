//! Processor time of searches and cost models, as counted by Linux, so that a busy machine hardly matters.
//!
//! `cargo run --release -p tilewright-lab --example cost_of_thinking`; `xgboost_beside.py` measures XGBoost
//! on the same tasks.

use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::metrics::kendall_tau;
use tilewright_learn::{Examples, Gbt, GbtOptions, Matrix, Objective};
use tilewright_search::{
    BoxError, Budget, Candidate, Config, Constraint, Event, HeadStart, Measure, Measured, MeasuringTraits, Next,
    Outcome, Parameter, Queue, SEARCHES, Space, Timing, Trial, Tuning,
};

const PNPOLY: &[u8] = include_bytes!("../../formats/tests/data/recorded/pnpoly-RTX_2080_Ti.json.gz");

fn main() {
    replays();
    of_template();
    annealing();
    trees();
}

/// CPU time of this thread in seconds.
fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts the time of threads");
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds come first") * 1e-9
}

/// CPU seconds that `work` takes, and its result.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = processor_seconds();
    let result = work();
    (processor_seconds() - start, result)
}

/// Runs a search, with batches as of [`Tuning`], each limited in size.
fn run(
    name: &str,
    seed: u64,
    space: &Arc<Space>,
    measure: &mut dyn Measure,
    (trials, batch): (u64, usize),
    observer: &mut dyn FnMut(Event),
) {
    let mut search = tilewright_search::build(name, space, seed).expect("a search of the table");
    let budget = Budget { trials: Some(trials), batch, ..Budget::default() };
    let (never, none) = (AtomicBool::new(false), HeadStart::default());
    let mut observer = |event: Event| {
        observer(event);
        Ok(())
    };
    let tuning = Tuning::new(search.as_mut(), (&**space).into(), none);
    tuning.run(measure, budget, &never, &mut observer).expect("look-ups");
}

/// Measures each search on a recorded space, five times 400 trials, one at a time and in batches; this
/// includes looking up outcomes.
fn replays() {
    let recorded = tilewright_formats::read("pnpoly", PNPOLY, None, None)
        .and_then(|read| read.task(None)?.space("pnpoly"))
        .expect("a sound file");
    for row in SEARCHES {
        let ms = [1, 16].map(|batch| {
            let run = |seed| run(row.name, seed, recorded.space(), &mut recorded.clone(), (400, batch), &mut |_| ());
            let (seconds, ()) = timed(|| (0..5).for_each(run));
            1e3 * seconds / 2000.0
        });
        println!("{}: {:.3} ms a trial, {:.3} in batches of 16", row.name, ms[0], ms[1]);
    }
}

/// Space like that of a template for a product of 1024 × 1024 matrices: 10 parameters, some tied by
/// constraints.
fn matmul_like() -> Arc<Space> {
    let powers = |name: &str, most: u32| Parameter::ordinal(name, (0..=most).map(|i| 1 << i));
    let parameters = vec![
        Parameter::factorization("m", 1024, 4),
        Parameter::factorization("n", 1024, 4),
        Parameter::factorization("k", 1024, 2),
        powers("tile_m", 4),
        powers("tile_n", 6),
        powers("unroll", 4),
        Parameter::permutation("order", &["m", "n", "k"]),
        Parameter::categorical("pack", &["none", "a", "b", "both"]),
        Parameter::boolean("prefetch"),
        powers("threads", 5),
    ];
    let registers = Constraint::new("registers", "tile_m * tile_n <= 256", &["tile_m", "tile_n"], |v| {
        v[0].int() * v[1].int() <= 256
    });
    Arc::new(Space::new("matmul", parameters, vec![registers]).expect("a sound space"))
}

fn time_ns(space: &Space, config: &Config) -> f64 {
    let off = |(i, &rank): (usize, &u64)| ((rank as f64 / space.n_values(i) as f64) - 0.4).powi(2) * (1 + i % 3) as f64;
    1e6 * (1.0 + config.ranks().iter().enumerate().map(off).sum::<f64>())
}

/// Measures each search on a space like a template's, 1,200 trials in batches; this includes computing
/// outcomes.
fn of_template() {
    let space = matmul_like();
    for row in SEARCHES.iter().filter(|row| row.name != "tree_gru") {
        let (mut n_known, mut text, start) = (0, String::new(), processor_seconds());
        let mut note = |event: Event| {
            if let Event::Batch(batch) = event {
                let before = n_known;
                n_known += batch.len();
                for n in [100, 200, 400, 800, 1200].into_iter().filter(|n| (before + 1..=n_known).contains(n)) {
                    text += &format!(" {:.3} to {n}", 1e3 * (processor_seconds() - start) / n_known as f64);
                }
            }
        };
        run(row.name, 0, &space, &mut Formula { space: space.clone(), queue: Queue::default() }, (1200, 16), &mut note);
        println!("{}, {} configurations: ms a trial{text}", row.name, space.size());
    }
}

/// Measuring side that computes times by [`time_ns`].
struct Formula {
    space: Arc<Space>,
    queue: Queue,
}

impl Measure for Formula {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        self.queue.submit(candidates)
    }

    fn next(&mut self, _: Option<f64>, _: Duration) -> Result<Next, BoxError> {
        Ok(self.queue.pop().map_or(Next::Idle, |(number, candidate)| {
            let outcome = trial(&self.space, candidate.config).outcome;
            Next::Done(number, Measured::of(outcome))
        }))
    }

    fn wind_down(&mut self) {
        self.queue.cancel(0);
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        self.queue.cancel(from);
        Ok(())
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits::default()
    }
}

fn trial(space: &Space, config: Config) -> Trial {
    let median_ns = time_ns(space, &config);
    let timing = Timing::of_samples(&[median_ns], false);
    Trial { config, outcome: Outcome::Measured(timing) }
}

/// Measures rounds of the boosted trees' search that fit a model and anneal 128 configurations for all 500
/// steps, or until they settle.
fn annealing() {
    let space = matmul_like();
    let mut gbt = tilewright_search::build("gbt", &space, 1).expect("a search of the table");
    for _ in 0..16 {
        let (seconds, batch) = timed(|| gbt.propose(16));
        println!(
            "gbt, {} configurations, {} parameters: {:.1} ms a round",
            space.size(),
            space.n_parameters(),
            1e3 * seconds
        );
        gbt.observe(&batch.into_iter().map(|config| trial(&space, config)).collect::<Vec<_>>());
    }
}

/// Measures fitting 1,000 rows of 200 features, and predicting 100,000 rows: the shortest of five times.
fn trees() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    for (n_rows, n_columns) in [(1000, 200), (1000, 20)] {
        let mut rows = |n: usize| {
            Matrix::from_rows(
                n_columns,
                (0..n).map(|_| (0..n_columns).map(|_| rng.random::<f32>()).collect::<Vec<_>>()),
            )
        };
        let (known, asked) = (rows(n_rows), rows(100_000));
        let target = |row: &[f32]| row[0] * row[1] + (4.0 * row[2]).sin() + 0.1 * row[3];
        let targets: Vec<f32> = known.rows().map(target).collect();
        let examples = Examples::new(&known, &targets);
        for objective in [Objective::SquaredError, GbtOptions::default().objective] {
            let options = GbtOptions { objective, ..GbtOptions::default() };
            let model = Gbt::fit(&examples, &options, 1).expect("sound examples");
            let fit = least(|| drop(black_box(Gbt::fit(&examples, &options, 1))));
            let predict = least(|| drop(black_box(model.predict(&asked))));
            let others = Matrix::from_rows(n_columns, asked.rows().take(2000));
            let truth: Vec<f32> = others.rows().map(target).collect();
            println!(
                "{n_rows} × {n_columns}, {objective:?}: {:.1} ms a fit, {:.0} rows/s predicted, Kendall's τ {:.3} on others",
                1e3 * fit,
                asked.n_rows() as f64 / predict,
                kendall_tau(&model.predict(&others), &truth)
            );
        }
    }
}

fn least(mut work: impl FnMut()) -> f64 {
    (0..5).map(|_| timed(&mut work).0).fold(f64::INFINITY, f64::min)
}
