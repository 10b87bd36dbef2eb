//! Tensors in NumPy's files: a `.npy` file holds one, a `.npz` file several by name.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use tilewright::file::{self, write_into_folder};
pub use tilewright::npy::NpyError;
use tilewright::npy::{self, MAGIC};
use tilewright_graph::onnx::kind_of_other;
use tilewright_graph::{DType, Tensor, TensorType};
use tilewright_ir::{Buffer, Program, Role};

/// Maximum number of characters of a tensor's name that go into a file name: systems allow 255, some of which
/// are reserved for a number.
const MOST_OF_NAME: usize = 200;

fn error<T>(what: impl Into<String>) -> Result<T, NpyError> {
    Err(NpyError(what.into()))
}

/// Element types with NumPy's names of them, without the byte order.
const TYPES: [(DType, &str); 12] = [
    (DType::F32, "f4"),
    (DType::F64, "f8"),
    (DType::F16, "f2"),
    (DType::I8, "i1"),
    (DType::I16, "i2"),
    (DType::I32, "i4"),
    (DType::I64, "i8"),
    (DType::U8, "u1"),
    (DType::U16, "u2"),
    (DType::U32, "u4"),
    (DType::U64, "u8"),
    (DType::Bool, "b1"),
];

/// Parses a `.npy` file.
///
/// # Errors
/// If the file is not a `.npy` file, is truncated, or holds anything other than numbers.
pub fn read_npy(file: &Bytes) -> Result<Tensor, NpyError> {
    let array = npy::read(file)?;
    let Some((dtype, _)) = TYPES.iter().find(|(_, name)| *name == array.element) else {
        let known: Vec<&str> = TYPES.iter().map(|(_, name)| *name).collect();
        return error(format!("its elements are {} (convert them to one of {})", array.element, known.join(", ")));
    };
    let data = match array.elements(dtype.size())? {
        Cow::Borrowed(elements) => file.slice_ref(elements),
        Cow::Owned(elements) => elements.into(),
    };
    Ok(Tensor::new(TensorType::new(*dtype, array.shape), data).expect("as many bytes as the type takes"))
}

/// Encodes a tensor as a `.npy` file.
///
/// # Panics
/// If NumPy does not have the element type.
pub fn write_npy(tensor: &Tensor) -> Vec<u8> {
    let dtype = match tensor.dtype() {
        DType::I2 | DType::I4 => DType::I8,
        DType::U2 | DType::U4 => DType::U8,
        dtype => dtype,
    };
    let name = TYPES.iter().find(|(known, _)| *known == dtype).expect("NumPy has it").1;
    let order = if tensor.dtype().size() == 1 { '|' } else { '<' };
    let dims: String = tensor.shape().iter().map(|d| format!("{d}, ")).collect();
    let mut header = format!("{{'descr': '{order}{name}', 'fortran_order': False, 'shape': ({}), }}", dims.trim_end());
    // The data begins at a multiple of 64 bytes.
    let end = (10 + header.len() + 1).next_multiple_of(64);
    header.extend(std::iter::repeat_n(' ', end - 10 - header.len() - 1));
    header.push('\n');
    let mut file = MAGIC.to_vec();
    file.extend([1, 0]);
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(tensor.bytes());
    file
}

/// Parses a `.npz` file: tensors by name.
///
/// # Errors
/// If the file is not a `.npz` file or has no members, or one of them is not a `.npy` file.
pub fn read_npz(file: &Bytes) -> Result<Vec<(String, Tensor)>, NpyError> {
    let no_archive = |why: zip::result::ZipError| NpyError(format!("it is no .npz file: {why} (use numpy.savez)"));
    let mut archive = zip::ZipArchive::new(Cursor::new(file)).map_err(no_archive)?;
    let mut tensors = Vec::with_capacity(archive.len().min(1 << 10));
    for at in 0..archive.len() {
        let entry = archive.by_index(at).map_err(no_archive)?;
        let name = entry.name().map_err(no_archive)?.into_owned();
        let name = name.strip_suffix(".npy").unwrap_or(&name).to_owned();
        let in_it = |why: String| NpyError(format!("its array `{name}`: {why}"));
        // The announced length is not trusted.
        let mut data = Vec::new();
        let most = (file.len() as u64).saturating_mul(1100);
        entry.take(most).read_to_end(&mut data).map_err(|why| in_it(format!("{why} (use numpy.savez)")))?;
        let tensor = read_npy(&Bytes::from(data)).map_err(|error| in_it(error.0))?;
        tensors.push((name, tensor));
    }
    if tensors.is_empty() {
        return error("it has no arrays (use numpy.savez)");
    }
    Ok(tensors)
}

/// Reads a file of either kind: one tensor without a name, or several with names.
///
/// # Errors
/// If the file cannot be read, or is of neither kind.
pub fn read_tensors(path: &Path) -> Result<Vec<(Option<String>, Tensor)>, tilewright::Error> {
    let bytes = Bytes::from(file::read(path, "a .npy or .npz file")?);
    let is_archive = bytes.starts_with(b"PK");
    let read = if is_archive {
        read_npz(&bytes).map(|all| all.into_iter().map(|(name, tensor)| (Some(name), tensor)).collect())
    } else {
        read_npy(&bytes).map(|tensor| vec![(None, tensor)])
    };
    read.map_err(|error| {
        let kind = kind_of_other(&bytes).filter(|_| !is_archive);
        tilewright::Error::input(format!(
            "{}: {}",
            path.display(),
            kind.map_or_else(|| error.to_string(), str::to_owned)
        ))
    })
}

/// Bytes of a kernel's buffer from a file: a `.npy` file of the right type, or raw elements.
///
/// # Errors
/// If the file has another type or another number of bytes.
pub fn read_elements(file: Bytes, buffer: &Buffer) -> Result<Bytes, NpyError> {
    let ty = format!("{}{:?}", buffer.dtype.name(), buffer.shape);
    if file.starts_with(MAGIC) {
        let tensor = read_npy(&file)?;
        let is_shape = tensor.shape().iter().map(|extent| *extent as i64).eq(buffer.shape.iter().copied());
        let fits = is_shape && tensor.dtype().name() == buffer.dtype.name();
        return if fits { Ok(tensor.bytes().clone()) } else { error(format!("it holds {} (give {ty})", tensor.ty())) };
    }
    let n_bytes = buffer.size_bytes().unwrap_or(0);
    if file.len() as u64 != n_bytes {
        let found = file.len();
        return error(format!("it has {found} bytes (give a .npy file, or the {n_bytes} bytes of {ty})"));
    }
    Ok(file)
}

/// Reads the constant inputs of a program from files; `given` are pairs of a name and a path, from the option
/// `option`.
///
/// # Errors
/// If an input is missing or does not fit, or a name is unknown.
pub fn read_constants(
    given: &[(String, PathBuf)],
    program: &Program,
    option: &str,
) -> Result<Vec<(String, Bytes)>, tilewright::Error> {
    let input = |reason: String| tilewright::Error::input(reason);
    let mut rest: Vec<&(String, PathBuf)> = given.iter().collect();
    let mut found = Vec::new();
    let wanted: Vec<&Buffer> = program.arguments().map(|(_, b)| b).filter(|b| b.role == Role::ConstInput).collect();
    for b in &wanted {
        let at = rest.iter().position(|(name, _)| name.eq_ignore_ascii_case(&b.name)).ok_or_else(|| {
            let name = &b.name;
            input(format!("{name} is constant (give {option} {name}=FILE, or leave const= out of the workload)"))
        })?;
        let (_, path) = rest.remove(at);
        let data = file::read(path, "a .npy file or one of bare elements")?;
        let data = read_elements(data.into(), b).map_err(|why| input(format!("{}: {why}", path.display())))?;
        found.push((b.name.clone(), data));
    }
    let names = || wanted.iter().map(|b| b.name.as_str()).collect::<Vec<_>>().join(", ");
    match rest.first() {
        None => Ok(found),
        Some((name, _)) if wanted.is_empty() => {
            Err(input(format!("{option} {name}: the workload has no constants (const= says which it has)")))
        }
        Some((name, _)) => Err(input(format!("{option} {name}: the workload's constants are {}", names()))),
    }
}

/// Writes each tensor to a file of its name in a folder, which is created if needed; returns the paths.
///
/// # Errors
/// If a file cannot be written.
pub fn write_tensors(folder: &Path, tensors: &[(String, Tensor)]) -> Result<Vec<PathBuf>, tilewright::Error> {
    let names = file_names(&tensors.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>());
    let mut files: Vec<PathBuf> = Vec::new();
    for ((_, tensor), name) in tensors.iter().zip(names) {
        // NumPy has no such type.
        let tensor = &if tensor.dtype() == DType::Bf16 { tensor.widened() } else { tensor.clone() };
        let path = folder.join(name);
        write_into_folder(&path, &write_npy(tensor))
            .map_err(|error| tilewright::Error::failed(format!("cannot write {}", path.display())).because(error))?;
        files.push(path);
    }
    Ok(files)
}

/// File names for tensors of these names, distinct even on case-insensitive file systems: NAME.npy if that is
/// a valid file name. Otherwise invalid characters become `_`, and a number is added to names that are
/// shortened or would be equal.
fn file_names(names: &[&str]) -> Vec<String> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let plain = |name: &str| name.chars().map(plain).take(MOST_OF_NAME).collect::<String>();
    let mut taken = HashSet::new();
    let mut files: Vec<Option<String>> = vec![None; names.len()];
    // Names that need no change are assigned first, so that no other tensor takes them.
    for is_exact in [true, false] {
        for (name, file) in names.iter().zip(&mut files).filter(|(name, _)| (plain(name) == **name) == is_exact) {
            let plain = plain(name);
            let mut numbered = (0u32..).map(|n| if n == 0 { plain.clone() } else { format!("{plain}.{n}") });
            *file = numbered.find(|name| taken.insert(name.to_ascii_lowercase()));
        }
    }
    files.into_iter().map(|file| file.expect("some number is free") + ".npy").collect()
}

#[cfg(test)]
mod tests {
    use tilewright_ir::op::Workload;

    use super::*;

    #[test]
    fn elements_come_bare_or_in_numpys_files() {
        let bare: Vec<u8> = (0..32).collect();
        let program = Workload::parse("matmul:m=1,n=2,k=4").unwrap().program();
        let (_, buffer) = program.arguments().nth(1).unwrap();
        let read = |file: Vec<u8>| read_elements(file.into(), buffer);
        assert_eq!(read(bare.clone()).unwrap(), bare);
        let with = |dtype: DType, shape: &[usize]| {
            read(write_npy(&Tensor::new(TensorType::new(dtype, shape), bare.clone().into()).unwrap()))
        };
        assert_eq!(with(DType::F32, &[4, 2]).unwrap(), bare);
        assert_eq!(with(DType::F64, &[2, 2]).unwrap_err().0, "it holds f64[2,2] (give f32[4, 2])");
        assert_eq!(with(DType::F32, &[1, 8]).unwrap_err().0, "it holds f32[1,8] (give f32[4, 2])");
        assert!(read(b"\x93NUMPY\x01\x00\xff".to_vec()).is_err());
        assert!(read(vec![0; 7]).unwrap_err().0.contains("7 bytes"));
    }

    #[test]
    fn outputs_are_found_under_their_names() {
        let check = |names: &[&str], expected: &[&str]| assert_eq!(file_names(names), expected, "{names:?}");
        check(&["y", "a b"], &["y.npy", "a_b.npy"]);
        // The tensor with exactly this name gets it, in whichever order similar names come.
        check(&["a/b", "a_b", "a_b.1"], &["a_b.2.npy", "a_b.npy", "a_b.1.npy"]);
        check(&["Y", "y"], &["Y.npy", "y.1.npy"]);
        check(&["..", "", "ä"], &["...npy", ".npy", "_.npy"]);
        let long = ["x".repeat(300), "x".repeat(400), "x".repeat(200)];
        let files = file_names(&long.each_ref().map(String::as_str));
        let short = |n: usize| "x".repeat(n);
        assert_eq!(files, [short(200) + ".1.npy", short(200) + ".2.npy", short(200) + ".npy"]);
    }

    #[test]
    fn what_is_written_is_read() {
        for (dtype, _) in TYPES {
            for shape in [vec![], vec![3], vec![2, 3], vec![0, 4]] {
                let n: usize = shape.iter().product();
                let numbers: Vec<f64> = (0..n).map(|at| (at % 2) as f64).collect();
                let tensor = Tensor::from_floats(dtype, shape, &numbers);
                let file = Bytes::from(write_npy(&tensor));
                assert_eq!((file.len() - tensor.bytes().len()) % 64, 0);
                assert_eq!(read_npy(&file).unwrap(), tensor);
            }
        }
    }
}
