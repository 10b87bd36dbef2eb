//! Tests of transfer: trials of other workloads yield models that predict from the start, and first
//! candidates that fit.
//!
//! Made-up costs replace measurements, so that everything is determined by seeds.

use std::ops::ControlFlow;
use std::sync::Arc;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_learn::sequence::{self, Architecture, Completions, Training, TrainingData, Vocabulary, train};
use tilewright_search::{
    Conditions, Config, Constraint, ErrorClass, Experience, Outcome, Parameter, Seconds, Space, Timing, Trial,
};
use tilewright_tune::predict::records::{self, Lessons, RecordsError, SpaceCompletions};
use tilewright_tune::transfer::{EarlierTask, experience, warm_start};
use tilewright_tune::{Record, TEMPLATES, Task, TemplateSetting};

/// Template of the paper's products.
const PAPER: &str = "gemm-4-2-4";

fn setting(workload: &str) -> TemplateSetting {
    let workload = Workload::parse(workload).unwrap();
    TemplateSetting { workload, target: Target::named("x86-64-v3").unwrap(), n_threads: 1 }
}

fn task(workload: &str, template: Option<&str>) -> Task {
    Task::new(setting(workload), template).unwrap()
}

/// Cost that is smallest for one size of the inner tiles, regardless of the size of the product; arbitrary
/// for templates other than the paper's.
fn cost(task: &Task, config: &Config) -> f64 {
    if task.template.name != PAPER {
        return 1.0 + config.ranks().iter().zip(1..).map(|(rank, at)| rank * at).sum::<u64>() as f64;
    }
    let off = |name: &str, best: &[f64]| -> f64 {
        let factors = task.space.factors(config, name);
        factors.iter().rev().zip(best).map(|(&factor, best)| ((factor as f64).log2() - best).abs()).sum()
    };
    1e6 * (1.0 + off("m", &[2.0, 3.0]) + off("k", &[4.0]) + off("n", &[4.0, 2.0]))
}

fn outcome(task: &Task, config: &Config) -> Outcome {
    Outcome::Measured(Timing::of_samples(&[cost(task, config)], false))
}

fn record(task: &Task, config: &Config, outcome: Outcome) -> Record {
    Record {
        workload: task.setting.workload.to_string(),
        target: task.setting.target.name(),
        template: task.template.name.into(),
        threads: 1,
        config: task.space.config_to_json(config),
        outcome,
        seconds: Seconds::default(),
        steps: task.steps(config).iter().map(|step| format!("{step}\n")).collect(),
        search: "random".into(),
        seed: 0,
        trial: 0,
        version: String::new(),
        toolchain: String::new(),
        unix_time: 0,
        run: None,
        limit: None,
        conditions: Conditions::default(),
        is_imported: false,
    }
}

fn earlier(task: &Task, n: usize, seed: u64) -> EarlierTask {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let configs = (0..n).map(|_| task.space.sample(&mut rng));
    EarlierTask {
        workload: task.setting.workload.clone(),
        template: task.template.name.into(),
        threads: 1,
        records: configs.map(|config| record(task, &config, outcome(task, &config))).collect(),
    }
}

/// Costs of the first candidates that a search proposes.
fn first_costs(task: &Task, text: &str, experience: Option<&Arc<Experience>>, seed: u64, n: usize) -> Vec<f64> {
    let problem = tilewright_search::Problem { experience: experience.cloned(), ..task.problem() };
    let mut search = tilewright_search::build(text, problem, seed).unwrap();
    let mut costs = Vec::new();
    while costs.len() < n {
        let proposals = search.propose(8.min(n - costs.len()));
        let trial = |config: Config| Trial { outcome: outcome(task, &config), config };
        let trials: Vec<Trial> = proposals.into_iter().map(trial).collect();
        costs.extend(trials.iter().map(|trial| trial.outcome.cost()));
        search.observe(&trials);
    }
    costs
}

#[test]
fn a_model_of_other_workloads_finds_better_candidates_from_the_start() {
    let sources =
        ["matmul:m=256,n=384,k=256", "matmul:m=512,n=256,k=128"].map(|w| earlier(&task(w, Some(PAPER)), 150, 1));
    let experience = Arc::new(experience(&sources, 4096));
    assert_eq!((experience.contexts.len(), experience.groups[0], experience.groups[299]), (300, 0, 1));
    assert!(experience.targets.iter().all(|share| (0.0..=1.0).contains(share)));
    let new = task("matmul:m=384,n=512,k=256", Some(PAPER));
    for more in ["", ",features=relation", ",bootstrap=2", ",global=loop", ",global=relation", ",global=knob"] {
        let text = format!("gbt:chains=32,steps=20,batch=8{more}");
        let mean_log = |experience: Option<&Arc<Experience>>, range: std::ops::Range<usize>| -> f64 {
            let costs =
                (0..3).flat_map(|seed| first_costs(&new, &text, experience, seed, range.end)[range.clone()].to_vec());
            costs.map(f64::ln).sum::<f64>() / (3 * range.len()) as f64
        };
        let (without, with) = (mean_log(None, 0..8), mean_log(Some(&experience), 0..8));
        assert!(with < without - 0.2, "{text}: {with} with, {without} without");
        let (without, with) = (mean_log(None, 8..24), mean_log(Some(&experience), 8..24));
        assert!(with < without, "{text}, later: {with} with, {without} without");
        let costs = |seed| first_costs(&new, &text, Some(&experience), seed, 16);
        assert_eq!(costs(5), costs(5), "{text}");
    }
}

#[test]
fn features_of_loops_guide_a_search_too() {
    let task = task("matmul:m=256,n=384,k=256", Some(PAPER));
    let best = |text: &str, seed| first_costs(&task, text, None, seed, 48).into_iter().fold(f64::INFINITY, f64::min);
    let mean = |text: &str| (0..4).map(|seed| best(text, seed).ln()).sum::<f64>() / 4.0;
    let random = mean("random");
    for kind in ["knob", "loop", "relation"] {
        let text = format!("gbt:chains=32,steps=20,batch=16,features={kind}");
        assert!(mean(&text) < random, "{kind}: {} against {random}", mean(&text));
    }
}

#[test]
fn experience_passes_over_what_it_cannot_use() {
    let source = task("matmul:m=64,n=64,k=64", None);
    let mut earlier = earlier(&source, 4, 1);
    earlier.records[0].steps = String::new();
    earlier.records[1].steps = "split nothing by 4".into();
    earlier.records[2].outcome = Outcome::Failed { class: ErrorClass::WrongAnswer, message: String::new() };
    let taught = experience(std::slice::from_ref(&earlier), 4096);
    assert_eq!(taught.targets, [0.0, 1.0]);
    earlier.records.truncate(3);
    earlier.records.remove(0);
    earlier.records.remove(0);
    assert!(experience(&[earlier], 4096).is_empty(), "nothing of it was measured");
}

/// Pairs of workloads that the same template may serve.
const PAIRS: &[[&str; 2]] = &[
    ["matmul:m=64,n=96,k=128", "matmul:m=17,n=330,k=1009"],
    ["matmul:m=64,n=96,k=128,tf32=1", "matmul:m=192,n=128,k=64,tf32=1"],
    ["batch_matmul:b=6,m=17,n=29,k=13", "batch_matmul:b=9,m=64,n=64,k=32,tb=1"],
    ["dense:m=13,n=37,k=35", "dense:m=128,n=40,k=33,const=w,epilogue=bias"],
    ["packed_matmul:m=16,n=48,k=128", "packed_matmul:m=5,n=37,k=96,int8=1,const=w+s,epilogue=bias"],
    ["resnet18.C2", "resnet18.C6"],
    ["resnet18.C4", "resnet18.C9:layout=blocked"],
    ["resnet18.C12", "resnet18.C3"],
    ["depthwise_conv2d:c=32,h=28,w=28,r=3,s=3,pad=1", "depthwise_conv2d:c=48,h=15,w=15,r=3,s=3,stride=2"],
    ["conv2d_transpose:c=16,h=8,w=8,k=24,r=4,s=4,stride=2,pad=1", "conv2d_transpose:c=8,h=7,w=9,k=16,r=3,s=3"],
    [
        "nest:buffer x0:f32[64,100]global input buffer y:f32[64,100]global output loops i0,i1 \
         run{for i0 in 64{for i1 in 100{y[i0,i1]=exp(x0[i0,i1])}}}",
        "nest:buffer x0:f32[33,70]global input buffer x1:f32[33]global input buffer y:f32[33,70]global output \
         loops i0,i1 run{for i0 in 33{for i1 in 70{y[i0,i1]=x0[i0,i1]*x1[i0]}}}",
    ],
    [
        "conv2d_transpose:c=16,h=8,w=8,k=24,r=4,s=4,stride=2,pad=1",
        "conv2d_transpose:c=40,h=6,w=5,k=64,r=3,s=3,stride=2",
    ],
];

#[test]
fn configurations_are_carried_over_legally_on_every_template() {
    let on =
        |target: &str, workload: &str| TemplateSetting { target: Target::named(target).unwrap(), ..setting(workload) };
    for template in TEMPLATES {
        let mut n_carried = 0;
        let pairs = PAIRS.iter().flat_map(|&[a, b]| [[a, b], [b, a]]);
        for (target, pair) in ["x86-64-v3", "sm_90a"].into_iter().flat_map(|t| pairs.clone().map(move |p| (t, p))) {
            if !pair.iter().all(|w| (template.serves)(&on(target, w))) {
                continue;
            }
            let [from, to] = pair.map(|w| Task::new(on(target, w), Some(template.name)).unwrap());
            let source = earlier(&from, 20, 3);
            let guesses = warm_start(&to, std::slice::from_ref(&source));
            assert!(guesses.iter().all(|config| to.space.contains(config)), "{} {pair:?}", template.name);
            n_carried += guesses.len();
            // Carried over to its own space, a configuration is unchanged, and the best one comes first.
            let own = warm_start(&from, std::slice::from_ref(&source));
            let best = source.records.iter().min_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost())).unwrap();
            assert_eq!(from.space.config_to_json(&own[0]), best.config, "{} {pair:?}", template.name);
        }
        assert!(n_carried > 0, "{}: no pair of workloads for it", template.name);
    }
}

#[test]
fn the_nearest_workload_comes_first() {
    let new = task("matmul:m=512,n=512,k=512", Some("gemm-4-2-4"));
    let tasks = ["matmul:m=64,n=64,k=64", "matmul:m=1024,n=512,k=512", "matmul:m=512,n=512,k=512,dtype=f64"]
        .map(|w| earlier(&task(w, Some("gemm-4-2-4")), 8, 1));
    let best = |source: &EarlierTask| warm_start(&new, std::slice::from_ref(source))[0].clone();
    let guesses = warm_start(&new, &tasks);
    assert_eq!(guesses[0], best(&tasks[1]));
    assert!(guesses.contains(&best(&tasks[2])) && guesses.contains(&best(&tasks[0])) && guesses.len() <= 16);
    assert!(warm_start(&task("matmul:m=64,n=64,k=64", None), &tasks).is_empty(), "they are of another template");
}

/// Trains a model on lessons.
fn learn(lessons: &Lessons) -> sequence::SequenceModel {
    let examples: Vec<_> = lessons.examples.concat();
    let training = Training { n_trees: 20, ..Training::default() };
    let mut silent = |_: &sequence::TrainingProgress| ControlFlow::Continue(());
    let data = TrainingData { vocabulary: &lessons.vocabulary, train: &examples, validation: &examples[..3] };
    train(Architecture::Chain, data, &training, None, &mut silent).unwrap()
}

#[test]
fn a_model_of_records_knows_good_configurations_of_other_sizes() {
    let sources = [(128, 256), (256, 128), (256, 512), (512, 256), (512, 512), (128, 512)];
    let sources: Vec<EarlierTask> = sources
        .iter()
        .map(|(m, n)| earlier(&task(&format!("matmul:m={m},n={n},k=256"), Some(PAPER)), 400, 3))
        .collect();
    let lessons = Lessons::of(PAPER, &sources).unwrap();
    let fields: Vec<&str> = lessons.vocabulary.fields.iter().map(|field| field.name.as_str()).collect();
    assert_eq!(fields, ["m", "n"], "only what varies");
    let model = learn(&lessons);

    let new = task("matmul:m=384,n=768,k=256", Some(PAPER));
    let target = new.setting.target.name();
    let predicted = records::predict(&model, &new.setting.workload, 1, &target, &new.space, 8).unwrap();
    assert_eq!(predicted.len(), 8);
    assert!(predicted.windows(2).all(|pair| pair[0].0 != pair[1].0 && pair[0].1 >= pair[1].1), "{predicted:?}");
    assert!(predicted.iter().all(|(config, _)| new.space.contains(config)));
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(9);
    let mut random: Vec<f64> = (0..200).map(|_| cost(&new, &new.space.sample(&mut rng))).collect();
    random.sort_by(f64::total_cmp);
    let best = predicted.iter().map(|(config, _)| cost(&new, config)).fold(f64::INFINITY, f64::min);
    assert!(best < random[10], "{best} is not among the best twentieth of random ones, from {} on", random[10]);

    let other = task("matmul:m=384,n=768,k=256", None);
    let refused = records::predict(&model, &other.setting.workload, 1, &target, &other.space, 8).unwrap_err();
    assert!(refused.to_string().contains("m[1]"), "{refused}");
    assert!(matches!(Lessons::of(PAPER, &sources[..1]), Err(RecordsError::TooFew { n_workloads: 1, .. })));
}

/// Checks a workload with padding, which has parameters that other workloads of the template do not have.
#[test]
fn a_model_of_records_serves_workloads_with_and_without_some_parameters() {
    let [padded, plain] = ["r=3,s=3,pad=1", "r=1,s=1"]
        .map(|filter| move |k: i64| task(&format!("conv2d:c=32,h=14,w=14,k={k},{filter},const=w"), Some("conv")));
    let sources: Vec<EarlierTask> =
        [16, 32, 64].into_iter().flat_map(|k| [padded(k), plain(k)]).map(|task| earlier(&task, 100, 5)).collect();
    let lessons = Lessons::of("conv", &sources).unwrap();
    assert_eq!(lessons.examples.len(), 6, "every workload teaches something");
    let model = learn(&lessons);
    for new in [padded(48), plain(48)] {
        let target = new.setting.target.name();
        let predicted = records::predict(&model, &new.setting.workload, 1, &target, &new.space, 8).unwrap();
        assert_eq!(predicted.len(), 8, "{}", new.setting.workload);
        assert!(predicted.iter().all(|(config, _)| new.space.contains(config)));
        assert!(predicted.windows(2).all(|pair| pair[0].0 != pair[1].0));
    }
}

/// Checks that the completions of a prefix are exactly those of the space's configurations, whichever values
/// a model knows.
#[test]
fn completions_of_a_space_are_exact() {
    let parameters = vec![
        Parameter::factorization("f", 24, 3),
        Parameter::ordinal("o", [1, 2, 4, 8]),
        Parameter::categorical("c", &["x", "y"]),
        Parameter::permutation("p", &["i", "j"]),
        Parameter::ordinal("free", [1, 2]),
    ];
    let constraints = vec![
        Constraint::new("small", "f[2] * o <= 12", &["f", "o"], |v| v[0].factors()[2] as i64 * v[1].int() <= 12),
        Constraint::new("odd", "o != 4 where c = y", &["o", "c"], |v| v[0].int() != 4 || v[1].text() == "x"),
    ];
    let space = Space::new("test", parameters, constraints).unwrap();
    let token = |name: &str, values: &[&str]| sequence::KernelParameter {
        name: name.into(),
        values: values.iter().map(|value| (*value).to_owned()).collect(),
    };
    // Values that the space does not have, and some of its values that the model does not know.
    let parameters = vec![
        token("c", &["y", "x"]),
        token("f[1]", &["1", "2", "3", "5", "6"]),
        token("f[2]", &["2", "3", "4", "12"]),
        token("o", &["1", "4", "8", "16"]),
        token("p", &["i,j"]),
        token("free", &["2"]),
    ];
    let vocabulary = Vocabulary { fields: Vec::new(), parameters };
    let mut completions = SpaceCompletions::new(&space, &vocabulary).unwrap();
    let mut whole = Vec::new();
    let mut prefixes: Vec<Vec<u32>> = vec![vec![]];
    while let Some(prefix) = prefixes.pop() {
        if prefix.len() == vocabulary.parameters.len() {
            whole.push(prefix);
            continue;
        }
        let allowed = completions.allowed(&prefix);
        let next = (0..).zip(&allowed).filter(|(_, allowed)| **allowed);
        prefixes.extend(next.map(|(value, _)| [&prefix[..], &[value]].concat()));
        assert!(allowed.contains(&true), "{prefix:?} leads nowhere");
    }
    let mut found: Vec<Config> = whole.iter().map(|answer| completions.config(answer).expect("legal")).collect();
    found.sort();
    let is_known = |config: &Config| {
        let factors = space.factors(config, "f");
        [1, 2, 3, 6].contains(&factors[1])
            && [2, 3, 4, 12].contains(&factors[2])
            && [1, 4, 8].contains(&space.int(config, "o"))
            && space.order(config, "p") == ["i", "j"]
            && space.int(config, "free") == 2
    };
    let mut expected: Vec<Config> = (0..space.size()).map(|at| space.config_at(at)).filter(is_known).collect();
    expected.sort();
    assert!(expected.len() > 10);
    assert_eq!(found, expected);
    // An impossible prefix has no completions.
    assert_eq!(completions.allowed(&[0, 0, 3, 2]), [false], "f[2] = 12 with o = 8");
    let mut unknown = vocabulary.clone();
    unknown.parameters[5] = token("free", &["7"]);
    assert!(matches!(SpaceCompletions::new(&space, &unknown), Err(RecordsError::NothingKnown)));
}
