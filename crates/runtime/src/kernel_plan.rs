//! Plans of single kernels.

use bytes::Bytes;
use tilewright_codegen::CallerBuffer;
use tilewright_ir::{Part, Role};

use crate::plan::{Constant, Place, Plan, PlanStep, Work};

/// Makes the plan that runs a kernel alone, from its buffers, its parts, and the alignment of its own memory;
/// see [`crate::Code::plan`].
pub(crate) fn plan_of_kernel(
    name: &str,
    buffers: &[CallerBuffer],
    has: &dyn Fn(Part) -> bool,
    line: usize,
    constant: &dyn Fn(&str) -> Option<Bytes>,
) -> Plan {
    let mut plan = Plan::default();
    let (mut n_inputs, mut n_outputs, mut arena_end) = (0, 0, 0);
    let (mut arguments, mut kept) = (Vec::new(), Vec::new());
    let data: Vec<Option<Bytes>> = buffers
        .iter()
        .map(|b| matches!(b.role, Role::Input | Role::ConstInput).then(|| constant(&b.name)).flatten())
        .collect();
    let is_read_as_input = |(b, data): (&CallerBuffer, &Option<Bytes>)| {
        b.read_by.contains(&Part::Prepare) && b.role != Role::Kept && data.is_none()
    };
    let is_changed = |b: &CallerBuffer| b.written_by.contains(&Part::Prepare) && b.written_by.len() > 1;
    let is_prepared_once = !buffers.iter().zip(&data).any(is_read_as_input) && !buffers.iter().any(is_changed);
    for (b, data) in buffers.iter().zip(data) {
        let n_bytes = b.size_bytes as usize;
        let place = match (b.role, data) {
            (_, Some(data)) => {
                plan.constants.push(Constant::Data(data));
                Place::Constant(plan.constants.len() - 1)
            }
            (Role::Output, None) => {
                n_outputs += 1;
                Place::Output(n_outputs - 1)
            }
            (Role::Kept, None) if is_prepared_once && b.written_by.contains(&Part::Prepare) => {
                plan.constants.push(Constant::Prepared(n_bytes));
                Place::Constant(plan.constants.len() - 1)
            }
            (Role::Kept | Role::Temporary, None) => {
                arena_end += n_bytes.next_multiple_of(line);
                Place::Arena(arena_end - n_bytes.next_multiple_of(line))
            }
            (Role::Input | Role::ConstInput, None) => {
                n_inputs += 1;
                Place::Input(n_inputs - 1)
            }
        };
        let shape: Vec<usize> = b.shape.iter().map(|extent| *extent as usize).collect();
        let tensor = plan.tensor(&b.name, b.dtype, &shape, place);
        let list = if b.role == Role::Kept { &mut kept } else { &mut arguments };
        list.push(plan.whole(tensor));
    }
    let in_runs = |part: &Part| has(*part) && (*part != Part::Prepare || !is_prepared_once);
    let parts = Part::ALL.map(|(part, _)| part).into_iter().filter(in_runs).collect();
    let work = Work::Kernel { kernel: 0, arguments, kept, parts, all_threads: true, sizes: Vec::new() };
    plan.steps.push(PlanStep { name: name.to_owned(), work, guard: None });
    plan
}
