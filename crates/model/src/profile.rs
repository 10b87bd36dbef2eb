//! Outline and profile of a model's run: its steps, and their times.

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;
use tilewright::format::{count, digits, duration, grouped, table};
use tilewright::{Workload, one_line};
use tilewright_runtime::ArenaLayout;
use tilewright_search::Timing;

use crate::compile::{Compiled, lay_out};
use crate::fuse::{Fused, Step};
use crate::net::{Kind, Node};
use crate::no_code::NoCode;
use crate::rules::Trace;
use crate::runner::{RunError, Runner};
use crate::value_memory::Places;

/// Outline of a compiled model.
pub struct Outline {
    /// Number of kernels; those of a sequence count for one time step.
    pub n_kernels: usize,
    /// Distinct kernels, each with its number of calls per run.
    pub kernels: Vec<(Workload, usize)>,
    /// Calls of C functions: name of the model's node, and of the function.
    pub calls: Vec<(String, String)>,
    /// Nodes without code.
    pub without_code: Vec<WithoutCode>,
    /// Number of copies between tensors.
    pub n_copies: usize,
    /// Memory plan of intermediate results.
    pub memory: ArenaLayout,
    /// Passes that made the steps from the model's graph.
    pub trace: Trace,
}

/// Node without code.
#[derive(Debug, Clone, PartialEq)]
pub struct WithoutCode {
    /// Name of the model's node.
    pub node: String,
    /// Name of its operator.
    pub operator: String,
    /// Reason why it has no code.
    pub reason: NoCode,
}

impl fmt::Display for WithoutCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WithoutCode { node, operator, reason } = self;
        write!(f, "{node} ({operator}): {reason}")
    }
}

impl Fused {
    /// Nodes without code, with the reasons.
    pub fn without_code(&self) -> impl Iterator<Item = WithoutCode> {
        self.all().filter_map(|(step, _)| {
            let Step::Host(node) = step else { return None };
            let Kind::Host(host) = &node.kind else { return None };
            let (origin, reason) = (node.origin.clone(), host.reason.clone());
            Some(WithoutCode { node: origin, operator: node.operator(), reason })
        })
    }
}

impl Outline {
    /// Outline of fused steps.
    pub fn of(fused: &Fused) -> Outline {
        let places = Places::new(fused);
        let (_, memory) = lay_out(fused, &places, 1);
        let calls = fused.each().filter_map(|(step, _)| match step {
            Step::Host(node) if matches!(node.kind, Kind::Call(_)) => Some((node.origin.clone(), node.operator())),
            _ => None,
        });
        let n_kernels = fused.each().filter(|(step, _)| matches!(step, Step::Kernel(_))).count();
        Outline {
            n_kernels,
            kernels: fused.tasks(),
            calls: calls.collect(),
            without_code: fused.without_code().collect(),
            n_copies: places.copies.len(),
            memory,
            trace: fused.trace.clone(),
        }
    }

    /// Formats the outline for people.
    pub fn text(&self) -> String {
        let n_kernels = count(self.n_kernels as u64, "kernel");
        let n_copies = if self.n_copies == 1 { "1 copy".to_owned() } else { format!("{} copies", self.n_copies) };
        let arena = grouped(self.memory.total);
        let mut text = format!("\na run is {n_kernels} and {n_copies}, with {arena} bytes for what is on the way\n");
        let rows = self.kernels.iter().map(|(workload, n)| vec![format!("  {}", workload.label()), format!("{n}×")]);
        text += &table(&rows.collect::<Vec<_>>());
        if !self.calls.is_empty() {
            text += "\nfunctions in C, each on one thread\n";
        }
        self.calls.iter().for_each(|(node, operator)| text += &format!("  {} ({operator})\n", one_line(node)));
        if !self.without_code.is_empty() {
            text += "\nwithout code, run as the reference evaluates them\n";
        }
        self.without_code.iter().for_each(|node| text += &format!("  {}\n", one_line(&node.to_string())));
        text
    }
}

/// A step of a run. Its JSON is an entry of `profile` of `tilewright run --profile --json`.
#[derive(Debug, Clone, Serialize)]
pub struct ProfiledStep {
    /// Names of the model's nodes that it comes from.
    pub name: String,
    /// Kind: `kernel`, `host` for an operator without code, `append` to a state, `loop` for the start or end
    /// of one, or `copy`.
    pub kind: &'static str,
    /// Workload of a kernel; operator of another step.
    pub workload: String,
    /// Label of the workload for people.
    #[serde(skip)]
    pub label: String,
    /// Channel layout of a kernel's output, unless plain: `c16` for blocks of 16 channels (NCHW16c).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<String>,
    /// Number of executions per run: once for each time step of a sequence, and for each iteration of a loop
    /// of known length.
    #[serde(skip_serializing_if = "is_one")]
    pub times: usize,
    /// Total time of all executions in a run, in microseconds, as the median over runs; 0 if not measured.
    pub us: f64,
    /// Throughput of a kernel in GFLOP/s, if its operations are counted.
    pub gflops: Option<f64>,
}

/// Label of a step that is not a kernel.
fn host_label(node: &Node) -> String {
    let how = if matches!(node.kind, Kind::Call(_)) { "in C" } else { "without code" };
    format!("{} {how}", node.operator())
}

fn is_one(n: &usize) -> bool {
    *n == 1
}

impl Compiled {
    /// Steps of a run, in order, without times; a step that is executed several times is listed at its first
    /// occurrence. For a model with plans for several numbers of rows, these are the steps for the fewest
    /// rows; for a model with steps for each size, those for the largest size.
    pub fn steps(&self) -> Vec<ProfiledStep> {
        let plan = self.model.plan();
        let (rows, row_of_steps) = self.rows();
        let of_members = plan.members.as_ref().map(|members| &members.each[0].steps);
        match plan.pieces.last().map(|piece| &piece.steps).or(of_members) {
            Some(steps) => chosen(rows, &row_of_steps[steps.clone()]),
            None => rows,
        }
    }

    /// Listed steps, and the index among them of each step of the plan.
    fn rows(&self) -> (Vec<ProfiledStep>, Vec<usize>) {
        let each: Vec<(&Step, usize)> = self.fused.all().collect();
        let (mut rows, mut row_of): (Vec<ProfiledStep>, HashMap<usize, usize>) = (Vec::new(), HashMap::new());
        let mut row = |(step, origin): (&tilewright_runtime::PlanStep, &Option<usize>)| {
            if let Some(&known) = origin.and_then(|at| row_of.get(&at)) {
                return known;
            }
            let (step_of, times) = origin.map_or((None, 1), |at| (Some(each[at].0), each[at].1));
            let (kind, workload, label) = match step_of {
                Some(Step::Kernel(kernel)) => ("kernel", kernel.workload.to_string(), kernel.workload.label()),
                Some(Step::Host(node)) => ("host", node.operator(), host_label(node)),
                Some(Step::Append { .. }) => ("append", String::new(), "append".to_owned()),
                Some(Step::While(_) | Step::Again(_)) => ("loop", String::new(), "loop".to_owned()),
                _ => ("copy", String::new(), "copy".to_owned()),
            };
            let layout = match step_of {
                Some(Step::Kernel(kernel)) if kernel.block > 1 => Some(format!("c{}", kernel.block)),
                _ => None,
            };
            let name = step.name.clone();
            rows.push(ProfiledStep { name, kind, workload, label, layout, times, us: 0.0, gflops: None });
            row_of.extend(origin.map(|at| (at, rows.len() - 1)));
            rows.len() - 1
        };
        let row_of_steps = self.model.plan().steps.iter().zip(&self.origins).map(&mut row).collect();
        (rows, row_of_steps)
    }

    /// Profiles the steps on the current inputs: the median time of each over `n_runs` runs.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn profile(&self, runner: &mut Runner, n_runs: usize) -> Result<Vec<ProfiledStep>, RunError> {
        let (mut rows, row_of_steps) = self.rows();
        let mut of_rows = vec![Vec::new(); rows.len()];
        for run in 0..n_runs.max(1) {
            let mut ns = vec![0; row_of_steps.len()];
            runner.profile(&mut ns)?;
            of_rows.iter_mut().for_each(|runs| runs.push(0.0));
            row_of_steps.iter().zip(ns).for_each(|(row, ns)| of_rows[*row][run] += ns as f64);
        }
        let each: Vec<&Step> = self.fused.all().map(|(step, _)| step).collect();
        for (row, ns) in rows.iter_mut().zip(&of_rows) {
            row.us = Timing::of_samples(ns, false).median_ns / 1e3;
        }
        let are_uncounted = self.fused.are_uncounted();
        for (row, origin) in row_of_steps.iter().zip(&self.origins) {
            // The work of a kernel with open sizes, or in a loop of unknown length, depends on the run.
            if let Some(Step::Kernel(kernel)) = origin.map(|at| each[at])
                && kernel.open.is_none()
                && !origin.is_some_and(|at| are_uncounted[at])
            {
                let flops = kernel.workload.flops() * rows[*row].times as f64;
                rows[*row].gflops = (flops > 0.0).then(|| flops / (rows[*row].us * 1e3).max(1.0));
            }
        }
        if let Some(steps) = runner.steps_of_member() {
            return Ok(chosen(rows, &row_of_steps[steps]));
        }
        let (plan, mut used) = (self.model.plan(), Vec::new());
        if plan.pieces.is_empty() {
            return Ok(rows);
        }
        let mut n = runner.rows().unwrap_or(plan.appends);
        while let Some(piece) = plan.piece(runner.n_items(), n) {
            used.extend_from_slice(&row_of_steps[piece.steps.clone()]);
            n %= piece.n;
        }
        Ok(chosen(rows, &used))
    }
}

/// Selects the rows of these numbers, each once.
fn chosen(rows: Vec<ProfiledStep>, numbers: &[usize]) -> Vec<ProfiledStep> {
    rows.into_iter().enumerate().filter(|(at, _)| numbers.contains(at)).map(|(_, row)| row).collect()
}

/// Formats steps as a table for people, slowest first.
pub fn profile_table(steps: &[ProfiledStep]) -> String {
    let total: f64 = steps.iter().map(|step| step.us).sum();
    let mut by_time: Vec<&ProfiledStep> = steps.iter().collect();
    by_time.sort_by(|a, b| b.us.total_cmp(&a.us));
    let rows = by_time.iter().map(|step| {
        let share = 100.0 * step.us / total.max(1e-3);
        let gflops = step.gflops.map_or(String::new(), |gflops| format!("{} GFLOP/s", digits(gflops)));
        let times = if step.times == 1 { String::new() } else { format!("  {}×", step.times) };
        let what = format!("{}  {}{times}", brief(&step.label, 70), brief(&one_line(&step.name), 50));
        vec![what, duration(step.us * 1e3), format!("{share:.1} %"), gflops]
    });
    table(&rows.collect::<Vec<_>>())
}

/// Shortens a text to `most` characters.
fn brief(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
