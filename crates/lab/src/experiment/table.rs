//! Table of the experiments.

use std::fmt;

use tilewright_search::SEARCHES;

use crate::history::SearchRun;
use tilewright::format::count;

/// Experiment: every arm on every problem, repeated with different seeds.
pub struct Experiment {
    /// Name on the command line.
    pub name: &'static str,
    /// Paper that it reproduces.
    pub paper: &'static str,
    /// Figure or table that it reproduces.
    pub figure: &'static str,
    /// Subject of the comparison, in one line.
    pub compares: &'static str,
    /// Deviations from the paper, in one line; empty if none.
    pub differs: &'static str,
    /// Deviations due to running on a CPU, in one line; empty if none.
    pub on_cpus: &'static str,
    /// Problems that are tuned.
    pub problems: &'static [SpaceProblem],
    /// Problems that are tuned first, as sources of transfer learning for arms.
    pub sources: &'static [SpaceProblem],
    /// Arms that are compared.
    pub arms: Arms,
    /// Length of each run at a budget of 1.
    pub length: Length,
    /// Number of repetitions of each arm on each problem.
    pub repeats: u64,
    /// Whether runs begin with initial guesses of the template's analytical model.
    pub with_guesses: bool,
    /// Whether each run ends with a race of its best candidates. A single trial takes a few milliseconds, so
    /// that the fastest of many is partly due to luck. The kernels that all runs found are timed in
    /// interleaved rounds afterwards, as the machine's speed may change from run to run.
    pub is_raced: bool,
    /// Whether slow candidates are timed completely, rather than pruned, as for results on the whole space.
    pub to_the_end: bool,
    /// Whether the space includes configurations beyond a GPU's limits, which fail.
    pub beyond_limits: bool,
    /// Quantity that is plotted.
    pub measure: PlottedQuantity,
    /// Statistic of several runs, in tables and curves.
    pub centre: Centre,
    /// Moments besides the end at which results are compared, in order, at a budget of 1.
    pub moments: &'static [ComparedMoment],
    /// Plots that are drawn.
    pub views: &'static [ResultView],
}

/// Workload and template whose space is searched.
#[derive(Debug, Clone, Copy)]
pub struct SpaceProblem {
    /// Name in plots and tables.
    pub label: &'static str,
    /// Workload as on the command line.
    pub workload: &'static str,
    /// Template; `None` for the default one.
    pub template: Option<&'static str>,
}

/// Arms that are compared.
pub enum Arms {
    /// Explicit list.
    Listed(&'static [Arm]),
    /// All searches with their defaults.
    EverySearch,
}

/// Arm of an experiment: a search with its options.
#[derive(Debug, Clone, Copy)]
pub struct Arm {
    /// Name in plots and tables.
    pub label: &'static str,
    /// Search with its options.
    pub search: &'static str,
    /// Kind of transfer learning.
    pub transfer: Transferred,
}

/// Kind of transfer learning from earlier trials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transferred {
    /// No transfer.
    Nothing,
    /// Cost model pretrained on the trials of the sources.
    Model,
    /// Pretrained cost model, and the sources' best configurations as first candidates.
    ModelAndStart,
    /// Cost model pretrained on the arm's own trials of the previous problem.
    Previous,
}

/// Length of a run: it ends at its trials or its seconds, whichever comes first.
#[derive(Debug, Clone, Copy)]
pub struct Length {
    /// Number of trials.
    pub trials: TrialCount,
    /// Maximum seconds of a run.
    pub seconds: f64,
}

/// Moment at which runs are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ComparedMoment {
    /// Seconds after the start of each run.
    Seconds(f64),
    /// Number of trials of each run.
    Trials(u64),
    /// End of the runs.
    End,
}

/// Number of trials of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrialCount {
    /// Fixed number.
    Count(u64),
    /// Share of the space's size.
    ShareOfSpace(f64),
    /// Unlimited: as many as fit the time.
    Any,
}

/// Quantity that is plotted of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PlottedQuantity {
    /// Throughput in GFLOP/s.
    Throughput,
    /// Time in milliseconds.
    Cost,
}

/// Statistic of several runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Centre {
    /// Median, with the quartiles.
    Median,
    /// Mean, with the standard deviation.
    Mean,
}

/// Plot of results.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ResultView {
    /// Best so far over the number of trials.
    Trials,
    /// Best so far over time in seconds.
    Time,
    /// Best so far over the share of the space that was tried.
    Share,
    /// Best so far relative to the best known, over time in seconds, across all problems.
    Relative,
    /// Speed-up of the best so far over that of the arm of this name, over time in seconds, across all
    /// problems.
    SpeedUpOver(&'static str),
    /// Final results, as box plots.
    Boxes,
    /// Number of trials until 95 % of the best known, as box plots.
    NearBest,
    /// Histogram of throughput.
    Histogram,
    /// Numbers of trials and time by error class.
    Outcomes,
    /// Seconds by activity.
    Seconds,
}

impl ComparedMoment {
    /// Moment scaled to another budget.
    pub fn scaled(self, budget: f64) -> ComparedMoment {
        match self {
            ComparedMoment::Seconds(seconds) => ComparedMoment::Seconds(seconds * budget),
            ComparedMoment::Trials(trials) => ComparedMoment::Trials((trials as f64 * budget).round() as u64),
            ComparedMoment::End => ComparedMoment::End,
        }
    }

    /// Number of trials that a run had made by this moment.
    pub fn n_trials(self, run: &SearchRun) -> usize {
        match self {
            ComparedMoment::Seconds(seconds) => run.trials.partition_point(|trial| trial.elapsed_s <= seconds),
            ComparedMoment::Trials(trials) => run.trials.len().min(trials as usize),
            ComparedMoment::End => run.trials.len(),
        }
    }
}

impl fmt::Display for ComparedMoment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComparedMoment::Seconds(seconds) => write!(f, "after {seconds:.1} s"),
            ComparedMoment::Trials(trials) => write!(f, "after {}", count(*trials, "trial")),
            ComparedMoment::End => f.write_str("at the end"),
        }
    }
}

impl Length {
    const fn trials(count: u64, seconds: f64) -> Length {
        Length { trials: TrialCount::Count(count), seconds }
    }

    const fn share_of_space(share: f64, seconds: f64) -> Length {
        Length { trials: TrialCount::ShareOfSpace(share), seconds }
    }

    const fn seconds(seconds: f64) -> Length {
        Length { trials: TrialCount::Any, seconds }
    }
}

impl SpaceProblem {
    const fn of(label: &'static str, workload: &'static str, template: &'static str) -> SpaceProblem {
        SpaceProblem { label, workload, template: Some(template) }
    }

    const fn default(label: &'static str, workload: &'static str) -> SpaceProblem {
        SpaceProblem { label, workload, template: None }
    }
}

impl Arm {
    const fn named(label: &'static str, search: &'static str) -> Arm {
        Arm { label, search, transfer: Transferred::Nothing }
    }

    const fn search(search: &'static str) -> Arm {
        Arm::named(search, search)
    }
}

impl Experiment {
    /// Arms of the experiment.
    pub fn arms(&self) -> Vec<Arm> {
        match self.arms {
            Arms::Listed(arms) => arms.to_vec(),
            Arms::EverySearch => SEARCHES.iter().map(|row| Arm::search(row.name)).collect(),
        }
    }
}

const fn resnet(template: Option<&'static str>) -> [SpaceProblem; 12] {
    [
        SpaceProblem { label: "C1", workload: "resnet18.C1", template },
        SpaceProblem { label: "C2", workload: "resnet18.C2", template },
        SpaceProblem { label: "C3", workload: "resnet18.C3", template },
        SpaceProblem { label: "C4", workload: "resnet18.C4", template },
        SpaceProblem { label: "C5", workload: "resnet18.C5", template },
        SpaceProblem { label: "C6", workload: "resnet18.C6", template },
        SpaceProblem { label: "C7", workload: "resnet18.C7", template },
        SpaceProblem { label: "C8", workload: "resnet18.C8", template },
        SpaceProblem { label: "C9", workload: "resnet18.C9", template },
        SpaceProblem { label: "C10", workload: "resnet18.C10", template },
        SpaceProblem { label: "C11", workload: "resnet18.C11", template },
        SpaceProblem { label: "C12", workload: "resnet18.C12", template },
    ]
}

const RESNET: &[SpaceProblem] = &resnet(None);
/// Layers of ResNet-18 and a matrix multiplication, with the default templates.
pub(super) const RESNET_AND_MATMUL: &[SpaceProblem] = &{
    let [c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12] = resnet(None);
    [c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, SpaceProblem::default("1024³", "matmul-1024")]
};
/// Layers that NoSE is tested on; the other four were used to choose its options.
const NOSE_TESTS: &[SpaceProblem] = &{
    let [_, _, c3, c4, c5, c6, c7, c8, c9, c10, _, _] = resnet(Some("conv-4-4-4-2-2-2"));
    [c3, c4, c5, c6, c7, c8, c9, c10]
};

const MIXED: &[SpaceProblem] = &[
    SpaceProblem::default("1024³", "matmul-1024"),
    SpaceProblem::default("C2", "resnet18.C2"),
    SpaceProblem::default("C9", "resnet18.C9"),
    SpaceProblem::default("C12", "resnet18.C12"),
];

const GBFS_PAPER: &str = "G-BFS and N-A2C";
const GBFS_ARMS: &[Arm] = &[
    Arm::named("gbfs", "gbfs:start=random"),
    Arm::named("na2c", "na2c:start=random"),
    Arm::named("gbt", "gbt:batch=64"),
    Arm::search("rnn_controller"),
    Arm::search("random"),
];
const ON_A_CPU: &str = "a CPU";
const AUTOTVM_DIFFERS: &str = "our templates; trees of depth 6 see parameters, the paper's of depth 3 loops; \
                                diversity is in units of the predictions' spread; the paper has 800 trials";
const AUTOTVM_MODELS_DIFFERS: &str = "our templates; trees are of depth 6 and see parameters, but for one arm with those of \
                                       the paper's implementation, of depth 3 and of loops; the network is half as wide, has no \
                                       embedding of each identifier and 20 updates a batch; where programs are looked at, by \
                                       the network and by the paper's trees, the annealing has a quarter of the chains and 32 \
                                       steps of 500; batches are not varied on purpose; the genetic algorithm is ours with the paper's population; the paper has 800 \
                                       trials";
const GBFS_DIFFERS: &str = "G-BFS and N-A2C begin at a random configuration, since the untiled one of the paper takes \
                             seconds here; the XGBoost tuner is `gbt`, at most 100 trees of depth 6 on parameters; a kernel's \
                             time is the median of a trial's samples, not the mean of ten; random search beside the paper's four";
const NO_FAILURES: &str = "a CPU, on which no configuration fails";
const NOSE_DIFFERS: &str = "eight of the twelve spaces have other sizes than the paper \
                             lists; XGBoost is `gbt`, at most 100 trees of depth 6 on parameters; a minute a run instead of an \
                             hour; deviations are standard ones, not errors of the mean";
const NOSE_ARMS: &[Arm] = &[
    Arm::named(
        "nose",
        "nose:population=100,generation=30,selection=fitness,start=random,crossover=one_point,mutation=0.3,steps=0,mutant=other",
    ),
    Arm::named(
        "genetic",
        "genetic:population=100,generation=97,selection=fitness,start=random,crossover=one_point,mutation=0.1,steps=0",
    ),
    Arm { label: "gbt", search: "gbt:batch=64", transfer: Transferred::Previous },
];
/// Arm of AutoTVM's figure 9, named by the features of its trees.
const fn seeing(label: &'static str, search: &'static str, transfer: Transferred) -> Arm {
    Arm { label, search, transfer }
}

/// Defaults of most experiments.
const PLAIN: Experiment = Experiment {
    name: "",
    paper: "",
    figure: "",
    compares: "",
    differs: "",
    on_cpus: "",
    problems: &[],
    sources: &[],
    arms: Arms::EverySearch,
    length: Length::seconds(0.0),
    repeats: 0,
    with_guesses: false,
    is_raced: false,
    to_the_end: false,
    beyond_limits: false,
    measure: PlottedQuantity::Throughput,
    centre: Centre::Median,
    moments: &[],
    views: &[],
};

/// Table of all experiments.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "gemm-fraction",
        paper: GBFS_PAPER,
        figure: "figure 7",
        compares: "the best kernel against the share of the space that was tried and against time, 1024³",
        differs: GBFS_DIFFERS,
        on_cpus: ON_A_CPU,
        problems: &[SpaceProblem::of("1024³", "matmul-1024", "gemm-4-2-4")],
        arms: Arms::Listed(GBFS_ARMS),
        length: Length::share_of_space(0.001, 300.0),
        repeats: 5,
        measure: PlottedQuantity::Cost,
        views: &[ResultView::Share, ResultView::Time],
        ..PLAIN
    },
    Experiment {
        name: "gemm-sizes",
        paper: GBFS_PAPER,
        figure: "figure 8a",
        compares: "the best kernel after 0.1 % of the space, 512³, 1024³ and 2048³",
        differs: GBFS_DIFFERS,
        on_cpus: ON_A_CPU,
        problems: &[
            SpaceProblem::of("512³", "matmul-512", "gemm-4-2-4"),
            SpaceProblem::of("1024³", "matmul-1024", "gemm-4-2-4"),
            SpaceProblem::of("2048³", "matmul-2048", "gemm-4-2-4"),
        ],
        arms: Arms::Listed(GBFS_ARMS),
        length: Length::share_of_space(0.001, 300.0),
        repeats: 10,
        measure: PlottedQuantity::Cost,
        views: &[ResultView::Boxes, ResultView::Share],
        ..PLAIN
    },
    Experiment {
        name: "gemm-time",
        paper: GBFS_PAPER,
        figure: "figure 8b",
        compares: "the best kernels of ten runs after 750 s each, 1024³",
        differs: GBFS_DIFFERS,
        on_cpus: ON_A_CPU,
        problems: &[SpaceProblem::of("1024³", "matmul-1024", "gemm-4-2-4")],
        arms: Arms::Listed(GBFS_ARMS),
        length: Length::seconds(750.0),
        repeats: 10,
        measure: PlottedQuantity::Cost,
        views: &[ResultView::Boxes, ResultView::Time],
        ..PLAIN
    },
    Experiment {
        name: "autotvm-models",
        paper: "AutoTVM",
        figure: "figure 4",
        compares: "boosted trees and TreeGRU against black-box searches",
        differs: AUTOTVM_MODELS_DIFFERS,
        on_cpus: ON_A_CPU,
        problems: RESNET_AND_MATMUL,
        arms: Arms::Listed(&[
            Arm::named("gbt", "gbt:batch=64"),
            Arm::named("gbt, paper", "gbt:batch=64,features=loop,trees=8000,depth=3,learning_rate=0.3,patience=20"),
            Arm::named("tree_gru", "tree_gru:batch=64"),
            Arm::search("random"),
            Arm::named("genetic", "genetic:population=100"),
        ]),
        length: Length::trials(512, 60.0),
        repeats: 3,
        views: &[ResultView::Trials, ResultView::Time],
        ..PLAIN
    },
    Experiment {
        name: "autotvm-objective",
        paper: "AutoTVM",
        figure: "figure 5",
        compares: "the rank objective against regression",
        differs: AUTOTVM_DIFFERS,
        on_cpus: ON_A_CPU,
        problems: RESNET_AND_MATMUL,
        arms: Arms::Listed(&[
            Arm::named("gbt, rank", "gbt:batch=64,objective=rank"),
            Arm::named("gbt, regression", "gbt:batch=64,objective=regression"),
            Arm::named("tree_gru, rank", "tree_gru:batch=64,objective=rank"),
            Arm::named("tree_gru, regression", "tree_gru:batch=64,objective=regression"),
        ]),
        length: Length::trials(512, 60.0),
        repeats: 3,
        views: &[ResultView::Trials],
        ..PLAIN
    },
    Experiment {
        name: "autotvm-diversity",
        paper: "AutoTVM",
        figure: "figure 6",
        compares: "batches that are varied on purpose against the best predictions alone",
        differs: AUTOTVM_DIFFERS,
        on_cpus: ON_A_CPU,
        problems: RESNET_AND_MATMUL,
        arms: Arms::Listed(&[
            Arm::named("gbt, diversity 0", "gbt:batch=64,diversity=0"),
            Arm::named("gbt, diversity 0.5", "gbt:batch=64,diversity=0.5"),
            Arm::named("gbt, diversity 2", "gbt:batch=64,diversity=2"),
        ]),
        length: Length::trials(512, 60.0),
        repeats: 3,
        views: &[ResultView::Trials],
        ..PLAIN
    },
    Experiment {
        name: "autotvm-uncertainty",
        paper: "AutoTVM",
        figure: "figure 7",
        compares: "acquisition functions over five bootstrapped models",
        differs: AUTOTVM_DIFFERS,
        on_cpus: ON_A_CPU,
        problems: RESNET_AND_MATMUL,
        arms: Arms::Listed(&[
            Arm::named("gbt, mean", "gbt:batch=64,bootstrap=5,acquisition=mean"),
            Arm::named("gbt, EI", "gbt:batch=64,bootstrap=5,acquisition=ei"),
            Arm::named("gbt, UCB", "gbt:batch=64,bootstrap=5,acquisition=ucb"),
        ]),
        length: Length::trials(512, 60.0),
        repeats: 3,
        views: &[ResultView::Trials],
        ..PLAIN
    },
    Experiment {
        name: "autotvm-transfer",
        paper: "AutoTVM",
        figure: "figure 8",
        compares: "a model trained on C1 to C6, also with their best configurations to begin with, against one that begins \
                   with nothing, on C7 to C9 and on 1024³",
        on_cpus: ON_A_CPU,
        differs: "our templates; the paper learns from 20,000 trials and more, here six runs teach 4,096 at most \
                  (`gbt:experience=` lifts that); what the model of other layers says is weighed by the trials of this one and \
                  handed on to trees on parameters",
        problems: &[
            SpaceProblem::default("C7", "resnet18.C7"),
            SpaceProblem::default("C8", "resnet18.C8"),
            SpaceProblem::default("C9", "resnet18.C9"),
            SpaceProblem::default("1024³", "matmul-1024"),
        ],
        sources: RESNET.split_at(6).0,
        arms: Arms::Listed(&[
            Arm::search("gbt"),
            Arm { label: "gbt, transfer", search: "gbt", transfer: Transferred::Model },
            Arm { label: "gbt, transfer and start", search: "gbt", transfer: Transferred::ModelAndStart },
        ]),
        length: Length::trials(256, 60.0),
        repeats: 3,
        views: &[ResultView::Trials, ResultView::NearBest],
        ..PLAIN
    },
    Experiment {
        name: "autotvm-invariance",
        paper: "AutoTVM",
        figure: "figure 9",
        compares: "what a model may see to be of use elsewhere: parameters, loops or relations between loops, alone and with what \
                   C1 to C6 teach, on C7 and on 1024³",
        on_cpus: ON_A_CPU,
        differs: "our templates; six runs teach 4,096 programs at most, the paper's 20,000 and more; figure 9d, from one \
                  device to another, is left out; trees on loops and relations anneal 32 chains for 32 steps",
        problems: &[SpaceProblem::default("C7", "resnet18.C7"), SpaceProblem::default("1024³", "matmul-1024")],
        sources: RESNET.split_at(6).0,
        arms: Arms::Listed(&[
            seeing("knob", "gbt:features=knob", Transferred::Nothing),
            seeing("loop", "gbt:features=loop", Transferred::Nothing),
            seeing("relation", "gbt:features=relation", Transferred::Nothing),
            seeing("knob, transfer", "gbt:features=knob,global=knob", Transferred::Model),
            seeing("loop, transfer", "gbt:features=loop,global=loop", Transferred::Model),
            seeing("relation, transfer", "gbt:features=relation,global=relation", Transferred::Model),
        ]),
        length: Length::trials(256, 60.0),
        repeats: 3,
        moments: &[ComparedMoment::Trials(64)],
        views: &[ResultView::Trials],
        ..PLAIN
    },
    Experiment {
        name: "opevo-operators",
        paper: "OpEvo",
        figure: "figures 2 to 4, tables 1 to 3",
        compares: "OpEvo against G-BFS, N-A2C, boosted trees and random search on eight operators",
        on_cpus: ON_A_CPU,
        differs: "96 products instead of 960 in a batch and one image instead of 512; G-BFS and N-A2C begin at a random \
                  configuration and search convolutions too; AutoTVM is `gbt`, at most 100 trees of depth 6 on parameters",
        problems: &[
            SpaceProblem::of("MM1", "bert.MM1", "matmul-4-3-4"),
            SpaceProblem::of("MM2", "bert.MM2", "matmul-4-3-4"),
            SpaceProblem::of("MM3", "bert.MM3", "matmul-4-3-4"),
            SpaceProblem::of("BMM1", "batch_matmul:b=96,m=128,n=64,k=128", "matmul-4-3-4"),
            SpaceProblem::of("BMM2", "batch_matmul:b=96,m=128,n=64,k=128,ta=1", "matmul-4-3-4"),
            SpaceProblem::of("BMM3", "batch_matmul:b=96,m=128,n=128,k=64,tb=1", "matmul-4-3-4"),
            SpaceProblem::of("C1", "conv2d:n=1,c=3,h=227,w=227,k=64,r=11,s=11,stride=4", "conv-4-4-4-2-2-2"),
            SpaceProblem::of("C2", "conv2d:n=1,c=64,h=27,w=27,k=192,r=5,s=5,pad=2", "conv-4-4-4-2-2-2"),
        ],
        arms: Arms::Listed(&[
            Arm::named("opevo", "opevo:generation=8,selection=fitness,q=0.5,start=random"),
            Arm::named("gbfs", "gbfs:start=random"),
            Arm::named("na2c", "na2c:start=random"),
            Arm::named("gbt", "gbt:batch=64"),
            Arm::search("random"),
        ]),
        length: Length::trials(512, 120.0),
        repeats: 5,
        centre: Centre::Mean,
        views: &[ResultView::Trials, ResultView::Boxes],
        ..PLAIN
    },
    Experiment {
        name: "nose-errors",
        paper: "NoSE",
        figure: "figures 3 and 4",
        compares: "error classes and throughput over the whole space of C12",
        on_cpus: NO_FAILURES,
        differs: "one in 200 drawn at random, where the paper measures all",
        problems: &[SpaceProblem::of("C12", "resnet18.C12", "conv-4-4-4-2-2-2")],
        arms: Arms::Listed(&[Arm::search("random")]),
        length: Length::share_of_space(0.005, 600.0),
        repeats: 1,
        to_the_end: true,
        beyond_limits: true,
        views: &[ResultView::Outcomes, ResultView::Histogram],
        ..PLAIN
    },
    Experiment {
        name: "nose-layers",
        paper: "NoSE",
        figure: "figures 5 and 8",
        compares: "NoSE against a genetic algorithm and boosted trees in wall-clock time",
        differs: NOSE_DIFFERS,
        on_cpus: NO_FAILURES,
        problems: NOSE_TESTS,
        arms: Arms::Listed(NOSE_ARMS),
        length: Length::seconds(60.0),
        repeats: 4,
        centre: Centre::Mean,
        moments: &[ComparedMoment::Seconds(10.0)],
        views: &[ResultView::Relative, ResultView::SpeedUpOver("genetic"), ResultView::Time],
        ..PLAIN
    },
    Experiment {
        name: "nose-iterations",
        paper: "NoSE",
        figure: "figures 6 and 7",
        compares: "where the time of 5,000 trials goes and how they end, NoSE, a genetic algorithm and boosted trees",
        differs: NOSE_DIFFERS,
        on_cpus: NO_FAILURES,
        problems: NOSE_TESTS,
        arms: Arms::Listed(NOSE_ARMS),
        length: Length::trials(5000, 600.0),
        repeats: 1,
        centre: Centre::Mean,
        views: &[ResultView::Seconds, ResultView::Outcomes],
        ..PLAIN
    },
    Experiment {
        name: "searches",
        paper: "Tilewright",
        compares: "all searches at equal time, as `tune` runs them",
        problems: MIXED,
        arms: Arms::EverySearch,
        length: Length::seconds(30.0),
        repeats: 3,
        with_guesses: true,
        is_raced: true,
        moments: &[ComparedMoment::Seconds(10.0)],
        views: &[ResultView::Time, ResultView::Boxes, ResultView::Seconds],
        ..PLAIN
    },
    Experiment {
        name: "trials-to-95",
        paper: "Tilewright",
        compares: "trials until 95 % of the best known",
        problems: MIXED,
        arms: Arms::Listed(&[Arm::search("auto"), Arm::search("gbt"), Arm::search("random")]),
        length: Length::trials(1200, 120.0),
        repeats: 5,
        is_raced: true,
        // Searches up to one of these moments are compared with searches up to three times as much.
        moments: &[
            ComparedMoment::Trials(64),
            ComparedMoment::Trials(128),
            ComparedMoment::Trials(256),
            ComparedMoment::Trials(400),
            ComparedMoment::Trials(768),
        ],
        views: &[ResultView::NearBest, ResultView::Trials],
        ..PLAIN
    },
];
