//! Operators that no kernel computes, imported as calls of generated C functions.

use tilewright_graph::DType;
use tilewright_runtime::host::{COUPLING, DET, HostCall, HostOperator, SELECT};

use super::job::NodeImport;
use crate::net::{Kind, ValueId};
use crate::no_code::Lowered;

impl NodeImport<'_> {
    /// Number that stands for a value's element type among the parameters of host operators.
    pub(super) fn type_number(&self, id: ValueId) -> Lowered<i64> {
        let name = self.net.value(id).dtype.name();
        let found = tilewright_ir::DType::ALL.into_iter().find(|(_, known)| *known == name);
        let (dtype, _) = found.ok_or_else(|| self.no_code_for(id, "types of kernels"))?;
        Ok(HostCall::type_number(dtype))
    }

    /// Calls a host operator.
    pub(super) fn call(
        &mut self,
        operator: HostOperator,
        parameters: Vec<i64>,
        scratch_bytes: usize,
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) {
        let call = HostCall { operator, parameters, sizes: Vec::new(), scratch_bytes };
        self.push_several(Kind::Call(Box::new(call)), inputs, outputs);
    }

    /// Returns the node's output at an index, or an unused value of this type.
    pub(super) fn output_or(&mut self, at: usize, dtype: DType, shape: &[i64]) -> ValueId {
        match self.try_output(at) {
            Some(id) => id,
            None => self.value(&format!("unused{at}"), dtype, shape),
        }
    }

    /// Lowers determinants of matrices.
    pub(super) fn determinants(&mut self) -> Lowered {
        let (x, to, shape) = (self.input(0)?, self.output()?, self.shape(0)?);
        self.need_real(x)?;
        let &[ref outer @ .., n, _] = &shape[..] else { return Err(self.no_code_of_rank(x, "matrices")) };
        let parameters = vec![self.type_number(x)?, outer.iter().product(), n];
        self.call(DET, parameters, 8 * (n * n) as usize, &[x], &[to]);
        Ok(())
    }

    /// Selects the result of one of two graphs.
    pub(super) fn selected(&mut self, refused: Option<bool>) -> Lowered {
        let (truth, a, b, to) = (self.input(0)?, self.input(1)?, self.input(2)?, self.output()?);
        let parameters = vec![self.net.value(to).n_bytes() as i64, refused.map_or(-1, i64::from)];
        self.call(SELECT, parameters, 0, &[truth, a, b], &[to]);
        Ok(())
    }

    /// Computes probabilities of classes from those of their pairs.
    pub(super) fn coupled(&mut self, n_classes: usize) -> Lowered {
        let (pairs, to) = (self.input(0)?, self.output()?);
        self.need_f32(pairs)?;
        let scratch_bytes = 16 * n_classes * (n_classes + 1);
        self.call(COUPLING, vec![self.net.shape(to)[0], n_classes as i64], scratch_bytes, &[pairs], &[to]);
        Ok(())
    }
}
