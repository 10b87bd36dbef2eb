//! Model files with their weights, and tensors for all of a model's inputs.

use std::path::Path;

use bytes::Bytes;
use tilewright::{Error, file, one_line};
use tilewright_graph::{Bindings, Dim, Graph, Model, Random, Tensor, Value, bind_inputs, onnx};

/// Reads an ONNX model. Its weights stay in the file and in those beside it, which are mapped: they must not
/// become shorter as long as the model is there.
///
/// # Errors
/// Where a file cannot be read, or it is no model.
pub fn read_model(path: &Path) -> Result<Model, Error> {
    let bytes = file::map(path, "an ONNX model")?;
    let model = onnx::read(&bytes, &mut weights_beside(path));
    model.map_err(|error| Error::input(format!("{}: {}", path.display(), one_line(&error.to_string()))))
}

/// Maps files with weights, which lie beside a model.
pub fn weights_beside(model: &Path) -> impl FnMut(&str) -> Result<Bytes, String> {
    let folder = model.parent().unwrap_or(Path::new("")).to_owned();
    move |name| {
        let mapped = file::map(&folder.join(name), "the model's weights, in the model's folder");
        mapped.map_err(|error| error.to_string())
    }
}

/// A tensor for each input of a model: a given one, what is bound, or random numbers of a seed (ones where it
/// is integers).
///
/// # Errors
/// Where something does not fit the model, or a size is not bound.
pub fn all_inputs(
    graph: &Graph,
    bindings: &Bindings,
    given: &[(String, Tensor)],
    seed: u64,
) -> Result<Vec<(Value, Tensor)>, Error> {
    let names: Vec<&str> = graph.inputs.iter().map(|&id| graph.value(id).name.as_str()).collect();
    if let Some((name, _)) = given.iter().find(|(name, _)| !names.contains(&name.as_str())) {
        return Err(Error::input(format!("there is no input `{}` (there are {})", one_line(name), names.join(", "))));
    }
    let values = bind_inputs(graph, bindings);
    let values = values.map_err(|problem| Error::input(one_line(&problem.to_string())))?;
    let mut random = Random::new(seed);
    let mut inputs = Vec::with_capacity(values.len());
    for value in values {
        let ty = value.ty.clone().expect("an input that is bound has its type");
        let found = given.iter().rfind(|(name, _)| *name == value.name).map(|(_, tensor)| tensor.clone());
        if let Some(found) = found.as_ref().filter(|found| *found.ty() != ty) {
            let what = format!("input {}: the file has {}, and the model takes {ty}", value.name, found.ty());
            return Err(Error::input(format!("{what} (convert it with .astype)")));
        }
        let tensor = found.or_else(|| value.constant.clone()).unwrap_or_else(|| random.input(&ty));
        inputs.push((value, tensor));
    }
    Ok(inputs)
}

/// The sizes of inputs' named dimensions; one that names several sizes is left out.
pub fn named_dims(inputs: &[(Value, Tensor)]) -> Vec<(String, usize)> {
    let mut dims: Vec<(String, Option<usize>)> = Vec::new();
    for (value, tensor) in inputs {
        let declared = value.declared.as_ref().and_then(|declared| declared.dims.as_ref());
        for (dim, &size) in declared.into_iter().flatten().zip(tensor.shape()) {
            let Dim::Named(name) = dim else { continue };
            match dims.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) if *known != Some(size) => *known = None,
                Some(_) => {}
                None => dims.push((name.clone(), Some(size))),
            }
        }
    }
    dims.into_iter().filter_map(|(name, size)| Some((name, size?))).collect()
}
