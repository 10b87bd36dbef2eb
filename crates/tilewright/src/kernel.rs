//! A kernel in this process, called on slices.

use tilewright_codegen::compile;
use tilewright_device::host;
use tilewright_ir::op::Workload;
use tilewright_ir::{DType, Role, lower};
use tilewright_runtime::Call;

use crate::best::Best;
use crate::error::Error;

/// A configuration of a workload, compiled for this machine.
pub struct Kernel {
    call: Call,
    workload: Workload,
    /// Name, role and elements of each argument.
    arguments: Vec<(String, Role, usize)>,
    /// An element type that arguments have besides or instead of f32.
    other_dtype: Option<DType>,
}

impl Kernel {
    /// Compiles the kernel of a recorded configuration, with `threads` threads of its own.
    ///
    /// # Errors
    /// Where the configuration is not of the template's space as it is now, its code cannot be made, or
    /// memory or threads do not suffice.
    pub fn new(workload: &Workload, best: &Best, threads: usize) -> Result<Kernel, Error> {
        let target = host::target();
        let lowered = lower::lower(&best.choice(workload, &target, threads)?.program()?);
        let kernel = compile(&lowered, &target).map_err(|error| Error::failed(&error).because(error))?;
        let cannot =
            |error: std::io::Error| Error::failed(format!("no memory or threads for {workload}")).because(error);
        let arguments =
            lowered.arguments().map(|(_, b)| (b.name.clone(), b.role, b.n_elements().unwrap_or(0) as usize));
        let arguments: Vec<_> = arguments.collect();
        let n_bytes: Vec<u64> = lowered.arguments().map(|(_, b)| b.size_bytes().unwrap_or(0)).collect();
        let call = Call::new(kernel, &n_bytes, threads).map_err(cannot)?;
        let other_dtype = lowered.arguments().map(|(_, b)| b.dtype).find(|dtype| *dtype != DType::F32);
        Ok(Kernel { call, workload: workload.clone(), arguments, other_dtype })
    }

    /// Name, role and number of elements of each argument, in order.
    pub fn arguments(&self) -> impl Iterator<Item = (&str, Role, usize)> {
        self.arguments.iter().map(|(name, role, n)| (name.as_str(), *role, *n))
    }

    /// Runs it: inputs in their order, then outputs in theirs, all row-major and packed. Inputs that the
    /// workload says are constant are read in the first run alone, and whenever [`Kernel::forget_constants`]
    /// was called.
    ///
    /// # Errors
    /// Where the number of arguments, their lengths or the element type are not the workload's.
    pub fn run(&mut self, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) -> Result<(), Error> {
        if let Some(other) = self.other_dtype {
            return Err(Error::input(format!("{} takes {}, not f32", self.workload, other.name())));
        }
        let is_input = |role: Role| role != Role::Output;
        let of = |wanted: bool| self.arguments.iter().filter(move |(_, role, _)| is_input(*role) == wanted);
        let check = |wanted: bool, given: &[usize]| -> Result<(), Error> {
            let expected: Vec<usize> = of(wanted).map(|(_, _, n)| *n).collect();
            let what = if wanted { "inputs" } else { "outputs" };
            if expected == given {
                return Ok(());
            }
            let names: Vec<String> = of(wanted).map(|(name, _, n)| format!("{name}[{n}]")).collect();
            Err(Error::input(format!(
                "{what} of {given:?} elements do not fit {} (give {})",
                self.workload,
                names.join(", ")
            )))
        };
        check(true, &inputs.iter().map(|x| x.len()).collect::<Vec<_>>())?;
        check(false, &outputs.iter().map(|x| x.len()).collect::<Vec<_>>())?;
        let mut next = inputs.iter();
        for (at, (_, role, _)) in self.arguments.iter().enumerate() {
            if is_input(*role) {
                let input = next.next().expect("their number was checked");
                if *role != Role::ConstInput || !self.call.is_prepared() {
                    self.call.argument_mut(at).copy_from_slice(input);
                }
            }
        }
        self.call.run();
        let mut next = outputs.iter_mut();
        for (at, (_, role, _)) in self.arguments.iter().enumerate() {
            if !is_input(*role) {
                next.next().expect("their number was checked").copy_from_slice(self.call.argument_mut(at));
            }
        }
        Ok(())
    }

    /// Has constant inputs read again in the next run.
    pub fn forget_constants(&mut self) {
        self.call.forget_prepared();
    }
}
