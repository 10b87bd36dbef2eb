//! State of an import, with helpers for the lowerings of all operators.

use tilewright_graph::op::Fact;
use tilewright_graph::{DType, Graph, Node as GraphNode, Op, Tensor};
use tilewright_ir::Expr;

use crate::jumps::decides;
use crate::net::{Kind, Net, Node, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::input;

/// Node of the graph that is being imported into the net.
pub(crate) struct NodeImport<'a> {
    pub(super) graph: &'a Graph,
    pub(crate) node: &'a GraphNode,
    pub(crate) net: &'a mut Net,
    pub(crate) inputs: Vec<Option<ValueId>>,
    pub(crate) outputs: Vec<Option<ValueId>>,
    /// Whether kernels multiply 8-bit integers.
    pub(crate) dots: bool,
}

/// Types for which functions of real numbers have code.
pub(super) const REALS: &str = "f32 and f64";

/// Converts sizes to the type that nets use.
pub(super) fn ints(list: &[usize]) -> Vec<i64> {
    list.iter().map(|&n| n as i64).collect()
}

impl NodeImport<'_> {
    /// Whether dimensions of images behind a batch of `n` may be open: where there are so many, their number
    /// is.
    pub(super) fn is_open_behind(&self, n: i64) -> bool {
        self.net.open_size.is_some_and(|size| size < 1 || n % size != 0)
    }

    /// Whether a number of rows is an open size, or may be one by its value.
    pub(super) fn is_open_size(&self, n: i64) -> bool {
        [self.net.open_size, self.net.second_size].contains(&Some(n))
    }

    /// Whether the open dimension is the length of a cache that a run appends to. The number of rows that it
    /// appends is then known.
    pub(super) fn has_open_cache(&self) -> bool {
        let graph = self.graph;
        let is_appended = |id: &tilewright_graph::ValueId| {
            let mut id = *id;
            loop {
                let [user] = graph.value(id).users[..] else { return false };
                let user = graph.node(user);
                match (&user.op, &user.outputs[..]) {
                    (Op::Concat(_) | Op::GroupQueryAttention(_), _) => return true,
                    // Caches of 16 bits are widened.
                    (Op::Cast(_), [Some(widened)]) => id = *widened,
                    _ => return false,
                }
            }
        };
        graph.inputs.iter().any(|id| graph.value(*id).varies.shape && is_appended(id))
    }

    /// A number that is known once a run has said its size.
    pub(super) fn number_of_run(&mut self, what: &str, n: i64) -> ValueId {
        let id = self.value(what, DType::I64, &[]);
        self.net.varying.push((id, Tensor::from_integers(DType::I64, [], &[n.into()])));
        id
    }

    /// Types and known values of the node's inputs.
    pub(crate) fn facts(&self) -> Vec<Option<Fact<'_>>> {
        let fact = |id: &Option<tilewright_graph::ValueId>| {
            let value = self.graph.value((*id)?);
            Some(Fact { ty: value.ty.as_ref()?, value: value.constant.as_ref() })
        };
        self.node.inputs.iter().map(fact).collect()
    }

    pub(crate) fn try_input(&self, at: usize) -> Option<ValueId> {
        self.inputs.get(at).copied().flatten()
    }

    pub(crate) fn shape(&self, at: usize) -> Lowered<Vec<i64>> {
        Ok(self.net.shape(self.input(at)?).to_vec())
    }

    pub(super) fn graph_shape(&self, at: usize) -> Lowered<&[usize]> {
        let id = self.node.inputs.get(at).copied().flatten().ok_or(NoCode::Missing(at))?;
        Ok(&self.graph.ty(id).shape)
    }

    pub(crate) fn is_f32(&self, id: ValueId) -> bool {
        self.net.value(id).dtype == DType::F32
    }

    /// Whether a value has no elements.
    pub(crate) fn is_empty(&self, id: ValueId) -> bool {
        self.net.value(id).n_elements() == 0
    }

    /// Whether there is code for a value's element type. For 16-bit floats only casts have code, since graphs
    /// are widened.
    pub(super) fn has_code(&self, id: ValueId) -> bool {
        self.net.element_type(id).is_some_and(|dtype| !dtype.is_half())
    }

    /// Whether a value's elements are integers or booleans for which there is code.
    pub(crate) fn is_whole(&self, id: ValueId) -> bool {
        self.net.element_type(id).is_some_and(|dtype| !dtype.is_float())
    }

    /// Returns an input that the lowering needs.
    pub(crate) fn input(&self, at: usize) -> Lowered<ValueId> {
        self.try_input(at).ok_or(NoCode::Missing(at))
    }

    /// Returns all inputs, none of which may be left out.
    pub(super) fn all_inputs(&self) -> Lowered<Vec<ValueId>> {
        (0..self.inputs.len()).map(|at| self.input(at)).collect()
    }

    /// Returns an output; `None` if it is unused or has no elements.
    pub(crate) fn try_output(&self, at: usize) -> Option<ValueId> {
        self.outputs.get(at).copied().flatten()
    }

    /// Returns the first output.
    pub(crate) fn output(&self) -> Lowered<ValueId> {
        self.try_output(0).ok_or(NoCode::Unread)
    }

    /// Returns the sizes of a value that has this many dimensions.
    pub(super) fn sizes_of<const RANK: usize>(&self, id: ValueId) -> Lowered<[i64; RANK]> {
        let takes = ["none", "one", "two", "three", "four"].get(RANK).copied().unwrap_or("others");
        self.net.shape(id).try_into().map_err(|_| self.no_code_of_rank(id, takes))
    }

    /// Returns the last size of a value.
    pub(super) fn last_size(&self, id: ValueId) -> Lowered<i64> {
        self.net.shape(id).last().copied().ok_or_else(|| self.no_code_of_rank(id, "one and more"))
    }

    /// Returns the elements of a constant.
    pub(super) fn known(&self, id: ValueId) -> Lowered<&Tensor> {
        self.net.value(id).constant.as_ref().ok_or_else(|| self.unknown(id))
    }

    /// Returns the elements of an input that is computed from constants, also if they differ between sizes of
    /// the open dimension: the nodes made of it are compared.
    pub(super) fn computed(&self, at: usize, most_bytes: usize) -> Lowered<Tensor> {
        let id = self.node.inputs.get(at).copied().flatten().ok_or(NoCode::Missing(at))?;
        let known = self.graph.known(id, most_bytes);
        known.ok_or_else(|| self.unknown(ValueId(id.0 as usize)))
    }

    /// Returns the only element of a constant input.
    pub(super) fn known_number(&self, at: usize) -> Lowered<f64> {
        let id = self.input(at)?;
        self.net.scalar(id).ok_or_else(|| self.unknown(id))
    }

    fn name(&self, id: ValueId) -> String {
        self.net.value(id).name.clone()
    }

    pub(super) fn unknown(&self, id: ValueId) -> NoCode {
        NoCode::Unknown(self.name(id))
    }

    pub(super) fn no_elements(&self, id: ValueId) -> NoCode {
        NoCode::Empty(self.name(id))
    }

    pub(super) fn no_code_for(&self, id: ValueId, takes: &'static str) -> NoCode {
        NoCode::Type { value: self.name(id), dtype: self.net.value(id).dtype, takes }
    }

    pub(super) fn no_code_of_rank(&self, id: ValueId, takes: &'static str) -> NoCode {
        NoCode::Rank { value: self.name(id), rank: self.net.shape(id).len(), takes }
    }

    /// Checks that kernels support a value's element type.
    pub(super) fn need_code(&self, id: ValueId) -> Lowered {
        need(self.has_code(id), || self.no_code_for(id, "f32, f64, booleans and integers"))
    }

    /// Checks that functions of real numbers have code for a value's element type.
    pub(super) fn need_real(&self, id: ValueId) -> Lowered {
        need(self.is_real(id), || self.no_code_for(id, REALS))
    }

    /// Checks that a value's elements are f32.
    pub(crate) fn need_f32(&self, id: ValueId) -> Lowered {
        need(self.is_f32(id), || self.no_code_for(id, "f32"))
    }

    /// Checks that a value's elements are integers or booleans.
    pub(crate) fn need_integers(&self, id: ValueId) -> Lowered {
        need(self.is_whole(id), || self.no_code_for(id, "booleans and integers"))
    }

    /// Checks that two values have the same element type.
    pub(super) fn need_same_type(&self, a: ValueId, b: ValueId) -> Lowered {
        let typed = |id| (self.name(id), self.net.value(id).dtype);
        need(self.net.value(a).dtype == self.net.value(b).dtype, || NoCode::Mixed(typed(a), typed(b)))
    }

    pub(crate) fn push(&mut self, kind: Kind, inputs: &[ValueId], output: ValueId) -> ValueId {
        let inputs = inputs.iter().map(|&id| Some(id)).collect();
        self.net.nodes.push(Node { kind, inputs, outputs: vec![output], origin: self.node.place.node.clone() });
        output
    }

    /// Adds a node with several outputs.
    pub(super) fn push_several(&mut self, kind: Kind, inputs: &[ValueId], outputs: &[ValueId]) {
        let inputs = inputs.iter().map(|&id| Some(id)).collect();
        self.net.nodes.push(Node { kind, inputs, outputs: outputs.to_vec(), origin: self.node.place.node.clone() });
    }

    /// Adds an intermediate value.
    pub(crate) fn value(&mut self, what: &str, dtype: DType, shape: &[i64]) -> ValueId {
        let name = format!("{}.{what}", self.node.place.node);
        self.net.add_value(&name, dtype, shape)
    }

    /// Adds a node with an intermediate result, of the type of its first input.
    pub(crate) fn step(&mut self, what: &str, kind: Kind, inputs: &[ValueId], shape: &[i64]) -> ValueId {
        let to = self.value(what, self.net.value(inputs[0]).dtype, shape);
        self.push(kind, inputs, to)
    }

    /// Whether a rounding error of the node's output may change a result discontinuously.
    pub(super) fn decides(&self) -> bool {
        self.node.outputs[0].is_some_and(|to| decides(self.graph, to))
    }

    /// Graph of the node.
    pub(crate) fn graph(&self) -> &Graph {
        self.graph
    }

    /// Adds a constant of integers.
    pub(crate) fn whole_constant(&mut self, what: &str, dtype: DType, shape: &[i64], numbers: &[i64]) -> ValueId {
        let id = self.value(what, dtype, shape);
        let numbers: Vec<i128> = numbers.iter().map(|&n| n.into()).collect();
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        self.net.values[id.0].constant = Some(Tensor::from_integers(dtype, shape, &numbers));
        id
    }

    /// Adds a constant of f32 numbers.
    pub(crate) fn constant(&mut self, what: &str, shape: &[i64], numbers: &[f32]) -> ValueId {
        let name = format!("{}.{what}", self.node.place.node);
        self.net.add_constant(&name, shape, numbers)
    }

    /// Adds a constant of numbers in the precision of a value.
    pub(super) fn real_constant(&mut self, what: &str, like: ValueId, shape: &[i64], numbers: &[f64]) -> ValueId {
        let dtype = self.net.value(like).dtype;
        let id = self.value(what, dtype, shape);
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        self.net.values[id.0].constant = Some(Tensor::from_floats(dtype, shape, numbers));
        id
    }

    /// Converts a tensor to f32.
    pub(super) fn single(&mut self, id: ValueId) -> Lowered<ValueId> {
        self.need_code(id)?;
        if self.is_f32(id) {
            return Ok(id);
        }
        let shape = self.net.shape(id).to_vec();
        let to = self.value("single", DType::F32, &shape);
        Ok(self.push(Kind::Map(input(0)), &[id], to))
    }

    /// Whether functions of real numbers have code for a value's element type.
    pub(super) fn is_real(&self, id: ValueId) -> bool {
        matches!(self.net.value(id).dtype, DType::F32 | DType::F64)
    }

    /// Reshapes a value.
    pub(crate) fn viewed(&mut self, what: &str, x: ValueId, shape: &[i64]) -> ValueId {
        if self.net.shape(x) == shape { x } else { self.step(what, Kind::View, &[x], shape) }
    }

    /// Broadcasts a value to a larger shape.
    pub(super) fn repeated(&mut self, what: &str, x: ValueId, shape: &[i64]) -> ValueId {
        if self.net.shape(x) == shape { x } else { self.step(what, Kind::Map(input(0)), &[x], shape) }
    }

    /// Adds a map of integers to i64.
    pub(crate) fn whole_map(&mut self, what: &str, value: Expr, inputs: &[ValueId], shape: &[i64]) -> ValueId {
        let to = self.value(what, DType::I64, shape);
        self.push(Kind::Map(value), inputs, to)
    }

    /// Adds a constant of `n` multiples of `stride` along one of `rank` dimensions.
    pub(super) fn counted(&mut self, rank: usize, axis: usize, n: i64, stride: i64) -> ValueId {
        let mut along = vec![1; rank];
        along[axis] = n;
        self.whole_constant("counted", DType::I64, &along, &(0..n).map(|at| at * stride).collect::<Vec<_>>())
    }

    /// Converts a value to f64.
    pub(super) fn double(&mut self, what: &str, id: ValueId, shape: &[i64]) -> ValueId {
        let to = self.value(what, DType::F64, shape);
        self.push(Kind::Map(input(0)), &[id], to)
    }
}
