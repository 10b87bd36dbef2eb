//! Kernels that turn channels to pixels, in either layout of images.

use tilewright_ir::op::{ProgramBuilder, StageSpec, Workload, WorkloadError};
use tilewright_ir::{DType, Expr, Role};

use super::{Kernel, in_memory};
use crate::net::{Kind, Net, ValueId};

/// Makes the kernel of a [`Kind::Pixels`]; `block_of` tells the block of adjacent channels of an image. A
/// block moves as a whole, since all of its channels are of one pixel.
pub(super) fn pixels(net: &Net, at: usize, block_of: &dyn Fn(ValueId) -> i64) -> Result<Kernel, WorkloadError> {
    let node = &net.nodes[at];
    let Kind::Pixels { block: [rows, columns], before } = node.kind else {
        unreachable!("it turns channels to pixels")
    };
    let (from, to) = (node.input(0), node.output());
    let (size, dtype) = (block_of(to), net.element_type(to).expect("nests are of types that have code"));
    let &[n, channels, height, width] = net.shape(to) else { unreachable!("an image has four dimensions") };
    let n_blocks = channels / size;
    let is_whole = before == [0, 0] && height % rows == 0 && width % columns == 0;
    let mut shape = match is_whole {
        true => vec![n, n_blocks, height / rows, rows, width / columns, columns],
        false => vec![n, n_blocks, height, width],
    };
    shape.extend((size > 1).then_some(size));
    let names: Vec<String> = (0..shape.len()).map(|d| format!("i{d}")).collect();
    let axes: Vec<(&str, i64)> = names.iter().map(String::as_str).zip(shape).collect();
    let mut program = ProgramBuilder::new("nest", DType::F32, Vec::new());
    program.set_dtype(dtype);
    let x = program.input("X", &in_memory(net.shape(from), size));
    program.stage(StageSpec { name: "Y", axes: &axes, reduce: None, role: Role::Output }, |at| {
        let [row, of_row, column, of_column] = match is_whole {
            true => [2, 3, 4, 5].map(|d| at[d].clone()),
            false => {
                let (row, column) = (at[2].offset(before[0]), at[3].offset(before[1]));
                [row.floor_div(rows), row.modulo(rows), column.floor_div(columns), column.modulo(columns)]
            }
        };
        let phase = of_row.scale(columns).add(&of_column);
        let mut place = vec![at[0].clone(), phase.scale(n_blocks).add(&at[1]), row, column];
        place.extend((size > 1).then(|| at[at.len() - 1].clone()));
        Expr::Load(x, place)
    });
    let workload = Workload::nest(program.finish())?;
    let (inputs, origin, members) = (vec![from], node.origin.clone(), vec![at]);
    Ok(Kernel { workload, inputs, output: to, origin, members, block: size, in_blocks: 1, open: None })
}
