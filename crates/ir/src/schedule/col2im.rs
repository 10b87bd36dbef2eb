//! Transposed convolutions as a matrix product followed by col2im.

use super::Illegal;
use super::compute_at::{StageNest, stage_nest, take_stage};
use super::tree::{buffer_id, nest};
use super::winograd::{StageMaker, begins_at_zero, load, select, variables};
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp};
use crate::index::{Atom, Index, Ranges, gcd};
use crate::op::unpad;
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Stmt};

/// Applies [`Step::Col2im`](super::Step::Col2im).
///
/// # Source
/// Gradient of im2col (Chellapilla et al., 2006), with which frameworks compute transposed convolutions. This
/// variant gathers: each result reads the columns that contribute to it, so that stages stay nests around one
/// assignment, and each column is read from memory only once.
pub fn col2im(program: &mut Program, stage: &str, block: i64, taps_last: bool) -> Result<(), Illegal> {
    let result = buffer_id(program, stage)?;
    let Transposed { loops, channels: c, rows, columns, padded, input, weights } = recognise(program, result)?;
    let [n, k, p, q] = loops.each_ref().map(|(_, extent)| extent.clone());
    let channels = k.as_const().expect("invariant: rows alone may be open");
    if block < 1 || channels % block != 0 {
        let why = format!("its {channels} channels are no blocks of {block}");
        return Err(Illegal::Buffer { buffer: stage.to_owned(), why });
    }
    // The padded copy is removed, as the input is read directly.
    take_stage(program, padded)?;
    let StageNest { place, .. } = stage_nest(program, result)?;
    let ahead = matches!(program.buffer(weights).role, Role::ConstInput | Role::Kept);
    let dtype = program.buffer(result).dtype;
    let mut new = StageMaker { program, stage, dtype };

    let (r, s) = (rows.taps, columns.taps);
    let column = |k: &Index, row: &Index, column: &Index| {
        let channel = k.modulo(block);
        let along = |outer: &Index, inner: &Index, n: i64| outer.scale(n).add(inner);
        if taps_last {
            along(&along(&channel, row, r), column, s)
        } else {
            along(&along(row, column, s), &channel, block)
        }
    };
    let (blocks, of_block) = (Index::from(channels / block), Index::from(block * r * s));
    let kept = if ahead { Role::Kept } else { Role::Temporary };
    let (w, w_nest) = new.stage("w", kept, [("c", &c), ("t", &blocks), ("y", &of_block)], |[c, t, y]| {
        let (channel, taps) =
            if taps_last { (y.floor_div(r * s), y.clone()) } else { (y.modulo(block), y.floor_div(block)) };
        let row = if taps_last { taps.floor_div(s).modulo(r) } else { taps.floor_div(s) };
        load(weights, [c, &t.scale(block).add(&channel), &row, &taps.modulo(s)])
    })?;
    let axes = [("n", &n), ("t", &blocks), ("y", &of_block), ("h", &rows.input), ("w", &columns.input)];
    let (m, m_nest) = new.reduction("m", axes, [("c", &c)], |[n, t, y, h, x], [c]| {
        Expr::binary(BinaryOp::Mul, load(w, [c, t, y]), load(input, [n, c, h, x]))
    })?;
    let (th, tw) = (rows.tiles(&p), columns.tiles(&q));
    let [of_rows, of_columns] = [rows.stride, columns.stride].map(Index::from);
    let axes = [("n", &n), ("k", &k), ("th", &th), ("fh", &of_rows), ("tw", &tw), ("fw", &of_columns)];
    let [most_rows, most_columns] = [rows.most_met(), columns.most_met()];
    let met = [most_rows, most_columns].map(Index::from);
    let sizes = new.program.ranges();
    let summand = |[n, k, th_, fh, tw_, fw]: [&Index; 6], [i, j]: [&Index; 2]| {
        let (row, h, row_meets) = rows.meet(&sizes, [th_, fh, i], &th);
        let (tap, x, column_meets) = columns.meet(&sizes, [tw_, fw, j], &tw);
        let value = load(m, [n, &k.floor_div(block), &column(k, &row, &tap), &h, &x]);
        match row_meets.and(column_meets) {
            Cond::True => value,
            meets => select(meets, value, Expr::Const(0.0)),
        }
    };
    let (t, t_nest) = if [most_rows, most_columns] == [1, 1] {
        let only = Index::from(0);
        new.stage("t", Role::Temporary, axes, |at| summand(at, [&only, &only]))?
    } else {
        new.reduction("t", axes, [("r", &met[0]), ("s", &met[1])], summand)?
    };
    let [n, k, p, q] = loops.each_ref().map(|(v, _)| Index::from(*v));
    let (y, x) = (p.offset(rows.cut), q.offset(columns.cut));
    let (fh, fw) = (y.modulo(rows.stride), x.modulo(columns.stride));
    let value = load(t, [&n, &k, &y.floor_div(rows.stride), &fh, &x.floor_div(columns.stride), &fw]);
    let store = Stmt::Store { buffer: result, index: vec![n, k, p, q], value };
    let taken = nest(loops.into_iter().map(|(v, extent)| (v, extent, LoopKind::Serial)), vec![store]);

    let in_body = [m_nest, t_nest, taken].into_iter().flatten();
    if ahead {
        program.prepare.extend(w_nest);
        program.body.splice(place..=place, in_body);
    } else {
        program.body.splice(place..=place, w_nest.into_iter().chain(in_body));
    }
    Ok(())
}

/// Spatial axis, in which the input element `h` and tap `r` contribute to the result
/// `h·stride + r·dilation − cut`.
struct TapAxis {
    /// Number of elements of the input.
    input: Index,
    taps: i64,
    stride: i64,
    dilation: i64,
    cut: i64,
}

impl TapAxis {
    /// Number of strides that cover the results, including those cropped at the beginning.
    fn tiles(&self, results: &Index) -> Index {
        results.offset(self.cut - 1).floor_div(self.stride).offset(1)
    }

    /// Distance between the taps that contribute to one result.
    fn period(&self) -> i64 {
        self.stride / gcd(self.stride, self.dilation)
    }

    /// Maximum number of taps that contribute to a result.
    fn most_met(&self) -> i64 {
        (self.taps + self.period() - 1) / self.period()
    }

    /// Returns the `number`th tap that contributes to the results at `phase` of a stride, its input element
    /// for stride `tile` of `tiles`, and the condition that both exist.
    fn meet(&self, sizes: &Ranges, [tile, phase, number]: [&Index; 3], tiles: &Index) -> (Index, Index, Cond) {
        let &TapAxis { ref input, taps, stride, dilation, .. } = self;
        let (common, period) = (gcd(stride, dilation), self.period());
        let phase = if stride == 1 { &Index::from(0) } else { phase };
        // r·dilation ≡ phase, modulo the stride; dilation / common has an inverse modulo the period.
        let inverse =
            (0..period).find(|i| i * (dilation / common) % period == 1 % period).expect("they have no divisor");
        let mut ranges = sizes.clone();
        for (index, extent) in [(tile, tiles), (phase, &stride.into()), (number, &self.most_met().into())] {
            index.for_each_var(&mut |v| ranges.push(v, extent.clone()));
        }
        let first = ranges.simplify(&phase.floor_div(common).scale(inverse).modulo(period));
        let ahead = first.scale(dilation).sub(phase).floor_div(stride).add(&number.scale(dilation / common));
        let (tap, element) = (first.add(&number.scale(period)), tile.sub(&ahead));
        let mut meets = Cond::True;
        if common > 1 {
            meets = meets.and(Cond::Eq(phase.modulo(common), 0.into()));
        }
        if ranges.upper(&tap).is_none_or(|most| most >= taps) {
            meets = meets.and(Cond::Lt(tap.clone(), taps.into()));
        }
        if ranges.lower(&element).is_none_or(|least| least < 0) {
            meets = meets.and(Cond::Lt(Index::from(-1), element.clone()));
        }
        if ranges.upper(&element.sub(input)).is_none_or(|most| most >= 0) {
            meets = meets.and(Cond::Lt(element.clone(), input.clone()));
        }
        (tap, element, meets)
    }
}

/// `result[n, k, p, q] += padded[n, c, p + r·d, q + s·d] · weights[c, k, R − 1 − r, S − 1 − s]`, in any order
/// of loops and factors, where `padded` holds the input with zeros inserted and around it.
struct Transposed {
    /// Loops n, k, p and q with their extents.
    loops: [(LoopId, Index); 4],
    /// Extent of c.
    channels: Index,
    rows: TapAxis,
    columns: TapAxis,
    padded: BufferId,
    input: BufferId,
    weights: BufferId,
}

fn recognise(program: &Program, result: BufferId) -> Result<Transposed, Illegal> {
    let name = &program.buffer(result).name;
    let fail = |why: &str| Illegal::Buffer { buffer: name.clone(), why: why.to_owned() };
    let no_form = || {
        let form = format!("{name}[n, k, p, q] += x[n, c, p + r, q + s] * w[c, k, R - 1 - r, S - 1 - s]");
        fail(&format!("it is not the transposed convolution {form} over serial loops"))
    };
    let StageNest { loops, leaf, .. } = stage_nest(program, result)?;
    let Stmt::Update { index, op: ReduceOp::Sum, value: Expr::Binary(BinaryOp::Mul, x, y), first, .. } = leaf else {
        return Err(fail("it is not a sum of products"));
    };
    let (Expr::Load(x, x_index), Expr::Load(y, y_index)) = (&**x, &**y) else {
        return Err(fail("it is not a sum of products of two buffers"));
    };
    let [n, k, p, q] = variables(index).ok_or_else(no_form)?;
    // The weights are the factor whose second subscript is that of the result.
    let (padded, at_input, weights, at_weights) = match (x_index.as_slice(), y_index.as_slice()) {
        (_, [_, of, ..]) if *of == Index::from(k) => (*x, x_index, *y, y_index),
        ([_, of, ..], _) if *of == Index::from(k) => (*y, y_index, *x, x_index),
        _ => return Err(no_form()),
    };
    let extent = |v: LoopId| loops.iter().find(|(l, _)| *l == v).map(|(_, extent)| extent.clone());
    let number = |v: LoopId| extent(v)?.as_const();
    let [of_c, _, of_r, of_s] = at_weights.as_slice() else { return Err(no_form()) };
    let [at_n, at_c, at_row, at_column] = at_input.as_slice() else { return Err(no_form()) };
    // Tap counted from the last one.
    let flipped = |of: &Index| match of.terms() {
        [(Atom::Var(v), -1)] => number(*v).filter(|n| n - 1 == of.constant()).map(|n| (*v, n)),
        _ => None,
    };
    let c = match (of_c.terms(), of_c.constant()) {
        ([(Atom::Var(v), 1)], 0) => *v,
        _ => return Err(no_form()),
    };
    let ((r, n_rows), (s, n_columns)) = flipped(of_r).zip(flipped(of_s)).ok_or_else(no_form)?;
    let all = [n, k, p, q, c, r, s];
    let is_nest = loops.len() == all.len() && all.iter().all(|v| loops.iter().filter(|(l, _)| l == v).count() == 1);
    if !is_nest || [at_n, at_c] != [&n.into(), &c.into()] || !begins_at_zero(first, [c, r, s]) {
        return Err(no_form());
    }
    let (input, inputs, spreads) = spread(program, padded).ok_or_else(|| {
        let operand = &program.buffer(padded).name;
        fail(&format!("`{operand}` is not its input with zeros inserted and around it"))
    })?;
    let along = |at: &Index, along: LoopId, tap: LoopId, taps: i64, d: usize| {
        let dilation = at.coefficient(tap);
        let is_window = dilation > 0 && *at == Index::from(along).add(&Index::from(tap).scale(dilation));
        let Spread { before, stride } = spreads[d];
        let axis = TapAxis { input: inputs[d].clone(), taps, stride, dilation, cut: dilation * (taps - 1) - before };
        (is_window && axis.cut >= 0).then_some(axis)
    };
    let rows = along(at_row, p, r, n_rows, 0).ok_or_else(no_form)?;
    let columns = along(at_column, q, s, n_columns, 1).ok_or_else(no_form)?;
    // The number of rows may be open.
    [n, k, q, c].into_iter().try_for_each(|v| number(v).map(|_| ()).ok_or_else(no_form))?;
    let [n, k, p, q] = [n, k, p, q].map(|v| extent(v).map(|n| (v, n)).ok_or_else(no_form));
    let channels = extent(c).ok_or_else(no_form)?;
    Ok(Transposed { loops: [n?, k?, p?, q?], channels, rows, columns, padded, input, weights })
}

/// Offset of the input in the padded input, and the distance of its elements there.
struct Spread {
    before: i64,
    stride: i64,
}

/// Finds the input of a stage that inserts zeros between and around rows and columns, its numbers of rows and
/// columns, and the offsets and distances that the stage uses.
fn spread(program: &Program, padded: BufferId) -> Option<(BufferId, [Index; 2], [Spread; 2])> {
    let StageNest { loops, leaf, .. } = stage_nest(program, padded).ok()?;
    let Stmt::Store { index, value, .. } = leaf else { return None };
    let vars = variables(index)?;
    let (inside, value) = match value {
        Expr::Select(inside, value, otherwise) if **otherwise == Expr::Const(0.0) => ((**inside).clone(), &**value),
        value => (Cond::True, value),
    };
    let Expr::Load(input, at) = value else { return None };
    let [n, c, row, column] = at.as_slice() else { return None };
    let shape = &program.buffer(padded).shape;
    let ranges = program.ranges();
    let covers = |(v, n): (&LoopId, &i64)| loops.iter().any(|(l, extent)| l == v && ranges.upper(extent) == Some(*n));
    if loops.len() != 4 || !vars.iter().zip(shape).all(covers) || [n, c] != [&vars[0].into(), &vars[1].into()] {
        return None;
    }
    let spread = |at: &Index| match at.terms() {
        [(Atom::FloorDiv(x, stride), 1)] => {
            Some(Spread { before: -(x.constant() + stride * at.constant()), stride: *stride })
        }
        [(Atom::Var(_), 1)] => Some(Spread { before: -at.constant(), stride: 1 }),
        _ => None,
    };
    let spreads = [spread(row)?, spread(column)?];
    let (mut expected, mut ends) = (Cond::True, [Index::from(0), Index::from(0)]);
    for (d, Spread { before, stride }) in spreads.iter().enumerate() {
        let from = program.buffer(*input).shape[2 + d];
        let is_behind = (shape[2 + d] - 1 - before).div_euclid(*stride) >= from;
        let (_, extent) = loops.iter().find(|(l, _)| *l == vars[2 + d])?;
        ends[d] = match (extent.as_const(), is_behind) {
            (Some(_), _) => from.into(),
            (None, true) => end_of(&inside, &at[2 + d])?,
            (None, false) => extent.offset(-1 - before).floor_div(*stride).offset(1),
        };
        let (element, inside) = unpad(&vars[2 + d].into(), *before, *stride, is_behind.then_some(&ends[d]));
        if element != at[2 + d] {
            return None;
        }
        expected = expected.and(inside);
    }
    (inside == expected).then_some((*input, ends, spreads))
}

/// Upper bound of an element's subscript in a dimension that a condition tests.
fn end_of(inside: &Cond, element: &Index) -> Option<Index> {
    match inside {
        Cond::And(a, b) => end_of(a, element).or_else(|| end_of(b, element)),
        Cond::Lt(a, end) if a == element => Some(end.clone()),
        _ => None,
    }
}
