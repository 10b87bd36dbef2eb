//! Text format of steps, one per line.

use super::{LayoutAxis, Step, Tail};
use crate::dtype::DType;
use crate::program::LoopKind;
use std::fmt;

/// Parse error: a line that is not a step.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("line {line}: `{text}` is not a step; expected `{expected}`")]
pub struct StepParseError {
    /// Line number, from 1.
    pub line: usize,
    /// The line.
    pub text: String,
    /// Form of the step that the line resembles most, or the list of steps.
    pub expected: String,
}

/// Syntax of every step, by its first word.
pub const FORMS: &[(&str, &str)] = &[
    ("split", "split LOOP FACTOR -> OUTER INNER [shrink|guard]"),
    ("fuse", "fuse OUTER INNER -> LOOP"),
    ("reorder", "reorder LOOP LOOP..."),
    ("peel", "peel LOOP first|last N as SUFFIX"),
    ("vectorize", "vectorize LOOP"),
    ("unroll", "unroll LOOP"),
    ("parallel", "parallel LOOP"),
    ("bind", "bind LOOP block.x|block.y|block.z|thread.x|thread.y|thread.z|turns"),
    ("tensorize", "tensorize LOOP tf32|tf32x3|wgmma|wgmmax3|halves|dot4|dot2"),
    ("stage", "stage BUFFER [at LOOP] -> NAME AXIS... [as TYPE] [shared], AXIS being 0, 0/48 or 0%48 for dimension 0"),
    ("accumulate", "accumulate BUFFER at LOOP -> NAME"),
    ("compute_at", "compute_at BUFFER at LOOP"),
    ("inline", "inline BUFFER"),
    ("layout", "layout BUFFER AXIS..., AXIS being 0, 0/48 or 0%48 for dimension 0"),
    ("reindex", "reindex STAGE BUFFER as NAME"),
    ("pad", "pad STAGE LOOP MULTIPLE"),
    ("rfactor", "rfactor STAGE LOOP as NAME"),
    ("winograd", "winograd STAGE 2|4"),
    ("col2im", "col2im STAGE BLOCK channels|taps"),
    ("prefetch", "prefetch BUFFER at LOOP ahead N [in LOOP...]"),
    ("pipeline", "pipeline BUFFER at LOOP -> NAME [twice]"),
    ("stream", "stream BUFFER... at LOOP in STAGES [held] [last] [fed] [multicast]"),
];

impl fmt::Display for LayoutAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayoutAxis::Whole(d) => write!(f, "{d}"),
            LayoutAxis::Outer(d, t) => write!(f, "{d}/{t}"),
            LayoutAxis::Inner(d, t) => write!(f, "{d}%{t}"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Split { target, factor, tail, outer, inner } => {
                write!(f, "split {target} {factor} -> {outer} {inner}")?;
                match tail {
                    Tail::Exact => Ok(()),
                    Tail::Shrink => write!(f, " shrink"),
                    Tail::Guard => write!(f, " guard"),
                }
            }
            Step::Fuse { outer, inner, fused } => write!(f, "fuse {outer} {inner} -> {fused}"),
            Step::Reorder { loops } => write!(f, "reorder {}", loops.join(" ")),
            Step::Peel { target, iterations, last, suffix } => {
                write!(f, "peel {target} {} {iterations} as {suffix}", if *last { "last" } else { "first" })
            }
            Step::Vectorize { target } => write!(f, "vectorize {target}"),
            Step::Unroll { target } => write!(f, "unroll {target}"),
            Step::Parallel { target } => write!(f, "parallel {target}"),
            Step::Bind { target, axis } => write!(f, "bind {target} {}", axis.name()),
            Step::Tensorize { target, how } => write!(f, "tensorize {target} {}", LoopKind::Tensor(*how).name()),
            Step::Stage { buffer, at, name, layout, dtype, shared } => {
                write!(f, "stage {buffer}")?;
                if let Some(at) = at {
                    write!(f, " at {at}")?;
                }
                write!(f, " -> {name}")?;
                for axis in layout {
                    write!(f, " {axis}")?;
                }
                if let Some(dtype) = dtype {
                    write!(f, " as {}", dtype.name())?;
                }
                if *shared { write!(f, " shared") } else { Ok(()) }
            }
            Step::Accumulate { buffer, at, name } => write!(f, "accumulate {buffer} at {at} -> {name}"),
            Step::ComputeAt { buffer, at } => write!(f, "compute_at {buffer} at {at}"),
            Step::Inline { buffer } => write!(f, "inline {buffer}"),
            Step::Layout { buffer, layout } => {
                write!(f, "layout {buffer}")?;
                layout.iter().try_for_each(|axis| write!(f, " {axis}"))
            }
            Step::Reindex { stage, buffer, name } => write!(f, "reindex {stage} {buffer} as {name}"),
            Step::Pad { stage, target, multiple } => write!(f, "pad {stage} {target} {multiple}"),
            Step::Rfactor { stage, target, name } => write!(f, "rfactor {stage} {target} as {name}"),
            Step::Winograd { buffer, tile } => write!(f, "winograd {buffer} {tile}"),
            Step::Col2im { buffer, block, taps_last } => {
                write!(f, "col2im {buffer} {block} {}", if *taps_last { "taps" } else { "channels" })
            }
            Step::Prefetch { buffer, at, ahead, inside } => {
                write!(f, "prefetch {buffer} at {at} ahead {ahead}")?;
                match inside.is_empty() {
                    true => Ok(()),
                    false => write!(f, " in {}", inside.join(" ")),
                }
            }
            Step::Pipeline { buffer, at, name, twice } => {
                write!(f, "pipeline {buffer} at {at} -> {name}{}", if *twice { " twice" } else { "" })
            }
            Step::Stream { buffers, at, stages, held, last, by_producer: fed, multicast } => {
                write!(f, "stream {} at {at} in {stages}", buffers.join(" "))?;
                let options = [(held, "held"), (last, "last"), (fed, "fed"), (multicast, "multicast")];
                options.into_iter().filter(|(is, _)| **is).try_for_each(|(_, word)| write!(f, " {word}"))
            }
        }
    }
}

/// Prints a schedule, one step per line, as it is recorded and sent to workers.
pub fn steps_text(steps: &[Step]) -> String {
    steps.iter().map(|s| format!("{s}\n")).collect()
}

/// Parses one step per line; empty lines and lines that begin with `#` are skipped.
///
/// # Errors
/// The first line that is not a step, with the form expected.
pub fn parse_steps(text: &str) -> Result<Vec<Step>, StepParseError> {
    let mut steps = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let error =
            || StepParseError { line: at + 1, text: line.chars().take(120).collect(), expected: expected(words[0]) };
        steps.push(parse_words(&words).ok_or_else(error)?);
    }
    Ok(steps)
}

fn expected(name: &str) -> String {
    if let Some((_, form)) = FORMS.iter().find(|(n, _)| *n == name) {
        return (*form).to_owned();
    }
    FORMS.iter().map(|(n, _)| *n).collect::<Vec<_>>().join("|")
}

fn parse_words(words: &[&str]) -> Option<Step> {
    let s = |w: &&str| (**w).to_owned();
    Some(match words {
        ["split", target, factor, "->", outer, inner, tail @ ..] => Step::Split {
            target: s(target),
            factor: factor.parse().ok()?,
            tail: match tail {
                [] => Tail::Exact,
                ["shrink"] => Tail::Shrink,
                ["guard"] => Tail::Guard,
                _ => return None,
            },
            outer: s(outer),
            inner: s(inner),
        },
        ["fuse", outer, inner, "->", fused] => Step::Fuse { outer: s(outer), inner: s(inner), fused: s(fused) },
        ["reorder", loops @ ..] if !loops.is_empty() => Step::Reorder { loops: loops.iter().map(s).collect() },
        ["peel", target, end @ ("first" | "last"), n, "as", suffix] => {
            Step::Peel { target: s(target), iterations: n.parse().ok()?, last: *end == "last", suffix: s(suffix) }
        }
        ["vectorize", target] => Step::Vectorize { target: s(target) },
        ["unroll", target] => Step::Unroll { target: s(target) },
        ["parallel", target] => Step::Parallel { target: s(target) },
        ["bind", target, axis] => Step::Bind {
            target: s(target),
            axis: LoopKind::ALL
                .iter()
                .find(|(k, n)| n == axis && matches!(k, LoopKind::Block(_) | LoopKind::Thread(_) | LoopKind::Turns))?
                .0,
        },
        ["tensorize", target, how] => Step::Tensorize {
            target: s(target),
            how: LoopKind::ALL.iter().find_map(|(kind, name)| match kind {
                LoopKind::Tensor(tensor) if name == how => Some(*tensor),
                _ => None,
            })?,
        },
        ["stage", buffer, "at", at, "->", name, rest @ ..] => stage(buffer, Some(at), name, rest)?,
        ["stage", buffer, "->", name, rest @ ..] => stage(buffer, None, name, rest)?,
        ["accumulate", buffer, "at", at, "->", name] => {
            Step::Accumulate { buffer: s(buffer), at: s(at), name: s(name) }
        }
        ["compute_at", buffer, "at", at] => Step::ComputeAt { buffer: s(buffer), at: s(at) },
        ["inline", buffer] => Step::Inline { buffer: s(buffer) },
        ["layout", buffer, axes @ ..] => Step::Layout { buffer: s(buffer), layout: layout(axes)? },
        ["reindex", stage, buffer, "as", name] => Step::Reindex { stage: s(stage), buffer: s(buffer), name: s(name) },
        ["pad", stage, target, multiple] => {
            Step::Pad { stage: s(stage), target: s(target), multiple: multiple.parse().ok()? }
        }
        ["rfactor", stage, target, "as", name] => Step::Rfactor { stage: s(stage), target: s(target), name: s(name) },
        ["winograd", buffer, tile] => Step::Winograd { buffer: s(buffer), tile: tile.parse().ok()? },
        ["col2im", buffer, block, last @ ("channels" | "taps")] => {
            Step::Col2im { buffer: s(buffer), block: block.parse().ok()?, taps_last: *last == "taps" }
        }
        ["prefetch", buffer, "at", at, "ahead", ahead, inside @ ..] if matches!(inside, [] | ["in", _, ..]) => {
            let inside = inside.iter().skip(1).map(&s).collect();
            Step::Prefetch { buffer: s(buffer), at: s(at), ahead: ahead.parse().ok()?, inside }
        }
        ["pipeline", buffer, "at", at, "->", name, twice @ ..] if matches!(twice, [] | ["twice"]) => {
            Step::Pipeline { buffer: s(buffer), at: s(at), name: s(name), twice: !twice.is_empty() }
        }
        ["stream", stream @ ..] => {
            let (mut stream, mut options) = (stream, [false; 4]);
            for (option, word) in options.iter_mut().zip(["held", "last", "fed", "multicast"]).rev() {
                if let [before @ .., last] = stream
                    && *last == word
                {
                    (stream, *option) = (before, true);
                }
            }
            let [held, last, fed, multicast] = options;
            let [buffers @ .., "at", at, "in", stages] = stream else { return None };
            let (buffers, stages) = (buffers.iter().map(s).collect::<Vec<_>>(), stages.parse().ok()?);
            return (!buffers.is_empty()).then(|| Step::Stream {
                buffers,
                at: s(at),
                stages,
                held,
                last,
                by_producer: fed,
                multicast,
            });
        }
        _ => return None,
    })
}

fn stage(buffer: &str, at: Option<&str>, name: &str, rest: &[&str]) -> Option<Step> {
    let (axes, shared) = match rest {
        [axes @ .., "shared"] => (axes, true),
        axes => (axes, false),
    };
    let (axes, dtype) = match axes {
        [axes @ .., "as", name] => (axes, Some(DType::ALL.iter().find(|(_, known)| known == name)?.0)),
        axes => (axes, None),
    };
    let (buffer, name, at) = (buffer.to_owned(), name.to_owned(), at.map(str::to_owned));
    Some(Step::Stage { buffer, at, name, layout: layout(axes)?, dtype, shared })
}

fn layout(axes: &[&str]) -> Option<Vec<LayoutAxis>> {
    let axis = |word: &&str| {
        if let Some((d, t)) = word.split_once('/') {
            Some(LayoutAxis::Outer(d.parse().ok()?, t.parse().ok()?))
        } else if let Some((d, t)) = word.split_once('%') {
            Some(LayoutAxis::Inner(d.parse().ok()?, t.parse().ok()?))
        } else {
            Some(LayoutAxis::Whole(word.parse().ok()?))
        }
    };
    axes.iter().map(axis).collect()
}
