//! OpenCL C for the kernels of a GPU program.
//!
//! Every kernel is a function with `reqd_work_group_size`, whose arguments are the buffers that it accesses
//! in global memory, in the order of [`GpuKernel::arguments`]. Iterations of a vectorized loop become vectors
//! of 2, 4, 8 or 16 elements, loaded and stored through vector pointers if alignment is guaranteed;
//! statements without a vector form are executed element by element. 16-bit floats are only loaded and
//! stored, which every device supports, and computed in `float`.

use std::collections::HashSet;
use std::fmt::Write;

use tilewright_ir::expr::{BinaryOp, Cond, Expr, ReduceOp, Subscript, UnaryOp};
use tilewright_ir::gpu::{BufferUse, GpuKernel, GpuProgram};
use tilewright_ir::index::{Atom, Ranges};
use tilewright_ir::{Buffer, BufferId, DType, Index, LoopId, LoopKind, Program, Role, Scope, Stmt, Target};

/// Vector widths of OpenCL C, widest first.
const WIDTHS: [i64; 4] = [16, 8, 4, 2];

/// Alignment of the widest vector, which has 64-bit elements.
const ALIGN: u64 = 128;

/// Words that a program's names must not use: keywords of the language, and functions called here.
const RESERVED: &str = "\
    auto bool break case char const constant continue default do double else enum event_t extern float \
    for global goto half if image2d_t image3d_t inline int kernel local long pipe private ptrdiff_t quad \
    read_only read_write register restrict return sampler_t short signed size_t sizeof static struct \
    switch typedef uchar uint ulong union unsigned ushort void volatile while write_only INFINITY NAN \
    MAXFLOAT HUGE_VAL abs barrier ceil clamp cos erf exp expm1 fabs floor fma fmax fmin isnan log \
    log1p max min pow rint sin sqrt tanh get_group_id get_local_id";

/// Reserved prefixes of names.
const RESERVED_STARTS: &[&str] = &["_", "as_", "convert_", "vload", "vstore", "cl_", "CL_", "CLK_"];

/// Helper functions, each printed if it is called.
const HELPERS: [(&str, &str); 10] = [
    (
        "floor_div",
        "long floor_div(long a, long b) { long q = a / b; return q * b != a && (a < 0) != (b < 0) ? q - 1 : q; }",
    ),
    (
        "floor_mod",
        "long floor_mod(long a, long b) { long r = a % b; return r != 0 && (r < 0) != (b < 0) ? r + b : r; }",
    ),
    ("int_div", "int int_div(int a, int b) { return b == 0 ? 0 : b == -1 ? as_int(0u - as_uint(a)) : a / b; }"),
    ("long_div", "long long_div(long a, long b) { return b == 0 ? 0 : b == -1 ? as_long(0ul - as_ulong(a)) : a / b; }"),
    ("ulong_div", "ulong ulong_div(ulong a, ulong b) { return b == 0 ? 0 : a / b; }"),
    ("place_of", "long place_of(long n, long extent) { return clamp(n < 0 ? n + extent : n, 0L, extent - 1L); }"),
    (
        "bf16_bits",
        "ushort bf16_bits(float x) {\n    uint bits = as_uint(x);\n    \
         return isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;\n}",
    ),
    ("bf16_value", "float bf16_value(ushort bits) { return as_float((uint)bits << 16); }"),
    ("round_bf16", "float round_bf16(float x) { return bf16_value(bf16_bits(x)); }"),
    (
        "round_half",
        "float round_half(float x) {\n    ushort bits;\n    vstore_half_rte(x, 0, (private half *)&bits);\n    \
         return vload_half(0, (private const half *)&bits);\n}",
    ),
];

/// All helper functions, including minima and maxima, for which `fmin` and `fmax` are unsuitable, as they
/// drop NaN.
fn all_helpers() -> impl DoubleEndedIterator<Item = (String, String)> {
    let types = ["float", "double"].into_iter().flat_map(|ty| ["", "2", "4", "8", "16"].map(|n| format!("{ty}{n}")));
    let extrema = types.flat_map(|ty| {
        [("min", '<'), ("max", '>')].map(|(what, sign)| {
            let name = format!("{what}_{ty}");
            let source = format!("{ty} {name}({ty} a, {ty} b) {{ return (a {sign} b) | isnan(a) ? a : b; }}");
            (name, source)
        })
    });
    let others = HELPERS.iter().map(|(name, source)| ((*name).to_owned(), (*source).to_owned()));
    others.chain(extrema.collect::<Vec<_>>())
}

/// Generates OpenCL C of all kernels of a program.
pub fn opencl_c(program: &GpuProgram, target: &Target) -> String {
    let names = CNames::of(&program.program);
    let parts = [&program.prepare, &program.body, &program.finish];
    let kernels: Vec<String> =
        parts.into_iter().flatten().map(|kernel| print(program, kernel, target, &names)).collect();
    let body = kernels.join("\n");
    // Compilers might otherwise contract a product and a sum, even if the product must be rounded separately;
    // `fma` is explicit elsewhere.
    let mut out = "#pragma OPENCL FP_CONTRACT OFF\n\n".to_owned();
    if ["double", "double2", "double4", "double8", "double16"].iter().any(|word| has_word(&body, word)) {
        out += "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n\n";
    }
    // Helpers are printed before their callers.
    let mut helpers = String::new();
    for (name, source) in all_helpers().rev() {
        if has_word(&body, &name) || has_word(&helpers, &name) {
            helpers = format!("{source}\n\n{helpers}");
        }
    }
    out + &helpers + &body
}

/// Whether a text contains a word as a whole word.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part))
}

/// C names of buffers and loops.
struct CNames {
    buffers: Vec<String>,
    loops: Vec<String>,
}

impl CNames {
    fn of(program: &Program) -> CNames {
        let mut taken: HashSet<String> = all_helpers().map(|(name, _)| name).collect();
        let mut name_of = |name: &str| {
            let letter = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
            let mut own: String = name.chars().map(letter).collect();
            let is_reserved = |word: &str| RESERVED.split_whitespace().any(|known| known == word);
            if RESERVED_STARTS.iter().any(|start| own.starts_with(start))
                || own.starts_with(|c: char| c.is_ascii_digit())
            {
                own.insert(0, 'v');
            }
            // `float4` is a type like `float`.
            if is_reserved(&own) || is_reserved(own.trim_end_matches(|c: char| c.is_ascii_digit())) {
                own.push('_');
            }
            while !taken.insert(own.clone()) {
                own.push('_');
            }
            own
        };
        let buffers = program.buffers.iter().map(|buffer| name_of(&buffer.name)).collect();
        CNames { buffers, loops: program.loops.iter().map(|name| name_of(name)).collect() }
    }
}

fn print(program: &GpuProgram, kernel: &GpuKernel, target: &Target, names: &CNames) -> String {
    let buffers = &program.program;
    let arguments = kernel.arguments(program);
    let is_shared_by_threads = arguments.iter().any(|(_, access)| *access == BufferUse::ReadWrite);
    // 64-bit addresses cost registers, and time on hardware without 64-bit arithmetic.
    let largest = arguments.iter().filter_map(|(b, _)| buffers.buffer(*b).n_elements()).max().unwrap_or(0);
    let mut printer = OpenClPrinter {
        program: buffers,
        names,
        has_fma: target.has_fma,
        index_type: if largest < 1 << 30 { "int" } else { "long" },
        fences: if is_shared_by_threads { "CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE" } else { "CLK_LOCAL_MEM_FENCE" },
        shared: &kernel.shared,
        out: String::new(),
        depth: 1,
        ranges: Ranges::default(),
        lanes: None,
    };
    let [x, y, z] = kernel.threads.map(|axis| axis.map_or(1, |(_, extent)| extent));
    let parameter = |(b, access): &(BufferId, BufferUse)| {
        let buffer = buffers.buffer(*b);
        let qualifier = if *access == BufferUse::Read { "const " } else { "" };
        format!("global {qualifier}{} *restrict {}", storage(buffer.dtype, true), names.buffers[b.0 as usize])
    };
    let parameters: Vec<String> = arguments.iter().map(parameter).collect();
    for b in &kernel.shared {
        printer.declare("local ", *b);
    }
    let axes = [(&kernel.blocks, "get_group_id"), (&kernel.threads, "get_local_id")];
    for (axes, function) in axes {
        for (at, axis) in axes.iter().enumerate() {
            let Some((var, extent)) = axis else { continue };
            let line = format!("const {} {} = {function}({at});", printer.index_type, names.loops[var.0 as usize]);
            printer.line(&line);
            printer.ranges.push(*var, Index::from(*extent));
        }
    }
    printer.block(&kernel.body);
    format!(
        "__attribute__((reqd_work_group_size({x}, {y}, {z})))\nkernel void {}({}) {{\n{}}}\n",
        kernel.name,
        parameters.join(", "),
        printer.out
    )
}

/// Type of elements in memory. Only pointers to `half` need no extension.
fn storage(dtype: DType, is_pointer: bool) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::F16 if is_pointer => "half",
        DType::F16 | DType::Bf16 => "ushort",
        DType::I8 | DType::I7 => "char",
        DType::U8 | DType::Bool => "uchar",
        DType::I16 => "short",
        DType::U16 => "ushort",
        DType::I32 => "int",
        DType::U32 => "uint",
        DType::I64 => "long",
        DType::U64 => "ulong",
    }
}

/// C type of the arithmetic of a type.
fn arithmetic(dtype: DType) -> &'static str {
    storage(dtype.arithmetic(), false)
}

/// C expression of a value.
#[derive(Clone)]
struct CValue {
    text: String,
    is_vector: bool,
}

impl CValue {
    fn scalar(text: impl Into<String>) -> CValue {
        CValue { text: text.into(), is_vector: false }
    }

    fn vector(text: impl Into<String>) -> CValue {
        CValue { text: text.into(), is_vector: true }
    }
}

struct OpenClPrinter<'p> {
    program: &'p Program,
    names: &'p CNames,
    has_fma: bool,
    index_type: &'static str,
    fences: &'static str,
    shared: &'p [BufferId],
    out: String,
    depth: usize,
    ranges: Ranges,
    /// Loop whose iterations are the elements of vectors, and their number.
    lanes: Option<(LoopId, i64)>,
}

impl OpenClPrinter<'_> {
    fn line(&mut self, text: &str) {
        let indent = 4 * self.depth;
        writeln!(self.out, "{:indent$}{text}", "").expect("a string takes all");
    }

    fn buffer(&self, b: BufferId) -> &Buffer {
        self.program.buffer(b)
    }

    fn name(&self, b: BufferId) -> &str {
        &self.names.buffers[b.0 as usize]
    }

    fn declare(&mut self, space: &str, b: BufferId) {
        let buffer = self.buffer(b);
        let n = buffer.n_elements().unwrap_or(u64::MAX).max(1);
        // Alignment of the widest vector in the buffer.
        let align = ALIGN.min(1 << n.saturating_mul(buffer.dtype.bytes()).ilog2());
        let align = if n > 1 { format!(" __attribute__((aligned({align})))") } else { String::new() };
        let line = format!("{space}{} {}[{n}]{align};", storage(buffer.dtype, false), self.name(b));
        self.line(&line);
    }

    fn block(&mut self, block: &[Stmt]) {
        block.iter().for_each(|stmt| self.stmt(stmt));
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::For(l) if l.kind == LoopKind::Vectorized && self.lanes.is_none() => {
                self.vectorized(l.var, &l.extent, &l.body)
            }
            Stmt::For(l) => {
                let name = &self.names.loops[l.var.0 as usize];
                let extent = self.index(&l.extent);
                let head = format!("for ({} {name} = 0; {name} < {extent}; ++{name}) {{", self.index_type);
                self.line(&head);
                self.ranges.push(l.var, l.extent.clone());
                self.nested(&l.body);
                self.ranges.pop();
                self.line("}");
            }
            Stmt::If { cond: Cond::True, then, .. } => {
                self.line("{");
                self.nested(then);
                self.line("}");
            }
            Stmt::If { cond, then, otherwise } => {
                let head = format!("if ({}) {{", self.cond(cond));
                self.line(&head);
                self.nested(then);
                if !otherwise.is_empty() {
                    self.line("} else {");
                    self.nested(otherwise);
                }
                self.line("}");
            }
            Stmt::Alloc(b) if self.shared.contains(b) => {}
            Stmt::Alloc(b) => self.declare("", *b),
            // Stores are synchronous.
            Stmt::Wait(_) => {}
            Stmt::Barrier => {
                let line = format!("barrier({});", self.fences);
                self.line(&line);
            }
            Stmt::Store { buffer, index, value } => {
                if self.needs_lanes_apart(stmt) {
                    return self.lane_by_lane(stmt);
                }
                let value = self.expr(value, self.buffer(*buffer).dtype.arithmetic());
                self.store(*buffer, index, value);
            }
            Stmt::Update { buffer, index, op, value, first } => {
                if self.needs_lanes_apart(stmt) {
                    return self.lane_by_lane(stmt);
                }
                let dtype = self.buffer(*buffer).dtype.arithmetic();
                let identity = Expr::Const(op.identity());
                let old = match first {
                    Cond::True => identity,
                    Cond::Not(never) if **never == Cond::True => Expr::Load(*buffer, index.clone()),
                    first => {
                        let old = Expr::Load(*buffer, index.clone());
                        Expr::Select(Box::new(first.clone()), Box::new(identity), Box::new(old))
                    }
                };
                // Dependent steps of an extremum wait for each other only through the second operand.
                let (a, b) = match op {
                    ReduceOp::Sum | ReduceOp::Product => (&old, value),
                    ReduceOp::Min | ReduceOp::Max => (value, &old),
                };
                let value = self.binary(op.combine(), a, b, dtype);
                self.store(*buffer, index, value);
            }
            // GPUs have no use for this cache hint.
            Stmt::Prefetch { .. } => {}
        }
    }

    fn nested(&mut self, block: &[Stmt]) {
        self.depth += 1;
        self.block(block);
        self.depth -= 1;
    }

    /// Prints a vectorized loop, in pieces of vector widths.
    fn vectorized(&mut self, var: LoopId, extent: &Index, body: &[Stmt]) {
        let Some(extent) = extent.as_const() else {
            let serial =
                tilewright_ir::Loop { var, extent: extent.clone(), kind: LoopKind::Serial, body: body.to_vec() };
            return self.stmt(&Stmt::For(serial));
        };
        let mut at = 0;
        while at < extent {
            let width = WIDTHS.into_iter().find(|width| *width <= extent - at);
            for stmt in body {
                match width {
                    Some(width) => {
                        self.lanes = Some((var, width));
                        let moved =
                            if at == 0 { stmt.clone() } else { stmt.substitute(var, &Index::from(var).offset(at)) };
                        self.ranges.push(var, Index::from(width));
                        self.stmt(&moved);
                        self.ranges.pop();
                        self.lanes = None;
                    }
                    None => self.stmt(&stmt.substitute(var, &Index::from(at))),
                }
            }
            at += width.unwrap_or(1);
        }
    }

    /// Whether a vector statement must be executed element by element, because its elements are not
    /// contiguous in memory, its conditions differ by element, or its type has no vectors.
    fn needs_lanes_apart(&self, stmt: &Stmt) -> bool {
        let Some((var, _)) = self.lanes else { return false };
        let Some((buffer, index)) = stmt.own_write() else { return false };
        let first_varies = matches!(stmt, Stmt::Update { first, .. } if first.uses(var));
        first_varies
            || matches!(self.buffer(buffer).dtype, DType::Bf16 | DType::Bool)
            || self.step(&self.place(buffer, index)) != Some(1)
    }

    fn lane_by_lane(&mut self, stmt: &Stmt) {
        let Some((var, width)) = self.lanes.take() else { unreachable!("it is on vectors") };
        for lane in 0..width {
            self.stmt(&stmt.substitute(var, &Index::from(lane)));
        }
        self.lanes = Some((var, width));
    }

    /// Distance between adjacent lanes; `None` if it varies.
    fn step(&self, place: &Index) -> Option<i64> {
        let Some((var, _)) = self.lanes else { return Some(0) };
        let step = place.coefficient(var);
        (!place.sub(&Index::from(var).scale(step)).uses(var)).then_some(step)
    }

    /// Position of an element in a buffer, in elements.
    fn place(&self, b: BufferId, index: &[Index]) -> Index {
        let strides = self.buffer(b).strides();
        let place = index.iter().zip(strides).fold(Index::from(0), |sum, (i, stride)| sum.add_scaled(i, stride));
        self.ranges.simplify(&place)
    }

    fn index(&self, e: &Index) -> String {
        let mut text = String::new();
        for (atom, c) in e.terms() {
            let atom = self.atom(atom);
            match (text.is_empty(), *c) {
                (true, 1) => text += &atom,
                (true, c) => write!(text, "{c} * {atom}").expect("a string takes all"),
                (false, 1) => write!(text, " + {atom}").expect("a string takes all"),
                (false, -1) => write!(text, " - {atom}").expect("a string takes all"),
                (false, c) if c < 0 => write!(text, " - {} * {atom}", -c).expect("a string takes all"),
                (false, c) => write!(text, " + {c} * {atom}").expect("a string takes all"),
            }
        }
        match (text.is_empty(), e.constant()) {
            (true, c) => c.to_string(),
            (false, 0) => text,
            (false, c) if c < 0 => format!("{text} - {}", -i128::from(c)),
            (false, c) => format!("{text} + {c}"),
        }
    }

    fn atom(&self, atom: &Atom) -> String {
        let divided = |e: &Index, d: i64, sign: char, helper: &str| {
            let text = self.index(e);
            if d > 0 && self.ranges.lower(e).is_some_and(|least| least >= 0) {
                return format!("({text}) {sign} {d}");
            }
            format!("({}){helper}({text}, {d})", self.index_type)
        };
        match atom {
            Atom::Var(v) => self.names.loops[v.0 as usize].clone(),
            Atom::FloorDiv(e, d) => format!("({})", divided(e, *d, '/', "floor_div")),
            Atom::Mod(e, d) => format!("({})", divided(e, *d, '%', "floor_mod")),
            Atom::Min(a, b) => self.of_two("min", a, b),
            Atom::Max(a, b) => self.of_two("max", a, b),
        }
    }

    /// Casts give both operands the same type, even constants.
    fn of_two(&self, function: &str, a: &Index, b: &Index) -> String {
        let ty = self.index_type;
        format!("{function}(({ty})({}), ({ty})({}))", self.index(a), self.index(b))
    }

    fn cond(&self, cond: &Cond) -> String {
        match cond {
            Cond::True => "1".to_owned(),
            Cond::Lt(a, b) => format!("{} < {}", self.index(a), self.index(b)),
            Cond::Eq(a, b) => format!("{} == {}", self.index(a), self.index(b)),
            Cond::Less(a, b) => {
                let dtype = Expr::arithmetic_of([a, b], &|b| self.buffer(b).dtype).unwrap_or(DType::F64);
                format!("{} < {}", self.expr(a, dtype).text, self.expr(b, dtype).text)
            }
            Cond::And(a, b) => format!("({}) && ({})", self.cond(a), self.cond(b)),
            Cond::Not(a) => format!("!({})", self.cond(a)),
        }
    }

    /// Computes a value for each lane separately.
    fn lanes_apart(&self, e: &Expr, dtype: DType) -> CValue {
        let (var, width) = self.lanes.expect("invariant: lanes differ in vectorized loops only");
        let one = OpenClPrinter { out: String::new(), lanes: None, ranges: self.ranges.clone(), ..*self };
        let lane = |lane: i64| one.expr(&e.map_index(&mut |i| i.substitute(var, &Index::from(lane))), dtype).text;
        let lanes: Vec<String> = (0..width).map(lane).collect();
        CValue::vector(format!("({}{width})({})", arithmetic(dtype), lanes.join(", ")))
    }

    fn varies(&self, e: &Expr) -> bool {
        self.lanes.is_some_and(|(var, _)| e.uses(var))
    }

    /// Prints an expression in the arithmetic of a type.
    fn expr(&self, e: &Expr, dtype: DType) -> CValue {
        match e {
            Expr::Const(x) => CValue::scalar(literal(*x, dtype.arithmetic())),
            Expr::Load(b, index) => self.load(*b, index, e, dtype),
            Expr::Gather(..) | Expr::FromIndex(_) if self.varies(e) => self.lanes_apart(e, dtype),
            Expr::Binary(BinaryOp::Div, ..) if !dtype.is_float() && self.varies(e) => self.lanes_apart(e, dtype),
            Expr::Gather(b, subscripts) => self.gather(*b, subscripts, dtype),
            Expr::FromIndex(index) => CValue::scalar(format!("({})({})", arithmetic(dtype), self.index(index))),
            Expr::Unary(op, x) => self.unary(*op, x, dtype),
            Expr::Binary(op, a, b) => self.binary(*op, a, b, dtype),
            Expr::Select(cond, a, b) => {
                if self.lanes.is_some_and(|(var, _)| cond.uses(var)) {
                    return self.lanes_apart(e, dtype);
                }
                let [a, b] = [a, b].map(|side| self.expr(side, dtype));
                let is_vector = a.is_vector || b.is_vector;
                let [a, b] = [a, b].map(|side| if is_vector { self.widened(side, dtype) } else { side.text });
                CValue { text: format!("({} ? {a} : {b})", self.cond(cond)), is_vector }
            }
            Expr::Cast(to, _) if matches!(to, DType::F16 | DType::Bf16 | DType::Bool) && self.varies(e) => {
                self.lanes_apart(e, dtype)
            }
            Expr::Cast(to, x) => {
                let CValue { text, is_vector } = self.expr(x, to.arithmetic());
                let ty = self.vector_type(to.arithmetic(), is_vector);
                let rounded = match to {
                    DType::F16 => format!("round_half({text})"),
                    DType::Bf16 => format!("round_bf16({text})"),
                    DType::I8 | DType::I7 | DType::U8 | DType::I16 | DType::U16 | DType::U32 => {
                        format!("convert_{ty}({})", self.narrowed(&text, *to, is_vector))
                    }
                    DType::Bool => format!("(int)({text} != 0)"),
                    DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::U64 => text,
                };
                self.converted(CValue { text: rounded, is_vector }, to.arithmetic(), dtype)
            }
        }
    }

    fn load(&self, b: BufferId, index: &[Index], e: &Expr, dtype: DType) -> CValue {
        let (of, place) = (self.buffer(b).dtype, self.place(b, index));
        let value = match (self.step(&place), self.lanes) {
            (Some(0), _) | (_, None) => CValue::scalar(self.element(b, &self.index(&place))),
            (Some(1), Some((var, width))) if of != DType::Bf16 => {
                let start = place.substitute(var, &Index::from(0));
                CValue::vector(match of {
                    DType::F16 => format!("vload_half{width}(0, {})", self.pointer(&self.halves(b, true), &start)),
                    _ if is_multiple(&start, width) => format!("*{}", self.vector_at(b, &start, width, true)),
                    _ => format!("vload{width}(0, {})", self.pointer(self.name(b), &start)),
                })
            }
            _ => return self.lanes_apart(e, dtype),
        };
        self.converted(value, of, dtype)
    }

    /// Pointer to a vector.
    fn vector_at(&self, b: BufferId, start: &Index, width: i64, is_const: bool) -> String {
        let (space, ty) = (self.space(b), storage(self.buffer(b).dtype, false));
        let qualifier = if is_const { "const " } else { "" };
        format!("({space} {qualifier}{ty}{width} *){}", self.pointer(self.name(b), start))
    }

    /// Pointer offset by `place` elements.
    fn pointer(&self, from: &str, place: &Index) -> String {
        if *place == Index::from(0) { from.to_owned() } else { format!("({from} + {})", self.index(place)) }
    }

    /// Pointer to the 16-bit elements of a buffer.
    fn halves(&self, b: BufferId, is_const: bool) -> String {
        let qualifier = if is_const { "const " } else { "" };
        match self.space(b) {
            "global" => self.name(b).to_owned(),
            space => format!("({space} {qualifier}half *){}", self.name(b)),
        }
    }

    fn space(&self, b: BufferId) -> &'static str {
        match self.buffer(b) {
            Buffer { scope, .. } if scope.is_shared() => "local",
            Buffer { scope: Scope::Global, .. } => "global",
            Buffer { role: Role::Temporary, .. } => "private",
            _ => "global",
        }
    }

    /// Expression for an element of a buffer.
    fn element(&self, b: BufferId, place: &str) -> String {
        match self.buffer(b).dtype {
            DType::F16 => format!("vload_half({place}, {})", self.halves(b, true)),
            DType::Bf16 => format!("bf16_value({}[{place}])", self.name(b)),
            _ => format!("{}[{place}]", self.name(b)),
        }
    }

    fn gather(&self, b: BufferId, subscripts: &[Subscript], dtype: DType) -> CValue {
        let buffer = self.buffer(b);
        let summands =
            subscripts.iter().zip(buffer.strides()).zip(&buffer.shape).map(|((subscript, stride), extent)| {
                let place = match subscript {
                    Subscript::Index(i) => format!("({})", self.index(i)),
                    Subscript::Value(value) => format!("place_of({}, {extent})", self.expr(value, DType::I64).text),
                };
                if stride == 1 { place } else { format!("{stride} * {place}") }
            });
        let place = summands.collect::<Vec<_>>().join(" + ");
        self.converted(CValue::scalar(self.element(b, &place)), buffer.dtype, dtype)
    }

    fn vector_type(&self, dtype: DType, is_vector: bool) -> String {
        let ty = arithmetic(dtype);
        match self.lanes {
            Some((_, width)) if is_vector => format!("{ty}{width}"),
            _ => ty.to_owned(),
        }
    }

    fn widened(&self, value: CValue, dtype: DType) -> String {
        if value.is_vector { value.text } else { format!("({})({})", self.vector_type(dtype, true), value.text) }
    }

    /// Converts a value of a buffer's type, or of an arithmetic, to another arithmetic.
    fn converted(&self, value: CValue, from: DType, to: DType) -> CValue {
        let CValue { text, is_vector } = value;
        // 16-bit floats are `float` after loading.
        let of = if from.is_float() { from.arithmetic() } else { from };
        if of == to.arithmetic() {
            return CValue { text, is_vector };
        }
        let ty = self.vector_type(to, is_vector);
        let text = match (is_vector, to.is_float()) {
            (_, false) if of.is_float() => format!("convert_{ty}_sat({text})"),
            (true, _) => format!("convert_{ty}({text})"),
            (false, _) => format!("({ty}){text}"),
        };
        CValue { text, is_vector }
    }

    /// Low bits of an integer as a storage-only type.
    fn narrowed(&self, text: &str, to: DType, is_vector: bool) -> String {
        let width = self.lanes.filter(|_| is_vector).map_or(String::new(), |(_, width)| width.to_string());
        let low_bits = format!("convert_{}{width}({text})", storage(to, false));
        if to == DType::I7 { format!("clamp({low_bits}, (char)-64, (char)64)") } else { low_bits }
    }

    fn store(&mut self, b: BufferId, index: &[Index], value: CValue) {
        let (dtype, place) = (self.buffer(b).dtype, self.place(b, index));
        let line = match self.lanes {
            None => {
                let (name, place, text) = (self.name(b), self.index(&place), value.text);
                match dtype {
                    DType::F16 => format!("vstore_half_rte({text}, {place}, {});", self.halves(b, false)),
                    DType::Bf16 => format!("{name}[{place}] = bf16_bits({text});"),
                    DType::I8 | DType::I7 | DType::U8 | DType::I16 | DType::U16 | DType::U32 => {
                        format!("{name}[{place}] = {};", self.narrowed(&text, dtype, false))
                    }
                    DType::Bool => format!("{name}[{place}] = {text} != 0;"),
                    DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::U64 => {
                        format!("{name}[{place}] = {text};")
                    }
                }
            }
            Some((var, width)) => {
                let start = place.substitute(var, &Index::from(0));
                let text = self.widened(value, dtype);
                let is_narrow = !dtype.is_float() && dtype.arithmetic() != dtype;
                let text = if is_narrow { self.narrowed(&text, dtype, true) } else { text };
                match dtype {
                    DType::F16 => {
                        format!("vstore_half{width}_rte({text}, 0, {});", self.pointer(&self.halves(b, false), &start))
                    }
                    _ if is_multiple(&start, width) => {
                        format!("*{} = {text};", self.vector_at(b, &start, width, false))
                    }
                    _ => format!("vstore{width}({text}, 0, {});", self.pointer(self.name(b), &start)),
                }
            }
        };
        self.line(&line);
    }

    fn unary(&self, op: UnaryOp, x: &Expr, dtype: DType) -> CValue {
        if !dtype.is_float() {
            match op {
                UnaryOp::Neg => return self.binary(BinaryOp::Sub, &Expr::Const(0.0), x, dtype),
                UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => return self.expr(x, dtype),
                UnaryOp::Abs => {
                    let CValue { text, is_vector } = self.expr(x, dtype);
                    let ty = self.vector_type(dtype, is_vector);
                    return CValue { text: format!("convert_{ty}(abs({text}))"), is_vector };
                }
                _ => {
                    let x = self.converted(self.expr(x, dtype), dtype, DType::F64);
                    let text = format!("{}({})", function(op), x.text);
                    return self.converted(CValue { text, ..x }, DType::F64, dtype);
                }
            }
        }
        let CValue { text, is_vector } = match op.rounded_difference(x, dtype) {
            Some((product, z)) => {
                let [product, z] = [product, z].map(|x| self.expr(x, dtype));
                self.combined(BinaryOp::Sub, product, z, dtype)
            }
            None => self.expr(x, dtype),
        };
        let text = match op {
            UnaryOp::Neg => format!("(-{text})"),
            _ => format!("{}({text})", function(op)),
        };
        CValue { text, is_vector }
    }

    fn binary(&self, op: BinaryOp, a: &Expr, b: &Expr, dtype: DType) -> CValue {
        let dtype = dtype.arithmetic();
        if !dtype.is_float() {
            let [a, b] = [a, b].map(|x| self.expr(x, dtype));
            return match op {
                BinaryOp::Min | BinaryOp::Max => self.combined(op, a, b, dtype),
                BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul => self.wrapping(op, a, b, dtype),
                // Vector divisions were split into lanes.
                BinaryOp::Div => CValue::scalar(format!("{}_div({}, {})", arithmetic(dtype), a.text, b.text)),
                BinaryOp::Nibble => CValue::scalar(format!("(({} >> (4 * {})) & 15)", a.text, b.text)),
                BinaryOp::Pow => {
                    let [a, b] = [a, b].map(|x| self.converted(x, dtype, DType::F64));
                    self.converted(self.combined(op, a, b, DType::F64), DType::F64, dtype)
                }
            };
        }
        if self.has_fma {
            let (product, z, signs) = match (op, a, b) {
                (BinaryOp::Add, z, Expr::Binary(BinaryOp::Mul, x, y))
                | (BinaryOp::Add, Expr::Binary(BinaryOp::Mul, x, y), z) => (Some((x, y)), z, ["", ""]),
                (BinaryOp::Sub, Expr::Binary(BinaryOp::Mul, x, y), z) => (Some((x, y)), z, ["", "-"]),
                (BinaryOp::Sub, z, Expr::Binary(BinaryOp::Mul, x, y)) => (Some((x, y)), z, ["-", ""]),
                _ => (None, a, ["", ""]),
            };
            if let Some((x, y)) = product {
                let [x, y, z] = [x, y, z].map(|v| self.expr(v, dtype));
                let is_vector = x.is_vector || y.is_vector || z.is_vector;
                let [x, y, z] = [x, y, z].map(|v| if is_vector { self.widened(v, dtype) } else { v.text });
                return CValue { text: format!("fma({}{x}, {y}, {}{z})", signs[0], signs[1]), is_vector };
            }
        }
        match (op, b) {
            // A constant is known not to be NaN.
            (BinaryOp::Min | BinaryOp::Max, Expr::Const(_)) => {
                self.combined(op, self.expr(b, dtype), self.expr(a, dtype), dtype)
            }
            (BinaryOp::Pow, Expr::Const(n)) if *n == 1.0 => self.expr(a, dtype),
            (BinaryOp::Pow, Expr::Const(n)) if *n == 2.0 => {
                let a = self.expr(a, dtype);
                self.combined(BinaryOp::Mul, a.clone(), a, dtype)
            }
            _ => self.combined(op, self.expr(a, dtype), self.expr(b, dtype), dtype),
        }
    }

    /// Sum, difference or product of integers. In the language, only unsigned integers wrap around.
    fn wrapping(&self, op: BinaryOp, a: CValue, b: CValue, dtype: DType) -> CValue {
        if dtype == DType::U64 {
            return self.combined(op, a, b, dtype);
        }
        let is_vector = a.is_vector || b.is_vector;
        let ty = self.vector_type(dtype, is_vector);
        let [a, b] = [a, b].map(|x| if is_vector { self.widened(x, dtype) } else { x.text });
        let [a, b] = [a, b].map(|text| CValue { text: format!("as_u{ty}({text})"), is_vector });
        let CValue { text, .. } = self.combined(op, a, b, dtype);
        CValue { text: format!("as_{ty}{text}"), is_vector }
    }

    fn combined(&self, op: BinaryOp, a: CValue, b: CValue, dtype: DType) -> CValue {
        let is_vector = a.is_vector || b.is_vector;
        let [a, b] = [a, b].map(|x| if is_vector { self.widened(x, dtype) } else { x.text });
        let text = match op {
            BinaryOp::Add => format!("({a} + {b})"),
            BinaryOp::Sub => format!("({a} - {b})"),
            BinaryOp::Mul => format!("({a} * {b})"),
            BinaryOp::Div => format!("({a} / {b})"),
            BinaryOp::Min | BinaryOp::Max => {
                let name = if op == BinaryOp::Min { "min" } else { "max" };
                match dtype.is_float() {
                    true => format!("{name}_{}({a}, {b})", self.vector_type(dtype, is_vector)),
                    false => format!("{name}({a}, {b})"),
                }
            }
            BinaryOp::Pow => format!("pow({a}, {b})"),
            BinaryOp::Nibble => format!("(((int){a} >> (4 * (int){b})) & 15)"),
        };
        CValue { text, is_vector }
    }
}

/// OpenCL C function for floating-point numbers.
fn function(op: UnaryOp) -> &'static str {
    match op {
        UnaryOp::Neg => "-",
        UnaryOp::Abs => "fabs",
        UnaryOp::Exp => "exp",
        UnaryOp::Expm1 => "expm1",
        UnaryOp::Log => "log",
        UnaryOp::Log1p => "log1p",
        UnaryOp::Sqrt => "sqrt",
        UnaryOp::Tanh => "tanh",
        UnaryOp::Erf => "erf",
        UnaryOp::Floor => "floor",
        UnaryOp::Ceil => "ceil",
        UnaryOp::Round => "rint",
        UnaryOp::Sin => "sin",
        UnaryOp::Cos => "cos",
    }
}

/// Whether an index is a multiple of a number for all values of its variables.
fn is_multiple(index: &Index, of: i64) -> bool {
    index.constant() % of == 0 && index.terms().iter().all(|(_, c)| c % of == 0)
}

/// Exact literal of a number in an arithmetic.
fn literal(x: f64, arithmetic: DType) -> String {
    if !arithmetic.is_float() {
        let x = arithmetic.literal(x);
        return match (arithmetic, x as i64) {
            (DType::U64, _) => format!("{x}UL"),
            (DType::I64, i64::MIN) => "(-9223372036854775807L - 1L)".to_owned(),
            (DType::I64, x) if x < 0 => format!("({x}L)"),
            (DType::I64, x) => format!("{x}L"),
            (_, x) if x == i64::from(i32::MIN) => "(-2147483647 - 1)".to_owned(),
            (_, x) if x < 0 => format!("({x})"),
            (_, x) => x.to_string(),
        };
    }
    let x = arithmetic.round(x);
    let (ty, suffix) = if arithmetic == DType::F32 { ("float", "f") } else { ("double", "") };
    let magnitude = match x.abs() {
        m if m.is_nan() => return format!("({ty})NAN"),
        m if m.is_infinite() => format!("({ty})INFINITY"),
        m if m == m.trunc() && m < 1e6 => format!("{m:.1}{suffix}"),
        m => format!("{}{suffix}", hexadecimal(m)),
    };
    if x.is_sign_negative() { format!("(-{magnitude})") } else { magnitude }
}

/// Positive number in C's hexadecimal floating-point notation.
fn hexadecimal(x: f64) -> String {
    let (exponent, fraction) = ((x.to_bits() >> 52) as i64, x.to_bits() & ((1 << 52) - 1));
    let (lead, exponent) = if exponent == 0 { (0, -1022) } else { (1, exponent - 1023) };
    let digits = format!("{fraction:013x}");
    let digits = digits.trim_end_matches('0');
    let point = if digits.is_empty() { "" } else { "." };
    format!("0x{lead}{point}{digits}p{exponent}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_exact() {
        let check = |x: f64, dtype: DType, expected: &str| assert_eq!(literal(x, dtype), expected);
        check(0.0, DType::F32, "0.0f");
        check(-0.0, DType::F32, "(-0.0f)");
        check(1.5, DType::F32, "0x1.8p0f");
        check(0.1, DType::F64, "0x1.999999999999ap-4");
        check(0.1, DType::F32, "0x1.99999ap-4f");
        check(f64::MIN_POSITIVE / 4.0, DType::F64, "0x0.4p-1022");
        check(f64::NEG_INFINITY, DType::F32, "(-(float)INFINITY)");
        check(f64::NAN, DType::F64, "(double)NAN");
        check(-7.0, DType::I32, "(-7)");
        check(-2147483648.0, DType::I32, "(-2147483647 - 1)");
        check(3e10, DType::I64, "30000000000L");
        check(f64::INFINITY, DType::U64, "18446744073709551615UL");
    }

    #[test]
    fn names_are_none_of_the_language() {
        let names = ["A.s", "half", "float4", "i", "i", "as_is", "_x", "fma", "floor_div", "2x"].map(str::to_owned);
        let program = Program { loops: names.to_vec(), ..Program::default() };
        let own = CNames::of(&program).loops;
        assert_eq!(own, ["A_s", "half_", "float4_", "i", "i_", "vas_is", "v_x", "fma_", "floor_div_", "v2x"]);
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("x = round_half(y)", "round_half") && !has_word("around_halfs", "round_half"));
    }
}
