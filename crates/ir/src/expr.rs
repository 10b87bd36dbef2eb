//! Value expressions, which compute the elements of tensors.

use crate::dtype::DType;
use crate::ids::{BufferId, LoopId};
use crate::index::Index;

/// Scalar expression.
///
/// An expression is computed in the [arithmetic](DType::arithmetic) of its context, which is the destination
/// buffer of the store or an enclosing cast. Loaded elements are converted to that type.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// Literal.
    Const(f64),
    /// Load of an element of a buffer.
    Load(BufferId, Vec<Index>),
    /// Load of an element of an input at data-dependent subscripts: see [`Subscript`].
    Gather(BufferId, Vec<Subscript>),
    /// Value of an integer index, as a number.
    FromIndex(Index),
    /// Unary function.
    Unary(UnaryOp, Box<Expr>),
    /// Binary function.
    Binary(BinaryOp, Box<Expr>, Box<Expr>),
    /// Conditional value: the first operand if the condition holds, else the second; only the chosen one is
    /// evaluated.
    Select(Box<Cond>, Box<Expr>, Box<Expr>),
    /// Cast: a value computed in the arithmetic of a type and rounded to that type, see [`DType::round`],
    /// then converted to the type of the context.
    Cast(DType, Box<Expr>),
}

/// Subscript of a gather.
#[derive(Clone, Debug, PartialEq)]
pub enum Subscript {
    /// Affine subscript of the loop variables.
    Index(Index),
    /// Data-dependent subscript: an integer expression, computed as `i64`. A negative value counts from the
    /// end; the result is clamped to the dimension, so that it is always in bounds.
    Value(Box<Expr>),
}

impl Subscript {
    /// Affine subscript, or 0 in place of a data-dependent one.
    pub fn known(&self) -> Index {
        match self {
            Subscript::Index(i) => i.clone(),
            Subscript::Value(_) => Index::from(0),
        }
    }

    /// Resolves a data-dependent subscript in a dimension of `extent`: negative values count from the end,
    /// and the result is clamped.
    pub fn place(number: i64, extent: i64) -> i64 {
        let from_start = if number < 0 { number.saturating_add(extent) } else { number };
        from_start.min(extent - 1).max(0)
    }
}

/// Unary functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnaryOp {
    /// −x
    Neg,
    /// |x|
    Abs,
    /// eˣ
    Exp,
    /// eˣ − 1, accurate near zero.
    Expm1,
    /// Natural logarithm.
    Log,
    /// ln(1 + x), accurate near zero.
    Log1p,
    /// Square root.
    Sqrt,
    /// Hyperbolic tangent.
    Tanh,
    /// Error function.
    Erf,
    /// Largest integer that is not above the value.
    Floor,
    /// Smallest integer that is not below the value.
    Ceil,
    /// Nearest integer, ties to even.
    Round,
    /// Sine.
    Sin,
    /// Cosine.
    Cos,
}

impl UnaryOp {
    /// Every function with its name in the text format.
    pub const ALL: [(UnaryOp, &'static str); 14] = [
        (UnaryOp::Neg, "neg"),
        (UnaryOp::Abs, "abs"),
        (UnaryOp::Exp, "exp"),
        (UnaryOp::Expm1, "expm1"),
        (UnaryOp::Log, "log"),
        (UnaryOp::Log1p, "log1p"),
        (UnaryOp::Sqrt, "sqrt"),
        (UnaryOp::Tanh, "tanh"),
        (UnaryOp::Erf, "erf"),
        (UnaryOp::Floor, "floor"),
        (UnaryOp::Ceil, "ceil"),
        (UnaryOp::Round, "round"),
        (UnaryOp::Sin, "sin"),
        (UnaryOp::Cos, "cos"),
    ];

    /// Parts `x · y` and `z` of an exponent `x · y − z` in the arithmetic of `dtype`, whose product must be
    /// rounded before `z` is subtracted, without fusing both to a multiply-add. In a softmax `z` is the
    /// largest of the rounded products; the exact one may exceed it so far that the exponential overflows.
    pub fn rounded_difference(self, argument: &Expr, dtype: DType) -> Option<(&Expr, &Expr)> {
        let (UnaryOp::Exp | UnaryOp::Expm1, Expr::Binary(BinaryOp::Sub, x, z)) = (self, argument.without_cast(dtype))
        else {
            return None;
        };
        matches!(x.without_cast(dtype), Expr::Binary(BinaryOp::Mul, ..)).then_some((x, z))
    }
}

/// Binary functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BinaryOp {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a · b
    Mul,
    /// a / b
    Div,
    /// Minimum; NaN if either operand is NaN. For zeros of opposite signs, either zero.
    Min,
    /// Maximum; NaN if either operand is NaN. For zeros of opposite signs, either zero.
    Max,
    /// a to the power of b, as C's `pow`: for negative a, the result is NaN unless b is an integer.
    Pow,
    /// Nibble of the unsigned integer a: the low one if b is 0, the high one if b is 1.
    Nibble,
}

impl BinaryOp {
    /// Every function with its name in the text format.
    pub const ALL: [(BinaryOp, &'static str); 8] = [
        (BinaryOp::Add, "+"),
        (BinaryOp::Sub, "-"),
        (BinaryOp::Mul, "*"),
        (BinaryOp::Div, "/"),
        (BinaryOp::Min, "min"),
        (BinaryOp::Max, "max"),
        (BinaryOp::Pow, "pow"),
        (BinaryOp::Nibble, "nibble"),
    ];

    /// Whether the text format writes the function as an infix operator rather than as a call.
    pub fn is_sign(self) -> bool {
        matches!(self, BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div)
    }
}

/// Operation with which a reduction combines its old value with a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum; identity 0.
    Sum,
    /// Maximum, NaN if any element is NaN; identity −∞.
    Max,
    /// Minimum, NaN if any element is NaN; identity +∞.
    Min,
    /// Product; identity 1.
    Product,
}

impl ReduceOp {
    /// Every reduction with its assignment operator in the text format.
    pub const ALL: [(ReduceOp, &'static str); 4] =
        [(ReduceOp::Sum, "+="), (ReduceOp::Max, "max="), (ReduceOp::Min, "min="), (ReduceOp::Product, "*=")];

    /// Identity element of the reduction.
    pub fn identity(self) -> f64 {
        match self {
            ReduceOp::Sum => 0.0,
            ReduceOp::Max => f64::NEG_INFINITY,
            ReduceOp::Min => f64::INFINITY,
            ReduceOp::Product => 1.0,
        }
    }

    /// Binary function that combines the old value with a new one.
    pub fn combine(self) -> BinaryOp {
        match self {
            ReduceOp::Sum => BinaryOp::Add,
            ReduceOp::Max => BinaryOp::Max,
            ReduceOp::Min => BinaryOp::Min,
            ReduceOp::Product => BinaryOp::Mul,
        }
    }
}

/// Condition on indices or on values.
#[derive(Clone, Debug, PartialEq)]
pub enum Cond {
    /// Always holds; the empty conjunction.
    True,
    /// `a < b`
    Lt(Index, Index),
    /// `a == b`
    Eq(Index, Index),
    /// `a < b` on values; false if either is NaN. Both are computed in the [widest](Expr::arithmetic)
    /// arithmetic of their parts, regardless of the context.
    Less(Box<Expr>, Box<Expr>),
    /// Both hold.
    And(Box<Cond>, Box<Cond>),
    /// Negation.
    Not(Box<Cond>),
}

impl Cond {
    /// Whether the condition depends on indices alone, so that no statement can change it by writing to a
    /// buffer.
    pub fn is_on_indices(&self) -> bool {
        match self {
            Cond::True | Cond::Lt(..) | Cond::Eq(..) => true,
            Cond::Less(..) => false,
            Cond::And(a, b) => a.is_on_indices() && b.is_on_indices(),
            Cond::Not(c) => c.is_on_indices(),
        }
    }

    /// Both hold.
    pub fn and(self, other: Cond) -> Cond {
        match (self, other) {
            (Cond::True, c) | (c, Cond::True) => c,
            (a, b) => Cond::And(Box::new(a), Box::new(b)),
        }
    }

    /// Rebuilds the condition with each direct part rewritten.
    pub fn map_parts(&self, rewrite: &mut (impl Rewrite + ?Sized)) -> Cond {
        match self {
            Cond::True => Cond::True,
            Cond::Lt(a, b) => Cond::Lt(rewrite.index(a), rewrite.index(b)),
            Cond::Eq(a, b) => Cond::Eq(rewrite.index(a), rewrite.index(b)),
            Cond::Less(a, b) => Cond::Less(Box::new(rewrite.expr(a)), Box::new(rewrite.expr(b))),
            Cond::And(a, b) => rewrite.cond(a).and(rewrite.cond(b)),
            Cond::Not(a) => Cond::Not(Box::new(rewrite.cond(a))),
        }
    }

    /// Rebuilds the condition with every index rewritten.
    pub fn map_index(&self, f: &mut dyn FnMut(&Index) -> Index) -> Cond {
        MapIndex(f).cond(self)
    }

    /// Calls `change` for every index in the condition, subscripts of loads included.
    pub fn for_each_index_mut(&mut self, change: &mut dyn FnMut(&mut Index)) {
        match self {
            Cond::True => {}
            Cond::Lt(a, b) | Cond::Eq(a, b) => {
                change(a);
                change(b);
            }
            Cond::Less(a, b) => {
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
            Cond::And(a, b) => {
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
            Cond::Not(a) => a.for_each_index_mut(change),
        }
    }

    /// Calls `visit` for every index in the condition, subscripts of loads included.
    pub fn for_each_index(&self, visit: &mut dyn FnMut(&Index)) {
        TreePart::Cond(self).for_each_index(visit);
    }

    /// Calls `visit` for every load inside the condition.
    pub fn for_each_load<'a>(&'a self, visit: &mut dyn FnMut(BufferId, &'a [Index])) {
        TreePart::Cond(self).for_each_load(visit);
    }

    /// Whether a loop variable occurs in the condition.
    pub fn uses(&self, var: LoopId) -> bool {
        TreePart::Cond(self).uses(var)
    }

    /// Rebuilds the condition, replacing each load for which `f` returns a value.
    pub fn map_loads(&self, f: &mut dyn FnMut(BufferId, &[Index]) -> Option<Expr>) -> Cond {
        MapLoads(f).cond(self)
    }
}

/// Expression or condition, as a node of their common tree.
#[derive(Clone, Copy, Debug)]
pub enum TreePart<'a> {
    /// A value.
    Expr(&'a Expr),
    /// A condition.
    Cond(&'a Cond),
}

impl<'a> TreePart<'a> {
    /// Direct children, in evaluation order.
    pub fn children(self) -> impl Iterator<Item = TreePart<'a>> {
        let (expr, cond) = (|e: &'a Expr| Some(TreePart::Expr(e)), |c: &'a Cond| Some(TreePart::Cond(c)));
        let mut subscripts: &[Subscript] = &[];
        let children = match self {
            TreePart::Expr(Expr::Const(_) | Expr::Load(..) | Expr::FromIndex(_)) => [None; 3],
            TreePart::Expr(Expr::Gather(_, all)) => {
                subscripts = all;
                [None; 3]
            }
            TreePart::Expr(Expr::Unary(_, x) | Expr::Cast(_, x)) => [expr(x), None, None],
            TreePart::Expr(Expr::Binary(_, a, b)) | TreePart::Cond(Cond::Less(a, b)) => [expr(a), expr(b), None],
            TreePart::Expr(Expr::Select(c, a, b)) => [cond(c), expr(a), expr(b)],
            TreePart::Cond(Cond::True | Cond::Lt(..) | Cond::Eq(..)) => [None; 3],
            TreePart::Cond(Cond::And(a, b)) => [cond(a), cond(b), None],
            TreePart::Cond(Cond::Not(a)) => [cond(a), None, None],
        };
        let values = subscripts.iter().filter_map(|subscript| match subscript {
            Subscript::Index(_) => None,
            Subscript::Value(value) => Some(TreePart::Expr(value)),
        });
        children.into_iter().flatten().chain(values)
    }

    /// Calls `visit` for this node and all its descendants, in evaluation order.
    pub fn walk(self, visit: &mut dyn FnMut(TreePart<'a>)) {
        visit(self);
        self.children().for_each(|child| child.walk(visit));
    }

    /// Calls `visit` for every index of this node and its descendants, subscripts of loads included.
    pub fn for_each_index(self, visit: &mut dyn FnMut(&Index)) {
        self.walk(&mut |node| match node {
            TreePart::Expr(Expr::Load(_, index)) => index.iter().for_each(&mut *visit),
            TreePart::Expr(Expr::Gather(_, subscripts)) => subscripts.iter().for_each(|subscript| {
                if let Subscript::Index(i) = subscript {
                    visit(i);
                }
            }),
            TreePart::Expr(Expr::FromIndex(i)) => visit(i),
            TreePart::Cond(Cond::Lt(a, b) | Cond::Eq(a, b)) => [a, b].into_iter().for_each(&mut *visit),
            TreePart::Expr(_) | TreePart::Cond(_) => {}
        });
    }

    /// Calls `visit` for every load of this node and its descendants, excluding gathers.
    pub fn for_each_load(self, visit: &mut dyn FnMut(BufferId, &'a [Index])) {
        self.walk(&mut |node| {
            if let TreePart::Expr(Expr::Load(buffer, index)) = node {
                visit(*buffer, index);
            }
        });
    }

    /// Calls `visit` for the buffer of every load and gather of this node and its descendants.
    pub fn for_each_buffer(self, visit: &mut dyn FnMut(BufferId)) {
        self.walk(&mut |node| {
            if let TreePart::Expr(Expr::Load(buffer, _) | Expr::Gather(buffer, _)) = node {
                visit(*buffer);
            }
        });
    }

    fn uses(self, var: LoopId) -> bool {
        let mut used = false;
        self.for_each_index(&mut |i| used |= i.uses(var));
        used
    }
}

/// Rewriter of expression trees; by default, each node is kept with its parts rewritten.
pub trait Rewrite {
    /// Rewrites an index.
    fn index(&mut self, index: &Index) -> Index {
        index.clone()
    }

    /// Rewrites a value.
    fn expr(&mut self, expr: &Expr) -> Expr {
        expr.map_parts(self)
    }

    /// Rewrites a condition.
    fn cond(&mut self, cond: &Cond) -> Cond {
        cond.map_parts(self)
    }
}

struct MapIndex<'f>(&'f mut dyn FnMut(&Index) -> Index);

impl Rewrite for MapIndex<'_> {
    fn index(&mut self, index: &Index) -> Index {
        (self.0)(index)
    }
}

struct MapLoads<'f>(&'f mut dyn FnMut(BufferId, &[Index]) -> Option<Expr>);

impl Rewrite for MapLoads<'_> {
    fn expr(&mut self, expr: &Expr) -> Expr {
        let replaced = match expr {
            Expr::Load(buffer, index) => (self.0)(*buffer, index),
            _ => None,
        };
        replaced.unwrap_or_else(|| expr.map_parts(self))
    }
}

impl Expr {
    /// Applies a unary function.
    pub fn unary(op: UnaryOp, x: Expr) -> Expr {
        Expr::Unary(op, Box::new(x))
    }

    /// Applies a binary function.
    pub fn binary(op: BinaryOp, a: Expr, b: Expr) -> Expr {
        Expr::Binary(op, Box::new(a), Box::new(b))
    }

    /// Strips an outer cast to `dtype`, which has no effect in that type's context.
    pub fn without_cast(&self, dtype: DType) -> &Expr {
        match self {
            Expr::Cast(to, x) if *to == dtype => x.without_cast(dtype),
            x => x,
        }
    }

    /// Wraps a value in a cast: computed in the arithmetic of a type and rounded to that type.
    pub fn cast(dtype: DType, x: Expr) -> Expr {
        Expr::Cast(dtype, Box::new(x))
    }

    /// Rebuilds the expression with each direct part rewritten.
    pub fn map_parts(&self, rewrite: &mut (impl Rewrite + ?Sized)) -> Expr {
        match self {
            Expr::Const(_) => self.clone(),
            Expr::Load(b, index) => Expr::Load(*b, index.iter().map(|i| rewrite.index(i)).collect()),
            Expr::Gather(b, subscripts) => {
                let of = |subscript: &Subscript| match subscript {
                    Subscript::Index(i) => Subscript::Index(rewrite.index(i)),
                    Subscript::Value(value) => Subscript::Value(Box::new(rewrite.expr(value))),
                };
                Expr::Gather(*b, subscripts.iter().map(of).collect())
            }
            Expr::FromIndex(i) => Expr::FromIndex(rewrite.index(i)),
            Expr::Unary(op, x) => Expr::unary(*op, rewrite.expr(x)),
            Expr::Binary(op, a, b) => Expr::binary(*op, rewrite.expr(a), rewrite.expr(b)),
            Expr::Select(c, a, b) => {
                Expr::Select(Box::new(rewrite.cond(c)), Box::new(rewrite.expr(a)), Box::new(rewrite.expr(b)))
            }
            Expr::Cast(dtype, x) => Expr::cast(*dtype, rewrite.expr(x)),
        }
    }

    /// Widest arithmetic of the loads, gathers and casts inside; `None` for constants and indices alone.
    pub fn arithmetic(&self, dtype_of: &dyn Fn(BufferId) -> DType) -> Option<DType> {
        match self {
            Expr::Const(_) | Expr::FromIndex(_) => None,
            Expr::Load(b, _) | Expr::Gather(b, _) => Some(dtype_of(*b).arithmetic()),
            Expr::Cast(dtype, _) => Some(dtype.arithmetic()),
            Expr::Unary(_, x) => x.arithmetic(dtype_of),
            Expr::Binary(_, a, b) | Expr::Select(_, a, b) => {
                let of_each = [a, b].into_iter().filter_map(|e| e.arithmetic(dtype_of));
                of_each.max_by_key(|dtype| (dtype.is_float(), dtype.bytes()))
            }
        }
    }

    /// Arithmetic in which two values are compared: the widest of both, but `f64` for an integer and a
    /// fractional constant.
    pub fn arithmetic_of(both: [&Expr; 2], dtype_of: &dyn Fn(BufferId) -> DType) -> Option<DType> {
        let of_each = both.into_iter().filter_map(|e| e.arithmetic(dtype_of));
        let widest = of_each.max_by_key(|dtype| (dtype.is_float(), dtype.bytes()))?;
        let mut has_fraction = false;
        for e in both {
            TreePart::Expr(e)
                .walk(&mut |node| has_fraction |= matches!(node, TreePart::Expr(Expr::Const(x)) if x.fract() != 0.0));
        }
        Some(if has_fraction && !widest.is_float() { DType::F64 } else { widest })
    }

    /// Rebuilds the expression with every index rewritten.
    pub fn map_index(&self, f: &mut dyn FnMut(&Index) -> Index) -> Expr {
        MapIndex(f).expr(self)
    }

    /// Rebuilds the expression, replacing each load for which `f` returns a value.
    pub fn map_loads(&self, f: &mut dyn FnMut(BufferId, &[Index]) -> Option<Expr>) -> Expr {
        MapLoads(f).expr(self)
    }

    /// Calls `visit` for every load.
    pub fn for_each_load<'a>(&'a self, visit: &mut dyn FnMut(BufferId, &'a [Index])) {
        TreePart::Expr(self).for_each_load(visit);
    }

    /// Calls `change` for every index, subscripts of loads and conditions included.
    pub fn for_each_index_mut(&mut self, change: &mut dyn FnMut(&mut Index)) {
        match self {
            Expr::Const(_) => {}
            Expr::Load(_, index) => index.iter_mut().for_each(change),
            Expr::Gather(_, subscripts) => {
                for subscript in subscripts {
                    match subscript {
                        Subscript::Index(i) => change(i),
                        Subscript::Value(value) => value.for_each_index_mut(change),
                    }
                }
            }
            Expr::FromIndex(i) => change(i),
            Expr::Unary(_, x) | Expr::Cast(_, x) => x.for_each_index_mut(change),
            Expr::Binary(_, a, b) => {
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
            Expr::Select(c, a, b) => {
                c.for_each_index_mut(change);
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
        }
    }

    /// Calls `visit` for every index, subscripts of loads and conditions included.
    pub fn for_each_index(&self, visit: &mut dyn FnMut(&Index)) {
        TreePart::Expr(self).for_each_index(visit);
    }

    /// Whether a loop variable occurs in the expression.
    pub fn uses(&self, var: LoopId) -> bool {
        TreePart::Expr(self).uses(var)
    }
}
