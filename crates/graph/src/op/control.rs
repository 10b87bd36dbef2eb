//! Subgraphs (`If`), and operators that are not supported.

use super::{Inputs, Operation, Operator, row};
use crate::error::invalid;
use crate::evaluate::run;
use crate::specialise::infer_graph;
use crate::{Graph, OpError, Tensor, TensorType};

/// Subgraph of a node. Its last inputs are captured from the node's own inputs.
#[derive(Debug, Clone)]
pub struct Body {
    /// The graph.
    pub graph: Box<Graph>,
    /// Indices of the node's inputs that the subgraph's last inputs are bound to.
    pub captures: Vec<usize>,
}

impl Body {
    /// Inputs of the node that the graph captures, in the order of the graph's last inputs.
    pub(crate) fn captured<T: Copy>(&self, inputs: &[T]) -> Vec<T> {
        self.captures.iter().map(|&at| inputs[at]).collect()
    }
}

/// `If`: runs one of two subgraphs, chosen by the boolean in input 0.
#[derive(Debug, Clone)]
pub struct If {
    /// Subgraph for true.
    pub then: Body,
    /// Subgraph for false.
    pub otherwise: Body,
}

/// Selection by a single boolean, input 0: input 1 if true, else input 2. Joins the outputs of both subgraphs
/// of an [`If`] if these are computed unconditionally.
#[derive(Debug, Clone, Copy)]
pub struct Select {
    /// Condition whose subgraph cannot be computed with these shapes: a run in which it occurs fails.
    pub refused: Option<bool>,
}

/// Operator that is not supported, kept so that the rest of the model can be shown.
#[derive(Debug, Clone)]
pub struct Unknown {
    /// Reason.
    pub reason: OpError,
}

pub(super) const ROWS: &[Operator] = &[row("If", &[1, 11, 13, 16, 19, 21, 23, 24, 25], 1..=1, |node| {
    Ok(If { then: node.body("then_branch")?, otherwise: node.body("else_branch")? }.into())
})];

impl If {
    /// Subgraph that a condition selects.
    ///
    /// # Errors
    /// If the condition does not have exactly one element.
    pub fn branch(&self, condition: &Tensor) -> Result<&Body, OpError> {
        match condition.integers()[..] {
            [holds] => Ok(if holds != 0 { &self.then } else { &self.otherwise }),
            _ => Err(invalid!("its condition {condition:?} is not one element")),
        }
    }
}

impl Operation for If {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let types = |body: &Body| infer_graph(&body.graph, &body.captured(inputs.0));
        if let Some(condition) = inputs.fact(0)?.value {
            return types(self.branch(condition)?);
        }
        match (types(&self.then), types(&self.otherwise)) {
            (Ok(found), Ok(other)) if found == other => Ok(found),
            (Ok(_), Ok(_)) => Err(OpError::NeedsValue(0)),
            // If sizes fit only one subgraph, runs with these sizes are expected to select it.
            (Ok(found), Err(OpError::Invalid(_))) | (Err(OpError::Invalid(_)), Ok(found)) => Ok(found),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let body = self.branch(inputs.tensor(0)?)?;
        let given = body.captured(inputs.0).into_iter().map(|fact| {
            fact.and_then(|fact| fact.value)
                .cloned()
                .ok_or_else(|| invalid!("a graph reads a value that does not exist"))
        });
        run(&body.graph, given.collect::<Result<_, _>>()?).map_err(|error| match error.reason() {
            Some(reason) => reason.clone(),
            None => invalid!("{error}"),
        })
    }
}

impl Operation for Select {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (a, b) = (inputs.ty(1)?, inputs.ty(2)?);
        if a == b { Ok(vec![a.clone()]) } else { Err(invalid!("it has {a} or {b}, and should have one type")) }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let holds = inputs.tensor(0)?.integers().first().is_some_and(|holds| *holds != 0);
        if self.refused == Some(holds) {
            return Err(invalid!("its condition is {holds}, and that graph refuses the sizes of its inputs"));
        }
        Ok(vec![inputs.tensor(if holds { 1 } else { 2 })?.clone()])
    }
}

impl Operation for Unknown {
    fn infer(&self, _: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Err(self.reason.clone())
    }

    fn evaluate(&self, _: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        Err(self.reason.clone())
    }
}
