//! Elements of ONNX tensors: raw data in the file, external data files, or typed lists of numbers.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::other::kind_of_other;
use super::proto::TensorProto;
use super::wire::{Budget, Message};
use crate::{DType, ReadError, Tensor, TensorType};

/// Opens an external data file by its path relative to the model, or returns the reason why it cannot be
/// opened.
pub type External<'a> = dyn FnMut(&str) -> Result<Bytes, String> + 'a;

/// ONNX's number of the string type.
const TEXTS: i64 = 8;

/// Source of tensors' elements.
pub struct TensorBytes<'a> {
    /// The model's file.
    pub file: &'a Bytes,
    /// External files beside the model's file.
    pub external: &'a mut External<'a>,
    /// External data files opened so far, by path.
    pub opened: Vec<(String, Bytes)>,
    /// Memory budget for copies.
    pub budget: &'a Budget,
}

/// Tensor as loaded: numbers, strings or an unsupported type (its name).
pub enum LoadedTensor {
    Tensor(Tensor),
    /// String tensor: the elements are indices into the list of distinct strings.
    Texts(Tensor, Arc<[String]>),
    Foreign(String),
}

impl TensorBytes<'_> {
    /// Loads a tensor's elements; they are copied only if they are stored as a list of numbers.
    ///
    /// # Errors
    /// If the number of elements does not match the shape, or an external data file cannot be opened.
    pub fn load(&mut self, proto: &TensorProto<'_>) -> Result<LoadedTensor, ReadError> {
        if proto.data_type == TEXTS {
            return self.texts(proto);
        }
        let refuse = |what: String| ReadError::Tensor { name: proto.name.to_owned(), what };
        let dtype = match DType::from_onnx(proto.data_type) {
            Ok(dtype) => dtype,
            Err(name) => return Ok(LoadedTensor::Foreign(name)),
        };
        let shape: Vec<usize> =
            proto.dims.iter().map(|&d| usize::try_from(d)).collect::<Result<_, _>>().map_err(|_| {
                refuse(format!("its shape {:?} has a negative dimension (save the model anew)", proto.dims))
            })?;
        let ty = TensorType::new(dtype, shape);
        let too_large = || refuse(format!("its shape {:?} is too large", ty.shape));
        // Several numbers of fewer than 8 bits share a byte.
        let each = 8 / dtype.bits().min(8);
        let wanted = ty.checked_bytes().ok_or_else(too_large)?.div_ceil(each);
        let bytes = if proto.is_external {
            self.external_bytes(proto, wanted).map_err(refuse)?
        } else if let Some(raw) = proto.raw {
            self.file.slice_ref(raw)
        } else {
            let message = proto.message.expect("a tensor that is read has its message");
            self.listed(message, dtype)?
        };
        let found = bytes.len();
        if each > 1 && found == wanted && !proto.is_external {
            self.budget.charge(ty.n_elements())?;
        }
        Tensor::from_packed(ty.clone(), bytes).map(LoadedTensor::Tensor).ok_or_else(|| {
            refuse(format!("{ty} takes {wanted} bytes, and {found} are there: the file is damaged (save it anew)"))
        })
    }

    /// Loads a string tensor as indices into the list of distinct strings, in order of first occurrence.
    fn texts(&self, proto: &TensorProto<'_>) -> Result<LoadedTensor, ReadError> {
        let (mut texts, mut places): (Vec<String>, Vec<i64>) = (Vec::new(), Vec::new());
        let mut known: HashMap<&[u8], i64> = HashMap::new();
        for field in proto.message.expect("a tensor that is read has its message") {
            let field = field?;
            if field.number == 6 {
                let bytes = field.message()?.bytes;
                self.budget.charge(2 * (size_of::<String>() + bytes.len() + 64))?;
                places.push(*known.entry(bytes).or_insert_with(|| {
                    texts.push(String::from_utf8_lossy(bytes).into_owned());
                    texts.len() as i64 - 1
                }));
            }
        }
        let shape: Option<Vec<usize>> = proto.dims.iter().map(|&d| usize::try_from(d).ok()).collect();
        let shape = shape.filter(|shape| TensorType::new(DType::I64, &shape[..]).checked_len() == Some(places.len()));
        let shape = shape.ok_or_else(|| ReadError::Tensor {
            name: proto.name.to_owned(),
            what: format!("its shape {:?} is not that of {} texts (save the model anew)", proto.dims, places.len()),
        })?;
        Ok(LoadedTensor::Texts(Tensor::vector(&places).reshaped(shape), texts.into()))
    }

    /// Loads elements from one of the typed fields.
    fn listed(&self, message: Message<'_>, dtype: DType) -> Result<Bytes, ReadError> {
        let (mut fixed, mut ints) = (Vec::new(), Vec::new());
        for field in message {
            let field = field?;
            match (field.number, dtype) {
                (4, DType::F32) => field.fixed(4, &mut fixed, self.budget)?,
                (10, DType::F64) => field.fixed(8, &mut fixed, self.budget)?,
                (5, DType::I32 | DType::I16 | DType::I8 | DType::U16 | DType::U8 | DType::Bool)
                | (5, DType::F8e4m3fn | DType::F8e4m3fnuz | DType::F8e5m2 | DType::F8e5m2fnuz)
                | (5, DType::F16 | DType::Bf16 | DType::I4 | DType::U4 | DType::I2 | DType::U2)
                | (7, DType::I64)
                | (11, DType::U32 | DType::U64) => field.ints(&mut ints, self.budget)?,
                _ => {}
            }
        }
        if matches!(dtype, DType::F32 | DType::F64) {
            return Ok(fixed.into());
        }
        self.budget.charge(ints.len() * dtype.size())?;
        // Numbers of 8 and 16 bits are listed as their bits.
        let bits = match dtype {
            DType::F16 | DType::Bf16 => DType::U16,
            other => other,
        };
        let mut bytes = Vec::with_capacity(ints.len() * dtype.size());
        for number in ints {
            match bits {
                DType::Bool => bytes.push(u8::from(number != 0)),
                _ => bytes.extend_from_slice(&number.to_le_bytes()[..bits.size()]),
            }
        }
        Ok(bytes.into())
    }

    fn external_bytes(&mut self, proto: &TensorProto<'_>, wanted: usize) -> Result<Bytes, String> {
        let entry = |key: &str| proto.external.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        let number = |key: &str, default: usize| {
            let digits = |text: &str| text.parse::<usize>().map_err(|_| format!("its {key} `{text}` is no number"));
            entry(key).map_or(Ok(default), digits)
        };
        let location = entry("location").ok_or("it lies beside the file, which does not say where")?;
        let is_inside = !location.is_empty()
            && !location.contains(['\\', '\0', ':'])
            && location.split('/').all(|part| !part.is_empty() && part != "..");
        if !is_inside {
            let mend = "put the weights into the model's folder and save it anew";
            return Err(format!("its file `{location}` is not below the model's folder ({mend})"));
        }
        let (offset, length) = (number("offset", 0)?, number("length", wanted)?);
        let known = self.opened.iter().find(|(name, _)| name == location).map(|(_, bytes)| bytes.clone());
        let bytes = match known {
            Some(bytes) => bytes,
            None => {
                let bytes = (self.external)(location)?;
                self.opened.push((location.to_owned(), bytes.clone()));
                bytes
            }
        };
        let end = offset.checked_add(length).filter(|&end| end <= bytes.len()).ok_or_else(|| {
            if let Some(kind) = kind_of_other(&bytes) {
                return format!("its file `{location}`: {kind}");
            }
            let found = bytes.len();
            format!("bytes {offset} to {offset}+{length} of `{location}` are beyond its {found} bytes (get it anew)")
        })?;
        Ok(bytes.slice(offset..end))
    }
}
