//! Import of operators with block-quantized weights of 2, 4 or 8 bits.

use tilewright_graph::op::{GatherBlockQuantized, Inputs, MatMulNBits, Operation, PackedWeights};
use tilewright_graph::{DType, Tensor, TensorType};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};
use tilewright_ir::op::Packed;

use crate::import::{NodeImport, from_start};
use crate::net::{Kind, Packing, ValueId};
use crate::no_code::Lowered;
use crate::scalar::{add, input, mul, number, of, sub, where_less};

/// Number of rows below which a product takes as long as reading its weights.
const STREAMED_ROWS: i64 = 8;

impl NodeImport<'_> {
    /// Lowers a product with constant weights of few bits. On CPUs with dot products of 8-bit integers, the
    /// weights stay packed if operand A is quantized to 8 bits, or if there are so few rows that reading the
    /// weights dominates; else the weights are dequantized.
    pub(crate) fn packed_product(&mut self, op: &MatMulNBits) -> Lowered {
        let (a, to) = (self.input(0)?, self.output()?);
        self.need_f32(a)?;
        self.need_f32(to)?;
        let facts = self.facts();
        let inputs = Inputs(&facts);
        let is_empty = op.is_empty(inputs)?;
        let rounds = op.rounds_with(inputs);
        let weights = if is_empty { None } else { Some(op.weights(inputs)?) };
        let bias = self.try_input(5);
        let (n, k) = (op.n as i64, op.k as i64);
        let out = self.net.shape(to).to_vec();
        let rows = out[..out.len() - 1].iter().product::<i64>();
        let Some(weights) = weights else {
            let zero = self.constant("zero", &[], &[0.0]);
            self.push(Kind::Map(input(0)), &[bias.unwrap_or(zero)], to);
            return Ok(());
        };
        let a = self.viewed("rows", a, &[rows, k]);
        let has_groups = self.try_input(4).is_some();
        let is_packed = self.dots && (rounds || rows < STREAMED_ROWS && !has_groups);
        let mut product = if is_packed && rows > 0 && n > 0 {
            self.product_as_packed(op, &weights, a, rounds)
        } else {
            let a = if rounds { self.rounded_by_blocks(a, rows, k, op.blocks.size as i64) } else { a };
            let weights = self.constant("weights", &[n, k], &weights.singles());
            self.step("product", Kind::Product { turned: true, heads: None }, &[a, weights], &[rows, n])
        };
        if let Some(bias) = bias {
            product = self.step("biased", Kind::Map(add(input(0), input(1))), &[product, bias], &[rows, n]);
        }
        self.push(Kind::View, &[product], to);
        Ok(())
    }

    /// Lowers to a product with packed weights, in the order in which dot products read them.
    fn product_as_packed(&mut self, op: &MatMulNBits, weights: &PackedWeights, a: ValueId, rounds: bool) -> ValueId {
        let (rows, n, n_blocks, block) = (self.net.shape(a)[0], op.n, op.n_blocks(), op.blocks.size);
        let whole = n_blocks * block;
        let a = match whole == op.k {
            true => a,
            false => self.step("padded", Kind::Pad(vec![0, 0], 0.0), &[a], &[rows, whole as i64]),
        };
        // Weights of 2 bits are stored as 4 bits, in the middle of the range.
        let (bits, offset) = if op.blocks.bits == 2 { (4, 6) } else { (op.blocks.bits, 0) };
        let each = 8 / bits;
        let mut bytes = vec![0; whole / each * n];
        for (j, column) in weights.numbers.chunks(op.k).enumerate() {
            for (at, x) in column.iter().enumerate() {
                let (row, shift) = match each {
                    1 => (at, 0),
                    _ => (at / 8 * 4 + at % 4, 4 * (at / 4 % 2)),
                };
                bytes[row * n + j] |= (x + offset) << shift;
            }
        }
        let turned = |numbers: &[f32], offset: f32| -> Vec<f32> {
            (0..n_blocks * n).map(|at| numbers[at % n * n_blocks + at / n] + offset).collect()
        };
        let of_blocks = [n_blocks as i64, n as i64];
        let ty = TensorType::new(DType::U8, [whole / each, n]);
        let packed = self.value("packed", DType::U8, &[(whole / each) as i64, n as i64]);
        self.net.values[packed.0].constant = Tensor::new(ty, bytes.into());
        let mut inputs = vec![a, packed, self.constant("scales", &of_blocks, &turned(&weights.scales, 0.0))];
        let middle = f32::from(op.blocks.middle());
        let has_zeros = weights.zeros.iter().any(|zero| *zero != middle);
        if has_zeros {
            let zeros = turned(&weights.zeros, f32::from(offset));
            inputs.push(self.constant("zeros", &of_blocks, &zeros));
        }
        let kind = Kind::Packed(Packing { bits: bits as i64, block: block as i64, has_zeros, rounds });
        self.step("product", kind, &inputs, &[rows, n as i64])
    }

    /// Rounds each block of rows of numbers to multiples of its own scale: see
    /// [`tilewright_graph::op::rounded_block`].
    fn rounded_by_blocks(&mut self, a: ValueId, rows: i64, k: i64, block: i64) -> ValueId {
        let n_blocks = (k + block - 1) / block;
        let whole = n_blocks * block;
        let padded = match whole == k {
            true => a,
            false => self.step("padded", Kind::Pad(vec![0, 0], 0.0), &[a], &[rows, whole]),
        };
        let (blocks, of_blocks) = ([rows, n_blocks, block], [rows, n_blocks, 1]);
        let x = self.viewed("blocks", padded, &blocks);
        let size = self.step("size", Kind::Map(of(UnaryOp::Abs, input(0))), &[x], &blocks);
        let most = self.step("most", Kind::Reduce(ReduceOp::Max, vec![2]), &[size], &of_blocks);
        let over = |a: Expr, b: Expr| Expr::binary(BinaryOp::Div, a, b);
        let scale = self.step("scale", Kind::Map(over(input(0), number(127.0))), &[most], &of_blocks);
        let least = number(f64::from(Packed::LEAST));
        let inverse = where_less(input(0), least, number(0.0), over(number(127.0), input(0)));
        let inverse = self.step("inverse", Kind::Map(inverse), &[most], &of_blocks);
        let rounded = mul(of(UnaryOp::Round, mul(input(0), input(2))), input(1));
        let rounded = self.step("rounded", Kind::Map(rounded), &[x, scale, inverse], &blocks);
        let rounded = self.viewed("whole", rounded, &[rows, whole]);
        match whole == k {
            true => rounded,
            false => self.step("cut", Kind::Slice(vec![(0, 1); 2]), &[rounded], &[rows, k]),
        }
    }

    /// Lowers slices of a constant table of few bits. If blocks are within rows, rows stay packed until they
    /// are gathered.
    pub(crate) fn packed_slices(&mut self, op: &GatherBlockQuantized) -> Lowered {
        let (index, to) = (self.input(1)?, self.output()?);
        self.need_f32(to)?;
        self.need_integers(index)?;
        let table = self.packed_table(op);
        let (shape, gather_axis) = match &table {
            Some(table) => (vec![table.rows, table.columns], 0),
            None => {
                let facts = self.facts();
                let shape: Vec<i64> = op.numbers(Inputs(&facts))?.0.into_iter().map(|n| n as i64).collect();
                let axis = tilewright_graph::op::axis(op.gather_axis, shape.len())?;
                (shape, axis)
            }
        };
        let n = shape[gather_axis];
        // An index out of bounds gives the row of zeros after the last row.
        let place = from_start(input(0), n);
        let end = number(n as f64);
        let inside = where_less(place.clone(), end.clone(), place.clone(), end.clone());
        let place = where_less(place, number(0.0), end, inside);
        let index_shape = self.net.shape(index).to_vec();
        let count = index_shape.iter().product();
        let places = self.whole_map("places", place, &[index], &index_shape);
        let places = self.viewed("list", places, &[count]);
        let take = Kind::Gather { axis: 0, by_element: false };
        let Some(table) = table else {
            return self.slices_of_numbers(op, &shape, gather_axis, places, count, to);
        };
        let PackedTable { columns, block, bits, bytes, scales, zeros, .. } = table;
        let each = 8 / bits as i64;
        let ty = TensorType::new(DType::U8, [n as usize + 1, (columns / each) as usize]);
        let known = Tensor::new(ty, bytes.into()).expect("a table has a row more than it had");
        let packed = self.value("packed", DType::U8, &[n + 1, columns / each]);
        self.net.values[packed.0].constant = Some(known);
        let taken = self.step("taken", take.clone(), &[packed, places], &[count, columns / each]);
        let apart = [count, columns / each, 1];
        let taken = self.viewed("apart", taken, &apart);
        let unpacked = match each {
            1 => taken,
            _ => {
                let parts: Vec<ValueId> = (0..each).map(|at| self.bits_of(taken, bits, at, &apart)).collect();
                self.step("unpacked", Kind::Concat(2), &parts, &[count, columns / each, each])
            }
        };
        let n_blocks = columns / block;
        let unpacked = self.viewed("by block", unpacked, &[count, n_blocks, block]);
        let [scale, zero] = [scales, zeros].map(|numbers| {
            let all = self.constant("by row", &[n + 1, n_blocks], &numbers);
            let taken = self.step("of blocks", take.clone(), &[all, places], &[count, n_blocks]);
            self.viewed("of block", taken, &[count, n_blocks, 1])
        });
        let numbers = self.value("numbers", DType::F32, &[count, n_blocks, block]);
        let value = mul(sub(input(0), input(2)), input(1));
        self.push(Kind::Map(value), &[unpacked, scale, zero], numbers);
        self.push(Kind::View, &[numbers], to);
        Ok(())
    }

    /// Extracts the numbers at a bit position in bytes.
    fn bits_of(&mut self, bytes: ValueId, bits: usize, at: i64, shape: &[i64]) -> ValueId {
        let down = |x: Expr, bits: i64| match bits {
            0 => x,
            _ => of(UnaryOp::Floor, mul(x, number(1.0 / f64::from(1 << bits)))),
        };
        let bits = bits as i64;
        let low = down(input(0), bits * at);
        let high = down(input(0), bits * (at + 1));
        let value = sub(low, mul(high, number(f64::from(1 << bits))));
        let to = self.value("bits", DType::F32, shape);
        self.push(Kind::Map(value), &[bytes], to)
    }

    /// Lowers slices of a table that is unpacked beforehand.
    fn slices_of_numbers(
        &mut self,
        op: &GatherBlockQuantized,
        shape: &[i64],
        axis: usize,
        places: ValueId,
        count: i64,
        to: ValueId,
    ) -> Lowered {
        let facts = self.facts();
        let numbers = op.numbers(Inputs(&facts))?.1;
        let (outer, n, inner) =
            (shape[..axis].iter().product::<i64>(), shape[axis], shape[axis + 1..].iter().product::<i64>());
        let mut with_zeros = Vec::with_capacity(numbers.len() + (outer * inner) as usize);
        for part in numbers.chunks((n * inner) as usize) {
            with_zeros.extend_from_slice(part);
            with_zeros.resize(with_zeros.len() + inner as usize, 0.0);
        }
        let table = self.constant("table", &[outer, n + 1, inner], &with_zeros);
        let take = Kind::Gather { axis: 1, by_element: false };
        let taken = self.step("taken", take, &[table, places], &[outer, count, inner]);
        self.push(Kind::View, &[taken], to);
        Ok(())
    }

    /// Constant matrix whose rows are gathered and whose blocks are within rows, followed by a row of zeros.
    fn packed_table(&self, op: &GatherBlockQuantized) -> Option<PackedTable> {
        let facts = self.facts();
        let inputs = Inputs(&facts);
        op.infer(inputs).ok()?;
        let data = inputs.tensor(0).ok()?;
        let &[rows, width] = data.shape() else { return None };
        let axis = |axis: i64| tilewright_graph::op::axis(axis, 2).ok();
        (axis(op.gather_axis)? == 0 && axis(op.quantize_axis)? == 1).then_some(())?;
        let offset = if data.dtype() == DType::I4 { 8.0 } else { 0.0 };
        let is_bytes = data.dtype() == DType::U8;
        let bits = if is_bytes { op.blocks.bits } else { 4 };
        let columns = if is_bytes { width * 8 / bits } else { width };
        (rows > 0 && columns > 0 && columns.is_multiple_of(op.blocks.size)).then_some(())?;
        let n_blocks = columns / op.blocks.size;
        let middle = if is_bytes { f32::from(op.blocks.middle()) } else { offset };
        let single = |tensor: &Tensor| tensor.floats().into_iter().map(|x| x as f32).collect::<Vec<f32>>();
        let mut zeros = match inputs.optional_tensor(3).ok()? {
            None => vec![middle; rows * n_blocks],
            Some(zeros) if is_bytes => {
                let row = zeros.shape()[1];
                op.blocks.unpacked(zeros.bytes(), row, n_blocks).into_iter().map(f32::from).collect()
            }
            Some(zeros) => single(zeros).into_iter().map(|zero| zero + offset).collect(),
        };
        let mut bytes = match is_bytes {
            true => data.bytes().to_vec(),
            false => {
                let numbers: Vec<i128> = data.integers().into_iter().map(|x| x + offset as i128).collect();
                Tensor::from_integers(DType::U4, data.shape(), &numbers).packed().to_vec()
            }
        };
        let mut scales = single(inputs.tensor(2).ok()?);
        bytes.resize(bytes.len() + columns * bits / 8, 0);
        [&mut scales, &mut zeros].into_iter().for_each(|list| list.resize(list.len() + n_blocks, 0.0));
        let [rows, columns, block] = [rows, columns, op.blocks.size].map(|n| n as i64);
        Some(PackedTable { rows, columns, block, bits, bytes, scales, zeros })
    }
}

/// Matrix of unsigned numbers, several of which share a byte, with scales and zero points of the blocks in
/// its rows.
struct PackedTable {
    rows: i64,
    columns: i64,
    block: i64,
    bits: usize,
    bytes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
}
