//! Compilation of models with the best known configurations of their kernels, in the image layouts that suit
//! these best.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::rc::Rc;

use tilewright::{Cache, Caches, Choice, Determined, Error, NO_CACHE, Records, target_name};
use tilewright_ir::op::{Layout, Structure, Workload};
use tilewright_ir::{DType, Program, Target};

use crate::compile::{CompileError, CompileOptions, Compiled, Scheduled, Scheduling, compile, compile_scheduled};
use crate::fuse::Fused;
use crate::layouts::{Costs, ImageLayouts};

/// Purpose for which image layouts are chosen.
#[derive(Clone, Copy)]
pub enum LayoutPurpose<'a> {
    /// Run with recorded kernels: layouts in which all kernels are recorded are preferred; otherwise
    /// unrecorded ones are assumed to be slower.
    Run(&'a Records),
    /// Tuning: unrecorded kernels are assumed to be as fast as the analytical model predicts, relative to
    /// recorded ones.
    Tune(&'a Records),
    /// Run with guesses, ignoring records.
    Guess,
}

/// Approximate nanoseconds per cycle of the machine model.
const NS: f64 = 0.3;
/// Approximate time of a guessed configuration relative to a tuned one.
const GUESSED: f64 = 1.25;

/// Configurations guessed by the machine model, each of which takes some milliseconds and is computed once.
struct Guesses<'a> {
    target: &'a Target,
    threads: usize,
    cache: &'a Cache,
    /// Estimated costs of the guesses, by the workload's text.
    estimates: RefCell<HashMap<String, Option<f64>>>,
    /// Guesses by the workload's text, or the reasons why there are none.
    known: RefCell<HashMap<String, Result<Rc<Choice>, String>>>,
}

impl<'a> Guesses<'a> {
    fn new(target: &'a Target, threads: usize, cache: &'a Cache) -> Guesses<'a> {
        Guesses { target, threads, cache, estimates: RefCell::default(), known: RefCell::default() }
    }

    /// Cost of the guess according to the machine model, in cycles.
    fn estimate(&self, workload: &Workload) -> Option<f64> {
        let estimate =
            || self.cache.number(&[workload, self.target, &self.threads], || self.of(workload).ok()?.estimate());
        *self.estimates.borrow_mut().entry(workload.to_string()).or_insert_with(estimate)
    }

    /// Scheduled program of the guess.
    fn program(&self, workload: &Workload) -> Result<Program, String> {
        let made = || self.of(workload)?.program().map_err(|error| error.to_string());
        self.cache.program(&[workload, self.target, &self.threads], made)
    }

    fn of(&self, workload: &Workload) -> Result<Rc<Choice>, String> {
        let guess = || Choice::guess(workload, self.target, self.threads, None);
        let mut known = self.known.borrow_mut();
        let known = known.entry(workload.to_string());
        known.or_insert_with(|| guess().map(Rc::new).map_err(|error| error.to_string())).clone()
    }
}

/// Chooses the image layouts that minimise the cost of all kernels: plain, or blocks of as many channels as a
/// vector has lanes. On a GPU all are plain.
///
/// # Errors
/// If records cannot be read.
pub fn laid_out(fused: Fused, target: &Target, threads: usize, layouts: LayoutPurpose) -> Result<Fused, CompileError> {
    laid_out_by(fused, layouts, &Guesses::new(target, threads, &NO_CACHE))
}

fn laid_out_by(mut fused: Fused, layouts: LayoutPurpose, guesses: &Guesses) -> Result<Fused, CompileError> {
    let pieces = std::mem::take(&mut fused.pieces).into_iter().map(|piece| laid_out_by(piece, layouts, guesses));
    let pieces = pieces.collect::<Result<Vec<_>, _>>()?;
    let mut whole = one_laid_out(fused, layouts, guesses)?;
    whole.pieces = pieces;
    if whole.sized.is_none() {
        whole.share_weights();
    }
    Ok(whole)
}

fn one_laid_out(fused: Fused, layouts: LayoutPurpose, guesses: &Guesses) -> Result<Fused, CompileError> {
    let (target, threads) = (guesses.target, guesses.threads);
    if target.gpu.is_some() {
        let of_nets = fused.sized.iter().flat_map(|sized| &sized.dims);
        return match fused.open.iter().map(|open| &open.dim).chain(of_nets).next() {
            Some(dim) => Err(CompileError::OpenOnGpu { name: dim.name.clone() }),
            None => Ok(fused),
        };
    }
    let caches = fused.caches(target);
    let failed: Cell<Option<String>> = Cell::new(None);
    // Images of an open batch are processed one by one.
    let is_open = fused.open.is_some();
    let of_images = |workload: &Workload| match workload.structure() {
        Structure::Window(window) if is_open => (workload.with_size("n", 1), window.n as f64),
        _ => (None, 1.0),
    };
    let recorded = |workload: &Workload| match layouts {
        LayoutPurpose::Guess => None,
        LayoutPurpose::Run(records) | LayoutPurpose::Tune(records) => {
            let (one, n) = of_images(workload);
            let workload = one.as_ref().unwrap_or(workload);
            let best = best_ns(records, workload, target, threads, caches.of(workload));
            let best = best.unwrap_or_else(|error| {
                failed.set(Some(error.to_string()));
                None
            });
            best.map(|ns| n * ns)
        }
    };
    let estimate = |workload: &Workload| {
        let (one, n) = of_images(workload);
        Some(n * guesses.estimate(one.as_ref().unwrap_or(workload))?)
    };
    let block = target.lanes(DType::F32);
    let cost = |workload: &Workload| {
        if let Some(ns) = recorded(workload) {
            return Some(ns);
        }
        let sides = [[1, 1], [block, block], [1, block], [block, 1]].map(Layout::of_channels);
        let others = sides.into_iter().filter(|layout| *layout != workload.layout());
        let others = others.filter_map(|layout| workload.clone().with_layout(layout).ok());
        let known = others.filter_map(|other| recorded(&other).map(|ns| (ns, other)));
        match (known.min_by(|a, b| a.0.total_cmp(&b.0)), layouts) {
            (None, _) => estimate(workload).map(|cycles| NS * cycles),
            (Some((ns, other)), LayoutPurpose::Tune(_)) => Some(ns * estimate(workload)? / estimate(&other)?),
            (Some((ns, _)), _) => Some(ns * GUESSED),
        }
    };
    let is_run = matches!(layouts, LayoutPurpose::Run(_));
    let chosen = || {
        let chosen = fused.cheapest_layouts(block, Costs { expected: &cost, measured: &recorded }, is_run);
        failed.take().map_or(Ok(()), Err)?;
        chosen.map_err(|error| error.to_string())
    };
    let refuse = |why: String| CompileError::Layouts { why };
    let chosen = known_layouts(&fused, layouts, guesses, &chosen).map_err(refuse)?;
    Ok(fused.with_layouts(block, &chosen).map_err(|error| refuse(error.to_string()))?.open_kernels()?)
}

/// Finds the layouts of images in the cache, or with `choose`. If the cache is collecting entries for a
/// package, the layouts are chosen anew, so that the entries they depend on are collected too.
fn known_layouts(
    fused: &Fused,
    layouts: LayoutPurpose,
    guesses: &Guesses,
    choose: &dyn Fn() -> Result<ImageLayouts, String>,
) -> Result<ImageLayouts, String> {
    let Guesses { target, threads, cache, .. } = guesses;
    let state = match layouts {
        LayoutPurpose::Run(records) if !cache.is_collecting() => records.state().map_err(|error| error.to_string())?,
        _ => None,
    };
    let Some(state) = state else { return choose() };
    let block = target.lanes(DType::F32);
    let is_open = fused.open.is_some();
    let determined_by: [&dyn Display; 5] = [&fused.text_of_images(), target, threads, &is_open, &state];
    let text = cache.text(&determined_by, || Ok::<String, String>(choose()?.to_string()))?;
    match ImageLayouts::parse(&text).filter(|known| fused.can_have(block, known)) {
        Some(known) => Ok(known),
        None => choose(),
    }
}

/// Best recorded time of a workload: for this cache state, else for another.
fn best_ns(
    records: &Records,
    workload: &Workload,
    target: &Target,
    threads: usize,
    caches: Caches,
) -> Result<Option<f64>, Error> {
    let others = [Caches::ColdConstants, Caches::Warm].into_iter().filter(|other| *other != caches);
    for caches in std::iter::once(caches).chain(others) {
        if let (Some(best), _) = records.best(workload, &target_name(target, caches), threads, None)? {
            return Ok(Some(best.median_ns));
        }
    }
    Ok(None)
}

/// Compiles fused steps with the best recorded configurations, and with guesses for kernels without records.
///
/// # Errors
/// As [`compile`], or if records cannot be read.
pub fn compile_known(
    fused: Fused,
    target: &Target,
    threads: usize,
    records: &Records,
    making: CompileOptions,
) -> Result<Compiled, CompileError> {
    let guesses = Guesses::new(target, threads, making.cache);
    let fused = laid_out_by(fused, LayoutPurpose::Run(records), &guesses)?;
    let (caches, guessed) = (fused.caches(target), RefCell::new(HashSet::new()));
    let guess = |workload: &Workload| guessed.borrow_mut().insert(workload.representative().to_string());
    let determined = |workload: &Workload| {
        let known = records.determined(workload, target, threads, caches.of(workload));
        let known = known.map_err(|error| error.to_string())?;
        if known.as_ref().is_some_and(|known| known.is_guess) {
            guess(workload);
        }
        Ok(known.map(|known| known.text))
    };
    let scheduled = |workload: &Workload| {
        let known = records.program(workload, target, threads, caches.of(workload), making.cache);
        if let Some((program, by)) = known.map_err(|error| error.to_string())? {
            return Ok(Scheduled { program, determined_by: Some(by.text) });
        }
        guess(workload);
        let by = Determined::guessed(workload, target, threads);
        Ok(Scheduled { program: guesses.program(workload)?, determined_by: Some(by.text) })
    };
    let scheduling = Scheduling { determined: &determined, scheduled: &scheduled };
    let compiled = compile_scheduled(fused, target, scheduling, making)?;
    Ok(Compiled { n_guessed: guessed.into_inner().len(), ..compiled })
}

/// Compiles fused steps with guesses only: the untuned model.
///
/// # Errors
/// As [`compile`].
pub fn compile_guessed(fused: Fused, target: &Target, threads: usize) -> Result<Compiled, CompileError> {
    let guesses = Guesses::new(target, threads, &NO_CACHE);
    let fused = laid_out_by(fused, LayoutPurpose::Guess, &guesses)?;
    let n_guessed = fused.tasks().len();
    let schedule = |workload: &Workload| guesses.program(workload);
    Ok(Compiled { n_guessed, ..compile(fused, target, &schedule)? })
}
