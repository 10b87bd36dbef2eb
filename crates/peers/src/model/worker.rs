//! Child's side: holds one model in one runtime, and runs and times it on request.

use std::io::{self, Write};
use std::path::PathBuf;

use tilewright_device::device::RoundLength;
use tilewright_device::host;
use tilewright_graph::Tensor;

use super::onnxruntime::ExecutionProvider;
use super::{Area, Engine, StoredTensor, onnxruntime, openvino, pytorch};
use crate::Unavailable;
use crate::library::Means;
use crate::protocol::{ChildReply, ChildRequest};
use crate::rounds::wall_samples_ns;
use crate::worker::answer;

/// Model in a runtime, with its inputs.
pub(super) trait RuntimeSession {
    /// Sets the inputs, of the types that the session was opened with.
    fn give(&mut self, inputs: &[(String, Tensor)]) -> Result<(), Unavailable>;
    /// Runs once.
    fn run(&mut self) -> Result<(), Unavailable>;
    /// Runs a round; returns nanoseconds per run, one value for each sample.
    fn round(&mut self, round: RoundLength) -> Result<Vec<f64>, Unavailable> {
        wall_samples_ns(round, || self.run())
    }
    /// Outputs of the last run, in the model's order.
    fn outputs(&mut self) -> Result<Vec<Tensor>, Unavailable>;
}

/// Session, with the runtime's description.
pub(super) struct OpenedSession {
    pub(super) version: String,
    pub(super) details: String,
    pub(super) session: Box<dyn RuntimeSession>,
}

/// Model and settings of a session.
pub(crate) struct Wanted {
    pub(crate) model: PathBuf,
    pub(crate) dims: Vec<(String, usize)>,
    pub(crate) means: Means,
}

/// Serves a session, from the request that opens a model to the end of the input.
pub(crate) fn serve(
    peer: &str,
    wanted: &Wanted,
    area: &Area,
    inputs: &[StoredTensor],
    input: &mut impl Iterator<Item = io::Result<String>>,
    output: &mut impl Write,
) -> io::Result<()> {
    // A GPU's driver has threads of its own.
    if wanted.means.gpu.is_none() {
        host::pin_thread(&host::pin_cpus(wanted.means.threads));
    }
    let opened = tensors(area, inputs).and_then(|tensors| {
        let spec = super::find(peer)?;
        let mut opened = match spec.engine {
            Engine::OnnxRuntime { spins } => onnxruntime::open(wanted, ExecutionProvider::Cpu { spins })?,
            Engine::OnnxRuntimeCuda => onnxruntime::open(wanted, ExecutionProvider::Cuda)?,
            Engine::OpenVino => openvino::open(wanted, &tensors)?,
            Engine::PyTorch(mode) => pytorch::open(wanted, &tensors, mode)?,
        };
        opened.session.give(&tensors)?;
        opened.session.run()?;
        Ok(opened)
    });
    let OpenedSession { version, details, mut session } = match opened {
        Ok(opened) => opened,
        Err(unavailable) => return answer(output, &ChildReply::Unavailable(unavailable)),
    };
    answer(output, &ChildReply::Ready { version, details, core_type: None })?;
    for line in input {
        let reply = match serde_json::from_str(&line?)? {
            ChildRequest::Round { min_time_ns, min_samples } => {
                let round = RoundLength { time: std::time::Duration::from_nanos(min_time_ns), min_samples };
                session.round(round).map(|times_ns| ChildReply::Round { times_ns })
            }
            ChildRequest::Run { inputs } => run(session.as_mut(), area, &inputs),
            other @ (ChildRequest::Version { .. }
            | ChildRequest::Start { .. }
            | ChildRequest::Open { .. }
            | ChildRequest::Check) => {
                return Err(io::Error::other(format!("{other:?} to a model that is open")));
            }
        };
        answer(output, &reply.unwrap_or_else(ChildReply::Unavailable))?;
    }
    Ok(())
}

fn tensors(area: &Area, places: &[StoredTensor]) -> Result<Vec<(String, Tensor)>, Unavailable> {
    let get = |place: &StoredTensor| Ok((place.name.clone(), area.get(place).map_err(super::broken)?));
    places.iter().map(get).collect()
}

/// Runs once; the outputs are stored after the inputs.
fn run(session: &mut dyn RuntimeSession, area: &Area, inputs: &[StoredTensor]) -> Result<ChildReply, Unavailable> {
    let inputs_given = tensors(area, inputs)?;
    session.give(&inputs_given)?;
    session.run()?;
    let outputs: Vec<(String, Tensor)> = session.outputs()?.into_iter().map(|y| (String::new(), y)).collect();
    let ends = inputs.iter().zip(&inputs_given).map(|(place, (_, x))| place.end(x.bytes().len()));
    let outputs = area.put_all(ends.max().unwrap_or(0), &outputs).map_err(super::broken)?;
    Ok(ChildReply::Outputs { outputs })
}
