//! Winograd's minimal filtering for 3 × 3 convolutions.

use super::Illegal;
use super::compute_at::{StageNest, stage_nest};
use super::tree::{buffer_id, nest, new_buffer, new_loop, require_fits};
use crate::dtype::DType;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp, UnaryOp};
use crate::index::{Atom, Index};
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt};
use crate::text::index_to_string;

/// Number of rows and columns of the window.
const WINDOW: i64 = 3;

/// Applies [`Step::Winograd`](super::Step::Winograd).
///
/// # Source
/// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015, arXiv 1509.09308), section 4.
/// The two one-dimensional transforms of data and of results are separate stages, for schedules to place.
pub fn winograd(program: &mut Program, stage: &str, tile: i64) -> Result<(), Illegal> {
    let result = buffer_id(program, stage)?;
    let Some(f) = filtering(tile) else {
        let known: Vec<String> = FILTERINGS.iter().map(|f| f.tile.to_string()).collect();
        let why = format!("its Winograd tiles may have {} rows and columns, not {tile}", known.join(" or "));
        return Err(Illegal::Buffer { buffer: stage.to_owned(), why });
    };
    let DirectConvolution { place, loops, channels, input, weights } = recognise(program, result)?;
    let [n, k, p, q] = loops.each_ref().map(|(_, extent)| extent.clone());
    if p.as_const().is_none() && p.residue(tile) != Some(0) {
        let why = format!("its open rows, {}, are no multiple of {tile}", index_to_string(program, &p));
        return Err(Illegal::Buffer { buffer: stage.to_owned(), why });
    }
    let tiles = |extent: &Index| extent.offset(tile - 1).floor_div(tile);
    let (th, tw) = (tiles(&p), tiles(&q));
    let (c, t, window) = (channels, Index::from(tile + WINDOW - 1), Index::from(WINDOW));
    let shape = program.buffer(input).shape.clone();
    let ahead = matches!(program.buffer(weights).role, Role::ConstInput | Role::Kept);
    let dtype = program.buffer(result).dtype;
    // The last tiles may reach beyond the operand, for results that are never read.
    let reaches = |tiles: &Index, size: i64| tiles.as_const().filter(|n| (n - 1) * tile + tile + WINDOW - 1 > size);
    let [reaches_rows, reaches_columns] = [reaches(&th, shape[2]), reaches(&tw, shape[3])];
    let mut new = StageMaker { program, stage, dtype };

    let axes = [("a", &t), ("s", &window), ("k", &k), ("c", &c)];
    let (g, g_nest) =
        new.stage("g", Role::Temporary, axes, |[a, s, k, c]| f.weights.row(a, &|r| load(weights, [k, c, &at(r), s])))?;
    let kept = if ahead { Role::Kept } else { Role::Temporary };
    let (u, u_nest) = new.stage("u", kept, [("a", &t), ("b", &t), ("k", &k), ("c", &c)], |[a, b, k, c]| {
        f.weights.row(b, &|s| load(g, [a, &at(s), k, c]))
    })?;
    let axes = [("a", &t), ("j", &t), ("n", &n), ("c", &c), ("th", &th), ("tw", &tw)];
    let (d, d_nest) = new.stage("d", Role::Temporary, axes, |[a, j, n, c, th_, tw_]| {
        f.data.row(a, &|i| {
            let (y, x) = (th_.scale(tile).offset(i as i64), tw_.scale(tile).add(j));
            let mut inside = Cond::True;
            if reaches_rows.is_some_and(|tiles| (tiles - 1) * tile + i as i64 >= shape[2]) {
                inside = inside.and(Cond::Lt(y.clone(), shape[2].into()));
            }
            if reaches_columns.is_some() {
                inside = inside.and(Cond::Lt(x.clone(), shape[3].into()));
            }
            let value = load(input, [n, c, &y, &x]);
            if inside == Cond::True { value } else { select(inside, value, Expr::Const(0.0)) }
        })
    })?;
    let axes = [("a", &t), ("b", &t), ("n", &n), ("c", &c), ("th", &th), ("tw", &tw)];
    let (v, v_nest) = new.stage("v", Role::Temporary, axes, |[a, b, n, c, th, tw]| {
        f.data.row(b, &|j| load(d, [a, &at(j), n, c, th, tw]))
    })?;
    let axes = [("a", &t), ("b", &t), ("n", &n), ("k", &k), ("th", &th), ("tw", &tw)];
    let (m, m_nest) = new.reduction("m", axes, [("c", &c)], |[a, b, n, k, th, tw], [c]| {
        Expr::binary(BinaryOp::Mul, load(u, [a, b, k, c]), load(v, [a, b, n, c, th, tw]))
    })?;
    let rows = Index::from(tile);
    let axes = [("i", &rows), ("b", &t), ("n", &n), ("k", &k), ("th", &th), ("tw", &tw)];
    let (r, r_nest) = new.stage("r", Role::Temporary, axes, |[i, b, n, k, th, tw]| {
        f.result.row(i, &|a| load(m, [&at(a), b, n, k, th, tw]))
    })?;
    let [n, k, p, q] = loops.each_ref().map(|(v, _)| Index::from(*v));
    let (i, th, tw) = (p.modulo(tile), p.floor_div(tile), q.floor_div(tile));
    let value = f.result.row(&q.modulo(tile), &|b| load(r, [&i, &at(b), &n, &k, &th, &tw]));
    let store = Stmt::Store { buffer: result, index: vec![n, k, p, q], value };
    let combined = nest(loops.into_iter().map(|(v, extent)| (v, extent, LoopKind::Serial)), vec![store]);

    let in_body = [d_nest, v_nest, m_nest, r_nest, combined].into_iter().flatten();
    let of_weights = g_nest.into_iter().chain(u_nest);
    if ahead {
        program.prepare.extend(of_weights);
        program.body.splice(place..=place, in_body);
    } else {
        program.body.splice(place..=place, of_weights.chain(in_body));
    }
    Ok(())
}

/// Amplification of rounding errors: root mean square of the products in the worst result of a tile, per
/// channel, with data and weights of size 1 (3 for the nine products of a direct convolution). `None` for an
/// unsupported tile size.
pub fn size_of_products(tile: i64) -> Option<f64> {
    let f = filtering(tile)?;
    let square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>();
    let products: Vec<f64> = f.data.rows.iter().zip(f.weights.rows).map(|(d, w)| square(d) * square(w)).collect();
    let result = |row: &&[f64]| row.iter().zip(&products).map(|(a, p)| a * a * p).sum::<f64>();
    // Rows and columns have the same transform, so the square root of the square is taken.
    f.result.rows.iter().map(result).reduce(f64::max)
}

/// Parsed stage `result[n, k, p, q] += input[n, c, p + r, q + s] · weights[k, c, r, s]`, in any order of
/// loops and factors.
struct DirectConvolution {
    /// Position of the statement in the body.
    place: usize,
    /// Loops n, k, p and q with their extents.
    loops: [(LoopId, Index); 4],
    /// Extent of c.
    channels: Index,
    input: BufferId,
    weights: BufferId,
}

fn recognise(program: &Program, result: BufferId) -> Result<DirectConvolution, Illegal> {
    let name = &program.buffer(result).name;
    let fail = |why: String| Illegal::Buffer { buffer: name.clone(), why };
    let StageNest { place, loops, leaf } = stage_nest(program, result)?;
    let Stmt::Update { index, op: ReduceOp::Sum, value: Expr::Binary(BinaryOp::Mul, x, y), first, .. } = leaf else {
        return Err(fail("it is not a sum of products".to_owned()));
    };
    let (Expr::Load(x, x_index), Expr::Load(y, y_index)) = (&**x, &**y) else {
        return Err(fail("it is not a sum of products of two buffers".to_owned()));
    };
    let no_form = || {
        let form = format!("{name}[n, k, p, q] += x[n, c, p + r, q + s] * w[k, c, r, s]");
        fail(format!("it is not the convolution {form} over serial loops"))
    };
    let [n, k, p, q] = variables(index).ok_or_else(no_form)?;
    // The weights are the factor whose first subscript is the result's second and whose subscripts are all
    // loop variables.
    let of_weights = |index: &[Index]| variables(index).filter(|[of, ..]| *of == k);
    let (input, at_input, weights, [_, c, r, s]) = match (of_weights(x_index), of_weights(y_index)) {
        (_, Some(w)) => (*x, x_index, *y, w),
        (Some(w), None) => (*y, y_index, *x, w),
        (None, None) => return Err(no_form()),
    };
    let all = [n, k, p, q, c, r, s];
    let is_nest = loops.len() == all.len() && loops.iter().all(|(v, _)| all.contains(v));
    let [at_n, at_c, y, x] = at_input.as_slice() else { return Err(no_form()) };
    if !is_nest || [at_n, at_c] != [&n.into(), &c.into()] || !begins_at_zero(first, [c, r, s]) {
        return Err(no_form());
    }
    for (at, along, window) in [(y, p, r), (x, q, s)] {
        let expected = Index::from(along).add(&window.into());
        if *at != expected {
            let [at, expected] = [at, &expected].map(|i| index_to_string(program, i));
            return Err(fail(format!("it reads at {at}, where stride and dilation 1 would read at {expected}")));
        }
    }
    let extent = |v: LoopId| {
        let (_, extent) = loops.iter().find(|(l, _)| *l == v).expect("every loop is of the nest");
        extent.clone()
    };
    // The number of rows may be open.
    let number = |v: LoopId| extent(v).as_const().ok_or_else(no_form);
    let window = [number(r)?, number(s)?];
    if window != [WINDOW, WINDOW] {
        return Err(fail(format!("its window is {} by {}, not {WINDOW} by {WINDOW}", window[0], window[1])));
    }
    [n, k, q, c].into_iter().try_for_each(|v| number(v).map(|_| ()))?;
    let loops = [n, k, p, q].map(|v| (v, extent(v)));
    Ok(DirectConvolution { place, loops, channels: extent(c), input, weights })
}

/// Returns the subscripts if they are four different loop variables.
pub(super) fn variables(index: &[Index]) -> Option<[LoopId; 4]> {
    let variable = |i: &Index| match (i.terms(), i.constant()) {
        ([(Atom::Var(v), 1)], 0) => Some(*v),
        _ => None,
    };
    let vars: [LoopId; 4] = index.iter().map(variable).collect::<Option<Vec<_>>>()?.try_into().ok()?;
    (0..4).all(|at| !vars[..at].contains(&vars[at])).then_some(vars)
}

/// Whether the condition says exactly that all these loops are at zero.
pub(super) fn begins_at_zero(first: &Cond, loops: [LoopId; 3]) -> bool {
    fn parts<'a>(cond: &'a Cond, into: &mut Vec<&'a Cond>) {
        match cond {
            Cond::And(a, b) => [a, b].into_iter().for_each(|c| parts(c, into)),
            other => into.push(other),
        }
    }
    let mut found = Vec::new();
    parts(first, &mut found);
    let wanted = loops.map(|v| Cond::Eq(v.into(), 0.into()));
    found.len() == wanted.len() && wanted.iter().all(|w| found.contains(&w))
}

/// Creates stages with the prefix of the original stage's name: `acc.v`, with loops `acc.v.a`, `acc.v.b` and
/// so on.
pub(super) struct StageMaker<'a> {
    pub program: &'a mut Program,
    pub stage: &'a str,
    pub dtype: DType,
}

impl StageMaker<'_> {
    /// Creates a stage without a reduction; returns its buffer and its nest.
    pub fn stage<const N: usize>(
        &mut self,
        name: &str,
        role: Role,
        axes: [(&str, &Index); N],
        value: impl Fn([&Index; N]) -> Expr,
    ) -> Result<(BufferId, Vec<Stmt>), Illegal> {
        let (buffer, vars) = self.buffer(name, role, axes)?;
        let index = vars.map(Index::from);
        let value = value(index.each_ref());
        let store = vec![Stmt::Store { buffer, index: index.into(), value }];
        let nest = nest(vars.iter().zip(axes).map(|(&v, (_, n))| (v, n.clone(), LoopKind::Serial)), store);
        let alloc = (role == Role::Temporary).then_some(Stmt::Alloc(buffer));
        Ok((buffer, alloc.into_iter().chain(nest).collect()))
    }

    /// Creates a temporary stage that sums over additional innermost loops.
    pub fn reduction<const N: usize, const M: usize>(
        &mut self,
        name: &str,
        axes: [(&str, &Index); N],
        over: [(&str, &Index); M],
        value: impl Fn([&Index; N], [&Index; M]) -> Expr,
    ) -> Result<(BufferId, Vec<Stmt>), Illegal> {
        let (buffer, vars) = self.buffer(name, Role::Temporary, axes)?;
        let mut summed = [LoopId(0); M];
        for (var, (axis, _)) in summed.iter_mut().zip(over) {
            *var = new_loop(self.program, &format!("{}.{name}.{axis}", self.stage))?;
        }
        let (index, at) = (vars.map(Index::from), summed.map(Index::from));
        let value = value(index.each_ref(), at.each_ref());
        let first = at.into_iter().fold(Cond::True, |first, at| first.and(Cond::Eq(at, 0.into())));
        let update = Stmt::Update { buffer, index: index.into(), op: ReduceOp::Sum, value, first };
        let loops =
            vars.into_iter().chain(summed).zip(axes.into_iter().chain(over).map(|(_, n)| n)).collect::<Vec<_>>();
        let nest = nest(loops.into_iter().map(|(v, n)| (v, n.clone(), LoopKind::Serial)), vec![update]);
        Ok((buffer, [Stmt::Alloc(buffer)].into_iter().chain(nest).collect()))
    }

    fn buffer<const N: usize>(
        &mut self,
        name: &str,
        role: Role,
        axes: [(&str, &Index); N],
    ) -> Result<(BufferId, [LoopId; N]), Illegal> {
        let name = format!("{}.{name}", self.stage);
        let buffer = new_buffer(self.program, &name, self.dtype, Scope::Global, role)?;
        let ranges = self.program.ranges();
        let most = |(_, n): &(&str, &Index)| ranges.upper(n).expect("invariant: constants and open sizes have bounds");
        self.program.buffers[buffer.0 as usize].shape = axes.iter().map(most).collect();
        require_fits(self.program, buffer)?;
        let mut vars = [LoopId(0); N];
        for (var, (axis, _)) in vars.iter_mut().zip(axes) {
            *var = new_loop(self.program, &format!("{name}.{axis}"))?;
        }
        Ok((buffer, vars))
    }
}

fn at(i: usize) -> Index {
    Index::from(i as i64)
}

pub(super) fn load<const N: usize>(buffer: BufferId, index: [&Index; N]) -> Expr {
    Expr::Load(buffer, index.map(Index::clone).into())
}

pub(super) fn select(cond: Cond, then: Expr, otherwise: Expr) -> Expr {
    Expr::Select(Box::new(cond), Box::new(then), Box::new(otherwise))
}

/// Minimal filtering F(tile × tile, 3 × 3).
struct Filtering {
    tile: i64,
    /// Bᵀ
    data: Transform,
    /// G
    weights: Transform,
    /// Aᵀ
    result: Transform,
}

/// Constant matrix of a linear transform.
struct Transform {
    rows: &'static [&'static [f64]],
    /// Columns, grouped so that rows use the same partial sum of a group up to a factor; code generation
    /// computes a common subexpression once.
    groups: &'static [&'static [usize]],
}

impl Transform {
    /// Returns element `row` of the product with a vector of elements `x`. Nested selects choose the row;
    /// unrolling makes their conditions constant.
    fn row(&self, row: &Index, x: &dyn Fn(usize) -> Expr) -> Expr {
        let mut rows = self.rows.iter().enumerate().rev();
        let (_, last) = rows.next().expect("a matrix has rows");
        rows.fold(self.sum(last, x), |rest, (i, coefficients)| {
            select(Cond::Eq(row.clone(), at(i)), self.sum(coefficients, x), rest)
        })
    }

    fn sum(&self, coefficients: &[f64], x: &dyn Fn(usize) -> Expr) -> Expr {
        let groups = self.groups.iter().filter_map(|columns| {
            let terms: Vec<(f64, usize)> =
                columns.iter().map(|&at| (coefficients[at], at)).filter(|(c, _)| *c != 0.0).collect();
            let (lead, _) = *terms.first()?;
            let alike = terms.iter().all(|(c, _)| c.abs() == lead.abs());
            let factor = if alike { lead } else { lead.signum() };
            Some((factor, weighted(terms.into_iter().map(|(c, at)| (c / factor, x(at))))))
        });
        weighted(groups)
    }
}

/// Builds a weighted sum without unnecessary multiplications.
fn weighted(terms: impl Iterator<Item = (f64, Expr)>) -> Expr {
    let scaled = |c: f64, x| if c == 1.0 { x } else { Expr::binary(BinaryOp::Mul, Expr::Const(c), x) };
    let add = |sum: Option<Expr>, (c, x): (f64, Expr)| {
        Some(match sum {
            None if c == -1.0 => Expr::unary(UnaryOp::Neg, x),
            None => scaled(c, x),
            Some(sum) if c < 0.0 => Expr::binary(BinaryOp::Sub, sum, scaled(-c, x)),
            Some(sum) => Expr::binary(BinaryOp::Add, sum, scaled(c, x)),
        })
    };
    terms.fold(None, add).expect("no row is zero")
}

fn filtering(tile: i64) -> Option<&'static Filtering> {
    FILTERINGS.iter().find(|f| f.tile == tile)
}

const FILTERINGS: [Filtering; 2] = [
    Filtering {
        tile: 2,
        data: Transform {
            rows: &[&[1., 0., -1., 0.], &[0., 1., 1., 0.], &[0., -1., 1., 0.], &[0., 1., 0., -1.]],
            groups: &[&[0, 2], &[1, 3]],
        },
        weights: Transform {
            rows: &[&[1., 0., 0.], &[0.5, 0.5, 0.5], &[0.5, -0.5, 0.5], &[0., 0., 1.]],
            groups: &[&[0, 2], &[1]],
        },
        result: Transform { rows: &[&[1., 1., 1., 0.], &[0., 1., -1., -1.]], groups: &[&[0], &[1, 2], &[3]] },
    },
    Filtering {
        tile: 4,
        data: Transform {
            rows: &[
                &[4., 0., -5., 0., 1., 0.],
                &[0., -4., -4., 1., 1., 0.],
                &[0., 4., -4., -1., 1., 0.],
                &[0., -2., -1., 2., 1., 0.],
                &[0., 2., -1., -2., 1., 0.],
                &[0., 4., 0., -5., 0., 1.],
            ],
            groups: &[&[4, 2, 0], &[5, 3, 1]],
        },
        weights: Transform {
            rows: &[
                &[1. / 4., 0., 0.],
                &[-1. / 6., -1. / 6., -1. / 6.],
                &[-1. / 6., 1. / 6., -1. / 6.],
                &[1. / 24., 1. / 12., 1. / 6.],
                &[1. / 24., -1. / 12., 1. / 6.],
                &[0., 0., 1.],
            ],
            groups: &[&[0, 2], &[1]],
        },
        result: Transform {
            rows: &[
                &[1., 1., 1., 1., 1., 0.],
                &[0., 1., -1., 2., -2., 0.],
                &[0., 1., 1., 4., 4., 0.],
                &[0., 1., -1., 8., -8., 1.],
            ],
            groups: &[&[0], &[1, 2], &[3, 4], &[5]],
        },
    },
];
