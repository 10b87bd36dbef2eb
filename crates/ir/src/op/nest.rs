//! Loop nest workloads: subgraphs without a named operator, such as a chain of elementwise functions, a
//! pooling or a softmax, given as a program.
//!
//! The text is canonical, so that equal computations have equal texts: buffers and loops are renamed by their
//! order, loops and dimensions of one element are dropped, and loops that always traverse adjacent dimensions
//! together are fused.

use super::{Operator, SizeRange, Structure, Workload, WorkloadError};
use crate::expr::{Cond, Expr, Rewrite, Subscript, TreePart};
use crate::index::{Atom, Index, Ranges};
use crate::lower::simplify_block;
use crate::program::{Buffer, BufferId, Loop, LoopId, LoopKind, OpenSize, Program, Role, Scope, Stmt};
use crate::text::{ParseError, parse};
use crate::verify::{Unproven, VerifyError, check};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Operator of workloads that are given as a loop nest program.
pub const NEST: Operator = Operator {
    name: "nest",
    text: "what the program behind the colon computes: some stages of loops around one assignment each",
    sizes: &[],
    constants: &[],
    has_layout: false,
    has_prologue: false,
    has_inexact: |_| false,
    check: |_| Ok(()),
    structure: |w| Structure::Nest(w.nest.clone().expect("a workload of this operator has its program")),
};

/// Name of the program of every nest, without meaning.
const NAME: &str = "nest";

/// Names of open sizes, in order.
const SIZES: [&str; 4] = ["s0", "s1", "s2", "s3"];

/// Reason why a program cannot be a workload, an error of its author.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NestError {
    /// Text that does not parse as a program.
    #[error("{0}")]
    Text(#[from] ParseError),
    /// Program that breaks a rule of the verifier.
    #[error("{0}")]
    Invalid(#[from] VerifyError),
    /// Access that is not proven to be in bounds.
    #[error("{0}")]
    Unproven(Unproven),
    /// More open (dynamic) sizes than supported.
    #[error("it has more than {} open sizes", SIZES.len())]
    OpenSizes,
    /// Number of outputs other than one.
    #[error("it has {0} outputs instead of one")]
    Outputs(usize),
    /// Buffer of an unsupported role or scope: kept between the parts, or in registers.
    #[error("buffer {0} is neither input, output nor temporary in global memory")]
    Buffer(String),
    /// Statements in `prepare` or `finish`.
    #[error("it has more than one part")]
    Parts,
    /// Statement that is not a nest of serial loops of constant extent around one assignment.
    #[error("a statement is not a nest of serial loops of constant extent around one assignment")]
    Form,
    /// Reduction that is not initialized exactly in the first iteration of all its loops.
    #[error("the reduction into {0} does not start where all of its loops do, and nowhere else")]
    Start(String),
    /// Stage that reads its own result.
    #[error("the stage of {0} reads it")]
    ReadsItself(String),
}

/// Program of one or more stages, in the canonical form that all programs of the same computation share.
#[derive(Debug)]
pub struct Nest {
    program: Program,
    text: String,
}

impl PartialEq for Nest {
    fn eq(&self, other: &Nest) -> bool {
        self.text == other.text
    }
}

impl Nest {
    /// Creates the nest of a program.
    pub(super) fn new(program: Program) -> Result<Nest, NestError> {
        if let Some(unproven) = check(&program)?.into_iter().next() {
            return Err(NestError::Unproven(unproven));
        }
        let program = canonical(program)?;
        debug_assert!(check(&program).is_ok(), "a nest stays valid\n{program}");
        let text = compact(&program);
        Ok(Nest { program, text })
    }

    /// Parses the text of a nest.
    pub(super) fn parse(text: &str) -> Result<Nest, NestError> {
        Nest::new(parse(&format!("program \"{NAME}\" {text}"))?)
    }

    /// Untransformed program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Open sizes with their names.
    pub(super) fn sizes(&self) -> impl Iterator<Item = (&'static str, SizeRange)> {
        let range = |size: &OpenSize| SizeRange { least: size.least, most: size.most(), step: size.step };
        SIZES.into_iter().zip(self.program.sizes.iter().map(range).collect::<Vec<_>>())
    }

    /// Canonical text on one line, without the program's name.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Kind of the nest in a word: `copy` if values are only moved, `map` for elementwise functions, `reduce`
    /// if a stage reduces, `normalize` if elements are combined with a reduction of others.
    pub fn kind(&self) -> &'static str {
        let (mut reduces, mut ends_so, mut computes) = (false, false, false);
        for leaf in leaves(&self.program) {
            ends_so = matches!(leaf, Stmt::Update { .. });
            reduces |= ends_so;
            computes |= n_operations(leaf) > 0.0;
        }
        match (ends_so, reduces, computes) {
            (true, ..) => "reduce",
            (false, true, _) => "normalize",
            (false, false, true) => "map",
            (false, false, false) => "copy",
        }
    }

    /// Output buffer.
    pub fn output(&self) -> &Buffer {
        let outputs = self.program.buffers.iter().find(|b| b.role == Role::Output);
        outputs.expect("a nest has an output")
    }

    /// Number of arithmetic operations of one run at the largest sizes; each written element counts as at
    /// least one.
    pub(super) fn flops(&self) -> f64 {
        fn of(stmt: &Stmt, ranges: &Ranges) -> f64 {
            match stmt {
                Stmt::For(l) => {
                    let n = ranges.upper(&l.extent).unwrap_or(0);
                    n as f64 * l.body.iter().map(|s| of(s, ranges)).sum::<f64>()
                }
                leaf => n_operations(leaf).max(1.0),
            }
        }
        let ranges = self.program.ranges();
        self.program.body.iter().filter(|s| !matches!(s, Stmt::Alloc(_))).map(|s| of(s, &ranges)).sum()
    }

    /// Short label of the nest: its kind, its output, and a hash that distinguishes it from similar nests.
    pub(super) fn label(&self) -> String {
        let Buffer { dtype, shape, .. } = self.output();
        let shape: Vec<String> = shape.iter().map(i64::to_string).collect();
        // FNV-1a.
        let mix = |h: u32, b: u8| (h ^ u32::from(b)).wrapping_mul(0x0100_0193);
        let digits = self.text.bytes().fold(0x811c_9dc5, mix);
        format!("nest:{} {}[{}] #{digits:08x}", self.kind(), dtype.name(), shape.join(","))
    }
}

impl Workload {
    /// Creates the workload of a program whose stages are nests of serial loops of constant extent around one
    /// assignment each, from inputs over temporaries to one output.
    ///
    /// Arguments keep their order and contents; names are dropped, and dimensions traversed together are
    /// fused, so that programs of the same computation become the same workload.
    pub fn nest(program: Program) -> Result<Workload, WorkloadError> {
        Nest::new(program).map_err(WorkloadError::Nest).and_then(Workload::of_nest)
    }

    pub(super) fn of_nest_text(text: &str) -> Result<Workload, WorkloadError> {
        Nest::parse(text).map_err(WorkloadError::Nest).and_then(Workload::of_nest)
    }

    fn of_nest(nest: Nest) -> Result<Workload, WorkloadError> {
        let constants = nest.program.buffers.iter().filter(|b| b.role == Role::ConstInput);
        let constants = constants.map(|b| b.name.to_lowercase()).collect();
        let dtype = nest.output().dtype;
        Workload::of_program(&NEST, dtype, constants, Arc::new(nest))
    }
}

/// Assignments of a nest's stages.
fn leaves(program: &Program) -> impl Iterator<Item = &Stmt> {
    program.body.iter().filter(|s| !matches!(s, Stmt::Alloc(_))).map(|s| {
        let mut leaf = s;
        while let Stmt::For(l) = leaf {
            leaf = &l.body[0];
        }
        leaf
    })
}

/// Number of operations of one iteration.
fn n_operations(leaf: &Stmt) -> f64 {
    let mut n = f64::from(u8::from(matches!(leaf, Stmt::Update { .. })));
    let value = match leaf {
        Stmt::Store { value, .. } | Stmt::Update { value, .. } => value,
        _ => return n,
    };
    TreePart::Expr(value)
        .walk(&mut |node| n += f64::from(u8::from(matches!(node, TreePart::Expr(Expr::Unary(..) | Expr::Binary(..))))));
    n
}

/// Text of a program without its name, on one line, with white space only between words.
fn compact(program: &Program) -> String {
    let text = program.to_string();
    let (_, rest) = text.split_once('\n').expect("the first line is the program's name");
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let mut out = String::with_capacity(rest.len());
    let mut space = false;
    for c in rest.chars() {
        if c.is_whitespace() {
            space = true;
            continue;
        }
        if space && is_word(c) && out.chars().next_back().is_some_and(is_word) {
            out.push(' ');
        }
        space = false;
        out.push(c);
    }
    out
}

/// Stage: serial loops around one assignment.
struct Stage {
    /// Loops with their extents, outermost first.
    loops: Vec<(LoopId, Index)>,
    leaf: Stmt,
}

impl Stage {
    /// Recognizes a stage, whose loops have constant extents or those of open sizes.
    fn of(mut stmt: Stmt, sizes: &[OpenSize]) -> Option<Stage> {
        let mut loops = Vec::new();
        let is_extent = |extent: &Index| {
            let of_size = |(atom, _): &(Atom, i64)| sizes.iter().any(|size| *atom == Atom::Var(size.var));
            extent.terms().iter().all(of_size)
        };
        loop {
            match stmt {
                Stmt::For(Loop { var, extent, kind: LoopKind::Serial, mut body }) if body.len() == 1 => {
                    loops.push((var, Some(extent).filter(is_extent)?));
                    stmt = body.pop().expect("the body has one statement");
                }
                leaf @ (Stmt::Store { .. } | Stmt::Update { .. }) => return Some(Stage { loops, leaf }),
                _ => return None,
            }
        }
    }

    fn stmt(self) -> Stmt {
        let nest = |body, (var, extent): (LoopId, Index)| {
            Stmt::For(Loop { var, extent, kind: LoopKind::Serial, body: vec![body] })
        };
        self.loops.into_iter().rev().fold(self.leaf, nest)
    }

    fn written(&self) -> (BufferId, &[Index]) {
        self.leaf.own_write().expect("a stage is an assignment")
    }

    /// Variables of the reduction loops.
    fn reduction(&self) -> Vec<LoopId> {
        let (_, index) = self.written();
        self.loops.iter().map(|l| l.0).filter(|v| !index.iter().any(|i| i.uses(*v))).collect()
    }

    /// Condition under which a reduction starts, the first iteration of all its loops.
    fn start(&self) -> Cond {
        self.reduction().into_iter().fold(Cond::True, |c, v| c.and(Cond::Eq(v.into(), 0.into())))
    }

    /// Subscript lists of all reads of the stage and of its write.
    fn accesses(&self) -> Vec<(BufferId, Vec<Index>)> {
        let mut all = Vec::new();
        self.leaf.own_nodes().for_each(|node| {
            node.walk(&mut |node| match node {
                TreePart::Expr(Expr::Load(b, index)) => all.push((*b, index.clone())),
                TreePart::Expr(Expr::Gather(b, subscripts)) => all.push((*b, with_marks(subscripts))),
                TreePart::Expr(_) | TreePart::Cond(_) => {}
            });
        });
        let (b, index) = self.written();
        all.push((b, index.to_vec()));
        all
    }
}

/// Canonical form, which all programs of a computation share.
fn canonical(mut program: Program) -> Result<Program, NestError> {
    if !program.prepare.is_empty() || !program.finish.is_empty() {
        return Err(NestError::Parts);
    }
    if program.sizes.len() > SIZES.len() {
        return Err(NestError::OpenSizes);
    }
    let is_foreign = |b: &&Buffer| b.role == Role::Kept || b.scope != Scope::Global;
    if let Some(buffer) = program.buffers.iter().find(is_foreign) {
        return Err(NestError::Buffer(buffer.name.clone()));
    }
    match program.buffers.iter().filter(|b| b.role == Role::Output).count() {
        1 => {}
        n => return Err(NestError::Outputs(n)),
    }
    let body = simplify_block(std::mem::take(&mut program.body), &mut program.ranges());
    let mut stages: Vec<Stage> = Vec::new();
    for stmt in body {
        if matches!(stmt, Stmt::Alloc(_)) {
            continue;
        }
        let stage = Stage::of(stmt, &program.sizes).ok_or(NestError::Form)?;
        let written = stage.written().0;
        let name = || program.buffer(written).name.clone();
        if let Stmt::Update { first, .. } = &stage.leaf {
            let (mut parts, mut wanted) = (BTreeSet::new(), BTreeSet::new());
            if !zeros(first, &mut parts) {
                return Err(NestError::Start(name()));
            }
            wanted.extend(stage.reduction());
            if parts != wanted {
                return Err(NestError::Start(name()));
            }
        }
        if stage.accesses().iter().filter(|(b, _)| *b == written).count() > 1 {
            return Err(NestError::ReadsItself(name()));
        }
        stages.push(stage);
    }
    if stages.is_empty() {
        return Err(NestError::Form);
    }
    drop_units(&mut program.buffers, &mut stages);
    while join(&mut program.buffers, &mut stages) {}
    Ok(renumbered(program, stages))
}

/// Gathers the variables of a conjunction of conditions `v == 0`; false for any other condition.
fn zeros(cond: &Cond, vars: &mut BTreeSet<LoopId>) -> bool {
    match cond {
        Cond::True => true,
        Cond::And(a, b) => zeros(a, vars) && zeros(b, vars),
        Cond::Eq(a, b) => match (a.sub(b).terms(), a.sub(b).constant()) {
            ([(Atom::Var(v), 1 | -1)], 0) => {
                vars.insert(*v);
                true
            }
            _ => false,
        },
        Cond::Lt(..) | Cond::Less(..) | Cond::Not(_) => false,
    }
}

/// Removes dimensions of one element from buffers, except for the last dimension of a buffer.
fn drop_units(buffers: &mut [Buffer], stages: &mut [Stage]) {
    let kept: Vec<Vec<usize>> = buffers
        .iter()
        .map(|b| {
            let long: Vec<usize> = (0..b.shape.len()).filter(|d| b.shape[*d] != 1).collect();
            if long.is_empty() { Vec::from_iter((!b.shape.is_empty()).then_some(0)) } else { long }
        })
        .collect();
    map_subscripts(stages, &mut |b, index| {
        // Only element 0 exists.
        let of = |d: &usize| if buffers[b.0 as usize].shape[*d] == 1 { Index::from(0) } else { index[*d].clone() };
        kept[b.0 as usize].iter().map(of).collect()
    });
    for (buffer, kept) in buffers.iter_mut().zip(&kept) {
        buffer.shape = kept.iter().map(|d| buffer.shape[*d]).collect();
    }
}

/// Placeholder for a data-dependent subscript, by position.
fn mark(at: usize) -> Index {
    LoopId(u32::MAX - at as u32).into()
}

/// Subscripts with a placeholder for each data-dependent one.
fn with_marks(subscripts: &[Subscript]) -> Vec<Index> {
    let of = |(at, subscript): (usize, &Subscript)| match subscript {
        Subscript::Index(i) => i.clone(),
        Subscript::Value(_) => mark(at),
    };
    subscripts.iter().enumerate().map(of).collect()
}

/// Buffer and subscripts.
type ArrayRef = (BufferId, Vec<Index>);

/// Rewriter of the buffer and subscripts of every access in an expression.
struct MapAccesses<'f>(&'f mut dyn FnMut(BufferId, &[Index]) -> ArrayRef);

impl Rewrite for MapAccesses<'_> {
    fn expr(&mut self, e: &Expr) -> Expr {
        match e {
            Expr::Load(b, index) => {
                let (b, index) = (self.0)(*b, index);
                Expr::Load(b, index)
            }
            Expr::Gather(b, subscripts) => {
                let (b, index) = (self.0)(*b, &with_marks(subscripts));
                let of = |i: Index| match (0..subscripts.len()).find(|at| i == mark(*at)).map(|at| &subscripts[at]) {
                    Some(Subscript::Value(value)) => Subscript::Value(Box::new(self.expr(value))),
                    _ => Subscript::Index(i),
                };
                let mapped: Vec<Subscript> = index.into_iter().map(of).collect();
                // A dropped dimension of one element takes its data-dependent subscript with it.
                if mapped.iter().all(|subscript| matches!(subscript, Subscript::Index(_))) {
                    return Expr::Load(b, mapped.iter().map(Subscript::known).collect());
                }
                Expr::Gather(b, mapped)
            }
            other => other.map_parts(self),
        }
    }
}

fn map_subscripts(stages: &mut [Stage], f: &mut dyn FnMut(BufferId, &[Index]) -> Vec<Index>) {
    for stage in stages {
        match &mut stage.leaf {
            Stmt::Store { buffer, index, value } | Stmt::Update { buffer, index, value, .. } => {
                *value = MapAccesses(&mut |b, index| (b, f(b, index))).expr(value);
                *index = f(*buffer, index);
            }
            _ => unreachable!("a stage is an assignment"),
        }
    }
}

/// Pair of loops of a stage that may be fused: stage, outer and inner variable, inner extent.
type LoopPair = (usize, LoopId, LoopId, i64);

/// Fuses a pair of loops, and the pairs in other stages that traverse the same dimensions; false if there is
/// no such pair.
fn join(buffers: &mut [Buffer], stages: &mut [Stage]) -> bool {
    let mut pairs: Vec<LoopPair> = Vec::new();
    for (at, stage) in stages.iter().enumerate() {
        let reduction = stage.reduction();
        for pair in stage.loops.windows(2) {
            let [(u, outer), (v, inner)] = pair else { unreachable!("they are windows of two") };
            // Loops over open sizes stay separate.
            let (Some(_), Some(n), u, v) = (outer.as_const(), inner.as_const(), *u, *v) else { continue };
            if reduction.contains(&u) == reduction.contains(&v) && places(buffers, stage, u, v, n).is_some() {
                pairs.push((at, u, v, n));
            }
        }
    }
    // Dimensions that a pair traverses must be traversed by a pair in every access.
    loop {
        let mut joined: HashMap<(BufferId, usize), usize> = HashMap::new();
        for (at, u, v, n) in &pairs {
            for place in places(buffers, &stages[*at], *u, *v, *n).expect("a pair has been found to have places") {
                *joined.entry(place).or_default() += 1;
            }
        }
        let mut n_accesses: HashMap<BufferId, usize> = HashMap::new();
        stages.iter().flat_map(Stage::accesses).for_each(|(b, _)| *n_accesses.entry(b).or_default() += 1);
        let before = pairs.len();
        pairs.retain(|(at, u, v, n)| {
            let places = places(buffers, &stages[*at], *u, *v, *n).expect("a pair has been found to have places");
            places.iter().all(|place| joined[place] == n_accesses[&place.0])
        });
        if pairs.len() == before {
            break;
        }
    }
    // A pair with all others that share dimensions with it.
    for start in &pairs {
        let mut chosen = vec![*start];
        let mut dims: BTreeSet<(BufferId, usize)> = BTreeSet::new();
        loop {
            for (at, u, v, n) in &chosen {
                dims.extend(places(buffers, &stages[*at], *u, *v, *n).into_iter().flatten());
            }
            let shares = |(at, u, v, n): &LoopPair| {
                places(buffers, &stages[*at], *u, *v, *n).into_iter().flatten().any(|place| dims.contains(&place))
            };
            let more: Vec<LoopPair> = pairs.iter().filter(|p| !chosen.contains(p) && shares(p)).copied().collect();
            if more.is_empty() {
                break;
            }
            chosen.extend(more);
        }
        let overlaps = |(at, u, v, _): &LoopPair| {
            chosen.iter().any(|(other, x, y, _)| at == other && (u, v) != (x, y) && (u == y || v == x))
        };
        let neighbours = |(b, d): &(BufferId, usize)| dims.contains(&(*b, d + 1));
        if chosen.iter().any(overlaps) || dims.iter().any(neighbours) {
            continue;
        }
        let dims: Vec<(BufferId, usize)> = dims.into_iter().collect();
        map_subscripts(stages, &mut |b, index| {
            let merged = |d: usize| dims.contains(&(b, d));
            let keep = (0..index.len()).filter(|d| *d == 0 || !merged(d - 1));
            keep.map(|d| index[d].clone()).collect()
        });
        for (b, d) in dims.iter().rev() {
            let shape = &mut buffers[b.0 as usize].shape;
            shape[*d] *= shape.remove(d + 1);
        }
        for (at, u, v, n) in chosen {
            let loops = &mut stages[at].loops;
            loops.retain(|(var, _)| *var != v);
            loops.iter_mut().filter(|(var, _)| *var == u).for_each(|(_, extent)| *extent = extent.scale(n));
        }
        return true;
    }
    false
}

/// Buffer and first of the two dimensions, for each access of a stage that the pair of loops traverses;
/// `None` if the pair cannot be fused.
fn places(buffers: &[Buffer], stage: &Stage, u: LoopId, v: LoopId, n: i64) -> Option<Vec<(BufferId, usize)>> {
    let uses = |i: &Index| i.uses(u) || i.uses(v);
    let mut places = Vec::new();
    for (b, index) in stage.accesses() {
        let used: Vec<usize> = (0..index.len()).filter(|d| uses(&index[*d])).collect();
        match used[..] {
            [] => {}
            [d, e] if e == d + 1 && index[d] == u.into() && index[e] == v.into() => {
                if buffers[b.0 as usize].shape[e] != n {
                    return None;
                }
                places.push((b, d));
            }
            _ => return None,
        }
    }
    // Uses of the variables elsewhere in the value prevent fusion.
    let mut is_used = false;
    let value = match &stage.leaf {
        Stmt::Store { value, .. } | Stmt::Update { value, .. } => value,
        _ => unreachable!("a stage is an assignment"),
    };
    TreePart::Expr(value).walk(&mut |node| match node {
        TreePart::Expr(Expr::FromIndex(i)) => is_used |= uses(i),
        TreePart::Cond(Cond::Lt(a, b) | Cond::Eq(a, b)) => is_used |= uses(a) || uses(b),
        TreePart::Expr(_) | TreePart::Cond(_) => {}
    });
    (!is_used && !places.is_empty()).then_some(places)
}

/// Builds the program of stages: arguments first, then temporaries in order of their writes, and loops in
/// order of appearance, each named by its number.
fn renumbered(program: Program, stages: Vec<Stage>) -> Program {
    let mut order: Vec<BufferId> = program.arguments().map(|(id, _)| id).collect();
    for stage in &stages {
        for (b, _) in stage.accesses() {
            if !order.contains(&b) {
                order.push(b);
            }
        }
    }
    let mut out = Program { name: NAME.to_owned(), ..Program::default() };
    let (mut n_inputs, mut n_temporaries) = (0, 0);
    for id in &order {
        let buffer = program.buffer(*id).clone();
        let name = match buffer.role {
            Role::Output => "y".to_owned(),
            Role::Temporary => {
                n_temporaries += 1;
                format!("t{}", n_temporaries - 1)
            }
            Role::Input | Role::ConstInput | Role::Kept => {
                n_inputs += 1;
                format!("x{}", n_inputs - 1)
            }
        };
        out.add_buffer(Buffer { name, ..buffer });
    }
    let number = |b: BufferId| BufferId(order.iter().position(|o| *o == b).expect("every buffer has a place") as u32);
    let mut allocated = BTreeSet::new();
    let mut of_sizes: Vec<(LoopId, LoopId)> = Vec::new();
    for (name, size) in SIZES.into_iter().zip(program.sizes) {
        let var = out.add_loop(format!("{name}.steps"));
        of_sizes.push((size.var, var));
        out.sizes.push(OpenSize { name: name.to_owned(), var, ..size });
    }
    let n_sizes = of_sizes.len();
    for mut stage in stages {
        let start = stage.start();
        let own = |(v, _): &(LoopId, Index)| (*v, out.add_loop(format!("i{}", out.loops.len() - n_sizes)));
        let mut vars: Vec<(LoopId, LoopId)> = stage.loops.iter().map(own).collect();
        vars.extend(&of_sizes);
        let renamed = |v: LoopId| vars.iter().find(|(old, _)| *old == v).map(|(_, new)| *new);
        let index = |i: &Index| {
            i.rewrite(&mut |atom| match atom {
                Atom::Var(v) => renamed(*v).map(Index::from),
                _ => None,
            })
        };
        if let Stmt::Update { first, .. } = &mut stage.leaf {
            *first = start;
        }
        let leaf = stage.leaf.map_index(&mut |i| index(i));
        let loads = |value: &Expr| MapAccesses(&mut |b, index| (number(b), index.to_vec())).expr(value);
        let leaf = match leaf {
            Stmt::Store { buffer, index, value } => Stmt::Store { buffer: number(buffer), index, value: loads(&value) },
            Stmt::Update { buffer, index, op, value, first } => {
                Stmt::Update { buffer: number(buffer), index, op, value: loads(&value), first }
            }
            _ => unreachable!("a stage is an assignment"),
        };
        let loops = stage.loops.iter().map(|(v, n)| (renamed(*v).expect("every loop has a name"), index(n))).collect();
        let stage = Stage { loops, leaf };
        let written = stage.written().0;
        if out.buffer(written).role == Role::Temporary && allocated.insert(written) {
            out.body.push(Stmt::Alloc(written));
        }
        out.body.push(stage.stmt());
    }
    out
}
