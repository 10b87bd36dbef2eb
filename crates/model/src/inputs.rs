//! Model files with their weights, and tensors for all of a model's inputs.

use std::path::Path;

use bytes::Bytes;
use tilewright::{Error, file, one_line};
use tilewright_graph::{
    Bindings, DType, Declared, Dim, Graph, Model, SplitMix64, Tensor, Value, ValueId, bind_inputs, onnx,
};

/// Reads an ONNX model. Its file and external data files are memory-mapped, and must not be truncated while
/// the model is in use.
///
/// # Errors
/// If a file cannot be read, or is not a model.
pub fn read_model(path: &Path) -> Result<Model, Error> {
    let bytes = file::map(path, "an ONNX model")?;
    let model = onnx::read(&bytes, &mut weights_beside(path));
    model.map_err(|error| Error::input(format!("{}: {}", path.display(), one_line(&error.to_string()))))
}

/// Opens external data files beside a model, by memory mapping.
pub fn weights_beside(model: &Path) -> impl FnMut(&str) -> Result<Bytes, String> {
    let folder = model.parent().unwrap_or(Path::new("")).to_owned();
    move |name| {
        let mapped = file::map(&folder.join(name), "the model's weights, in the model's folder");
        mapped.map_err(|error| error.to_string())
    }
}

/// Tensors given for a model, checked against its inputs.
#[derive(Debug, Default)]
pub struct Given {
    /// Tensors by the name of the input.
    pub inputs: Vec<(String, Tensor)>,
    /// Shapes of inputs that only these tensors determine.
    pub shapes: Vec<(String, Vec<usize>)>,
}

/// Checks tensors against a model's inputs and their bindings. Tensors for inputs with defaults replace the
/// defaults in the graph. Numbers in f32 for an input in bf16, which NumPy lacks, are rounded.
///
/// # Errors
/// If an input does not exist, or has another type or shape.
pub fn feed(graph: &mut Graph, bindings: &Bindings, tensors: Vec<(String, Tensor)>) -> Result<Given, Error> {
    let mut given = Given::default();
    for (name, tensor) in tensors {
        let named = |id: &&ValueId| graph.value(**id).name == name;
        let Some(&id) = graph.inputs.iter().chain(&graph.defaults).find(named) else {
            let names = graph.input_names().join(", ");
            return Err(Error::input(format!("there is no input `{}` (there are {names})", one_line(&name))));
        };
        let of_file = tensor.ty().clone();
        let refuse = |why: String| Error::input(one_line(&format!("input {name}: the file has {of_file}, {why}")));
        if bindings.values.iter().any(|(bound, _)| *bound == name) {
            return Err(refuse(format!("and --set {name} gives it as well (leave one of them out)")));
        }
        let value = graph.value(id);
        let is_default = value.constant.is_some();
        let is_rounded =
            tensor.dtype() == DType::F32 && value.declared.as_ref().is_some_and(|d| d.dtype == DType::Bf16);
        let tensor = match is_rounded {
            true => tensor.rounded(DType::Bf16),
            false => tensor,
        };
        if let Some(declared) = &value.declared {
            fits(declared, &tensor).map_err(refuse)?;
            let is_bound = !is_default && matches_bound(&name, declared, bindings, tensor.shape()).map_err(refuse)?;
            // A scalar has no sizes to bind.
            if !is_default && !is_bound && !tensor.shape().is_empty() {
                given.shapes.push((name.clone(), tensor.shape().to_vec()));
            }
        }
        if is_default {
            let value = graph.value_mut(id);
            (value.ty, value.constant) = (Some(tensor.ty().clone()), Some(tensor));
        } else {
            given.inputs.push((name, tensor));
        }
    }
    Ok(given)
}

/// Checks a tensor against an input's declaration.
fn fits(declared: &Declared, tensor: &Tensor) -> Result<(), String> {
    let (dims, shape) = (declared.dims.as_deref(), tensor.shape());
    let texts = dims.map(|dims| dims.iter().map(Dim::to_string).collect::<Vec<_>>().join(","));
    let wanted = format!("{}{}", declared.dtype, texts.map_or(String::new(), |texts| format!("[{texts}]")));
    if declared.dtype != tensor.dtype() {
        let to = if declared.dtype == DType::Bf16 { "('f4')" } else { "" };
        return Err(format!("and the model takes {wanted} (convert it with .astype{to})"));
    }
    let Some(dims) = dims else { return Ok(()) };
    if dims.len() != shape.len() {
        return Err(format!("and the model takes {wanted} (give an array of {} dimensions)", dims.len()));
    }
    let mut both = dims.iter().zip(shape).enumerate();
    match both.find(|(_, (dim, size))| matches!(dim, Dim::Size(wanted) if wanted != *size)) {
        Some((axis, (dim, size))) => {
            Err(format!("and the model takes {wanted} (its dimension {axis} has to be {dim}, not {size})"))
        }
        None => Ok(()),
    }
}

/// Checks a tensor's shape against the bindings; returns whether they bind all of its dimensions.
fn matches_bound(name: &str, declared: &Declared, bindings: &Bindings, shape: &[usize]) -> Result<bool, String> {
    if let Some((_, bound)) = bindings.shapes.iter().rfind(|(input, _)| input == name) {
        let sizes = bound.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let why = || format!("and --shape {name}={sizes} is given (leave that out, or give another file)");
        return if bound == shape { Ok(true) } else { Err(why()) };
    }
    let Some(dims) = &declared.dims else { return Ok(false) };
    for (axis, (dim, &size)) in dims.iter().zip(shape).enumerate() {
        let Dim::Named(dim) = dim else { continue };
        if let Some((_, bound)) = bindings.dims.iter().rfind(|(known, bound)| known == dim && *bound != size) {
            let why = format!("and --dim {dim}={bound} is given, which its dimension {axis} of {size} is not");
            return Err(format!("{why} (leave that out, or give another file)"));
        }
    }
    Ok(bindings.bound(dims).is_ok())
}

/// Makes a tensor for each input of a model: the given one, the bound one, or random numbers (ones for
/// integers).
///
/// # Errors
/// If a tensor or binding does not fit the model, or a size is not bound.
pub fn all_inputs(
    graph: &Graph,
    bindings: &Bindings,
    given: &[(String, Tensor)],
    seed: u64,
) -> Result<Vec<(Value, Tensor)>, Error> {
    let values = bind_inputs(graph, bindings);
    let values = values.map_err(|problem| Error::input(one_line(&problem.to_string())))?;
    let mut random = SplitMix64::new(seed);
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

/// Sizes of inputs' symbolic dimensions; a name with several sizes is left out.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_f32_are_rounded_for_an_input_in_bf16() {
        let declared = Declared { dtype: DType::Bf16, dims: Some(vec![Dim::Size(2)]) };
        let value = Value { name: "x".into(), declared: Some(declared), ..Value::default() };
        let mut graph = Graph::default();
        let id = graph.add_value(value);
        graph.inputs.push(id);
        let mut fed = |dtype, numbers: &[f64]| {
            let x = Tensor::from_floats(dtype, [2], numbers);
            feed(&mut graph, &Bindings::default(), vec![("x".into(), x)]).map_err(|error| error.to_string())
        };
        // Halfway between two numbers, the even one.
        let given = fed(DType::F32, &[1.0 + 2f64.powi(-8), f64::NAN]).unwrap();
        let (_, x) = &given.inputs[0];
        assert_eq!((x.dtype(), x.floats()[0], x.floats()[1].is_nan()), (DType::Bf16, 1.0, true));
        let error = fed(DType::F64, &[1.0, 2.0]).unwrap_err();
        assert!(error.ends_with("and the model takes bf16[2] (convert it with .astype('f4'))"), "{error}");
    }
}
