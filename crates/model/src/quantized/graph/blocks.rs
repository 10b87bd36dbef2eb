//! Products by weights with scales in blocks, as such of packed weights.

use tilewright_graph::op::{MatMulNBits, ScaledBlocks, axis};
use tilewright_graph::{DType, Node, Op, Tensor, TensorType, ValueId};

use super::Quantizer;

impl Quantizer<'_> {
    /// Rewrites a product by a constant behind a `DequantizeLinear` in blocks that nothing else reads.
    /// Packed weights are an eighth of the bytes that few rows read, or a quarter; results are the same.
    pub fn packed_product(&mut self, node: &Node) -> Option<()> {
        let graph = self.old;
        let (a, weights, to) = (node.inputs[0]?, node.inputs[1]?, node.outputs[0]?);
        let value = graph.value(weights);
        let scaling = graph.node(value.producer?.0);
        let Op::DequantizeLinear(op) = &scaling.op else { return None };
        let input = |at: usize| scaling.inputs.get(at).copied().flatten();
        let known = |id: ValueId| graph.value(id).constant.as_ref();
        let (x, scales) = (known(input(0)?)?, known(input(1)?)?);
        let zeros = match input(2) {
            Some(id) => Some(known(id)?),
            None => None,
        };
        let (&[k, n], size) = (x.shape(), op.0.block) else { return None };
        let is_single = |id: &ValueId| graph.ty(*id).dtype == DType::F32;
        let fits = (16..=256).contains(&size) && size.is_power_of_two() && axis(op.0.axis, 2).ok() == Some(0);
        let is_read_once = value.users.len() == 1 && !graph.outputs.contains(&weights);
        (fits && is_read_once && [a, weights, to].iter().all(is_single)).then_some(())?;
        (scales.dtype() == DType::F32 && graph.ty(a).shape.len() >= 2).then_some(())?;
        let bits = match x.dtype() {
            DType::I2 | DType::U2 => 2,
            DType::I4 | DType::U4 => 4,
            DType::I8 | DType::U8 => 8,
            _ => return None,
        };
        let op = MatMulNBits { n, k, blocks: ScaledBlocks { bits, size }, rounds: false };
        let n_blocks = op.n_blocks();

        // Integers with a sign are counted from the least one.
        let least = x.dtype().integer_range().0 as i64;
        let (each, column_size) = (8 / bits, n_blocks * size);
        let mut bytes = vec![0; n * column_size / each];
        for (at, number) in x.i64s().into_iter().enumerate() {
            let place = at % n * column_size + at / n;
            bytes[place / each] |= ((number - least) as u8) << (bits * (place % each));
        }
        let name = &value.name;
        let turned = |numbers: &[f64]| {
            let numbers: Vec<f64> = (0..n * n_blocks).map(|at| numbers[at % n_blocks * n + at / n_blocks]).collect();
            Tensor::from_floats(DType::F32, [n, n_blocks], &numbers)
        };
        let is_middle = zeros.is_none() && least < 0;
        let zeros = zeros.map_or(vec![0.0; n * n_blocks], Tensor::floats);
        let zeros: Vec<f64> = zeros.into_iter().map(|zero| zero - least as f64).collect();
        let packed = Tensor::new(TensorType::new(DType::U8, [n, n_blocks, size / each]), bytes.into())?;
        let mut inputs = vec![
            Some(self.plain(a)),
            Some(self.add_constant(format!("{name}.packed"), packed)),
            Some(self.add_constant(format!("{name}.scales"), turned(&scales.floats()))),
        ];
        if !is_middle {
            inputs.push(Some(self.add_constant(format!("{name}.zeros"), turned(&zeros))));
        }
        let outputs = vec![Some(self.plain(to))];
        self.add(Node { op: op.into(), place: node.place.clone(), inputs, outputs });
        Some(())
    }
}
