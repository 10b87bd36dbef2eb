//! Products by weights with scales in blocks, as such of packed weights.

use tilewright_graph::op::{Binary, MatMulNBits, ScaledBlocks, axis};
use tilewright_graph::{DType, Node, Op, Tensor, TensorType, ValueId};

use super::Quantizer;

impl Quantizer<'_> {
    /// Rewrites a product by a constant behind a `DequantizeLinear` in blocks that nothing else reads, with
    /// a column, or a row if the product `transposes` it, for each result. Packed weights are an eighth of
    /// the bytes that few rows read, or a quarter; results are the same.
    pub fn packed_product(&mut self, node: &Node, transposes: bool) -> Option<()> {
        let graph = self.old;
        let (a, weights, to) = (node.inputs[0]?, node.inputs[1]?, node.outputs[0]?);
        let is_read_once = |id: ValueId| graph.value(id).users.len() == 1 && !graph.outputs.contains(&id);
        let producer = graph.node(graph.value(weights).producer?.0);
        let (weights, is_turned) = match &producer.op {
            Op::Transpose(turn) if turn.order.as_deref().is_none_or(|order| order == [1, 0]) => {
                is_read_once(weights).then_some((producer.inputs[0]?, !transposes))?
            }
            _ => (weights, transposes),
        };
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
        let (&[rows, columns], size) = (x.shape(), op.0.block) else { return None };
        let ([k, n], along) = if is_turned { ([columns, rows], 1) } else { ([rows, columns], 0) };
        let is_single = |id: &ValueId| graph.ty(*id).dtype == DType::F32;
        let fits = (16..=256).contains(&size) && size.is_power_of_two() && axis(op.0.axis, 2).ok() == Some(along);
        (fits && is_read_once(weights) && [a, weights, to].iter().all(is_single)).then_some(())?;
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
            let (row, column) = if is_turned { (at % k, at / k) } else { (at / n, at % n) };
            let place = column * column_size + row;
            bytes[place / each] |= ((number - least) as u8) << (bits * (place % each));
        }
        let name = &value.name;
        let of_columns = |numbers: &[f64]| {
            let place = |at: usize| if is_turned { at } else { at % n_blocks * n + at / n_blocks };
            let numbers: Vec<f64> = (0..n * n_blocks).map(|at| numbers[place(at)]).collect();
            Tensor::from_floats(DType::F32, [n, n_blocks], &numbers)
        };
        let is_middle = zeros.is_none() && least < 0;
        let zeros = zeros.map_or(vec![0.0; n * n_blocks], Tensor::floats);
        let zeros: Vec<f64> = zeros.into_iter().map(|zero| zero - least as f64).collect();
        let packed = Tensor::new(TensorType::new(DType::U8, [n, n_blocks, size / each]), bytes.into())?;
        let mut inputs = vec![
            Some(self.plain(a)),
            Some(self.add_constant(format!("{name}.packed"), packed)),
            Some(self.add_constant(format!("{name}.scales"), of_columns(&scales.floats()))),
        ];
        if !is_middle {
            inputs.push(Some(self.add_constant(format!("{name}.zeros"), of_columns(&zeros))));
        }
        let (mut op, outputs) = (Op::from(op), vec![Some(self.plain(to))]);
        if let Some(added) = node.inputs.get(2).copied().flatten() {
            let name = format!("{}.product", graph.value(to).name);
            let product = self.step(name, op, &node.place, inputs)?;
            (op, inputs) = (Binary::Add.into(), vec![Some(product), Some(self.plain(added))]);
        }
        self.add(Node { op, place: node.place.clone(), inputs, outputs });
        Some(())
    }
}
