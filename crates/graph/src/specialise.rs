//! Specialisation: a model with its symbolic dimensions bound, so that every tensor's type is concrete.

mod chosen;
mod dynamic;
mod heads;
mod loops;
mod mask;
mod sequences;
mod varies;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use self::chosen::Chosen;
pub use self::dynamic::DynamicPart;
pub use self::heads::derived_dims;
use self::heads::with_derived;
use self::mask::{MASK, with_cache};
pub use self::varies::Varies;
use self::varies::{may_fold, outputs_vary};
use crate::error::{Unbound, invalid, unsupported};
use crate::evaluate::check_types;
use crate::op::{Fact, If, Inputs, Op, Select, Texts, Unary, no_tensor};
use crate::tensor::shape_text;
use crate::{DType, Dim, Graph, Node, NodeId, OpError, Problem, Reason, Tensor, TensorType, Value, ValueId};

/// Values for a model's symbolic dimensions and inputs.
#[derive(Debug, Clone)]
pub struct Bindings {
    /// Sizes of symbolic dimensions, by name.
    pub dims: Vec<(String, usize)>,
    /// Shapes of inputs.
    pub shapes: Vec<(String, Vec<usize>)>,
    /// Inputs that become constants, by name: comma-separated numbers, one for each element or one for all.
    pub values: Vec<(String, String)>,
    /// Name of the dimension whose size each run gives (the open dimension), if any. Values that depend on
    /// its size are folded only if they are element counts or positions. The masks of a key-value cache are
    /// those of sequences without padding.
    pub open: Option<String>,
    /// Name of a second open dimension, if any.
    pub second: Option<String>,
    /// Limit of constant folding: a node with constant inputs is folded if its outputs take at most this many
    /// bytes.
    pub fold_bytes: usize,
    /// Maximum number of conditions by which `NonZero` chooses rows of products, for all rows to be computed
    /// instead, of which some do not count; open sizes have no maximum. If it is 0, which is the default, the
    /// graph is divided there.
    pub most_conditions: usize,
}

impl Default for Bindings {
    /// No bindings; values as small as shapes are folded, and weights are not.
    fn default() -> Bindings {
        let (dims, shapes, values) = Default::default();
        Bindings { dims, shapes, values, open: None, second: None, fold_bytes: 1 << 16, most_conditions: 0 }
    }
}

/// Splits an option `NAME=…`. A name may contain `=`, but its value may not.
fn halves<'a>(option: &str, text: &'a str, example: &str) -> Result<(&'a str, &'a str), String> {
    text.rsplit_once('=')
        .filter(|(name, value)| !name.is_empty() && !value.is_empty())
        .ok_or_else(|| format!("{option} {text} is no binding (give it as {option} {example})"))
}

impl Bindings {
    /// Shape of declared dimensions with names replaced by their sizes.
    ///
    /// # Errors
    /// If a size is missing: the dimensions, with the sizes of bound ones.
    pub fn bound(&self, dims: &[Dim]) -> Result<Vec<usize>, Vec<Dim>> {
        let bound = |dim: &Dim| match dim {
            Dim::Named(name) => {
                let size = self.dims.iter().rfind(|(known, _)| known == name);
                size.map_or_else(|| dim.clone(), |(_, size)| Dim::Size(*size))
            }
            _ => dim.clone(),
        };
        let dims: Vec<Dim> = dims.iter().map(bound).collect();
        let size = |dim: &Dim| if let Dim::Size(size) = dim { Some(*size) } else { None };
        dims.iter().map(size).collect::<Option<_>>().ok_or(dims)
    }

    /// Binds a symbolic dimension, given as text such as `N=1`.
    ///
    /// # Errors
    /// If the text is not a binding.
    pub fn bind_dim(&mut self, text: &str) -> Result<(), String> {
        let (name, size) = halves("--dim", text, "N=1")?;
        let size = size.parse().map_err(|_| format!("--dim {text}: `{size}` is no size (give a whole number)"))?;
        self.dims.push((name.to_owned(), size));
        Ok(())
    }

    /// Binds an input's shape, given as text such as `x=1,3,224,224`.
    ///
    /// # Errors
    /// If the text is not a binding.
    pub fn bind_shape(&mut self, text: &str) -> Result<(), String> {
        let (name, sizes) = halves("--shape", text, "x=1,3,224,224")?;
        let read = |size: &str| {
            size.trim().parse().map_err(|_| format!("--shape {text}: `{size}` is no size (give whole numbers)"))
        };
        let sizes = sizes.split(',').map(read).collect::<Result<_, _>>()?;
        self.shapes.push((name.to_owned(), sizes));
        Ok(())
    }

    /// Binds an input to a constant, given as text such as `sr=16000`.
    ///
    /// # Errors
    /// If the text is not a binding.
    pub fn bind_value(&mut self, text: &str) -> Result<(), String> {
        let (name, numbers) = halves("--set", text, "sr=16000")?;
        self.values.push((name.to_owned(), numbers.to_owned()));
        Ok(())
    }
}

/// Graph whose tensors have concrete types, or the problems that prevent it.
#[derive(Debug, Clone)]
pub struct Specialised {
    /// Specialised graph, without the nodes that problems exclude.
    pub graph: Graph,
    /// Problems in the order of nodes, without consequences of earlier ones.
    pub problems: Vec<Problem>,
    /// Division of the graph, if the only problems are shapes that depend on the data.
    pub dynamic: Option<DynamicPart>,
}

/// Binds a graph's symbolic dimensions and inputs, infers every tensor's type and folds constants. Each `If`
/// with a constant condition is replaced by the branch taken, each `Scan` by a `Loop`, and each short `Loop`
/// of constant length by its iterations. Up to `most_conditions`, rows that a `NonZero` chooses are all rows,
/// of which some do not count, if that makes no difference to the graph's outputs. Dead nodes are removed.
///
/// # Cost
/// Linear in the number of nodes, plus the evaluation of folded ones.
pub fn specialise(graph: &Graph, bindings: &Bindings) -> Specialised {
    let special = specialise_with(graph, bindings, None);
    if special.dynamic.is_none() || bindings.most_conditions == 0 {
        return special;
    }
    let of_all_rows = specialise_with(graph, bindings, Some(Chosen::of(bindings.most_conditions)));
    if of_all_rows.problems.is_empty() { of_all_rows } else { special }
}

/// Specialises a graph as [`specialise`] does, with all rows if `chosen` keeps account of those that count.
fn specialise_with(graph: &Graph, bindings: &Bindings, chosen: Option<Chosen>) -> Specialised {
    let size = |of: &String| bindings.dims.iter().rfind(|(name, _)| name == of).map(|(_, size)| *size);
    let [open_size, second_size] = [&bindings.open, &bindings.second].map(|name| name.as_ref().and_then(size));
    let open = bindings.open.clone();
    let bindings = &with_derived(graph, bindings);
    let bindings = &with_cache(graph, bindings);
    let mut job = Specialiser { chosen, ..Specialiser::new(bindings.fold_bytes) };
    job.graph.name.clone_from(&graph.name);
    (job.graph.open_size, job.graph.second_size) = (open_size, second_size);
    job.check_names(graph, bindings);
    let mut map: Vec<Option<ValueId>> = vec![None; graph.values().len()];
    for &id in &graph.inputs {
        if let Some(mut value) = job.input(graph.value(id), bindings) {
            value.bind_dims_but(open.as_deref());
            if let Some(mask) = job.causal_mask(&value, bindings) {
                map[id.0 as usize] = Some(mask);
                continue;
            }
            let is_constant = value.constant.is_some();
            let new = job.graph.add_value(value);
            map[id.0 as usize] = Some(new);
            if !is_constant {
                job.graph.inputs.push(new);
            }
        }
    }
    job.tell_unbound();
    for &id in &graph.defaults {
        let given = bindings.values.iter().rfind(|(name, _)| *name == graph.value(id).name);
        map[id.0 as usize] = given.and_then(|(_, text)| job.in_place_of_default(graph.value(id), text));
    }
    job.walk(graph, &mut map);
    let dynamic = job.dynamic_part(graph, &map);
    for &id in &graph.outputs {
        if let Some(new) = job.mapped(graph, &mut map, id) {
            let name = &graph.value(id).name;
            if job.is_of_rows(new) {
                job.refuse(Reason::Op(OpError::ShapeOfData));
                continue;
            }
            if job.graph.value(new).parts.is_some() {
                job.refuse(Reason::Op(unsupported!(
                    "output `{name}` is a sequence of tensors (let each be an output)"
                )));
                continue;
            }
            if let Some(dtype) = job.graph.value(new).ty.as_ref().map(|ty| ty.dtype).filter(|dtype| dtype.is_float8()) {
                job.refuse(Reason::Op(unsupported!("output `{name}` is {dtype} (put a Cast to f32 behind it)")));
                continue;
            }
            let new = job.named_output(new, name);
            job.graph.outputs.push(new);
        }
    }
    let graph = if job.problems.is_empty() { pruned(&job.graph) } else { job.graph };
    Specialised { graph, problems: job.problems, dynamic }
}

/// If-converts a specialised graph: computes both branches of each `If` and selects among their outputs by
/// [`Select`]. With `unrolls`, loops of constant length are unrolled unless they are too long. Mixtures of
/// experts become other operators, with loops of computed lengths unless it `unrolls`.
///
/// # Panics
/// If the graph is not specialised.
pub fn with_both_branches(graph: &Graph, unrolls: bool) -> Cow<'_, Graph> {
    if !graph.nodes().any(|(_, node)| matches!(node.op, Op::If(_) | Op::Loop(_) | Op::Experts(_))) {
        return Cow::Borrowed(graph);
    }
    let mut job = Specialiser { takes_both: true, unrolls, ..Specialiser::new(Bindings::default().fold_bytes) };
    job.graph.name.clone_from(&graph.name);
    (job.graph.open_size, job.graph.second_size) = (graph.open_size, graph.second_size);
    let mut map: Vec<Option<ValueId>> = vec![None; graph.values().len()];
    for &id in &graph.inputs {
        let new = job.graph.add_value(Value { producer: None, users: Vec::new(), ..graph.value(id).clone() });
        map[id.0 as usize] = Some(new);
        job.graph.inputs.push(new);
    }
    job.walk(graph, &mut map);
    for &id in &graph.outputs {
        let new = job.mapped(graph, &mut map, id).expect("a specialised graph computes its outputs");
        let new = job.named_output(new, &graph.value(id).name);
        job.graph.outputs.push(new);
    }
    Cow::Owned(pruned(&job.graph))
}

/// Inputs of a graph with their concrete types, and with their elements if they are bound to constants.
///
/// # Errors
/// The first problem.
pub fn bind_inputs(graph: &Graph, bindings: &Bindings) -> Result<Vec<Value>, Box<Problem>> {
    let bindings = &with_derived(graph, bindings);
    let bindings = &with_cache(graph, bindings);
    let mut job = Specialiser::new(bindings.fold_bytes);
    job.check_names(graph, bindings);
    let values = graph.inputs.iter().filter_map(|&id| job.input(graph.value(id), bindings)).collect();
    job.tell_unbound();
    job.problems.into_iter().next().map_or(Ok(values), |problem| Err(Box::new(problem)))
}

/// Infers the types of a graph's outputs from facts about its inputs.
///
/// # Errors
/// The first problem.
pub(crate) fn infer_graph(graph: &Graph, inputs: &[Option<Fact<'_>>]) -> Result<Vec<TensorType>, OpError> {
    let mut job = Specialiser::new(Bindings::default().fold_bytes);
    let mut map: Vec<Option<ValueId>> = vec![None; graph.values().len()];
    for (&id, fact) in graph.inputs.iter().zip(inputs) {
        let fact = fact.ok_or_else(|| invalid!("a graph reads a value that does not exist"))?;
        let (ty, constant) = (Some(fact.ty.clone()), fact.value.cloned());
        map[id.0 as usize] = Some(job.graph.add_value(Value { ty, constant, ..Value::default() }));
    }
    job.walk(graph, &mut map);
    let mut types = Vec::with_capacity(graph.outputs.len());
    for &id in &graph.outputs {
        match job.mapped(graph, &mut map, id) {
            Some(new) => types.push(job.graph.value(new).ty.clone().ok_or_else(no_tensor)?),
            None => {
                let problem = job.problems.into_iter().next();
                return Err(problem.map_or_else(|| invalid!("a graph has no output"), within));
            }
        }
    }
    Ok(types)
}

/// Makes the error of a node whose subgraph has this problem.
fn within(problem: Problem) -> OpError {
    let error = match problem.reason {
        Reason::Op(error) | Reason::NeedsInput { error, .. } => error,
        reason => invalid!("{reason}"),
    };
    match (error, problem.place) {
        (OpError::Invalid(what), Some(place)) => invalid!("{place}: {what}"),
        (OpError::Unsupported(what), Some(place)) => OpError::Unsupported(format!("{place}: {what}")),
        (error, _) => error,
    }
}

struct Specialiser {
    graph: Graph,
    problems: Vec<Problem>,
    /// Inputs that lack sizes, which are reported together.
    unbound: Unbound,
    fold_bytes: usize,
    /// Whether both subgraphs of an `If` are inlined if its condition is not known.
    takes_both: bool,
    /// Whether loops are unrolled unless they are too long.
    unrolls: bool,
    /// Rows of which some do not count, if there may be such.
    chosen: Option<Chosen>,
}

impl Specialiser {
    fn new(fold_bytes: usize) -> Specialiser {
        let (graph, unbound) = (Graph::default(), Unbound::default());
        Specialiser {
            graph,
            problems: Vec::new(),
            unbound,
            fold_bytes,
            takes_both: false,
            unrolls: false,
            chosen: None,
        }
    }

    fn tell_unbound(&mut self) {
        if !self.unbound.0.is_empty() {
            let unbound = std::mem::take(&mut self.unbound);
            self.refuse(Reason::Unbound(unbound));
        }
    }

    /// Parses a constant that replaces a default of the model.
    fn in_place_of_default(&mut self, default: &Value, text: &str) -> Option<ValueId> {
        let constant = match parsed(default.ty.as_ref()?, text) {
            Ok(constant) => constant,
            Err(what) => {
                self.refuse(Reason::Binding(format!("--set {}: {what}", default.name)));
                return None;
            }
        };
        let ty = Some(constant.ty().clone());
        let new = Value { name: default.name.clone(), ty, constant: Some(constant), ..Value::default() };
        Some(self.graph.add_value(new))
    }

    fn refuse(&mut self, reason: Reason) {
        self.problems.push(Problem { place: None, reason });
    }

    /// Reports bound names that do not exist in the model.
    fn check_names(&mut self, graph: &Graph, bindings: &Bindings) {
        let inputs: Vec<&Value> = graph.inputs.iter().map(|&id| graph.value(id)).collect();
        let names = graph.input_names();
        let all_dims = inputs.iter().filter_map(|value| value.declared.as_ref()?.dims.as_ref()).flatten();
        let dims: Vec<&str> =
            all_dims.filter_map(|dim| if let Dim::Named(name) = dim { Some(&**name) } else { None }).collect();
        let shapes = bindings.shapes.iter().map(|(name, _)| name);
        let is_default = |name: &&String| names[inputs.len()..].contains(&name.as_str());
        if let Some(name) = shapes.clone().find(is_default) {
            self.refuse(Reason::Binding(format!(
                "input `{name}` has the shape of its default (leave --shape {name} out)"
            )));
        }
        for name in shapes.chain(bindings.values.iter().map(|(name, _)| name)) {
            if !names.contains(&name.as_str()) {
                let what = format!("there is no input `{name}` (there are {})", names.join(", "));
                self.refuse(Reason::Binding(what));
            }
        }
        for (name, _) in &bindings.dims {
            if !dims.contains(&name.as_str()) {
                let mut known = dims.clone();
                known.dedup();
                let known =
                    if known.is_empty() { "none has a name".into() } else { format!("there are {}", known.join(", ")) };
                self.refuse(Reason::Binding(format!("no input has a dimension `{name}` ({known})")));
            }
        }
    }

    /// Makes an input with its concrete type, and its elements if they are bound.
    fn input(&mut self, value: &Value, bindings: &Bindings) -> Option<Value> {
        let name = value.name.clone();
        let given_shape = bindings.shapes.iter().rfind(|(n, _)| *n == name).map(|(_, shape)| shape);
        let given_value = bindings.values.iter().rfind(|(n, _)| *n == name).map(|(_, text)| text);
        let Some(declared) = &value.declared else {
            self.refuse(Reason::Op(unsupported!(
                "input `{name}` is no tensor of a supported type (leave it out of the model)"
            )));
            return None;
        };
        let shape = match (given_shape, &declared.dims) {
            (Some(shape), Some(dims)) => {
                let fits = |(dim, size): (&Dim, &usize)| !matches!(dim, Dim::Size(d) if d != size);
                if dims.len() != shape.len() || !dims.iter().zip(shape).all(fits) {
                    let dims: Vec<String> = dims.iter().map(Dim::to_string).collect();
                    let what = format!("--shape {name}={} does not fit the model's", comma(shape));
                    self.refuse(Reason::Binding(format!("{what} [{}]", dims.join(","))));
                    return None;
                }
                shape.clone()
            }
            (Some(shape), None) => shape.clone(),
            (None, Some(dims)) => match bindings.bound(dims) {
                Ok(shape) => shape,
                // A single number needs no shape.
                Err(_) if given_value.is_some_and(|text| !text.contains(',')) => vec![1; dims.len()],
                Err(dims) => {
                    self.unbound.0.push((name, Some(dims)));
                    return None;
                }
            },
            (None, None) if given_value.is_some() => Vec::new(),
            (None, None) => {
                self.unbound.0.push((name, None));
                return None;
            }
        };
        let ty = TensorType::new(declared.dtype, shape);
        if let Err(error) = check_types(std::slice::from_ref(&ty), 1) {
            self.refuse(Reason::Op(error));
            return None;
        }
        let constant = match given_value.map(|text| parsed(&ty, text)).transpose() {
            Ok(constant) => constant,
            Err(what) => {
                self.refuse(Reason::Binding(format!("--set {name}: {what}")));
                return None;
            }
        };
        let is_open = |dim: &Dim| matches!((dim, &bindings.open), (Dim::Named(name), Some(open)) if name == open);
        // A filled mask has the length of the open dimension.
        let is_open = bindings.open.is_some()
            && (constant.is_some() && name == MASK
                || declared.dims.as_ref().is_some_and(|dims| dims.iter().any(is_open)));
        let varies = Varies { shape: is_open, elements: false };
        Some(Value { name, declared: value.declared.clone(), ty: Some(ty), constant, varies, ..Value::default() })
    }

    /// Returns the new value of an old one; constants are copied when they are first read.
    fn mapped(&mut self, old: &Graph, map: &mut [Option<ValueId>], id: ValueId) -> Option<ValueId> {
        let value = old.value(id);
        let slot = &mut map[id.0 as usize];
        if slot.is_none() && value.constant.is_some() {
            let (name, ty, constant) = (value.name.clone(), value.ty.clone(), value.constant.clone());
            let texts = value.texts.clone();
            *slot = Some(self.graph.add_value(Value { name, ty, constant, texts, ..Value::default() }));
        }
        *slot
    }

    fn walk(&mut self, old: &Graph, map: &mut [Option<ValueId>]) {
        for (_, node) in old.nodes() {
            let inputs: Vec<Option<ValueId>> =
                node.inputs.iter().map(|id| id.and_then(|id| self.mapped(old, map, id))).collect();
            let is_complete = node.inputs.iter().zip(&inputs).all(|(old, new)| old.is_some() == new.is_some());
            // A node with an unknown operator fails regardless of its inputs.
            if !is_complete && !matches!(node.op, Op::Unknown(_)) {
                continue;
            }
            if let Err(problem) = self.node(old, node, &inputs, map) {
                self.problems.push(*problem);
            }
        }
    }

    /// Inlines the subgraphs of a node, if its inputs determine which, and drops an `Identity` of a quantized
    /// or dequantized value whose result is no output of the graph. Returns whether it did.
    fn replaced(
        &mut self,
        old: &Graph,
        node: &Node,
        inputs: &[Option<ValueId>],
        map: &mut [Option<ValueId>],
    ) -> Result<bool, Reason> {
        let facts = facts_of(&self.graph, inputs);
        match (&node.op, facts.first()) {
            (Op::If(choice), Some(Some(Fact { value: Some(condition), .. }))) => {
                let body = choice.branch(condition).map_err(Reason::Op)?;
                self.graph.branches.push((node.place.node.to_string(), condition.integers()[0] != 0));
                let outputs = self.inline(&body.graph, &body.captured(inputs));
                name_outputs(node, outputs, map);
            }
            (Op::If(choice), Some(Some(_))) if self.takes_both => self.both(old, choice, node, inputs, map),
            (Op::Loop(op), _) => {
                let outputs = self.repeated(old, op, node, inputs)?;
                name_outputs(node, outputs, map);
            }
            (Op::Scan(op), _) => {
                let body = op.graph(&facts, &node.place).map_err(Reason::Op)?;
                self.inline_operator(old, node, &body, inputs, map);
            }
            // What to make of a mixture of experts is decided by the target, as what to make of branches.
            (Op::Experts(op), _) if self.takes_both => {
                let is_open = inputs[0].is_some_and(|id| self.graph.value(id).varies.shape);
                let body = op.graph(&facts, &node.place, is_open, !self.unrolls).map_err(Reason::Op)?;
                self.inline_operator(old, node, &body, inputs, map);
            }
            // Rules that look for a producer, such as a dequantization, find it.
            (Op::Unary(Unary::Identity), _)
                if self.is_of_quantization(inputs[0])
                    && !node.outputs.iter().flatten().any(|id| old.outputs.contains(id)) =>
            {
                name_outputs(node, vec![inputs[0]], map);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Inlines the graph that a node stands for; values without a name get that of the node's output.
    fn inline_operator(
        &mut self,
        old: &Graph,
        node: &Node,
        body: &Graph,
        inputs: &[Option<ValueId>],
        map: &mut [Option<ValueId>],
    ) {
        let outputs = self.inline(body, inputs);
        for (output, new) in node.outputs.iter().zip(&outputs) {
            if let (Some(output), Some(new)) = (output, new)
                && self.graph.value(*new).name.is_empty()
            {
                self.graph.value_mut(*new).name.clone_from(&old.value(*output).name);
            }
        }
        name_outputs(node, outputs, map);
    }

    /// Whether a value is quantized or dequantized by a node.
    fn is_of_quantization(&self, id: Option<ValueId>) -> bool {
        let producer = self.graph.nodes().find(|(_, node)| node.outputs.contains(&id)).map(|(_, node)| &node.op);
        id.is_some() && matches!(producer, Some(Op::QuantizeLinear(_) | Op::DequantizeLinear(_)))
    }

    fn node(
        &mut self,
        old: &Graph,
        node: &Node,
        inputs: &[Option<ValueId>],
        map: &mut [Option<ValueId>],
    ) -> Result<(), Box<Problem>> {
        match self.is_of_chosen(node, inputs) {
            true => self.chosen_node(old, node, inputs, map),
            false => self.plain_node(old, node, inputs, map),
        }
    }

    fn plain_node(
        &mut self,
        old: &Graph,
        node: &Node,
        inputs: &[Option<ValueId>],
        map: &mut [Option<ValueId>],
    ) -> Result<(), Box<Problem>> {
        let about = |reason: Reason| Box::new(Problem { place: Some(node.place.clone()), reason });
        let refuse = |error: OpError| about(Reason::Op(error));
        if self.replaced(old, node, inputs, map).map_err(about)?
            || self.sequence(old, node, inputs, map).map_err(|error| about(self.reason(error, inputs)))?
        {
            return Ok(());
        }
        let graph = &self.graph;
        let facts = facts_of(graph, inputs);
        let operation = node.op.operation();
        let given = Inputs(&facts);
        let texts: Vec<Option<&Texts>> = inputs.iter().map(|id| graph.value((*id)?).texts.as_ref()).collect();
        let texts = node.op.texts(&texts).map_err(refuse)?;
        let types = match operation.infer(given) {
            Ok(types) => types,
            Err(error) => return Err(about(self.reason(error, inputs))),
        };
        check_types(&types, node.outputs.len()).map_err(refuse)?;
        let n_bytes: usize = types.iter().map(|ty| ty.checked_bytes().expect("it was checked")).sum();
        if n_bytes > MOST_MADE {
            self.check_made(&types, inputs).map_err(refuse)?;
        }
        let is_known = facts.iter().flatten().all(|fact| fact.value.is_some()) || node.op.reads_type_only();
        let is_known = is_known && !node.op.is_random();
        let varies = self.varies(&node.op, inputs);
        let is_folded = is_known && n_bytes <= self.fold_bytes && may_fold(&node.op, given, &types, varies);
        let constants = match is_folded {
            true => Some(operation.evaluate(given).map_err(refuse)?),
            false => None,
        };
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for (at, output) in node.outputs.iter().enumerate() {
            let constant = constants.as_ref().and_then(|constants| constants.get(at).cloned());
            let ty = constant.as_ref().map_or_else(|| types[at].clone(), |constant| constant.ty().clone());
            outputs.push(output.map(|id| {
                let value = old.value(id);
                let (name, declared) = (value.name.clone(), value.declared.clone());
                let texts = texts.clone();
                let new = Value { name, declared, ty: Some(ty), constant, texts, varies, ..Value::default() };
                let new = self.graph.add_value(new);
                map[id.0 as usize] = Some(new);
                new
            }));
        }
        if constants.is_none() {
            let (op, place) = (node.op.clone(), node.place.clone());
            self.graph.add_node(Node { op, place, inputs: inputs.to_vec(), outputs });
        }
        Ok(())
    }

    /// Checks that large outputs are not constants that little is expanded to, which no weights are: all of
    /// them would be in memory, several times while they are made.
    ///
    /// # Errors
    /// If they are.
    fn check_made(&self, types: &[TensorType], inputs: &[Option<ValueId>]) -> Result<(), OpError> {
        let of_inputs = inputs.iter().flatten().filter_map(|id| self.graph.value(*id).ty.as_ref()?.checked_bytes());
        let n_given: usize = of_inputs.fold(0, usize::saturating_add);
        let n_made = types.iter().filter_map(TensorType::checked_bytes).fold(0, usize::saturating_add);
        if n_made / LEAST_GROWTH < n_given || !self.are_of_constants(inputs) {
            return Ok(());
        }
        let (ty, mib) = (&types[0], n_made >> 20);
        Err(invalid!(
            "its output {ty} would be a constant of {mib} MiB made of {n_given} bytes (give it smaller sizes)"
        ))
    }

    /// Whether values are computed from constants alone.
    fn are_of_constants(&self, values: &[Option<ValueId>]) -> bool {
        let mut open: Vec<ValueId> = values.iter().flatten().copied().collect();
        let mut seen = HashSet::new();
        while let Some(id) = open.pop() {
            let value = self.graph.value(id);
            match value.producer {
                _ if value.constant.is_some() || !seen.insert(id) => {}
                Some((node, _)) => open.extend(self.graph.node(node).inputs.iter().flatten()),
                None => return false,
            }
        }
        true
    }

    fn varies(&self, op: &Op, inputs: &[Option<ValueId>]) -> Varies {
        let of_inputs: Vec<Option<Varies>> = inputs.iter().map(|id| Some(self.graph.value((*id)?).varies)).collect();
        outputs_vary(op, &of_inputs)
    }

    /// Reason why a node is rejected; if a value is needed, with the model's inputs that it is computed from.
    fn reason(&self, error: OpError, inputs: &[Option<ValueId>]) -> Reason {
        let OpError::NeedsValue(at) = error else { return Reason::Op(error) };
        let from = inputs.get(at).copied().flatten().map_or(Vec::new(), |id| sources(&self.graph, id));
        Reason::NeedsInput { error, inputs: from }
    }

    /// Inlines a subgraph with the given inputs, and returns its outputs.
    fn inline(&mut self, graph: &Graph, inputs: &[Option<ValueId>]) -> Vec<Option<ValueId>> {
        let mut inner: Vec<Option<ValueId>> = vec![None; graph.values().len()];
        for (&id, &given) in graph.inputs.iter().zip(inputs) {
            inner[id.0 as usize] = given;
        }
        self.walk(graph, &mut inner);
        graph.outputs.iter().map(|&id| self.mapped(graph, &mut inner, id)).collect()
    }

    /// Inlines both subgraphs of a node, and selects among their outputs. A subgraph that does not support
    /// the sizes of its inputs is left out.
    fn both(&mut self, old: &Graph, choice: &If, node: &Node, inputs: &[Option<ValueId>], map: &mut [Option<ValueId>]) {
        let [mut then, mut otherwise] =
            [&choice.then, &choice.otherwise].map(|body| self.inline(&body.graph, &body.captured(inputs)));
        let is_refused = |outputs: &[Option<ValueId>]| outputs.contains(&None);
        let refused = is_refused(&then).then_some(true).or(is_refused(&otherwise).then_some(false));
        match refused {
            Some(true) => then.clone_from(&otherwise),
            Some(false) => otherwise.clone_from(&then),
            None => {}
        }
        for (output, of_both) in node.outputs.iter().zip(then.into_iter().zip(otherwise)) {
            let (Some(output), (Some(then), Some(otherwise))) = (output, of_both) else { continue };
            let name = old.value(*output).name.clone();
            let of_then = self.graph.value(then);
            let (ty, texts) = (of_then.ty.clone(), of_then.texts.clone());
            let new = self.graph.add_value(Value { name, ty, texts, ..Value::default() });
            let (op, place) = (Select { refused }.into(), node.place.clone());
            let inputs = vec![inputs[0], Some(then), Some(otherwise)];
            self.graph.add_node(Node { op, place, inputs, outputs: vec![Some(new)] });
            map[output.0 as usize] = Some(new);
        }
    }

    /// Renames an output of the graph, as values of an inlined subgraph have other names.
    fn named_output(&mut self, id: ValueId, name: &str) -> ValueId {
        let value = self.graph.value(id);
        if value.name == name {
            return id;
        }
        let is_taken = value.producer.is_none() && value.constant.is_none() || self.graph.outputs.contains(&id);
        if !is_taken {
            self.graph.value_mut(id).name = name.to_owned();
            return id;
        }
        let (ty, constant, texts) = (value.ty.clone(), value.constant.clone(), value.texts.clone());
        let is_constant = constant.is_some();
        let new = self.graph.add_value(Value { name: name.to_owned(), ty, constant, texts, ..Value::default() });
        if !is_constant {
            let place = crate::Place { node: name.to_owned(), operator: "Identity".to_owned(), opset: 1 };
            self.graph.add_node(Node { op: Op::identity(), place, inputs: vec![Some(id)], outputs: vec![Some(new)] });
        }
        new
    }
}

/// Facts about a node's inputs, if they are present and typed.
fn facts_of<'g>(graph: &'g Graph, inputs: &[Option<ValueId>]) -> Vec<Option<Fact<'g>>> {
    let fact = |id: &Option<ValueId>| {
        let value = graph.value((*id)?);
        Some(Fact { ty: value.ty.as_ref()?, value: value.constant.as_ref() })
    };
    inputs.iter().map(fact).collect()
}

/// Maps a node's outputs to the values that replace them.
fn name_outputs(node: &Node, outputs: Vec<Option<ValueId>>, map: &mut [Option<ValueId>]) {
    for (output, new) in node.outputs.iter().zip(outputs) {
        output.iter().for_each(|id| map[id.0 as usize] = new);
    }
}

fn comma(shape: &[usize]) -> String {
    let text = shape_text(shape);
    text[1..text.len() - 1].to_owned()
}

/// Maximum size of a tensor that a single number fills, in bytes.
const MOST_FILLED: usize = 1 << 24;

/// Maximum number of bytes of a constant that a node makes of inputs smaller by [`LEAST_GROWTH`].
const MOST_MADE: usize = 1 << 31;
const LEAST_GROWTH: usize = 16;

/// Parses a constant.
fn parsed(ty: &TensorType, text: &str) -> Result<Tensor, String> {
    let mut parts: Vec<&str> = text.split(',').map(str::trim).collect();
    // A single number fills the tensor.
    if let (&[one], Some(n)) = (&parts[..], ty.checked_len().filter(|_| ty.checked_bytes() <= Some(MOST_FILLED))) {
        parts = vec![one; n];
    }
    if Some(parts.len()) != ty.checked_len() {
        return Err(format!("{ty} takes other than {} numbers (give as many as it takes)", parts.len()));
    }
    let refuse = |part: &str| format!("`{part}` is no {}", ty.dtype);
    if ty.dtype.is_float() {
        let numbers: Vec<f64> = parts.iter().map(|p| p.parse().map_err(|_| refuse(p))).collect::<Result<_, _>>()?;
        return Ok(Tensor::from_floats(ty.dtype, ty.shape.clone(), &numbers));
    }
    let (least, most) = ty.dtype.integer_range();
    let read = |part: &&str| {
        let number = match (ty.dtype, *part) {
            (DType::Bool, "true") => 1,
            (DType::Bool, "false") => 0,
            (_, part) => part.parse().map_err(|_| refuse(part))?,
        };
        if (least..=most).contains(&number) { Ok(number) } else { Err(refuse(part)) }
    };
    let numbers: Vec<i128> = parts.iter().map(read).collect::<Result<_, _>>()?;
    Ok(Tensor::from_integers(ty.dtype, ty.shape.clone(), &numbers))
}

/// Inputs of the graph that a value is computed from.
fn sources(graph: &Graph, id: ValueId) -> Vec<String> {
    let mut seen = vec![false; graph.values().len()];
    let (mut stack, mut found) = (vec![id], Vec::new());
    while let Some(id) = stack.pop() {
        if std::mem::replace(&mut seen[id.0 as usize], true) {
            continue;
        }
        let value = graph.value(id);
        match value.producer {
            Some((node, _)) => stack.extend(graph.node(node).inputs.iter().flatten()),
            None if value.constant.is_none() => found.push(value.name.clone()),
            None => {}
        }
    }
    found.sort();
    found
}

/// Copies a graph without dead nodes and values.
fn pruned(graph: &Graph) -> Graph {
    let mut is_needed = vec![false; graph.nodes().len()];
    let mut stack: Vec<ValueId> = graph.outputs.clone();
    while let Some(id) = stack.pop() {
        if let Some((NodeId(node), _)) = graph.value(id).producer
            && !std::mem::replace(&mut is_needed[node as usize], true)
        {
            stack.extend(graph.node(NodeId(node)).inputs.iter().flatten());
        }
    }
    let mut new = Graph::default();
    new.name.clone_from(&graph.name);
    (new.open_size, new.second_size) = (graph.open_size, graph.second_size);
    new.branches.clone_from(&graph.branches);
    let mut map: HashMap<ValueId, ValueId> = HashMap::new();
    let mut moved = |new: &mut Graph, id: ValueId| {
        *map.entry(id).or_insert_with(|| {
            let value = graph.value(id);
            new.add_value(Value { producer: None, users: Vec::new(), ..value.clone() })
        })
    };
    for &id in &graph.inputs {
        let id = moved(&mut new, id);
        new.inputs.push(id);
    }
    for (_, node) in graph.nodes().filter(|(id, _)| is_needed[id.0 as usize]) {
        let inputs = node.inputs.iter().map(|id| id.map(|id| moved(&mut new, id))).collect();
        let outputs = node.outputs.iter().map(|id| id.map(|id| moved(&mut new, id))).collect();
        new.add_node(Node { op: node.op.clone(), place: node.place.clone(), inputs, outputs });
    }
    for &id in &graph.outputs {
        let id = moved(&mut new, id);
        new.outputs.push(id);
    }
    new
}
