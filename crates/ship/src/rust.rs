//! Libraries as Rust crates.

use tilewright_ir::DType;
use tilewright_runtime::{OpenDimension, PlanTensor, RunSize};

use crate::{File, Library, identifier, named, of_kind};

/// Words that are not names in Rust, or that the template already uses.
const RESERVED: &str = include_str!("../templates/reserved.txt");

/// Whether a name is reserved, in Rust or by the template.
pub fn is_reserved(name: &str) -> bool {
    RESERVED.split_whitespace().any(|word| word == name)
}

/// Files of the crate, without its archive.
pub fn files(library: &Library) -> Vec<File> {
    let name = &library.name;
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2021\"\nrust-version = \"1.82\"\n\
         links = \"{name}\"\nbuild = \"build.rs\"\n"
    );
    let build = format!(
        "//! Says where the library is, and what it needs.\n\nfn main() {{\n    \
         println!(\"cargo:rerun-if-changed=lib{name}.a\");\n    \
         println!(\"cargo:rustc-link-search=native={{}}\", env!(\"CARGO_MANIFEST_DIR\"));\n    \
         println!(\"cargo:rustc-link-lib=static={name}\");\n    \
         println!(\"cargo:rustc-link-lib=m\");\n    println!(\"cargo:rustc-link-lib={}\");\n}}\n",
        if library.is_for_gpu { "dl" } else { "pthread" },
    );
    vec![File::new("Cargo.toml", manifest), File::new("build.rs", build), File::new("src/lib.rs", source(library))]
}

/// Slice parameter of the wrapper.
struct SliceParameter {
    name: String,
    ty: &'static str,
    n_elements: usize,
    /// Number of elements at the size of a context, as an expression.
    n_at: String,
    is_output: bool,
}

fn source(library: &Library) -> String {
    let mut names: Vec<String> = Vec::new();
    let mut parameter = |(port, tensor): (usize, &PlanTensor), is_output| {
        let name = identifier(&tensor.name, &names);
        names.push(name.clone());
        let n_elements: usize = tensor.shape.iter().product();
        let n_item = if tensor.in_items { n_elements / tensor.shape[0].max(1) } else { n_elements };
        let mut n_at = match tensor.open {
            None if library.sized.is_some() => format!("self.member.lengths[{port}]"),
            None => n_item.to_string(),
            Some((axis, RunSize { dim, factor, term, .. })) => {
                let row = n_item / tensor.shape[axis].max(1);
                let size = if library.rows.is_some() { "rows" } else { "size" };
                let size = if dim == 1 { "second" } else { size };
                format!("{row} * ({factor} * self.{size} + {term}) as usize")
            }
        };
        if tensor.in_items {
            n_at += " * self.items as usize";
        }
        SliceParameter { name, ty: rust_type(tensor.dtype), n_elements, n_at, is_output }
    };
    let (of_inputs, of_outputs) = (library.inputs.iter().enumerate(), library.outputs.iter());
    let inputs: Vec<SliceParameter> = of_inputs.map(|tensor| parameter(tensor, false)).collect();
    let outputs: Vec<SliceParameter> = (inputs.len()..).zip(of_outputs).map(|tensor| parameter(tensor, true)).collect();
    let all: Vec<&SliceParameter> = inputs.iter().chain(&outputs).collect();
    let joined = |of: &[&SliceParameter], text: &dyn Fn(&SliceParameter) -> String| {
        of.iter().map(|p| text(p)).collect::<Vec<_>>().join(", ")
    };
    let mutable = |p: &SliceParameter| if p.is_output { "mut " } else { "" };
    let parameters = joined(&all, &|p| format!("{}: &{}[{}]", p.name, mutable(p), p.ty));
    let lengths = joined(&all, &|p| format!("({:?}, {}, {}.len())", p.name, p.n_at, p.name));
    let pointers = |of: &[SliceParameter]| {
        let text =
            |p: &SliceParameter| format!("{}.{}().cast()", p.name, if p.is_output { "as_mut_ptr" } else { "as_ptr" });
        joined(&of.iter().collect::<Vec<_>>(), &text)
    };
    let made: String = all
        .iter()
        .map(|p| {
            let zero = if p.ty.starts_with('f') { "0.0" } else { "0" };
            format!("//! let {}{} = vec![{zero}{}; {}];\n", mutable(p), p.name, p.ty, p.n_elements)
        })
        .collect();
    let (rows, second, items) = (library.rows.as_ref(), library.second.as_ref(), library.items.as_ref());
    let set = |dim: &OpenDimension| format!("//! context.set_dim({:?}, {})?;\n", dim.name, dim.most);
    let example = format!(
        "{made}{}//! context.run({})?;",
        rows.into_iter().chain(second).chain(items).map(set).collect::<String>(),
        joined(&all, &|p| format!("&{}{}", mutable(p), p.name))
    );
    let origin: Vec<String> = library.origin.iter().map(|line| format!("//! {line}")).collect();
    let of_rows = |text: &dyn Fn(&OpenDimension) -> String| rows.map_or(String::new(), text);
    let of_second = |text: &dyn Fn(&OpenDimension) -> String| second.map_or(String::new(), text);
    let of_items = |text: &dyn Fn(&OpenDimension) -> String| items.map_or(String::new(), text);
    let mut fields = "context, size: @FIRST@".to_owned();
    fields += if rows.is_some() { ", rows: @LEAST_ROWS@" } else { "" };
    fields += if second.is_some() { ", second: @MOST_SECOND@" } else { "" };
    fields += if items.is_some() { ", items: @MOST_ITEMS@" } else { "" };
    let made_of_fields = format!("Ok(Context {{ {fields} }})");
    let text = of_kind(include_str!("../templates/lib.rs.txt"), library.kind())
        .replace("@ORIGIN@", &origin.join("\n//!\n"))
        .replace("@EXAMPLE@", &example)
        .replace("@PARAMETERS@", &parameters)
        .replace("@LENGTHS@", &lengths)
        .replace("@INPUT_POINTERS@", &pointers(&inputs))
        .replace("@OUTPUT_POINTERS@", &pointers(&outputs))
        .replace("@INPUTS@", &inputs.len().to_string())
        .replace("@OUTPUTS@", &outputs.len().to_string())
        .replace("@COPY@", if library.has_dims() { "" } else { "Copy, " })
        .replace("@FIELD@", if library.has_dims() { "context" } else { "0" })
        .replace(
            "@MADE@",
            match &library.dim {
                None if library.sized.is_some() => "Ok(Context { context, member: &MEMBERS[0] })",
                None => "Ok(Context(context))",
                Some(_) => &made_of_fields,
            },
        )
        .replace(
            "@FIRST@",
            &library.dim.as_ref().map_or(String::new(), |dim| {
                (if library.states.is_empty() { dim.most } else { dim.least }).to_string()
            }),
        )
        .replace("@ITEMS_AT@", &library.items_at().to_string())
        .replace("@SECOND_AT@", &library.second_at().to_string())
        .replace("@SECOND_NAME@", &of_second(&|second| second.name.escape_default().to_string()))
        .replace("@LEAST_SECOND@", &of_second(&|second| second.least.to_string()))
        .replace("@MOST_SECOND@", &of_second(&|second| second.most.to_string()))
        .replace("@ITEMS_NAME@", &of_items(&|items| items.name.escape_default().to_string()))
        .replace("@LEAST_ITEMS@", &of_items(&|items| items.least.to_string()))
        .replace("@MOST_ITEMS@", &of_items(&|items| items.most.to_string()))
        .replace("@ROWS_NAME@", &of_rows(&|rows| rows.name.escape_default().to_string()))
        .replace("@LEAST_ROWS@", &of_rows(&|rows| rows.least.to_string()))
        .replace("@MOST_ROWS@", &of_rows(&|rows| rows.most.to_string()))
        .replace("@MOST@", &library.dim.as_ref().map_or(String::new(), |dim| dim.most.to_string()))
        .replace("@DIM_NAME@", &library.dim.as_ref().map_or(String::new(), |dim| dim.name.escape_default().to_string()))
        .replace("@NAME@", &library.name);
    named(&with_members(text, library), &library.name)
}

/// Fills in what a text says about a library's members.
fn with_members(text: String, library: &Library) -> String {
    let Some(members) = &library.sized else { return text };
    let lengths = |shapes: &Vec<Vec<usize>>| shapes.iter().map(|shape| shape.iter().product()).collect::<Vec<usize>>();
    let each = members.each.iter().zip(&library.member_shapes);
    let each: Vec<String> = each
        .map(|(member, shapes)| format!("    Member {{ sizes: {:?}, lengths: {:?} }},", member.sizes, lengths(shapes)))
        .collect();
    let names: Vec<String> = members.dims.iter().map(|dim| format!("{:?}", dim.name)).collect();
    let of_dim = |dim: &OpenDimension| {
        format!("`{}` ({} to {} in steps of {})", dim.name.escape_default(), dim.least, dim.most, dim.step)
    };
    let dims: Vec<String> = members.dims.iter().map(of_dim).collect();
    text.replace("@N_DIMS@", &members.dims.len().to_string())
        .replace("@N_PORTS@", &members.each[0].ports.len().to_string())
        .replace("@N_MEMBERS@", &members.each.len().to_string())
        .replace("@MEMBERS@", &each.join("\n"))
        .replace("@DIM_NAMES@", &names.join(", "))
        .replace("@DIM_TEXTS@", &dims.join(" or "))
}

/// Rust type with as many bits; an integer if Rust has no such type.
fn rust_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::F16 | DType::Bf16 | DType::U16 => "u16",
        DType::I8 | DType::I7 => "i8",
        DType::U8 | DType::Bool => "u8",
        DType::I16 => "i16",
        DType::I32 => "i32",
        DType::U32 => "u32",
        DType::I64 => "i64",
        DType::U64 => "u64",
    }
}
