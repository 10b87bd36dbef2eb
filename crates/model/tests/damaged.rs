//! Random and damaged NumPy files: read or rejected, without a panic or much memory.

#[path = "../../graph/tests/common/damage.rs"]
mod damage;

use std::io::{Cursor, Write};

use damage::{mutated, read_many};
use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_graph::{DType, Tensor};
use tilewright_model::npy::{read_npy, read_npz, write_npy};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Arrays as `numpy.savez` and `numpy.savez_compressed` write them.
fn archive(arrays: &[Vec<u8>], method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (at, array) in arrays.iter().enumerate() {
        zip.start_file(format!("arr_{at}.npy"), SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(array).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

#[test]
fn arrays_that_may_be_anything_are_refused_without_a_panic() {
    let shapes: [(DType, &[usize]); 5] =
        [(DType::F32, &[3, 4]), (DType::I64, &[]), (DType::Bool, &[7]), (DType::F64, &[0, 2]), (DType::U8, &[1, 2, 3])];
    let array = |(dtype, shape): (DType, &[usize])| {
        let n: usize = shape.iter().product();
        write_npy(&Tensor::from_floats(dtype, shape, &vec![1.0; n]))
    };
    let mut files: Vec<Vec<u8>> = shapes.into_iter().map(array).collect();
    for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
        files.push(archive(&files[..5], method));
        assert_eq!(read_npz(&files[files.len() - 1].clone().into()).unwrap().len(), 5);
    }
    // The memory that a header announces is not allocated before the data is there.
    let header = |random: &mut Xoshiro256PlusPlus| {
        let dims: Vec<String> = (0..random.random_range(0..4)).map(|_| random.random::<u64>().to_string()).collect();
        let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({},), }}\n", dims.join(", "));
        header.truncate(random.random_range(0..=header.len()));
        [&b"\x93NUMPY\x01\x00"[..], &(header.len() as u16).to_le_bytes(), header.as_bytes()].concat()
    };
    let make = |random: &mut Xoshiro256PlusPlus| match random.random_range(0..10) {
        0 => header(random),
        1 => (0..random.random_range(0..60)).map(|_| random.random()).collect(),
        _ => mutated(&files[random.random_range(0..files.len())], random),
    };
    read_many(5000, make, |file| {
        let file = bytes::Bytes::from(file);
        let _ = (read_npy(&file), read_npz(&file));
    });
}
