//! Tilewright for Python: spaces, searches, replays, records, runs of `tune`, kernels and models, behind the
//! package `python/tilewright`. Built without LLVM: kernels are compiled by our own back end.

mod contexts;
mod kernel;
mod model;
mod race;
mod recorded;
mod records;
mod run;
mod search;
mod space;
mod value;

use pyo3::prelude::*;

/// Contents of the package.
#[pymodule]
mod _tilewright {
    #[pymodule_export]
    use super::kernel::Kernel;
    #[pymodule_export]
    use super::model::Model;
    #[pymodule_export]
    use super::race::race;
    #[pymodule_export]
    use super::recorded::{Recorded, open_recorded};
    #[pymodule_export]
    use super::records::Records;
    #[pymodule_export]
    use super::run::{Running, serve, start_command, start_kernel, start_workload};
    #[pymodule_export]
    use super::search::{Search, searches};
    #[pymodule_export]
    use super::space::{Space, workload_space};

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", tilewright::version::RELEASE)?;
        module.add("build", tilewright::version::BUILD)
    }
}
