//! Template of loop nests on CPUs: rows shared among threads, vectors along the output or along the
//! reduction.
//!
//! The first guess has to be good, since an untuned model runs it.

mod schedule;
pub mod stages;

use super::model::bandwidth;
use super::{Template, TemplateSetting, ceil_div};
use schedule::{Choices, LaneLoop};
use stages::{LoopStage, StageGroup};
use std::collections::BTreeSet;
use tilewright_ir::op::Structure;
use tilewright_ir::{BufferId, Program, Step};
use tilewright_search::{Config, Parameter, Space, SpaceError};

pub use schedule::ScheduleBuilder;

/// Loop nests of any kind.
pub const NEST: Template = Template {
    name: "nest",
    text: "stages fused by rows or apart, vectors along the output or the reduction, tiles for transpositions, threads",
    serves: |s| s.target.gpu.is_none() && matches!(s.workload.structure(), Structure::Nest(_)),
    space,
    steps: |s, space, config| ScheduleBuilder::scheduled(s, &Choices::of(space, config)),
    estimate: Some(estimate),
};

/// Program of a workload with small stages inlined, and the steps that did it.
pub fn inlined(s: &TemplateSetting) -> (Program, Vec<Step>) {
    ScheduleBuilder::inlined(s)
}

/// Cycles for starting other threads, and for waiting for them.
const START_CYCLES: f64 = 5000.0;
/// Cycles of a single-threaded kernel up to which other threads are never used.
const ALONE_CYCLES: f64 = 4000.0;
/// Cycles from which on all threads are always used.
const SHARED_CYCLES: f64 = 4e6;

/// Makes the space, whose parameters depend on the stages.
fn space(s: &TemplateSetting) -> Result<Space, SpaceError> {
    let (program, _) = ScheduleBuilder::inlined(s);
    let stages = stages::stages(&program);
    let groups = stages::groups(&program, &stages, false, false);
    let lanes = s.target.lanes(stages::lane_type(&program));
    let any = |holds: &dyn Fn(&StageGroup) -> bool| groups.iter().any(holds);
    let mut parameters = vec![Parameter::ordinal("vectors", [1, 2, 4, 8])];
    if stages.iter().any(|stage| stage.reduces) {
        parameters.push(Parameter::ordinal("unroll", [1, 4, 16, 64]));
    }
    if any(&|g| LaneLoop::is_choice(&stages, g, g.root, lanes)) {
        parameters.push(Parameter::categorical("lanes", &["auto", "across", "along"]));
    }
    if any(&|g| schedule::crossing(&stages, g, lanes).is_some()) {
        parameters.push(Parameter::ordinal("tile", [1, 4, 8, 16]));
    }
    if any(&|g| !g.attached.is_empty()) {
        parameters.push(Parameter::categorical("stages", &["rows", "apart"]));
    }
    if any(&|g| schedule::borders(&stages, g, lanes).is_some()) {
        parameters.push(Parameter::categorical("borders", &["peeled", "selected"]));
    }
    let alone = cycles(s, &program, &stages, &groups, &Choices::default());
    if s.n_threads > 1 && alone > ALONE_CYCLES {
        let shares: &[&str] = if alone > SHARED_CYCLES { &["all"] } else { &["all", "one"] };
        parameters.push(Parameter::categorical("threads", shares));
        parameters.push(Parameter::ordinal("pieces", [1, 2, 4, 8]));
    }
    Space::declare("nest", parameters, Vec::new())
}

/// Cycles of the busiest thread.
fn estimate(s: &TemplateSetting, space: &Space, config: &Config) -> f64 {
    let choices = Choices::of(space, config);
    let (program, _) = ScheduleBuilder::inlined(s);
    let stages = stages::stages(&program);
    let groups = stages::groups(&program, &stages, choices.apart, false);
    cycles(s, &program, &stages, &groups, &choices)
}

fn cycles(
    s: &TemplateSetting,
    program: &Program,
    stages: &[LoopStage],
    groups: &[StageGroup],
    choices: &Choices,
) -> f64 {
    let lanes = s.target.lanes(stages::lane_type(program));
    let (mut compute, mut bytes, mut n_begins) = (0.0, 0.0, 0.0);
    for group in groups {
        let all: Vec<usize> = group.attached.iter().chain([&group.root]).copied().collect();
        compute += all.iter().map(|at| stage_cycles(stages, group, *at, lanes, choices)).sum::<f64>();
        // Buffers computed for a row stay in cache; all others are read or written once per group.
        let is_near = |b: &BufferId| group.attached.iter().any(|at| stages[*at].buffer == *b);
        let read = all.iter().flat_map(|at| stages[*at].reads.iter().map(|r| r.buffer));
        let touched: BTreeSet<BufferId> = read.chain([stages[group.root].buffer]).filter(|b| !is_near(b)).collect();
        bytes += touched.iter().map(|b| program.buffer(*b).size_bytes().unwrap_or(0) as f64).sum::<f64>();
        n_begins += 1.0;
    }
    let memory = bytes / bandwidth(s, bytes);
    let cycles = compute.max(memory) + 0.2 * compute.min(memory);
    if !choices.all_threads || s.n_threads == 1 {
        return cycles;
    }
    let n_threads = s.n_threads as f64;
    let uneven = 1.0 + 0.5 / choices.pieces as f64;
    let of_each = compute / n_threads * uneven;
    let memory = memory / n_threads.min(2.0);
    of_each.max(memory) + 0.2 * of_each.min(memory) + n_begins * (START_CYCLES + 100.0 * choices.pieces as f64)
}

/// Cycles of a stage on one core.
fn stage_cycles(stages: &[LoopStage], group: &StageGroup, at: usize, lanes: i64, choices: &Choices) -> f64 {
    let stage = &stages[at];
    let n = stage.iterations();
    let of_lanes = LaneLoop::of(stages, group, at, lanes, choices);
    let Some(along) = of_lanes.at() else { return n * (stage.cycles + 2.0 + stage.reads.len() as f64) };
    let extent = stage.loops[along].extent;
    let vectors = choices.vectors.min(ceil_div(extent, lanes)) as f64;
    let tile = if at == group.root && schedule::crossing(stages, group, lanes).is_some() { choices.tile } else { 1 };
    let mut step = stage.cycles;
    for read in &stage.reads {
        step += match read.strides[along] {
            Some(0 | 1) => 0.5,
            Some(2..=4) if choices.unroll >= 4 || !stage.reduces => 1.5,
            Some(_) if tile >= 8 => 7.0 * 16.0 / (tile + lanes.min(tile)) as f64,
            Some(_) if tile >= 4 => 10.0,
            Some(_) | None => 1.2 * lanes as f64,
        };
    }
    let cost_of_masks: f64 =
        stage.reads.iter().map(|r| if r.strides[along] == Some(1) { 2.0 } else { 0.2 * lanes as f64 }).sum();
    let is_conditional = stage.conditions.iter().any(|c| c.iter().any(|i| i.uses(stage.loops[along].var)));
    // Share of the iterations of the lane loop that are masked, and cost of those that are peeled off, if
    // conditions hold for some lanes only.
    let (mut masked, mut of_peeled) = (0.0, 0.0);
    if is_conditional && at == group.root {
        let width = (lanes * choices.vectors).min(extent);
        match schedule::borders(stages, group, lanes) {
            Some([front, back]) if choices.selects => {
                let vectors = (ceil_div(front, width) + ceil_div(back, width)).min(ceil_div(extent, width));
                masked = (vectors * width) as f64 / extent as f64;
            }
            // Element by element, through memory if it is a reduction.
            Some([front, back]) => {
                let of_each = if stage.reduces { 16.0 } else { 2.0 };
                of_peeled = (front + back) as f64 * (n / extent as f64) * of_each * stage.reads.len() as f64;
            }
            None => masked = 1.0,
        }
    }
    step += masked.min(1.0) * cost_of_masks;
    let n_rest: f64 = n / extent as f64;
    let n_steps = n_rest * ceil_div(extent, lanes) as f64;
    of_peeled
        + match of_lanes {
            LaneLoop::Along(_) => {
                // Each addition waits for the previous one.
                let step = (step + 0.5).max(4.0 / vectors) + 1.5 / vectors;
                let n_results: f64 = stage.axes().map(|a| stage.loops[a].extent as f64).product();
                n_steps * step + n_results * (10.0 + 2.0 * (lanes as f64).log2() + 1.5 * vectors)
            }
            _ if stage.reduces => {
                let unrolled = choices.unroll as f64;
                n_steps * ((step + 0.5).max(3.0 / vectors) + 2.0 / (vectors * unrolled)) + n_rest * 2.0 / unrolled
            }
            _ => n_steps * (step + 1.0 + 1.5 / vectors) + n_rest * 4.0,
        }
}
