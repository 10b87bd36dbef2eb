//! Kernels compiled into this process, called on slices.

use tilewright_codegen::compile;
use tilewright_device::host;
use tilewright_ir::op::Workload;
use tilewright_ir::{DType, Role, lower};
use tilewright_runtime::KernelCall;

use crate::best::Best;
use crate::element::{Element, Elements, ElementsMut};
use crate::error::Error;
use crate::subject::workload::require_one_size;

/// Compiled kernel of a workload's configuration, with its own thread pool.
pub struct Kernel {
    call: KernelCall,
    workload: Workload,
    arguments: Vec<Argument>,
}

/// Argument of a kernel: a tensor, row-major and packed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Argument {
    /// Name in the workload's program.
    pub name: String,
    /// Role: input, constant input or output.
    pub role: Role,
    /// Type of the elements.
    pub dtype: DType,
    /// Extents, outermost first; the last dimension is contiguous.
    pub shape: Vec<usize>,
}

impl Argument {
    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the argument is an input.
    pub fn is_input(&self) -> bool {
        self.role != Role::Output
    }
}

impl Kernel {
    /// Compiles the kernel of a recorded configuration, with a pool of `threads` threads.
    ///
    /// # Errors
    /// If the configuration is not in the template's current space, its code cannot be generated, or memory
    /// or threads are insufficient.
    pub fn new(workload: &Workload, best: &Best, threads: usize) -> Result<Kernel, Error> {
        require_one_size(workload, "a call")?;
        let target = host::target();
        let lowered = lower::lower(&best.choice(workload, &target, threads)?.program()?);
        let kernel = compile(&lowered, &target).map_err(|error| Error::failed(&error).because(error))?;
        let cannot =
            |error: std::io::Error| Error::failed(format!("no memory or threads for {workload}")).because(error);
        let arguments = lowered.arguments().map(|(_, buffer)| Argument {
            name: buffer.name.clone(),
            role: buffer.role,
            dtype: buffer.dtype,
            shape: buffer.shape.iter().map(|&extent| usize::try_from(extent).unwrap_or(0)).collect(),
        });
        let arguments: Vec<Argument> = arguments.collect();
        let n_bytes: Vec<u64> = lowered.arguments().map(|(_, buffer)| buffer.size_bytes().unwrap_or(0)).collect();
        let call = KernelCall::new(kernel, &n_bytes, threads).map_err(cannot)?;
        Ok(Kernel { call, workload: workload.clone(), arguments })
    }

    /// Arguments, in the order in which [`Kernel::run`] takes inputs and outputs. Each is row-major and
    /// packed: for a shape `[m, k]`, the element `[i, j]` has index `i * k + j` in its slice.
    ///
    /// ```standalone_crate
    /// use tilewright::{DType, Request, Session};
    ///
    /// fn main() -> Result<(), tilewright::Error> {
    ///     tilewright::serve_if_worker();
    /// #   let folder = tempfile::tempdir().unwrap();
    /// #   let session = Session::open(folder.path().join("records.db"))?;
    /// #   /*
    ///     let session = Session::open("records.db")?;
    /// #   */
    ///     let request = Request::parse("matmul:m=2,n=4,k=3,dtype=f64")?.trials(2);
    ///     session.tune(&request)?;
    ///     let mut kernel = session.kernel(request.workload()?, 1)?;
    ///     let [a, b, c] = kernel.arguments() else { panic!("a product has two factors and a result") };
    ///     assert_eq!((a.name.as_str(), a.dtype, &a.shape[..]), ("A", DType::F64, &[2, 3][..]));
    ///     assert_eq!((&b.shape[..], &c.shape[..]), (&[3, 4][..], &[2, 4][..]));
    ///
    ///     // Row 1 of the left factor picks row 2 of the right one.
    ///     let a = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
    ///     let b: Vec<f64> = (0..12).map(f64::from).collect();
    ///     let mut c = [0.0; 8];
    ///     kernel.run(&[&a, &b], &mut [&mut c])?;
    ///     assert_eq!(c, [0.0, 0.0, 0.0, 0.0, 8.0, 9.0, 10.0, 11.0]);
    ///     Ok(())
    /// }
    /// ```
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// Runs the kernel: inputs in their order, then outputs in theirs, all row-major and packed. Constant
    /// inputs of the workload are read only by the first run, and after [`Kernel::forget_constants`].
    ///
    /// # Errors
    /// If the number of arguments, their lengths or their types differ from the workload's.
    pub fn run<E: Element>(&mut self, inputs: &[&[E]], outputs: &mut [&mut [E]]) -> Result<(), Error> {
        let inputs: Vec<&dyn Elements> = inputs.iter().map(|input| input as &dyn Elements).collect();
        let mut outputs: Vec<&mut dyn ElementsMut> =
            outputs.iter_mut().map(|output| output as &mut dyn ElementsMut).collect();
        self.run_mixed(&inputs, &mut outputs)
    }

    /// Runs the kernel, as [`Kernel::run`] does, on arguments of several types, such as `u8` by `i8`:
    /// vectors, arrays and slices of [elements](Element).
    ///
    /// # Errors
    /// As [`Kernel::run`].
    pub fn run_mixed(&mut self, inputs: &[&dyn Elements], outputs: &mut [&mut dyn ElementsMut]) -> Result<(), Error> {
        self.check(true, &inputs.iter().map(|x| (x.dtype(), x.n_elements())).collect::<Vec<_>>())?;
        self.check(false, &outputs.iter().map(|x| (x.dtype(), x.n_elements())).collect::<Vec<_>>())?;
        let is_prepared = self.call.is_prepared();
        let of = |is_input| {
            let arguments = self.arguments.iter().enumerate();
            arguments.filter(move |(_, argument)| argument.is_input() == is_input)
        };
        for ((at, argument), input) in of(true).zip(inputs) {
            if argument.role != Role::ConstInput || !is_prepared {
                input.read(self.call.argument_mut(at));
            }
        }
        self.call.run();
        for ((at, _), output) in of(false).zip(outputs) {
            output.write(self.call.argument_mut(at));
        }
        Ok(())
    }

    /// Checks types and lengths of inputs, or of outputs.
    fn check(&self, is_input: bool, given: &[(DType, usize)]) -> Result<(), Error> {
        let wanted: Vec<&Argument> = self.arguments.iter().filter(|of| of.is_input() == is_input).collect();
        let lengths: Vec<usize> = given.iter().map(|(_, n)| *n).collect();
        if wanted.iter().map(|of| of.n_elements()).ne(lengths.iter().copied()) {
            let what = if is_input { "inputs" } else { "outputs" };
            let names: Vec<String> = wanted.iter().map(|of| format!("{}[{}]", of.name, of.n_elements())).collect();
            let (workload, names) = (&self.workload, names.join(", "));
            return Err(Error::input(format!("{what} of {lengths:?} elements do not fit {workload} (give {names})")));
        }
        match wanted.iter().zip(given).find(|(of, (dtype, _))| of.dtype != *dtype) {
            None => Ok(()),
            Some((of, (dtype, _))) => Err(Error::input(format!(
                "{} of {} holds {}, not {}",
                of.name,
                self.workload,
                of.dtype.name(),
                dtype.name()
            ))),
        }
    }

    /// Discards the prepared constant inputs, so that the next run reads them again.
    pub fn forget_constants(&mut self) {
        self.call.forget_prepared();
    }
}
