//! Reference results of a kernel: from a function, a configuration, a command, files, or one of our
//! operators.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use tilewright_device::command::{CommandTemplate, FOLDER};
use tilewright_device::host;
use tilewright_device::kernel::GpuJob;
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{evaluate_watched, random_elements};
use tilewright_ir::{DType, Role};
use tilewright_search::Space;

use super::bench::{BenchFolder, wrapper};
use super::form::{Axes, Fill, FillName, Language, RoleForm};
use super::{BUILD, CALL, KernelPort};
use crate::error::Error;
use crate::npy;

/// Timeout of the reference.
const REFERENCE_TIMEOUT: Duration = Duration::from_secs(600);

/// Elements of several buffers.
type Numbers = Vec<Vec<f64>>;

impl BenchFolder<'_> {
    /// Contents of buffers before a run, by argument.
    pub(super) fn contents(&self) -> Vec<Vec<f64>> {
        let seed = self.settings.seed;
        let of = |(at, port): (usize, &KernelPort)| {
            let n = port.n.unwrap_or(0) as usize;
            let fill = match &port.fill {
                Fill::Default if port.role == RoleForm::Out => return Vec::new(),
                Fill::Default => Fill::Name(FillName::Random),
                other => other.clone(),
            };
            match fill {
                Fill::Name(FillName::Random) => random_elements(port.dtype, seed.wrapping_add(at as u64), n).collect(),
                Fill::Name(FillName::Index) => (0..n).map(|at| at as f64).collect(),
                Fill::Number(value) => vec![value; n],
                Fill::Default => unreachable!("it is replaced above"),
            }
        };
        self.ports.iter().enumerate().map(of).collect()
    }

    pub(super) fn outputs(&self) -> impl Iterator<Item = &KernelPort> {
        self.ports.iter().filter(|port| port.n.is_some() && port.role != RoleForm::In)
    }

    /// Result of a function of the same arguments, in the kernel's own source unless another is given, with
    /// the parameters of a configuration.
    pub(super) fn computed(
        &self,
        source: Option<&Path>,
        function: &str,
        parameters: &[(String, String)],
        contents: &[Vec<f64>],
    ) -> Result<Vec<Vec<f64>>, Error> {
        let language = source.map_or_else(|| self.request.language(), Language::of)?;
        let library = self.folder.path().join("reference.so").to_string_lossy().into_owned();
        let macros = |option: &str| -> Vec<String> {
            parameters.iter().map(|(name, value)| format!("{option}{name}={value}")).collect()
        };
        let path = self.request.path(source.unwrap_or(&self.request.form.source));
        let output = if language.api().is_none() {
            let text = wrapper(&path, function, &self.ports);
            let extension = if language == Language::C { "c" } else { "cc" };
            let wrapper = self.write(&format!("reference.{extension}"), text.as_bytes())?;
            // Only the kernel's own source uses its parameters.
            let macros = if source.is_none() { macros("-D") } else { Vec::new() };
            let build = self.compile(&wrapper, language, &macros, &library);
            self.run("the build of the reference", build, REFERENCE_TIMEOUT)?;
            let job = self.job("reference", None, contents, None)?;
            self.run("the reference", self.caller(CALL, &job, &library, &[]), REFERENCE_TIMEOUT)?
        } else {
            let gpu = self.gpu.as_ref().filter(|_| Ok(language) == self.request.language().map_err(drop));
            let Some(gpu) = gpu else {
                return Err(Error::input("the reference is in a language that is neither C, C++ nor the kernel's"));
            };
            let reference = &self.request.form.reference;
            let axes = |given: &Option<Axes>, own: &[String; 3]| {
                given.as_ref().map_or_else(|| Ok(own.clone()), |axes| axes.texts("the reference"))
            };
            let (grid, block) = (axes(&reference.grid, &gpu.grid)?, axes(&reference.block, &gpu.block)?);
            let gpu = GpuJob { source: path, function: function.to_owned(), grid, block, ..gpu.clone() };
            let job = self.job("reference", Some(gpu), contents, None)?;
            let words = |option| self.caller(option, &job, &library, &macros(""));
            self.run("the build of the reference", words(BUILD), REFERENCE_TIMEOUT)?;
            self.run("the reference", words(CALL), REFERENCE_TIMEOUT)?
        };
        let n_bytes = self.outputs().filter_map(|port| port.n).sum::<u64>() * DType::F64.bytes();
        // The function may have written output of its own before.
        let bytes = output.len().checked_sub(n_bytes as usize).map(|from| &output[from..]);
        let bytes = bytes.ok_or_else(|| Error::failed("the reference's answer is cut off"))?;
        let mut all = bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        Ok(self.outputs().map(|port| all.by_ref().take(port.n.unwrap_or(0) as usize).collect()).collect())
    }

    /// Parameters of a configuration; of the first one if none is given.
    pub(super) fn parameters(
        &self,
        space: &Space,
        given: Option<&BTreeMap<String, toml::Value>>,
    ) -> Result<Vec<(String, String)>, Error> {
        let config = match given {
            Some(given) if !given.is_empty() => {
                let json = serde_json::to_value(given).expect("invariant: plain values have a form in JSON");
                let refuse = |error| Error::input(format!("the reference's configuration: {error}"));
                space.config_from_json(&json).map_err(refuse)?
            }
            _ => space.config_at(0),
        };
        let text = |value: tilewright_search::Value| match value {
            tilewright_search::Value::Text(text) => text,
            other => other.to_string(),
        };
        Ok(space.names().map(|name| (name.to_owned(), text(space.value(&config, name)))).collect())
    }

    /// Contents of buffers, and expected results of outputs.
    pub(super) fn answers(&self, space: &Space) -> Result<(Numbers, Numbers), Error> {
        let form = &self.request.form;
        let reference = &form.reference;
        let contents = self.contents();
        let answers = if let Some(workload) = &reference.workload {
            self.of_workload(workload, &contents)?
        } else if let Some(function) = &reference.function {
            let parameters = self.parameters(space, None)?;
            self.computed(reference.source.as_deref(), function, &parameters, &contents)?
        } else if let Some(configuration) = &reference.configuration {
            let parameters = self.parameters(space, Some(configuration))?;
            self.computed(None, &form.function, &parameters, &contents)?
        } else if let Some(command) = &reference.command {
            self.of_command(command, &contents)?
        } else if let Some(files) = &reference.files {
            let answer = |port: &KernelPort| {
                let missing = || Error::input(format!("the reference has no file of {}", port.name));
                let path = self.request.path(files.get(&port.name).ok_or_else(missing)?);
                let bytes = crate::file::read(&path, "the reference")?;
                elements(&bytes, port).map_err(|why| Error::input(format!("{}: {why}", path.display())))
            };
            self.outputs().map(answer).collect::<Result<_, Error>>()?
        } else {
            let mend = "give it a function, a configuration, a command, files or a workload";
            return Err(Error::input(format!("the reference says nothing ({mend})")));
        };
        Ok((contents, answers))
    }

    /// Results of a command, which reads and writes files of elements.
    fn of_command(&self, command: &str, contents: &[Vec<f64>]) -> Result<Numbers, Error> {
        for (port, contents) in self.ports.iter().zip(contents).filter(|(port, _)| port.n.is_some()) {
            let mut bytes = vec![0; contents.len() * port.dtype.bytes() as usize];
            port.dtype.write(contents, &mut bytes);
            self.write(&format!("{}.bin", port.name), &bytes)?;
        }
        let template = CommandTemplate::words(command, &[FOLDER]);
        let template = template.map_err(|error| Error::input(format!("the reference's command: {error}")))?;
        let words = template.with(&|_| self.folder.path().to_string_lossy().into_owned()).words;
        self.run("the reference's command", words, REFERENCE_TIMEOUT)?;
        let answer = |port: &KernelPort| {
            let name = format!("{}.bin", port.name);
            let refuse = |why: &dyn Display| Error::input(format!("the reference's {name}: {why}"));
            let bytes = fs::read(self.folder.path().join(&name)).map_err(|error| refuse(&error))?;
            let (values, n) = (port.dtype.read_held(&bytes), port.n.unwrap_or(0) as usize);
            let found = values.len();
            if found == n { Ok(values) } else { Err(refuse(&format!("it has {found} elements, not {n}"))) }
        };
        self.outputs().map(answer).collect()
    }

    /// Results of one of our operators, whose arguments are the buffers in order.
    fn of_workload(&self, text: &str, contents: &[Vec<f64>]) -> Result<Numbers, Error> {
        let workload = Workload::parse(text).map_err(|error| Error::input(format!("the reference: {error}")))?;
        let program = workload.program();
        let theirs: Vec<_> = program.arguments().map(|(_, buffer)| buffer).collect();
        let ours = || self.ports.iter().zip(contents).filter(|(port, _)| port.n.is_some());
        let fits = theirs.len() == ours().count()
            && theirs.iter().zip(ours()).all(|(buffer, (port, _))| {
                (buffer.n_elements(), buffer.dtype, buffer.role == Role::Output)
                    == (port.n, port.dtype, port.role != RoleForm::In)
            });
        if !fits {
            let list = theirs.iter().map(|buffer| {
                let role = if buffer.role == Role::Output { "out" } else { "in" };
                format!("{} ({} {}, {role})", buffer.name, buffer.n_elements().unwrap_or(0), buffer.dtype.name())
            });
            let list = list.collect::<Vec<_>>().join(", ");
            return Err(Error::input(format!("the buffers are not those of {text}, which has {list}")));
        }
        let held = |(port, contents): (&KernelPort, &Vec<f64>)| contents.iter().map(|x| port.dtype.held(*x)).collect();
        let inputs: Numbers = ours().filter(|(port, _)| port.role == RoleForm::In).map(held).collect();
        evaluate_watched(&program, inputs, host::most_threads(), &|_| ControlFlow::Continue(()))
            .map_err(|error| Error::failed("the reference").because(error))
    }
}

/// Elements of a file in NumPy's format, which must have the port's type and size.
fn elements(file: &[u8], port: &KernelPort) -> Result<Vec<f64>, String> {
    let array = npy::read(file).map_err(|error| error.to_string())?;
    let letter = match port.dtype {
        dtype if dtype.is_float() => 'f',
        dtype if dtype.is_unsigned() => 'u',
        _ => 'i',
    };
    let wanted = format!("{letter}{}", port.dtype.bytes());
    if array.element != wanted {
        let found = array.element;
        return Err(format!("its elements are {found} (convert them to {wanted}, NumPy's name of {})", port.c_type));
    }
    let n = port.n.unwrap_or(0);
    let found = array.shape.iter().fold(1u64, |n, extent| n.saturating_mul(*extent as u64));
    if found != n {
        return Err(format!("it has {found} elements, not {n}"));
    }
    let bytes = array.elements(port.dtype.bytes() as usize).map_err(|error| error.to_string())?;
    Ok(port.dtype.read_held(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_files_fit_their_outputs() {
        let check = |c_type: &str, descr: &str, shape: &str, expected: Result<&[f64], &str>| {
            let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}");
            let data: Vec<u8> = [1f32, 2.0].into_iter().flat_map(f32::to_le_bytes).collect();
            let length = (header.len() as u16).to_le_bytes();
            let file = [npy::MAGIC, &[1, 0], &length, header.as_bytes(), &data].concat();
            let (c_type, dtype) = *super::super::TYPES.iter().find(|(known, _)| *known == c_type).unwrap();
            let port = KernelPort {
                name: "y".into(),
                c_type: c_type.into(),
                dtype,
                n: Some(2),
                shared: None,
                is_variable: false,
                value: 0.0,
                role: RoleForm::Out,
                fill: Fill::Default,
            };
            match (elements(&file, &port), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{header}"),
                (Err(why), Err(part)) => assert!(why.contains(part), "{header}: {why}"),
                (found, _) => panic!("{header}: {found:?}"),
            }
        };
        check("float", "<f4", "(2,)", Ok(&[1.0, 2.0]));
        check("float", "<f4", "(1, 2)", Ok(&[1.0, 2.0]));
        check("float", "<f8", "(2,)", Err("its elements are f8 (convert them to f4, NumPy's name of float)"));
        check("float", "<f4", "(3,)", Err("it has 3 elements, not 2"));
        check("double", "<f8", "(2,)", Err("its elements take 16 bytes, and there are 8"));
        check("uint8_t", "|i1", "(2,)", Err("convert them to u1"));
    }
}
