//! Arrays in NumPy's `.npy` files.
//!
//! # Source
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>

use std::borrow::Cow;
use std::fmt;

/// First bytes of a `.npy` file.
pub const MAGIC: &[u8] = b"\x93NUMPY";
/// Maximum size of a header in bytes; only a hostile file has a longer one.
const LONGEST_HEADER: usize = 1 << 16;

/// Error of a `.npy` file, with the reason and how to mend it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpyError(pub String);

impl fmt::Display for NpyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NpyError {}

fn error<T>(what: impl Into<String>) -> Result<T, NpyError> {
    Err(NpyError(what.into()))
}

/// Array of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array<'f> {
    /// Element type in NumPy's notation without byte order, such as `f4`; elements are little-endian.
    pub element: &'f str,
    /// Extents.
    pub shape: Vec<usize>,
    /// Whether the file has the elements in column-major order.
    pub is_column_major: bool,
    /// Bytes after the header, which may be truncated.
    pub data: &'f [u8],
}

impl<'f> Array<'f> {
    /// Bytes of all elements, `element_bytes` each, in row-major order.
    ///
    /// # Errors
    /// If the file has fewer bytes.
    pub fn elements(&self, element_bytes: usize) -> Result<Cow<'f, [u8]>, NpyError> {
        let n_bytes = self.shape.iter().try_fold(element_bytes, |n, extent| n.checked_mul(*extent));
        let Some(n_bytes) = n_bytes else { return error(format!("its shape {:?} is too large", self.shape)) };
        let found = self.data.len();
        let short = || NpyError(format!("its elements take {n_bytes} bytes, and there are {found} (write it again)"));
        let data = self.data.get(..n_bytes).ok_or_else(short)?;
        Ok(match self.is_column_major {
            true => Cow::Owned(row_major(data, &self.shape, element_bytes)),
            false => Cow::Borrowed(data),
        })
    }
}

/// Puts elements of `size` bytes from column-major into row-major order.
fn row_major(data: &[u8], shape: &[usize], size: usize) -> Vec<u8> {
    let stride = |stride: &mut usize, extent: &usize| Some(std::mem::replace(stride, *stride * extent));
    let strides: Vec<usize> = shape.iter().scan(size, stride).collect();
    let (mut index, mut at) = (vec![0; shape.len()], 0);
    let mut out = Vec::with_capacity(data.len());
    while out.len() < data.len() {
        out.extend_from_slice(&data[at..at + size]);
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            at += strides[d];
            if index[d] < shape[d] {
                break;
            }
            at -= strides[d] * shape[d];
            index[d] = 0;
        }
    }
    out
}

/// Parses a `.npy` file.
///
/// # Errors
/// If the file is not a `.npy` file, is truncated within its header, or has elements that are not
/// little-endian.
pub fn read(file: &[u8]) -> Result<Array<'_>, NpyError> {
    if !file.starts_with(MAGIC) || file.len() < 10 {
        return error("it is no .npy file (write it with numpy.save)");
    }
    let (start, length) = match file[6] {
        1 => (10, usize::from(u16::from_le_bytes([file[8], file[9]]))),
        2 | 3 if file.len() >= 12 => (12, u32::from_le_bytes([file[8], file[9], file[10], file[11]]) as usize),
        _ => return error(format!("its format version {} is not known (write it with numpy.save)", file[6])),
    };
    if length > LONGEST_HEADER || file.len() < start + length {
        return error("it ends within its header (write it again)");
    }
    let Ok(header) = std::str::from_utf8(&file[start..start + length]) else {
        return error("its header is no text (write it with numpy.save)");
    };
    let (element, shape, is_column_major) = read_header(header)?;
    Ok(Array { element, shape, is_column_major, data: &file[start + length..] })
}

/// Value of a key in a header.
fn field<'a>(header: &'a str, key: &str) -> Result<&'a str, NpyError> {
    let missing = || NpyError(format!("its header has no {key} (write it with numpy.save)"));
    let at = header.find(&format!("'{key}'")).ok_or_else(missing)?;
    let rest = header[at + key.len() + 2..].trim_start();
    Ok(rest.strip_prefix(':').ok_or_else(missing)?.trim_start())
}

/// Type of the elements, shape, and whether the order is column-major.
fn read_header(header: &str) -> Result<(&str, Vec<usize>, bool), NpyError> {
    let descr = field(header, "descr")?;
    let name = descr.strip_prefix('\'').and_then(|rest| rest.split_once('\'')).map(|(name, _)| name);
    let Some(name) = name else { return error("it holds records (save one field as an array of its own)") };
    let element = name.trim_start_matches(['<', '|', '=', '>']);
    if name.starts_with('>') && !element.ends_with('1') {
        return error(format!("its elements are big-endian (save array.astype('<{element}'))"));
    }
    let is_column_major = field(header, "fortran_order")?.starts_with("True");
    let dims = field(header, "shape")?.strip_prefix('(').and_then(|rest| rest.split_once(')')).map(|(dims, _)| dims);
    let Some(dims) = dims else { return error("its shape cannot be read (write it with numpy.save)") };
    let read =
        |dim: &str| dim.trim().parse::<usize>().map_err(|_| NpyError(format!("its dimension {dim} is not a number")));
    let shape = dims.split(',').filter(|dim| !dim.trim().is_empty()).map(read).collect::<Result<Vec<_>, _>>()?;
    Ok((element, shape, is_column_major))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [MAGIC, &[1, 0], &(header.len() as u16).to_le_bytes(), header.as_bytes(), data].concat()
    }

    #[test]
    fn headers_are_read_as_numpy_writes_them() {
        let check = |descr: &str, order: &str, shape: &str, expected: Result<(&str, &[usize]), &str>| {
            let header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n");
            let file = file(&header, &[7; 24]);
            match (read(&file), expected) {
                (Ok(array), Ok((element, shape))) => {
                    assert_eq!(
                        (array.element, &array.shape[..], array.data),
                        (element, shape, &[7; 24][..]),
                        "{header}"
                    )
                }
                (Err(error), Err(part)) => assert!(error.0.contains(part), "{header}: {error}"),
                (found, _) => panic!("{header}: {found:?}"),
            }
        };
        check("<f4", "False", "(2, 3)", Ok(("f4", &[2, 3])));
        check("|u1", "False", "(24,)", Ok(("u1", &[24])));
        check("<f8", "False", "()", Ok(("f8", &[])));
        check(">i1", "False", "(24,)", Ok(("i1", &[24])));
        check(">f4", "False", "(6,)", Err("array.astype('<f4')"));
        check("<f4", "True", "(2, 3)", Ok(("f4", &[2, 3])));
        check("<f4", "False", "(2, -3)", Err("dimension  -3"));
        check("<f4", "False", "2", Err("shape cannot be read"));
    }

    #[test]
    fn elements_are_as_many_as_the_shape_says() {
        let array =
            |shape: &[usize]| Array { element: "f4", shape: shape.to_vec(), is_column_major: false, data: &[0; 24] };
        assert_eq!(array(&[2, 3]).elements(4).map(|bytes| bytes.len()), Ok(24));
        assert_eq!(array(&[0, usize::MAX]).elements(4).map(|bytes| bytes.len()), Ok(0));
        assert!(array(&[7]).elements(4).unwrap_err().0.contains("take 28 bytes, and there are 24"));
        assert!(array(&[usize::MAX, 2]).elements(4).unwrap_err().0.contains("too large"));
    }

    /// Arrays as `numpy.asfortranarray` leaves them.
    #[test]
    fn elements_in_columns_are_put_into_rows() {
        let check = |shape: &[usize], data: &[u8], expected: &[u8]| {
            let array = Array { element: "u1", shape: shape.to_vec(), is_column_major: true, data };
            assert_eq!(*array.elements(1).unwrap(), *expected, "{shape:?}");
        };
        check(&[2, 3], &[0, 3, 1, 4, 2, 5, 9], &[0, 1, 2, 3, 4, 5]);
        check(&[2, 1, 2, 2], &[0, 4, 2, 6, 1, 5, 3, 7], &[0, 1, 2, 3, 4, 5, 6, 7]);
        check(&[3], &[0, 1, 2], &[0, 1, 2]);
        check(&[], &[7], &[7]);
        check(&[2, 0], &[], &[]);
        let array = Array { element: "u2", shape: vec![2, 2], is_column_major: true, data: &[0, 1, 4, 5, 2, 3, 6, 7] };
        assert_eq!(*array.elements(2).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
