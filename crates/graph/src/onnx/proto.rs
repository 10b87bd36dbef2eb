//! Messages of ONNX's protocol buffers, as far as they are used. Names and nodes borrow from the file;
//! weights are not copied.

use super::wire::{Budget, Message};
use crate::ReadError;

/// `ModelProto`; its graph is decoded on request.
#[derive(Debug, Default)]
pub struct ModelProto<'a> {
    pub ir_version: i64,
    pub opsets: Vec<(&'a str, i64)>,
    pub producer: (&'a str, &'a str),
    pub graph: Option<Message<'a>>,
    pub functions: Vec<FunctionProto<'a>>,
}

/// `GraphProto`.
#[derive(Debug, Default)]
pub struct GraphProto<'a> {
    pub name: &'a str,
    pub nodes: Vec<NodeProto<'a>>,
    pub initializers: Vec<TensorProto<'a>>,
    pub n_sparse: usize,
    pub inputs: Vec<ValueInfo<'a>>,
    pub outputs: Vec<ValueInfo<'a>>,
    pub value_infos: Vec<ValueInfo<'a>>,
}

/// `NodeProto`.
#[derive(Debug, Clone, Default)]
pub struct NodeProto<'a> {
    pub name: &'a str,
    pub op_type: &'a str,
    pub domain: &'a str,
    pub inputs: Vec<&'a str>,
    pub outputs: Vec<&'a str>,
    pub attributes: Vec<AttributeProto<'a>>,
}

/// `FunctionProto`: a function that the model defines.
#[derive(Debug, Default)]
pub struct FunctionProto<'a> {
    pub name: &'a str,
    pub domain: &'a str,
    pub inputs: Vec<&'a str>,
    pub outputs: Vec<&'a str>,
    /// Attributes with their defaults.
    pub defaults: Vec<AttributeProto<'a>>,
    pub nodes: Vec<NodeProto<'a>>,
    pub opsets: Vec<(&'a str, i64)>,
}

/// `AttributeProto`; numbers are decoded, tensors and graphs stay encoded.
#[derive(Debug, Clone, Default)]
pub struct AttributeProto<'a> {
    pub name: &'a str,
    pub reference: &'a str,
    pub kind: i64,
    pub float: Option<f32>,
    pub int: Option<i64>,
    pub text: Option<&'a [u8]>,
    pub tensor: Option<Message<'a>>,
    pub graph: Option<Message<'a>>,
    pub floats: Vec<u8>,
    pub ints: Vec<i64>,
    pub texts: Vec<&'a [u8]>,
}

/// `TensorProto`; its elements are decoded on request.
#[derive(Debug, Default)]
pub struct TensorProto<'a> {
    pub name: &'a str,
    pub dims: Vec<i64>,
    pub data_type: i64,
    pub raw: Option<&'a [u8]>,
    pub message: Option<Message<'a>>,
    pub is_external: bool,
    pub external: Vec<(&'a str, &'a str)>,
}

/// `ValueInfoProto`: a declared value.
#[derive(Debug, Default)]
pub struct ValueInfo<'a> {
    pub name: &'a str,
    /// Element type as the number of ONNX's `DataType`; `None` if the value is not a tensor.
    pub elements: Option<i64>,
    /// Dimensions; `None` if the rank is unknown.
    pub dims: Option<Vec<DimProto<'a>>>,
    /// Whether the value is a sequence, a map or anything else but a tensor.
    pub is_foreign: bool,
}

/// `TensorShapeProto.Dimension`.
#[derive(Debug, Clone, Copy)]
pub enum DimProto<'a> {
    Size(i64),
    Named(&'a str),
    Unknown,
}

fn push<T>(list: &mut Vec<T>, item: T, budget: &Budget) -> Result<(), ReadError> {
    // A growing list has memory for up to twice its elements allocated.
    budget.charge(2 * size_of::<T>())?;
    list.push(item);
    Ok(())
}

impl<'a> ModelProto<'a> {
    pub fn read(message: Message<'a>, budget: &Budget) -> Result<ModelProto<'a>, ReadError> {
        let mut model = ModelProto::default();
        for field in message {
            let field = field?;
            match field.number {
                1 => model.ir_version = field.int()?,
                2 => model.producer.0 = field.text()?,
                3 => model.producer.1 = field.text()?,
                7 => model.graph = Some(field.message()?),
                8 => push(&mut model.opsets, read_opset(field.message()?)?, budget)?,
                25 => push(&mut model.functions, FunctionProto::read(field.message()?, budget)?, budget)?,
                _ => {}
            }
        }
        Ok(model)
    }
}

fn read_opset(message: Message<'_>) -> Result<(&str, i64), ReadError> {
    let (mut domain, mut version) = ("", 0);
    for field in message {
        let field = field?;
        match field.number {
            1 => domain = field.text()?,
            2 => version = field.int()?,
            _ => {}
        }
    }
    Ok((domain, version))
}

/// Predicate on domain and operator: whether the attributes of such nodes are decoded.
pub type IsRead<'a> = dyn Fn(&str, &str) -> bool + 'a;

impl<'a> GraphProto<'a> {
    /// Decodes a graph. Attributes are decoded only of nodes whose operator `is_read` accepts.
    pub fn read(message: Message<'a>, budget: &Budget, is_read: &IsRead<'_>) -> Result<GraphProto<'a>, ReadError> {
        let mut graph = GraphProto::default();
        for field in message {
            let field = field?;
            match field.number {
                1 => push(&mut graph.nodes, NodeProto::read(field.message()?, budget, is_read)?, budget)?,
                2 => graph.name = field.text()?,
                5 => push(&mut graph.initializers, TensorProto::read(field.message()?, budget)?, budget)?,
                11 => push(&mut graph.inputs, ValueInfo::read(field.message()?, budget)?, budget)?,
                12 => push(&mut graph.outputs, ValueInfo::read(field.message()?, budget)?, budget)?,
                13 => push(&mut graph.value_infos, ValueInfo::read(field.message()?, budget)?, budget)?,
                15 => graph.n_sparse += 1,
                _ => {}
            }
        }
        Ok(graph)
    }
}

impl<'a> NodeProto<'a> {
    fn read(message: Message<'a>, budget: &Budget, is_read: &IsRead<'_>) -> Result<NodeProto<'a>, ReadError> {
        let mut node = NodeProto::default();
        // The domain comes after the attributes, which may be larger than everything else.
        for field in message {
            let field = field?;
            match field.number {
                1 => push(&mut node.inputs, field.text()?, budget)?,
                2 => push(&mut node.outputs, field.text()?, budget)?,
                3 => node.name = field.text()?,
                4 => node.op_type = field.text()?,
                7 => node.domain = field.text()?,
                _ => {}
            }
        }
        if is_read(node.domain, node.op_type) {
            for field in message {
                let field = field?;
                if field.number == 5 {
                    push(&mut node.attributes, AttributeProto::read(field.message()?, budget)?, budget)?;
                }
            }
        }
        Ok(node)
    }
}

impl<'a> FunctionProto<'a> {
    fn read(message: Message<'a>, budget: &Budget) -> Result<FunctionProto<'a>, ReadError> {
        let mut function = FunctionProto::default();
        for field in message {
            let field = field?;
            match field.number {
                1 => function.name = field.text()?,
                4 => push(&mut function.inputs, field.text()?, budget)?,
                5 => push(&mut function.outputs, field.text()?, budget)?,
                7 => push(&mut function.nodes, NodeProto::read(field.message()?, budget, &|_, _| true)?, budget)?,
                9 => push(&mut function.opsets, read_opset(field.message()?)?, budget)?,
                10 => function.domain = field.text()?,
                11 => push(&mut function.defaults, AttributeProto::read(field.message()?, budget)?, budget)?,
                _ => {}
            }
        }
        Ok(function)
    }
}

impl<'a> AttributeProto<'a> {
    fn read(message: Message<'a>, budget: &Budget) -> Result<AttributeProto<'a>, ReadError> {
        let mut attribute = AttributeProto::default();
        for field in message {
            let field = field?;
            match field.number {
                1 => attribute.name = field.text()?,
                2 => attribute.float = Some(field.float()?),
                3 => attribute.int = Some(field.int()?),
                4 => attribute.text = Some(field.message()?.bytes),
                5 => attribute.tensor = Some(field.message()?),
                6 => attribute.graph = Some(field.message()?),
                7 => field.fixed(4, &mut attribute.floats, budget)?,
                8 => field.ints(&mut attribute.ints, budget)?,
                9 => push(&mut attribute.texts, field.message()?.bytes, budget)?,
                20 => attribute.kind = field.int()?,
                21 => attribute.reference = field.text()?,
                _ => {}
            }
        }
        Ok(attribute)
    }
}

impl<'a> TensorProto<'a> {
    pub fn read(message: Message<'a>, budget: &Budget) -> Result<TensorProto<'a>, ReadError> {
        let mut tensor = TensorProto { message: Some(message), ..TensorProto::default() };
        for field in message {
            let field = field?;
            match field.number {
                1 => field.ints(&mut tensor.dims, budget)?,
                2 => tensor.data_type = field.int()?,
                8 => tensor.name = field.text()?,
                9 => tensor.raw = Some(field.message()?.bytes),
                13 => push(&mut tensor.external, read_entry(field.message()?)?, budget)?,
                14 => tensor.is_external = field.int()? == 1,
                _ => {}
            }
        }
        Ok(tensor)
    }
}

fn read_entry(message: Message<'_>) -> Result<(&str, &str), ReadError> {
    let mut entry = ("", "");
    for field in message {
        let field = field?;
        match field.number {
            1 => entry.0 = field.text()?,
            2 => entry.1 = field.text()?,
            _ => {}
        }
    }
    Ok(entry)
}

impl<'a> ValueInfo<'a> {
    fn read(message: Message<'a>, budget: &Budget) -> Result<ValueInfo<'a>, ReadError> {
        let mut info = ValueInfo::default();
        for field in message {
            let field = field?;
            match field.number {
                1 => info.name = field.text()?,
                2 => {
                    for field in field.message()? {
                        let field = field?;
                        match field.number {
                            1 => info.read_tensor(field.message()?, budget)?,
                            4 | 5 | 7 | 8 | 9 => info.is_foreign = true,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(info)
    }

    fn read_tensor(&mut self, message: Message<'a>, budget: &Budget) -> Result<(), ReadError> {
        for field in message {
            let field = field?;
            match field.number {
                1 => self.elements = Some(field.int()?),
                2 => {
                    let mut dims = Vec::new();
                    for dim in field.message()? {
                        let dim = dim?;
                        if dim.number == 1 {
                            push(&mut dims, read_dim(dim.message()?)?, budget)?;
                        }
                    }
                    self.dims = Some(dims);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn read_dim(message: Message<'_>) -> Result<DimProto<'_>, ReadError> {
    let mut dim = DimProto::Unknown;
    for field in message {
        let field = field?;
        match field.number {
            1 => dim = DimProto::Size(field.int()?),
            2 => dim = DimProto::Named(field.text()?),
            _ => {}
        }
    }
    Ok(dim)
}
