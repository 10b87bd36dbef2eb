//! PyTorch, in a Python process: each of a model's nodes is a call of one of its operators.

mod convert;

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tilewright_device::ChildProcess;
use tilewright_device::device::RoundLength;
use tilewright_graph::{Bindings, Graph, Tensor, onnx, problems_text, specialise};

use super::worker::{OpenedSession, RuntimeSession, Wanted};
use super::{Area, StoredTensor, Unavailable, broken};
use crate::library::find;
use crate::rounds::SAMPLE_NS;

/// Way in which PyTorch runs a model's operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Operators one at a time, as called from Python.
    Eager,
    /// Compiled together by `torch.compile`, on a GPU replayed as one graph.
    Compiled,
}

/// Program that Python runs.
const RUNNER: &str = include_str!("pytorch/runner.py");

fn not_installed(reason: &str) -> Unavailable {
    let get = "pip install torch in an environment and give its folder as --peer-path";
    let reason = if reason.is_empty() { String::new() } else { format!("; Python says {reason}") };
    Unavailable::NotInstalled { library: "PyTorch".to_owned(), get: format!("{get}{reason}") }
}

/// Python's interpreter: that of an environment in the folder, or else the system's, with the folder added to
/// its package paths.
fn python(folder: Option<&Path>) -> Command {
    let own = folder.and_then(|folder| find(folder, &["python3"]));
    let mut command = Command::new(own.unwrap_or_else(|| PathBuf::from("python3")));
    if let Some(folder) = folder {
        command.env("PYTHONPATH", folder);
    }
    command
}

/// Version of the package that the system's Python finds.
pub(super) fn version() -> Result<String, Unavailable> {
    let program = "import importlib.metadata; print(importlib.metadata.version('torch'))";
    let output = python(None).args(["-c", program]).output().map_err(|_| not_installed(""))?;
    match (output.status.success(), String::from_utf8(output.stdout)) {
        (true, Ok(text)) => Ok(text.trim().to_owned()),
        _ => Err(not_installed("")),
    }
}

/// Opens a model for inputs of these shapes.
pub(super) fn open(wanted: &Wanted, inputs: &[(String, Tensor)], mode: Mode) -> Result<OpenedSession, Unavailable> {
    let unsupported = |reason: String| Unavailable::Unsupported { reason };
    let graph = graph_of(wanted, inputs)?;
    let text = convert::text_of(&graph).map_err(unsupported)?;
    let (area, constants) = (Area::new().map_err(broken)?, Area::new().map_err(broken)?);
    let numbered: Vec<_> = text.constants.into_iter().map(|constant| (String::new(), constant)).collect();
    let places = constants.put_all(0, &numbered).map_err(broken)?;
    let device = wanted.means.gpu.map_or("cpu".to_owned(), |number| format!("cuda:{number}"));
    let mut command = python(wanted.means.folder.as_deref());
    command.args(["-c", RUNNER]);
    let (sender, replies) = channel();
    let process =
        ChildProcess::start(command, move |reply| sender.send(reply).is_ok()).map_err(|_| not_installed(""))?;
    let mut session = Box::new(Torch { process, replies, area, end: 0 });
    let ready = session.ask(&json!({
        "code": text.code, "inputs": text.inputs, "constants": places, "threads": wanted.means.threads,
        "constants_fd": constants.0.as_raw_fd(), "data_fd": session.area.0.as_raw_fd(),
        "device": device, "compiled": mode == Mode::Compiled,
    }))?;
    let details = match (mode, wanted.means.gpu) {
        (Mode::Eager, None) => format!("each operator by itself, threads: {}", wanted.means.threads),
        (Mode::Eager, Some(_)) => "each operator by itself, tensors copied to the device and back".to_owned(),
        (Mode::Compiled, None) => format!("torch.compile, threads: {}", wanted.means.threads),
        (Mode::Compiled, Some(_)) => {
            "torch.compile(mode=\"reduce-overhead\"), tensors copied to the device and back".to_owned()
        }
    };
    Ok(OpenedSession { version: ready.version.unwrap_or_default(), details, session })
}

/// Graph of the model at the sizes of these inputs.
fn graph_of(wanted: &Wanted, inputs: &[(String, Tensor)]) -> Result<Graph, Unavailable> {
    let unsupported = |reason: String| Unavailable::Unsupported { reason };
    let file = std::fs::read(&wanted.model).map_err(|error| unsupported(format!("the model's file: {error}")))?;
    let folder = wanted.model.parent().unwrap_or(Path::new("."));
    let mut beside = |path: &str| {
        std::fs::read(folder.join(path)).map(Into::into).map_err(|error| format!("its weights in `{path}`: {error}"))
    };
    let model = onnx::read(&file.into(), &mut beside).map_err(|error| unsupported(error.to_string()))?;
    let shapes = inputs.iter().map(|(name, x)| (name.clone(), x.shape().to_vec())).collect();
    // Shapes of all inputs leave no dimension open.
    let special = specialise(&model.graph, &Bindings { shapes, ..Bindings::default() });
    if special.problems.is_empty() { Ok(special.graph) } else { Err(unsupported(problems_text(&special.problems))) }
}

/// Reply of the program; it has the fields that the request needs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ProgramAnswer {
    version: Option<String>,
    times_ns: Vec<f64>,
    outputs: Vec<StoredTensor>,
    missing: Option<String>,
    error: Option<String>,
}

/// Model in PyTorch. Its process is stopped except while it serves a request.
struct Torch {
    process: ChildProcess,
    replies: Receiver<Option<ProgramAnswer>>,
    area: Area,
    /// Offset of the end of the inputs.
    end: u64,
}

impl Torch {
    fn ask(&mut self, request: &impl Serialize) -> Result<ProgramAnswer, Unavailable> {
        self.process.go_on();
        self.process.tell(request);
        // The parent enforces the timeout.
        let Ok(Some(answer)) = self.replies.recv() else {
            return Err(Unavailable::Broken { reason: format!("Python ended: {}", self.process.last_words()) });
        };
        self.process.stop();
        match answer {
            ProgramAnswer { missing: Some(reason), .. } => Err(not_installed(&reason)),
            ProgramAnswer { error: Some(reason), .. } => Err(Unavailable::Unsupported { reason }),
            answer => Ok(answer),
        }
    }
}

impl RuntimeSession for Torch {
    fn give(&mut self, inputs: &[(String, Tensor)]) -> Result<(), Unavailable> {
        let places = self.area.put_all(0, inputs).map_err(broken)?;
        let sizes: HashMap<&str, usize> = inputs.iter().map(|(name, x)| (name.as_str(), x.bytes().len())).collect();
        self.end = places.iter().map(|place| place.end(sizes[place.name.as_str()])).max().unwrap_or(0);
        self.ask(&json!({ "give": places })).map(drop)
    }

    fn run(&mut self) -> Result<(), Unavailable> {
        self.ask(&json!({ "run": true })).map(drop)
    }

    fn round(&mut self, round: RoundLength) -> Result<Vec<f64>, Unavailable> {
        let wanted = json!({ "round": [round.time.as_nanos() as u64, round.min_samples, SAMPLE_NS] });
        Ok(self.ask(&wanted)?.times_ns)
    }

    fn outputs(&mut self) -> Result<Vec<Tensor>, Unavailable> {
        let places = self.ask(&json!({ "outputs": self.end }))?.outputs;
        places.iter().map(|place| self.area.get(place).map_err(broken)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use tilewright_graph::Op;
    use tilewright_graph::networks::NETWORKS;
    use tilewright_graph::op::Unary;

    use super::*;
    use crate::library::Means;

    fn bytes_of(network: &str) -> Vec<u8> {
        onnx::write(&NETWORKS.iter().find(|row| row.name == network).expect("a network").build(0))
    }

    /// Network at 3 steps, and its text.
    fn text(network: &str) -> (Graph, convert::Text) {
        let model = onnx::read(&bytes_of(network).into(), &mut |_| Err("no file".to_owned())).expect("a model");
        let dims = if network == "lstm" { vec![("steps".to_owned(), 3)] } else { vec![] };
        let graph = specialise(&model.graph, &Bindings { dims, ..Bindings::default() }).graph;
        let text = convert::text_of(&graph).expect("all its operators are PyTorch's");
        (graph, text)
    }

    #[test]
    fn networks_are_written_as_operators() {
        for network in NETWORKS {
            let (graph, text) = text(network.name);
            assert!(text.code.lines().count() > graph.nodes().len(), "{}", text.code);
        }
        let (mut graph, dqn) = text("dqn");
        let begin =
            "def model(self, v0):\n    v2 = F.conv2d(v0, self.c0, None, [4, 4], [0, 0], [1, 1], 1)\n    del v0\n";
        assert!(dqn.code.starts_with(begin), "{}", dqn.code);
        assert!(dqn.code.contains("F.linear(") && dqn.code.ends_with("]\n"), "{}", dqn.code);
        assert!(text("lstm").1.code.contains("recurrent('lstm', (0, 2, 3, 1), "));
        for op in graph.ops_mut() {
            if matches!(op, Op::Unary(Unary::Relu)) {
                *op = Unary::Selu { alpha: 1.0, gamma: 2.0 }.into();
            }
        }
        let refused = convert::text_of(&graph).err().expect("it is not translated");
        assert!(refused.contains("(Relu, ") && refused.contains("the function Selu"), "{refused}");
    }

    /// Model in a program that replaces Python.
    fn opened(folder: &Path, program: &str) -> Result<OpenedSession, Unavailable> {
        let (bin, model) = (folder.join("bin"), folder.join("dqn.onnx"));
        fs::create_dir_all(&bin).expect("a folder");
        fs::write(bin.join("python3"), format!("#!/bin/sh\n{program}")).expect("a program");
        fs::set_permissions(bin.join("python3"), fs::Permissions::from_mode(0o755)).expect("it may run");
        fs::write(&model, bytes_of("dqn")).expect("a model");
        let (graph, _) = text("dqn");
        let x = graph.value(graph.inputs[0]);
        let ty = x.ty.as_ref().expect("it is known");
        let ones = Tensor::from_floats(ty.dtype, ty.shape.clone(), &vec![1.0; ty.n_elements()]);
        let inputs = [(x.name.clone(), ones)];
        let means = Means { threads: 1, folder: Some(folder.to_owned()), gpu: None };
        let mut opened = open(&Wanted { model, dims: vec![], means }, &inputs, Mode::Eager)?;
        opened.session.give(&inputs)?;
        Ok(opened)
    }

    #[test]
    fn python_is_asked_and_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = |program: &str| opened(folder.path(), program).err().expect("it is refused").to_string();
        let missing = refused("read x; echo '{\"missing\": \"ModuleNotFoundError: no torch\"}'");
        assert!(missing.starts_with("PyTorch is not installed (pip install torch"), "{missing}");
        assert!(missing.ends_with("; Python says ModuleNotFoundError: no torch)"), "{missing}");
        assert!(refused("exit 3").contains("Python ended: ended with exit code 3"));
        assert!(refused("read x; echo '{\"error\": \"TypeError: so\"}'").contains("TypeError: so"));

        let answers = r#"read x; echo '{"version": "9.9"}'
            while read x; do case "$x" in
                *round*) echo '{"times_ns": [5, 6]}';;
                *outputs*) echo '{"outputs": [{"name": "", "dtype": 1, "shape": [2], "at": 0}]}';;
                *) echo '{"done": true}';;
            esac; done"#;
        let OpenedSession { version, details, mut session } = opened(folder.path(), answers).expect("it answers");
        assert_eq!((version.as_str(), details.as_str()), ("9.9", "each operator by itself, threads: 1"));
        session.run().expect("it runs");
        let round = RoundLength { time: Duration::from_millis(1), min_samples: 2 };
        assert_eq!(session.round(round).expect("times"), [5.0, 6.0]);
        // Offset of its input.
        assert_eq!(session.outputs().expect("outputs")[0].floats(), [1.0, 1.0]);
    }
}
