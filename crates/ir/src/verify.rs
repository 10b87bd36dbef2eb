//! Verifier of the rules that every program obeys between passes.
//!
//! 1. Names of loops are valid ([`is_name`]) and unique; so are names of buffers.
//! 2. Every extent of a buffer is at least one and its size in bytes fits 63 bits.
//! 3. Loop and buffer ids exist, a loop variable is used inside its loop only, no loop is nested in one of
//!    the same variable, and an access has as many subscripts as its buffer has dimensions. The variable of
//!    an open size has no loop and is in scope in all of `run`. The size is at least one, has at least one
//!    value, and a unique name.
//! 4. A divisor in an index is at least one, and no index can exceed 2⁵⁰, so that bounds never overflow.
//! 5. Every access is within its buffer. This is proven from the loop extents and from the conditions around
//!    the access (of guards and selects; the left side of `&&` holds on the right), or by trying every
//!    iteration if there are few. An access with a counterexample is an error; one that is neither proven nor
//!    refuted is not an error, but [`check`] reports it as [`Unproven`]. A prefetch may be out of bounds.
//! 6. Only temporaries are allocated, and each before its use, in the same or an enclosing block. During
//!    their lifetime, they may be allocated again only in the block that allocated them.
//! 7. Inputs are never written. Kept buffers are written in `prepare` or in `run`, but not in both, as a
//!    second run would see the results of the first; outputs are written in `run` or `finish`. `prepare`
//!    reads no outputs, `finish` no inputs. Gathers read inputs only.
//! 8. A vectorized loop contains only stores, updates, prefetches and unrolled loops of these.
//! 9. GPU axes are 0 to 2, and a loop is not bound to the axis of an enclosing loop.
//! 10. Iterations of parallel, vectorized, block and thread loops are independent: if one iteration writes an
//!     element of a buffer that outlives the iteration, no other iteration writes or reads it. See
//!     [`find_race`].
//! 11. A loop marked as a tensor product can be computed by that tensor instruction: [`products::check`].

use crate::dependence::{DataRace, find_race};
use crate::expr::{Cond, Expr, Subscript};
use crate::gpu::products;
use crate::index::{Atom, Index, Ranges, gcd};
use crate::interp::{IterationPoint, list};
use crate::program::{BufferId, Loop, LoopKind, OpenSize, Part, Program, Role, Stmt};
use crate::text::{index_to_string, is_name, loop_name};
use thiserror::Error;

/// Violation of a verifier rule, an error of the pass or the author of the program.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum VerifyError {
    /// Invalid name (rule 1).
    #[error("{name:?} is not a name")]
    Name {
        /// Name that was given.
        name: String,
    },
    /// Name used twice (rule 1).
    #[error("two loops or two buffers are called {name}")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// Extent below one, or size beyond 63 bits (rule 2).
    #[error("{buffer}[{}] has no valid size", list(shape))]
    Size {
        /// The buffer's name.
        buffer: String,
        /// Extents of the buffer.
        shape: Vec<i64>,
    },
    /// Reference to a buffer that does not exist (rule 3).
    #[error("there is no buffer with number {id}")]
    UnknownBuffer {
        /// The number.
        id: u32,
    },
    /// Reference to a loop variable that does not exist (rule 3).
    #[error("there is no loop variable with number {id}")]
    UnknownLoop {
        /// The number.
        id: u32,
    },
    /// Loop variable used outside its loop (rule 3).
    #[error("{var} is used outside its loop in {index}")]
    Unbound {
        /// Name of the loop variable.
        var: String,
        /// Index that uses it.
        index: String,
    },
    /// Loop nested in a loop over the same variable (rule 3).
    #[error("a loop over {var} is inside a loop over {var}")]
    Nested {
        /// Name of the loop variable.
        var: String,
    },
    /// Invalid open (dynamic) size: its variable has a loop, or its range or name is invalid (rule 3).
    #[error("the open size {name} has no valid values, or shares its name or its variable with another")]
    OpenSize {
        /// The size's name.
        name: String,
    },
    /// Wrong number of subscripts (rule 3).
    #[error("{buffer} has {rank} dimensions and is used with {n_subscripts} subscripts")]
    Rank {
        /// The buffer's name.
        buffer: String,
        /// Number of its dimensions.
        rank: usize,
        /// Number of subscripts given.
        n_subscripts: usize,
    },
    /// Divisor below one (rule 4).
    #[error("divisor {divisor} in {index}")]
    Divisor {
        /// The divisor.
        divisor: i64,
        /// The index.
        index: String,
    },
    /// Index that may exceed 2⁵⁰ (rule 4).
    #[error("{index} may be too large")]
    Magnitude {
        /// The index.
        index: String,
    },
    /// Access with a counterexample out of bounds (rule 5).
    #[error("{buffer}[{}] is outside {buffer}[{}] {place}", list(subscripts), list(shape))]
    OutOfBounds {
        /// The buffer's name.
        buffer: String,
        /// Subscripts in the counterexample.
        subscripts: Vec<i64>,
        /// The buffer's extents.
        shape: Vec<i64>,
        /// Loop variables of the counterexample.
        place: IterationPoint,
    },
    /// Allocation of a buffer that is not a temporary (rule 6).
    #[error("{buffer} is {} and cannot be allocated", role_name(*role))]
    AllocOfArgument {
        /// The buffer's name.
        buffer: String,
        /// Role of the buffer, which should be a temporary.
        role: Role,
    },
    /// Temporary accessed without an allocation (rule 6).
    #[error("{buffer} is used where it is not allocated")]
    NotAllocated {
        /// The buffer's name.
        buffer: String,
    },
    /// Temporary allocated again during its lifetime (rule 6).
    #[error("{buffer} is allocated inside its own life")]
    Reallocated {
        /// The buffer's name.
        buffer: String,
    },
    /// Write in a part where the buffer's role forbids it (rule 7).
    #[error("{} {buffer} is written in {part}", role_name(*role))]
    Write {
        /// The buffer's name.
        buffer: String,
        /// Role of the buffer.
        role: Role,
        /// Part: `prepare`, `run` or `finish`.
        part: &'static str,
    },
    /// Read in a part where the buffer's role forbids it (rule 7).
    #[error("{} {buffer} is read in {part}", role_name(*role))]
    Read {
        /// The buffer's name.
        buffer: String,
        /// Role of the buffer.
        role: Role,
        /// Part: `prepare` or `finish`.
        part: &'static str,
    },
    /// Gather from a buffer that is not an input (rule 7).
    #[error("{} {buffer} is gathered from, which only inputs are", role_name(*role))]
    Gathered {
        /// The buffer's name.
        buffer: String,
        /// Role of the buffer.
        role: Role,
    },
    /// Kept buffer written in both `prepare` and `run` (rule 7).
    #[error("kept {buffer} is written both in prepare and in run")]
    TwoWriters {
        /// The buffer's name.
        buffer: String,
    },
    /// Statement that a vectorized loop may not contain (rule 8).
    #[error("vectorized loop {var} contains something else than stores, updates and prefetches")]
    VectorBody {
        /// Name of the loop variable.
        var: String,
    },
    /// GPU axis above 2, or bound by an enclosing loop (rule 9).
    #[error("loop {var} is bound to GPU axis {axis}, which does not exist or is taken by a loop around it")]
    Axis {
        /// Name of the loop variable.
        var: String,
        /// Index of the axis.
        axis: u8,
    },
    /// Loop marked as a tensor product that is none (rule 11).
    #[error("loop {var} is not a product of tiles: {why}")]
    TileProduct {
        /// Name of the loop variable.
        var: String,
        /// Reason why the loop is not such a product.
        why: &'static str,
    },
    /// Data race between iterations of a loop (rule 10).
    #[error("iterations of {kind} loop {var} race for {buffer}: {first} and {second}")]
    Race {
        /// Name of the loop variable.
        var: String,
        /// Kind of the loop.
        kind: &'static str,
        /// The buffer's name.
        buffer: String,
        /// Access that writes.
        first: String,
        /// Conflicting access in another iteration; equal to `first` if the access conflicts with itself.
        second: String,
    },
}

fn role_name(role: Role) -> &'static str {
    Role::ALL.iter().find(|(r, _)| *r == role).expect("every role is listed").1
}

/// Access that is neither proven nor refuted to be in bounds.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cannot prove that {subscript} is within 0..{extent} in {buffer}, inside loops {}", loops.join(", "))]
pub struct Unproven {
    /// The buffer's name.
    pub buffer: String,
    /// Index of the dimension.
    pub dimension: usize,
    /// Subscript in that dimension.
    pub subscript: String,
    /// Extent of the buffer in that dimension.
    pub extent: i64,
    /// Loops around the access, outermost first.
    pub loops: Vec<String>,
}

/// Checks a program against all rules.
///
/// # Errors
/// The first violation found.
///
/// # Cost
/// Some microseconds per statement; for rule 10, a pair of accesses to one written buffer counts as a
/// statement.
pub fn verify(program: &Program) -> Result<(), VerifyError> {
    check(program).map(drop)
}

/// Checks like [`verify`], and returns the accesses that are neither proven nor refuted to be in bounds.
///
/// # Errors
/// The first violation found.
pub fn check(program: &Program) -> Result<Vec<Unproven>, VerifyError> {
    tables(program)?;
    let sizes: Vec<Loop> = program.sizes.iter().map(loop_of_size).collect();
    let mut most = vec![0; program.loops.len()];
    sizes.iter().zip(&program.sizes).for_each(|(l, size)| most[l.var.0 as usize] = size.n_values.into());
    let mut checker = Checker {
        program,
        part: Part::Prepare,
        prepared: vec![false; program.buffers.len()],
        known: KnownFacts { most, ..KnownFacts::default() },
        around: Vec::new(),
        alive: vec![false; program.buffers.len()],
        unproven: Vec::new(),
    };
    for (part, _) in Part::ALL {
        checker.part = part;
        let is_body = part == Part::Body;
        checker.known.ranges = if is_body { program.ranges() } else { Ranges::default() };
        checker.around = sizes.iter().filter(|_| is_body).map(Around::Loop).collect();
        checker.block(program.part(part))?;
    }
    Ok(checker.unproven)
}

fn tables(program: &Program) -> Result<(), VerifyError> {
    let buffers = program.buffers.iter().map(|b| &b.name).collect::<Vec<_>>();
    for mut names in [program.loops.iter().collect(), buffers] {
        if let Some(name) = names.iter().find(|n| !is_name(n)) {
            return Err(VerifyError::Name { name: (*name).clone() });
        }
        names.sort();
        if let Some(pair) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(VerifyError::Duplicate { name: pair[0].clone() });
        }
    }
    if let Some(size) = program.sizes.iter().find(|size| !is_open_size(program, size)) {
        return Err(VerifyError::OpenSize { name: size.name.clone() });
    }
    match program.buffers.iter().find(|b| b.shape.iter().any(|e| *e < 1) || b.size_bytes().is_none()) {
        Some(b) => Err(VerifyError::Size { buffer: b.name.clone(), shape: b.shape.clone() }),
        None => Ok(()),
    }
}

fn is_open_size(program: &Program, size: &OpenSize) -> bool {
    let is_like = |other: &&OpenSize| other.name == size.name || other.var == size.var;
    let is_alone = program.sizes.iter().filter(is_like).count() == 1;
    let most = size.n_values.checked_sub(1).and_then(|n| n.checked_mul(size.step)?.checked_add(size.least));
    let has_values = size.least >= 1 && size.step >= 1 && size.n_values >= 1 && most.is_some();
    is_name(&size.name) && (size.var.0 as usize) < program.loops.len() && is_alone && has_values
}

/// Loop around all parts that represents an open size, so that bounds must hold for all of its values.
fn loop_of_size(size: &OpenSize) -> Loop {
    Loop { var: size.var, extent: size.n_values.into(), kind: LoopKind::Serial, body: Vec::new() }
}

/// Largest accepted magnitude of an index, far from overflow.
const MAX_MAGNITUDE: i128 = 1 << 50;

/// Maximum number of iterations tried to prove or refute an access.
const MAX_TRIES: u64 = 1 << 14;

/// Facts at a point of the program: the loops, and indices that conditions imply to be nonnegative.
#[derive(Default)]
struct KnownFacts {
    ranges: Ranges,
    facts: Vec<Index>,
    /// Bound of each loop variable's magnitude.
    most: Vec<i128>,
}

impl KnownFacts {
    /// Upper bound of the magnitudes of an index and of all intermediate values of bounding it.
    fn magnitude(&self, e: &Index) -> i128 {
        e.terms().iter().fold(i128::from(e.constant().unsigned_abs()), |sum, (atom, c)| {
            let part = match atom {
                Atom::Var(v) => self.most[v.0 as usize],
                Atom::FloorDiv(x, d) | Atom::Mod(x, d) => self.magnitude(x).saturating_add(i128::from(*d)),
                Atom::Min(a, b) | Atom::Max(a, b) => self.magnitude(a).saturating_add(self.magnitude(b)),
            };
            sum.saturating_add(part.saturating_mul(i128::from(c.unsigned_abs())))
        })
    }

    /// Adds the facts that follow from a condition that holds, or that does not hold.
    fn assume(&mut self, cond: &Cond, holds: bool) {
        match cond {
            Cond::Lt(a, b) if holds => self.facts.push(b.sub(a).offset(-1)),
            Cond::Lt(a, b) => self.facts.push(a.sub(b)),
            Cond::Eq(a, b) if holds => self.facts.extend([a.sub(b), b.sub(a)]),
            Cond::And(a, b) if holds => {
                self.assume(a, true);
                self.assume(b, true);
            }
            Cond::Not(c) => self.assume(c, !holds),
            Cond::True | Cond::Eq(..) | Cond::Less(..) | Cond::And(..) => {}
        }
    }

    /// Whether `e < bound` is known, by adding multiples of up to `n_facts` facts to `e`.
    ///
    /// A fact is never negative, so an upper bound of `e + λ·fact` is one of `e`; λ is chosen such that an
    /// atom cancels, and both sides are scaled if necessary.
    fn is_below(&self, e: &Index, bound: i64, n_facts: usize) -> bool {
        if self.ranges.upper(e).is_some_and(|u| u < bound) {
            return true;
        }
        if n_facts == 0 {
            return false;
        }
        self.facts.iter().any(|fact| {
            e.terms().iter().any(|(atom, c)| {
                let Some((_, f)) = fact.terms().iter().find(|(a, _)| a == atom) else { return false };
                if (*f < 0) == (*c < 0) {
                    return false;
                }
                let divisor = gcd(c.unsigned_abs(), f.unsigned_abs());
                let (of_e, of_fact) = ((f.unsigned_abs() / divisor) as i64, (c.unsigned_abs() / divisor) as i64);
                let sum_magnitude = self
                    .magnitude(e)
                    .saturating_mul(i128::from(of_e))
                    .saturating_add(self.magnitude(fact).saturating_mul(i128::from(of_fact)));
                if sum_magnitude.saturating_add(i128::from(bound) * i128::from(of_e)) > 1 << 60 {
                    return false;
                }
                self.is_below(&e.scale(of_e).add(&fact.scale(of_fact)), bound * of_e, n_facts - 1)
            })
        })
    }
}

/// Loop or condition around a point, outermost first.
#[derive(Clone, Copy)]
enum Around<'a> {
    Loop(&'a Loop),
    /// Condition, and whether it holds.
    Cond(&'a Cond, bool),
}

struct Checker<'a> {
    program: &'a Program,
    /// Part that is being checked.
    part: Part,
    /// Whether `prepare` writes each buffer.
    prepared: Vec<bool>,
    known: KnownFacts,
    around: Vec<Around<'a>>,
    /// Whether each buffer is a live temporary.
    alive: Vec<bool>,
    unproven: Vec<Unproven>,
}

type Checked = Result<(), VerifyError>;

impl<'a> Checker<'a> {
    fn block(&mut self, block: &'a [Stmt]) -> Checked {
        let mut own = Vec::new();
        for stmt in block {
            if let Stmt::Alloc(id) = stmt {
                self.alloc(*id, &own)?;
                own.push(*id);
            } else {
                self.stmt(stmt)?;
            }
        }
        for id in own {
            self.alive[id.0 as usize] = false;
        }
        Ok(())
    }

    fn alloc(&mut self, id: BufferId, own: &[BufferId]) -> Checked {
        let buffer = self.program.buffers.get(id.0 as usize).ok_or(VerifyError::UnknownBuffer { id: id.0 })?;
        if buffer.role != Role::Temporary {
            return Err(VerifyError::AllocOfArgument { buffer: buffer.name.clone(), role: buffer.role });
        }
        if self.alive[id.0 as usize] && !own.contains(&id) {
            return Err(VerifyError::Reallocated { buffer: buffer.name.clone() });
        }
        self.alive[id.0 as usize] = true;
        Ok(())
    }

    fn stmt(&mut self, stmt: &'a Stmt) -> Checked {
        match stmt {
            Stmt::For(l) => self.enter(l),
            Stmt::If { cond, then, otherwise } => {
                self.cond(cond)?;
                self.under(cond, true, |c| c.block(then))?;
                self.under(cond, false, |c| c.block(otherwise))
            }
            Stmt::Alloc(_) => unreachable!("allocations are checked with their block"),
            Stmt::Store { buffer, index, value } => {
                self.expr(value)?;
                self.write(*buffer, index)
            }
            Stmt::Update { buffer, index, value, first, .. } => {
                self.expr(value)?;
                self.cond(first)?;
                self.write(*buffer, index)
            }
            Stmt::Prefetch { buffer, index, .. } => self.subscripts(*buffer, index),
            Stmt::Barrier | Stmt::Wait(_) => Ok(()),
        }
    }

    fn enter(&mut self, l: &'a Loop) -> Checked {
        if l.var.0 as usize >= self.program.loops.len() {
            return Err(VerifyError::UnknownLoop { id: l.var.0 });
        }
        self.index(&l.extent)?;
        let name = || self.program.loop_name(l.var).to_owned();
        let outer = || {
            self.around.iter().filter_map(|a| match a {
                Around::Loop(l) => Some(l),
                Around::Cond(..) => None,
            })
        };
        if outer().any(|o| o.var == l.var) {
            return Err(VerifyError::Nested { var: name() });
        }
        match l.kind {
            LoopKind::Block(axis) | LoopKind::Thread(axis) => {
                if axis > 2 || outer().any(|o| o.kind == l.kind) {
                    return Err(VerifyError::Axis { var: name(), axis });
                }
            }
            LoopKind::Vectorized => {
                if !l.body.iter().all(Stmt::is_vectorizable) {
                    return Err(VerifyError::VectorBody { var: name() });
                }
            }
            LoopKind::Tensor(how) => {
                products::check(self.program, l, how, &self.known.ranges)
                    .map_err(|why| VerifyError::TileProduct { var: name(), why })?;
            }
            LoopKind::Serial | LoopKind::Parallel | LoopKind::Unrolled | LoopKind::Turns => {}
        }
        self.known.most[l.var.0 as usize] = self.known.magnitude(&l.extent).max(1);
        self.known.ranges.push(l.var, l.extent.clone());
        self.around.push(Around::Loop(l));
        self.block(&l.body)?;
        self.around.pop();
        self.known.ranges.pop();
        match l.kind {
            LoopKind::Serial | LoopKind::Unrolled | LoopKind::Tensor(_) => Ok(()),
            LoopKind::Parallel | LoopKind::Vectorized | LoopKind::Block(_) | LoopKind::Thread(_) | LoopKind::Turns => {
                self.races(l)
            }
        }
    }

    /// Runs a check under the assumption that a condition holds, or that it does not hold.
    fn under(&mut self, cond: &'a Cond, holds: bool, check: impl FnOnce(&mut Self) -> Checked) -> Checked {
        let n_facts = self.known.facts.len();
        self.known.assume(cond, holds);
        self.around.push(Around::Cond(cond, holds));
        check(self)?;
        self.around.pop();
        self.known.facts.truncate(n_facts);
        Ok(())
    }

    fn cond(&mut self, cond: &'a Cond) -> Checked {
        match cond {
            Cond::True => Ok(()),
            Cond::Lt(a, b) | Cond::Eq(a, b) => {
                self.index(a)?;
                self.index(b)
            }
            Cond::Less(a, b) => {
                self.expr(a)?;
                self.expr(b)
            }
            Cond::And(a, b) => {
                self.cond(a)?;
                self.under(a, true, |c| c.cond(b))
            }
            Cond::Not(c) => self.cond(c),
        }
    }

    fn expr(&mut self, expr: &'a Expr) -> Checked {
        match expr {
            Expr::Const(_) => Ok(()),
            Expr::Load(b, index) => {
                self.subscripts(*b, index)?;
                let buffer = self.program.buffer(*b);
                let allowed = match buffer.role {
                    Role::Input | Role::ConstInput => self.part != Part::Finish,
                    Role::Output => self.part != Part::Prepare,
                    Role::Kept | Role::Temporary => true,
                };
                if !allowed {
                    let (buffer, role, part) = (buffer.name.clone(), buffer.role, self.part.name());
                    return Err(VerifyError::Read { buffer, role, part });
                }
                self.within(*b, index)
            }
            Expr::Gather(b, subscripts) => {
                let index: Vec<Index> = subscripts.iter().map(Subscript::known).collect();
                self.subscripts(*b, &index)?;
                let buffer = self.program.buffer(*b);
                if !matches!(buffer.role, Role::Input | Role::ConstInput) {
                    return Err(VerifyError::Gathered { buffer: buffer.name.clone(), role: buffer.role });
                }
                if self.part == Part::Finish {
                    let (buffer, role, part) = (buffer.name.clone(), buffer.role, self.part.name());
                    return Err(VerifyError::Read { buffer, role, part });
                }
                for subscript in subscripts {
                    if let Subscript::Value(value) = subscript {
                        self.expr(value)?;
                    }
                }
                self.within(*b, &index)
            }
            Expr::FromIndex(i) => self.index(i),
            Expr::Unary(_, x) | Expr::Cast(_, x) => self.expr(x),
            Expr::Binary(_, a, b) => {
                self.expr(a)?;
                self.expr(b)
            }
            Expr::Select(c, a, b) => {
                self.cond(c)?;
                self.under(c, true, |checker| checker.expr(a))?;
                self.under(c, false, |checker| checker.expr(b))
            }
        }
    }

    fn write(&mut self, id: BufferId, index: &'a [Index]) -> Checked {
        self.subscripts(id, index)?;
        let buffer = self.program.buffer(id);
        let allowed = match buffer.role {
            Role::Input | Role::ConstInput => false,
            Role::Output => self.part != Part::Prepare,
            Role::Kept => self.part != Part::Finish,
            Role::Temporary => true,
        };
        if !allowed {
            let part = self.part.name();
            return Err(VerifyError::Write { buffer: buffer.name.clone(), role: buffer.role, part });
        }
        self.prepared[id.0 as usize] |= self.part == Part::Prepare;
        if buffer.role == Role::Kept && self.part == Part::Body && self.prepared[id.0 as usize] {
            return Err(VerifyError::TwoWriters { buffer: buffer.name.clone() });
        }
        self.within(id, index)
    }

    /// Checks rules 3, 4 and 6 for an access.
    fn subscripts(&self, id: BufferId, index: &[Index]) -> Checked {
        let buffer = self.program.buffers.get(id.0 as usize).ok_or(VerifyError::UnknownBuffer { id: id.0 })?;
        let (name, rank, n_subscripts) = (|| buffer.name.clone(), buffer.shape.len(), index.len());
        if rank != n_subscripts {
            return Err(VerifyError::Rank { buffer: name(), rank, n_subscripts });
        }
        if buffer.role == Role::Temporary && !self.alive[id.0 as usize] {
            return Err(VerifyError::NotAllocated { buffer: name() });
        }
        index.iter().try_for_each(|i| self.index(i))
    }

    /// Checks rules 3 and 4 for an index.
    fn index(&self, e: &Index) -> Checked {
        let text = || index_to_string(self.program, e);
        let mut unbound = None;
        e.for_each_var(&mut |v| {
            if !self.known.ranges.loops().iter().any(|(l, _)| *l == v) {
                unbound = Some(v);
            }
        });
        if let Some(v) = unbound {
            return Err(VerifyError::Unbound { var: loop_name(self.program, v), index: text() });
        }
        if let Some(divisor) = bad_divisor(e) {
            return Err(VerifyError::Divisor { divisor, index: text() });
        }
        if self.known.magnitude(e) > MAX_MAGNITUDE {
            return Err(VerifyError::Magnitude { index: text() });
        }
        Ok(())
    }

    /// Checks rule 5 for an access.
    fn within(&mut self, id: BufferId, index: &[Index]) -> Checked {
        let buffer = self.program.buffer(id);
        let proven =
            |(e, extent): (&Index, &i64)| self.known.is_below(e, *extent, 2) && self.known.is_below(&e.scale(-1), 1, 2);
        let Some(dimension) = index.iter().zip(&buffer.shape).position(|dim| !proven(dim)) else { return Ok(()) };
        match IterationSearch::new(self.program, &self.around).counterexample(index, &buffer.shape) {
            Tried::Counterexample(subscripts, place) => Err(VerifyError::OutOfBounds {
                buffer: buffer.name.clone(),
                subscripts,
                shape: buffer.shape.clone(),
                place,
            }),
            Tried::AllFine => Ok(()),
            Tried::SomeFine => {
                self.unproven.push(Unproven {
                    buffer: buffer.name.clone(),
                    dimension,
                    subscript: index_to_string(self.program, &index[dimension]),
                    extent: buffer.shape[dimension],
                    loops: self.known.ranges.loops().iter().map(|(v, _)| loop_name(self.program, *v)).collect(),
                });
                Ok(())
            }
        }
    }

    /// Checks rule 10 for a loop whose body is already checked.
    fn races(&self, l: &'a Loop) -> Checked {
        let Some(DataRace { buffer, write, other }) = find_race(l, &self.known.ranges) else { return Ok(()) };
        let name = &self.program.buffer(buffer).name;
        let text = |index: &[Index]| {
            let subscripts = index.iter().map(|e| index_to_string(self.program, e)).collect::<Vec<_>>();
            format!("{name}[{}]", subscripts.join(", "))
        };
        Err(VerifyError::Race {
            var: loop_name(self.program, l.var),
            kind: l.kind.name(),
            buffer: name.clone(),
            first: text(write),
            second: text(other),
        })
    }
}

fn bad_divisor(e: &Index) -> Option<i64> {
    e.terms().iter().find_map(|(atom, _)| match atom {
        Atom::Var(_) => None,
        Atom::FloorDiv(x, d) | Atom::Mod(x, d) => bad_divisor(x).or((*d < 1).then_some(*d)),
        Atom::Min(a, b) | Atom::Max(a, b) => bad_divisor(a).or_else(|| bad_divisor(b)),
    })
}

/// Result of trying iterations of the loops around an access.
enum Tried {
    /// Subscripts out of bounds, and the iteration.
    Counterexample(Vec<i64>, IterationPoint),
    /// All iterations were tried, without a counterexample.
    AllFine,
    SomeFine,
}

/// Search over iterations of the loops around an access: all if they are few, else the first and last of each
/// loop.
struct IterationSearch<'a> {
    program: &'a Program,
    around: &'a [Around<'a>],
    values: Vec<i64>,
    left: u64,
    /// Whether all iterations of each loop are tried.
    all: bool,
}

impl<'a> IterationSearch<'a> {
    fn new(program: &'a Program, around: &'a [Around<'a>]) -> IterationSearch<'a> {
        IterationSearch { program, around, values: vec![0; program.loops.len()], left: MAX_TRIES, all: true }
    }

    fn counterexample(mut self, index: &[Index], shape: &[i64]) -> Tried {
        for all in [true, false] {
            (self.all, self.left) = (all, MAX_TRIES);
            if let Some((subscripts, place)) = self.descend(0, true, index, shape) {
                return Tried::Counterexample(subscripts, place);
            }
            if all && self.left > 0 {
                return Tried::AllFine;
            }
        }
        Tried::SomeFine
    }

    fn eval(&self, e: &Index) -> Option<i64> {
        e.eval(&|v| self.values[v.0 as usize])
    }

    /// Tries the iterations inside the first `depth` enclosing loops and conditions; `certain` is true if
    /// these include no condition on values.
    fn descend(
        &mut self,
        depth: usize,
        certain: bool,
        index: &[Index],
        shape: &[i64],
    ) -> Option<(Vec<i64>, IterationPoint)> {
        if self.left == 0 {
            return None;
        }
        match self.around.get(depth) {
            None => {
                self.left -= 1;
                let subscripts = index.iter().map(|e| self.eval(e)).collect::<Option<Vec<_>>>()?;
                if subscripts.iter().zip(shape).all(|(i, extent)| (0..*extent).contains(i)) {
                    return None;
                }
                if !certain {
                    // The access may never be reached, which proves nothing.
                    self.left = 0;
                    return None;
                }
                let place = self.around.iter().filter_map(|a| match a {
                    Around::Loop(l) => Some((loop_name(self.program, l.var), self.values[l.var.0 as usize])),
                    Around::Cond(..) => None,
                });
                Some((subscripts, IterationPoint(place.collect())))
            }
            Some(Around::Cond(cond, holds)) => {
                let now = self.cond(cond);
                if now == Some(!holds) {
                    // Iterations that do not reach the access count as tried, too.
                    self.left -= 1;
                    return None;
                }
                self.descend(depth + 1, certain && now.is_some(), index, shape)
            }
            Some(Around::Loop(l)) => {
                let n = self.eval(&l.extent)?;
                let var = l.var.0 as usize;
                if self.all {
                    for i in 0..n {
                        self.values[var] = i;
                        let found = self.descend(depth + 1, certain, index, shape);
                        if found.is_some() || self.left == 0 {
                            return found;
                        }
                    }
                } else if n > 0 {
                    for i in [n - 1, 0].into_iter().take(if n == 1 { 1 } else { 2 }) {
                        self.values[var] = i;
                        let found = self.descend(depth + 1, certain, index, shape);
                        if found.is_some() {
                            return found;
                        }
                    }
                }
                self.left = self.left.saturating_sub(1);
                None
            }
        }
    }

    /// Whether the condition holds; `None` if it depends on values.
    fn cond(&self, cond: &Cond) -> Option<bool> {
        match cond {
            Cond::True => Some(true),
            Cond::Lt(a, b) => Some(self.eval(a)? < self.eval(b)?),
            Cond::Eq(a, b) => Some(self.eval(a)? == self.eval(b)?),
            Cond::Less(..) => None,
            Cond::And(a, b) => match (self.cond(a), self.cond(b)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (a, b) => Some(a? && b?),
            },
            Cond::Not(c) => Some(!self.cond(c)?),
        }
    }
}
