//! Sums of products with an operand into which zeros were inserted, as a transposed convolution has one.
//!
//! Where the elements of an operand other than zero lie `step` apart along an axis that a window moves over,
//! most taps meet a zero. Here each such element goes to the results whose window it is in, and no zero is
//! walked over. That an operand has this form is seen from its values, not from how they came about.

use super::nest::zero_axes;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp};
use crate::index::{Atom, Index};
use crate::interp::is_undefined;
use crate::program::{BufferId, LoopId, Program, Stmt};
use std::sync::Mutex;

/// `to[outer…, p…] += sparse[plain…, (p + dilation·tap)…] · dense[…]` over loops of constant extent.
pub(super) struct Inserted {
    to: BufferId,
    /// Extents of the loops, by which all other fields number them.
    extents: Vec<i64>,
    /// The loops that are the first subscripts of the result.
    outer: Vec<usize>,
    windows: Vec<Window>,
    /// Loops of the reduction other than taps.
    summed: Vec<usize>,
    /// The sparse operand without what is inserted.
    compact: Vec<f64>,
    /// For each of its dimensions the loop that is its subscript, or the window that moves over it.
    along: Vec<Along>,
    dense: BufferId,
    /// By loop: elements of the dense operand from iteration to iteration, after a constant.
    dense_at: (i64, Vec<i64>),
}

enum Along {
    Loop(usize),
    Window(usize),
}

/// Along one dimension: elements at `first + step·i`, for `i` below `count`, meet taps where that is
/// `p + dilation·tap`.
struct Window {
    tap: usize,
    dilation: i64,
    results: i64,
    first: i64,
    step: i64,
    count: i64,
}

impl Window {
    /// The elements that a tap meets a result with, and the results.
    fn met(&self, tap: i64) -> (std::ops::Range<i64>, impl Fn(i64) -> i64) {
        let to = self.first - self.dilation * tap;
        let least = (-to).div_euclid(self.step) + i64::from((-to).rem_euclid(self.step) > 0);
        let end = (self.results - 1 - to).div_euclid(self.step) + 1;
        let step = self.step;
        (least.clamp(0, self.count)..end.clamp(0, self.count), move |i| to + step * i)
    }
}

impl Inserted {
    /// The statement as such a sum, where it is one and its operand has zeros inserted.
    pub(super) fn of(program: &Program, stmt: &Stmt, memory: &[Vec<f64>]) -> Option<Inserted> {
        let (mut loops, mut inner) = (Vec::new(), stmt);
        while let Stmt::For(l) = inner {
            let [only] = l.body.as_slice() else { return None };
            loops.push((l.var, l.extent.as_const().filter(|n| (1..1 << 40).contains(n))?));
            inner = only;
        }
        let Stmt::Update { buffer: to, index, op: ReduceOp::Sum, value, first } = inner else { return None };
        let Expr::Binary(BinaryOp::Mul, a, b) = value else { return None };
        let (Expr::Load(a, at_a), Expr::Load(b, at_b)) = (&**a, &**b) else { return None };
        let form = |sparse: (BufferId, &[Index]), dense: (BufferId, &[Index])| {
            Inserted::with(program, &loops, (*to, index), first, sparse, dense, memory)
        };
        form((*a, at_a), (*b, at_b)).or_else(|| form((*b, at_b), (*a, at_a)))
    }

    fn with(
        program: &Program,
        loops: &[(LoopId, i64)],
        (to, at): (BufferId, &[Index]),
        first: &Cond,
        (sparse, at_sparse): (BufferId, &[Index]),
        (dense, at_dense): (BufferId, &[Index]),
        memory: &[Vec<f64>],
    ) -> Option<Inserted> {
        if [sparse, dense].contains(&to) || memory[to.0 as usize].is_empty() {
            return None;
        }
        let number = |var: LoopId| loops.iter().position(|(v, _)| *v == var);
        let alone = |i: &Index| match (i.terms(), i.constant()) {
            ([(Atom::Var(v), 1)], 0) => number(*v),
            _ => None,
        };
        // The result has a loop for each dimension, and all of its elements are computed.
        let results: Vec<usize> = at.iter().map(alone).collect::<Option<_>>()?;
        let covers = |(l, n): (&usize, &i64)| loops[*l].1 == *n;
        let is_once = |l: &usize| results.iter().filter(|other| *other == l).count() == 1;
        if !results.iter().zip(&program.buffer(to).shape).all(covers) || !results.iter().all(is_once) {
            return None;
        }
        let mut begins = Vec::new();
        zero_axes(first, &|v| number(v), &mut begins)?;
        let reduction: Vec<usize> = (0..loops.len()).filter(|l| !results.contains(l)).collect();
        if !reduction.iter().all(|l| loops[*l].1 == 1 || begins.contains(l))
            || begins.iter().any(|l| results.contains(l))
        {
            return None;
        }
        // Windows move over the last dimensions of both.
        let (mut along, mut windows, mut moving): (Vec<Along>, Vec<Window>, Vec<usize>) = Default::default();
        for i in at_sparse {
            if let Some(l) = alone(i) {
                along.push(Along::Loop(l));
                continue;
            }
            let ([(Atom::Var(x), c), (Atom::Var(y), d)], 0) = (i.terms(), i.constant()) else { return None };
            let (x, y) = (number(*x)?, number(*y)?);
            let (result, tap, dilation) = match (results.contains(&x), results.contains(&y), c, d) {
                (true, false, 1, d) => (x, y, *d),
                (false, true, c, 1) => (y, x, *c),
                _ => return None,
            };
            along.push(Along::Window(windows.len()));
            moving.push(result);
            windows.push(Window { tap, dilation, results: loops[result].1, first: 0, step: 1, count: 0 });
        }
        let n_outer = results.len() - windows.len();
        let taps: Vec<usize> = windows.iter().map(|w| w.tap).collect();
        let has_own = |l: &usize| taps.iter().filter(|tap| *tap == l).count() == 1;
        let is_moved = along.iter().any(|a| matches!(a, Along::Loop(l) if moving.contains(l) || taps.contains(l)));
        if windows.is_empty()
            || results[n_outer..] != moving
            || !taps.iter().all(has_own)
            || is_moved
            || windows.iter().any(|w| w.dilation < 1)
        {
            return None;
        }
        let mut dense_at = (0, vec![0; loops.len()]);
        let of_dense = program.buffer(dense);
        for ((i, stride), extent) in at_dense.iter().zip(of_dense.strides()).zip(&of_dense.shape) {
            let (mut least, mut most) = (i.constant(), i.constant());
            dense_at.0 += stride * i.constant();
            for (atom, c) in i.terms() {
                let Atom::Var(v) = atom else { return None };
                let l = number(*v).filter(|l| !moving.contains(l))?;
                dense_at.1[l] += stride * c;
                let last = c * (loops[l].1 - 1);
                (least, most) = (least + last.min(0), most + last.max(0));
            }
            if least < 0 || most >= *extent {
                return None;
            }
        }
        // An infinite factor would not vanish beside a zero.
        let values = [sparse, dense].map(|b| memory[b.0 as usize].as_slice());
        if values.iter().any(|values| values.is_empty() || values.iter().any(|x| is_undefined(*x) || !x.is_finite())) {
            return None;
        }
        let shape = &program.buffer(sparse).shape;
        let within = |(a, n): (&Along, &i64)| match a {
            Along::Loop(l) => loops[*l].1 == *n,
            Along::Window(w) => {
                let Window { tap, dilation, results, .. } = windows[*w];
                results + dilation * (loops[tap].1 - 1) <= *n
            }
        };
        if !along.iter().zip(shape).all(within) {
            return None;
        }
        let compact = compact(values[0], shape, &along, &mut windows)?;
        let summed = reduction.into_iter().filter(|l| !taps.contains(l)).collect();
        let (extents, outer) = (loops.iter().map(|(_, n)| *n).collect(), results[..n_outer].to_vec());
        Some(Inserted { to, extents, outer, windows, summed, compact, along, dense, dense_at })
    }

    /// Carries out the sum.
    pub(super) fn run(&self, memory: &mut [Vec<f64>], n_threads: usize) {
        let mut to = std::mem::take(&mut memory[self.to.0 as usize]);
        to.fill(0.0);
        let dense = memory[self.dense.0 as usize].as_slice();
        let n: i64 = self.windows.iter().map(|w| w.results).product();
        let parts = Mutex::new(to.chunks_exact_mut(n as usize).enumerate());
        let work = || {
            let next = || parts.lock().expect("no worker panics").next();
            while let Some((part, to)) = next() {
                let mut at = vec![0; self.extents.len()];
                let mut rest = part as i64;
                for l in self.outer.iter().rev() {
                    at[*l] = rest % self.extents[*l];
                    rest /= self.extents[*l];
                }
                self.part(&mut at, dense, to);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..n_threads {
                scope.spawn(work);
            }
            work();
        });
        drop(parts);
        memory[self.to.0 as usize] = to;
    }

    /// The results of one iteration of the outer loops.
    fn part(&self, at: &mut [i64], dense: &[f64], to: &mut [f64]) {
        let (last, others) = self.windows.split_last().expect("there is a window");
        let taps: Vec<usize> = self.windows.iter().map(|w| w.tap).collect();
        // Elements of the compact operand from iteration to iteration, of loops and of windows.
        let (mut of_loops, mut of_windows, mut stride) = (Vec::new(), vec![0; self.windows.len()], 1);
        for along in self.along.iter().rev() {
            match along {
                Along::Loop(l) => {
                    of_loops.push((*l, stride));
                    stride *= self.extents[*l];
                }
                Along::Window(w) => {
                    of_windows[*w] = stride;
                    stride *= self.windows[*w].count;
                }
            }
        }
        let step = *of_windows.last().expect("there is a window");
        let mut sums = Vec::new();
        for_each(at, &taps, &self.extents, &mut |at| {
            let (row, place) = last.met(at[last.tap]);
            let ranges: Vec<_> = others.iter().map(|w| w.met(at[w.tap])).collect();
            let extents: Vec<i64> = ranges.iter().map(|(r, _)| r.end - r.start).collect();
            if row.is_empty() || extents.iter().any(|n| *n < 1) {
                return;
            }
            let all: Vec<usize> = (0..extents.len()).collect();
            for_each(&mut vec![0; extents.len()], &all, &extents, &mut |i| {
                let (mut from, mut base) = (row.start * step, 0);
                for (((range, place), i), (w, stride)) in
                    ranges.iter().zip(i.iter()).zip(others.iter().zip(&of_windows))
                {
                    from += (range.start + i) * stride;
                    base = base * w.results + place(range.start + i);
                }
                sums.clear();
                sums.resize((row.end - row.start) as usize, 0.0);
                for_each(at, &self.summed, &self.extents, &mut |at| {
                    let from = of_loops.iter().fold(from, |from, (l, stride)| from + at[*l] * stride) as usize;
                    let factor = self.dense_at.1.iter().zip(at.iter()).fold(self.dense_at.0, |sum, (c, i)| sum + c * i);
                    let factor = dense[factor as usize];
                    if step == 1 {
                        let row = &self.compact[from..][..sums.len()];
                        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
                    } else {
                        let row = self.compact[from..].iter().step_by(step as usize);
                        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
                    }
                });
                for (i, sum) in row.clone().zip(&sums) {
                    to[(base * last.results + place(i)) as usize] += sum;
                }
            });
        });
    }
}

/// Goes through all iterations of some loops, which begin and end at zero.
fn for_each(at: &mut [i64], loops: &[usize], extents: &[i64], visit: &mut dyn FnMut(&mut [i64])) {
    loop {
        visit(at);
        let advanced = loops.iter().rev().any(|l| {
            at[*l] = (at[*l] + 1) % extents[*l];
            at[*l] > 0
        });
        if !advanced {
            return;
        }
    }
}

/// The elements that are not inserted, with where they lie put into the windows; `None` where no zeros are
/// inserted.
fn compact(values: &[f64], shape: &[i64], along: &[Along], windows: &mut [Window]) -> Option<Vec<f64>> {
    let mut used: Vec<Vec<bool>> = shape.iter().map(|n| vec![false; *n as usize]).collect();
    let row = *shape.last()? as usize;
    for (number, row) in values.chunks_exact(row).enumerate() {
        let (of_row, of_others) = used.split_last_mut()?;
        let mut any = false;
        for (used, x) in of_row.iter_mut().zip(row) {
            *used |= *x != 0.0;
            any |= *x != 0.0;
        }
        if any {
            let mut rest = number;
            for used in of_others.iter_mut().rev() {
                let n = used.len();
                used[rest % n] = true;
                rest /= n;
            }
        }
    }
    let mut kept: Vec<Vec<usize>> = Vec::with_capacity(shape.len());
    for (along, used) in along.iter().zip(&used) {
        kept.push(match along {
            Along::Loop(_) => (0..used.len()).collect(),
            Along::Window(w) => {
                let places: Vec<usize> = (0..used.len()).filter(|i| used[*i]).collect();
                let (first, last) = (*places.first()?, *places.last()?);
                let step = places.iter().fold(0, |step, i| gcd(step, i - first)).max(1);
                let window = &mut windows[*w];
                (window.first, window.step) = (first as i64, step as i64);
                window.count = ((last - first) / step + 1) as i64;
                (first..=last).step_by(step).collect()
            }
        });
    }
    if windows.iter().all(|w| w.step == 1) {
        return None;
    }
    let mut rows: Vec<usize> = vec![0];
    let (of_row, of_others) = kept.split_last()?;
    for (kept, n) in of_others.iter().zip(shape) {
        rows = rows.iter().flat_map(|row| kept.iter().map(move |i| row * *n as usize + i)).collect();
    }
    Some(rows.iter().flat_map(|row_at| of_row.iter().map(move |i| values[row_at * row + i])).collect())
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
