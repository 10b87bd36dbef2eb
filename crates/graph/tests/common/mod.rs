//! Official tests, in the form that `tests/onnx/generate.py` writes.
#![allow(dead_code, reason = "each test uses a part of it")]

pub mod build;
pub mod damage;
pub mod light;

use std::io::Read;
use std::path::Path;

use bytes::Bytes;
use tilewright_graph::{DType, Tensor, TensorType};

/// Inputs and the expected outputs.
pub type Set = (Vec<Tensor>, Vec<Tensor>);

/// Model with sets of tensors.
pub struct Case {
    /// Name of the case.
    pub name: String,
    /// File of the model.
    pub model: Bytes,
    /// Sets of inputs and outputs.
    pub sets: Vec<Set>,
}

/// Reads a file of `tests/onnx`.
pub fn read(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../graph/tests/onnx").join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn tensor(record: &Bytes) -> Tensor {
    let dtype = DType::from_onnx(record[0].into()).expect("types that are supported");
    let rank = usize::from(record[1]);
    let dims = record[2..2 + 4 * rank].chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()) as usize);
    let ty = TensorType::new(dtype, dims.collect::<Vec<_>>());
    Tensor::new(ty, record.slice(2 + 4 * rank..)).expect("as many bytes as its type takes")
}

/// Reads the cases of a file.
pub fn cases(file: &str) -> Vec<Case> {
    let mut all = Vec::new();
    flate2::read::GzDecoder::new(&read(file)[..]).read_to_end(&mut all).expect("a packed file");
    let all = Bytes::from(all);
    let (mut at, mut records) = (0, Vec::new());
    while at < all.len() {
        let n = u32::from_le_bytes(all[at..at + 4].try_into().unwrap()) as usize;
        records.push(all.slice(at + 4..at + 4 + n));
        at += 4 + n;
    }
    let n_tensors = records.iter().position(|record| record.is_empty()).expect("an empty record behind the tensors");
    let tensors: Vec<Tensor> = records[..n_tensors].iter().map(tensor).collect();
    let case = |parts: &[Bytes]| {
        let numbers: Vec<u32> = parts[2].chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
        let mut sets = Vec::new();
        let mut at = 0;
        while at < numbers.len() {
            let n_inputs = numbers[at] as usize;
            let n_outputs = numbers[at + 1 + n_inputs] as usize;
            let of = |range: std::ops::Range<usize>| -> Vec<Tensor> {
                numbers[range].iter().map(|&t| tensors[t as usize].clone()).collect()
            };
            sets.push((of(at + 1..at + 1 + n_inputs), of(at + 2 + n_inputs..at + 2 + n_inputs + n_outputs)));
            at += 2 + n_inputs + n_outputs;
        }
        let name = String::from_utf8(parts[0].to_vec()).expect("names are text");
        Case { name, model: parts[1].clone(), sets }
    };
    records[n_tensors + 1..].chunks(3).map(case).collect()
}

/// Names of the cases that `refused.txt` lists: unsupported ones, or ones with other results.
pub fn refused() -> Vec<String> {
    let listed = String::from_utf8(read("refused.txt")).expect("text");
    listed.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// Checks the cases of a file that are not listed as refused; returns the results of the check for those that
/// pass. A check that returns `None` skips a case.
///
/// # Panics
/// If a case fails, or fewer than `at_least` pass.
pub fn check_cases<T>(file: &str, at_least: usize, check: impl Fn(&Case) -> Result<Option<T>, String>) -> Vec<T> {
    let listed = refused();
    let (mut passed, mut n_plain, mut wrong) = (Vec::new(), 0, Vec::new());
    for case in cases(file).iter().filter(|case| !listed.contains(&case.name)) {
        match check(case) {
            Ok(None) => {}
            Ok(Some(found)) => {
                passed.push(found);
                n_plain += usize::from(is_plain(case));
            }
            Err(why) => wrong.push(format!("{}: {why}", case.name)),
        }
    }
    println!("{file}: {} pass, {n_plain} of them plain", passed.len());
    assert!(wrong.is_empty(), "{} are refused or wrong, and not listed:\n{}", wrong.len(), wrong.join("\n"));
    assert!(passed.len() >= at_least, "{} pass, and {at_least} did", passed.len());
    passed
}

/// Opens external data files: there are none.
pub fn no_files(path: &str) -> Result<Bytes, String> {
    Err(format!("there is no {path}"))
}

/// Checks that two tensors agree: equal types, and numbers that differ by no more than a thousandth, as in
/// ONNX's own tests, or by a small fraction of the largest number.
pub fn agree(found: &Tensor, wanted: &Tensor) -> Result<(), String> {
    if found.ty() != wanted.ty() {
        return Err(format!("is {}, and should be {}", found.ty(), wanted.ty()));
    }
    if !wanted.dtype().is_float() {
        return if found == wanted { Ok(()) } else { Err("has other elements".to_owned()) };
    }
    let (relative, absolute) = match wanted.dtype() {
        DType::F16 | DType::Bf16 => (1e-2, 1e-3),
        _ => (1e-3, 1e-6),
    };
    for (at, (x, y)) in found.floats().into_iter().zip(wanted.floats()).enumerate() {
        let is_close = x == y || (x.is_nan() && y.is_nan()) || (x - y).abs() <= absolute + relative * y.abs();
        if !is_close {
            return Err(format!("has {x} at {at}, and should have {y}"));
        }
    }
    Ok(())
}

/// Whether a case needs only f32, 32- and 64-bit integers, and `bool`.
pub fn is_plain(case: &Case) -> bool {
    let plain = [DType::F32, DType::I32, DType::I64, DType::Bool];
    let tensors = case.sets.iter().flat_map(|(inputs, outputs)| inputs.iter().chain(outputs));
    tensors.into_iter().all(|x| plain.contains(&x.dtype()))
}
