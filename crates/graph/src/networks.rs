//! Convolutional networks of the literature, built with seeded random weights, so that no downloaded weights
//! are needed for measurements.
//!
//! These are the five networks that AutoTVM was measured on end to end (Chen et al. 2018, section 6). Weights
//! follow He's uniform initialisation, so that activations keep their magnitude from layer to layer.

use crate::onnx::{GraphPort, ModelFile, NodeFile};
use crate::op::Attribute;
use crate::{DType, Dim, SplitMix64, Tensor};

/// Every network.
pub const NETWORKS: &[Network] = &[
    Network { name: "resnet18", text: "ResNet-18 (He et al. 2016), an image of 224 by 224", build: resnet18 },
    Network { name: "mobilenet", text: "MobileNet v1 (Howard et al. 2017), an image of 224 by 224", build: mobilenet },
    Network {
        name: "lstm",
        text: "a language model of two LSTM layers with 200 units (Zaremba et al. 2014, small), as many steps as given",
        build: lstm,
    },
    Network { name: "dqn", text: "a deep Q-network (Mnih et al. 2015), four frames of 84 by 84", build: dqn },
    Network {
        name: "dcgan",
        text: "the generator of a DCGAN (Radford et al. 2015), an image of 64 by 64",
        build: dcgan,
    },
];

/// Row of [`NETWORKS`].
#[derive(Debug)]
pub struct Network {
    /// Name on the command line.
    pub name: &'static str,
    /// Description for help texts.
    pub text: &'static str,
    build: fn(&mut NetworkBuilder),
}

impl Network {
    /// Builds the network with random weights of the given seed.
    pub fn build(&self, seed: u64) -> ModelFile {
        let model = ModelFile { name: self.name.to_owned(), opset: 17, ..ModelFile::default() };
        let mut builder = NetworkBuilder { model, random: SplitMix64::new(seed) };
        (self.build)(&mut builder);
        builder.model
    }
}

/// Builder of a model. A node has the name of the value that it computes.
struct NetworkBuilder {
    model: ModelFile,
    random: SplitMix64,
}

/// Convolution layer: input and output channels, window, stride, padding.
#[derive(Clone, Copy)]
struct ConvLayer {
    channels: (usize, usize),
    window: usize,
    stride: usize,
    pad: usize,
    groups: usize,
}

type NodeAttributes<'a> = Vec<(&'a str, Attribute)>;

/// Repeats a number for both dimensions, or all four sides, of an image.
fn both<const N: usize>(name: &str, number: usize) -> (&str, Attribute) {
    (name, Attribute::Ints(vec![number as i64; N]))
}

fn sizes<const N: usize>(sizes: [usize; N]) -> Vec<Dim> {
    sizes.map(Dim::Size).to_vec()
}

/// Bound of uniform weights that preserve the magnitude of activations, if each result sums `n_products`
/// products.
fn he(n_products: usize) -> f64 {
    (6.0 / n_products as f64).sqrt()
}

impl NetworkBuilder {
    fn input(&mut self, name: &str, dtype: DType, dims: Vec<Dim>) -> String {
        self.model.inputs.push(GraphPort { name: name.to_owned(), dtype, dims });
        name.to_owned()
    }

    fn output(&mut self, name: &str, dims: Vec<Dim>) {
        self.model.outputs.push(GraphPort { name: name.to_owned(), dtype: DType::F32, dims });
    }

    /// Adds a weight with random numbers in a range.
    fn weight(&mut self, name: String, shape: &[usize], (low, high): (f64, f64)) -> String {
        let tensor = self.random.tensor(shape, low, high);
        self.constant(name, tensor)
    }

    fn constant(&mut self, name: String, tensor: Tensor) -> String {
        self.model.weights.push((name.clone(), tensor));
        name
    }

    fn nodes(&mut self, op: &str, inputs: &[&str], outputs: &[&str], attributes: NodeAttributes<'_>) {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let attributes = attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let (inputs, outputs) = (owned(inputs), owned(outputs));
        self.model.nodes.push(NodeFile { op: op.to_owned(), inputs, outputs, attributes, ..NodeFile::default() });
    }

    fn node(&mut self, op: &str, name: &str, inputs: &[&str], attributes: NodeAttributes<'_>) -> String {
        self.nodes(op, inputs, &[name], attributes);
        name.to_owned()
    }

    fn relu(&mut self, x: &str) -> String {
        self.node("Relu", &format!("{x}.relu"), &[x], vec![])
    }

    fn conv(&mut self, name: &str, x: &str, conv: ConvLayer) -> String {
        let ConvLayer { channels: (c, k), window, stride, pad, groups } = conv;
        let shape = [k, c / groups, window, window];
        let bound = he(shape[1..].iter().product());
        let w = self.weight(format!("{name}.weight"), &shape, (-bound, bound));
        let attributes = vec![
            both::<2>("kernel_shape", window),
            both::<2>("strides", stride),
            both::<4>("pads", pad),
            ("group", Attribute::Int(groups as i64)),
        ];
        self.node("Conv", name, &[x, &w], attributes)
    }

    /// Adds a batch normalization with random scales in a range.
    fn batch_norm(&mut self, x: &str, channels: usize, scales: (f64, f64)) -> String {
        let name = format!("{x}.norm");
        let mut each = |what: &str, range| self.weight(format!("{name}.{what}"), &[channels], range);
        let [scale, bias, mean] =
            [("scale", scales), ("bias", (-0.1, 0.1)), ("mean", (-0.1, 0.1))].map(|(what, range)| each(what, range));
        let variance = each("variance", (0.5, 1.5));
        self.node("BatchNormalization", &name, &[x, &scale, &bias, &mean, &variance], vec![])
    }

    fn conv_norm_relu(&mut self, name: &str, x: &str, conv: ConvLayer) -> String {
        let y = self.conv(name, x, conv);
        let y = self.batch_norm(&y, conv.channels.1, SCALES);
        self.relu(&y)
    }

    /// Adds a product with weights and a bias.
    fn dense(&mut self, name: &str, x: &str, (k, n): (usize, usize), bound: f64) -> String {
        let w = self.weight(format!("{name}.weight"), &[n, k], (-bound, bound));
        let bias = self.weight(format!("{name}.bias"), &[n], (-0.1, 0.1));
        self.node("Gemm", name, &[x, &w, &bias], vec![("transB", Attribute::Int(1))])
    }

    /// Adds global average pooling and a dense layer for `n_classes` classes.
    fn classify(&mut self, x: &str, channels: usize, n_classes: usize) {
        let y = self.node("GlobalAveragePool", "pool", &[x], vec![]);
        let y = self.node("Flatten", "features", &[&y], vec![]);
        self.dense("logits", &y, (channels, n_classes), he(channels));
        self.output("logits", sizes([1, n_classes]));
    }
}

/// Range of a normalisation's scales.
const SCALES: (f64, f64) = (0.5, 1.5);
/// Range of a normalisation's scales if its result is added to another, so that sums grow slowly.
const DAMPED: (f64, f64) = (0.3, 0.6);

fn resnet18(net: &mut NetworkBuilder) {
    let x = net.input("image", DType::F32, sizes([1, 3, 224, 224]));
    let x = net.conv_norm_relu("stem", &x, ConvLayer { channels: (3, 64), window: 7, stride: 2, pad: 3, groups: 1 });
    let pool = vec![both::<2>("kernel_shape", 3), both::<2>("strides", 2), both::<4>("pads", 1)];
    let mut x = net.node("MaxPool", "stem.pool", &[&x], pool);
    let mut c = 64;
    for (stage, k) in [64, 128, 256, 512].into_iter().enumerate() {
        for block in 0..2 {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let name = format!("stage{}.block{}", stage + 1, block + 1);
            let first = ConvLayer { channels: (c, k), window: 3, stride, pad: 1, groups: 1 };
            let y = net.conv_norm_relu(&format!("{name}.conv1"), &x, first);
            let y = net.conv(&format!("{name}.conv2"), &y, ConvLayer { channels: (k, k), stride: 1, ..first });
            let y = net.batch_norm(&y, k, DAMPED);
            if c != k {
                let shortcut = ConvLayer { window: 1, pad: 0, ..first };
                x = net.conv(&format!("{name}.shortcut"), &x, shortcut);
                x = net.batch_norm(&x, k, SCALES);
            }
            let sum = net.node("Add", &format!("{name}.sum"), &[&y, &x], vec![]);
            (x, c) = (net.relu(&sum), k);
        }
    }
    net.classify(&x, 512, 1000);
}

fn mobilenet(net: &mut NetworkBuilder) {
    const LAYERS: &[(usize, usize)] = &[
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        (512, 1),
        (512, 1),
        (512, 1),
        (512, 1),
        (512, 1),
        (1024, 2),
        (1024, 1),
    ];
    let x = net.input("image", DType::F32, sizes([1, 3, 224, 224]));
    let mut x =
        net.conv_norm_relu("stem", &x, ConvLayer { channels: (3, 32), window: 3, stride: 2, pad: 1, groups: 1 });
    let mut c = 32;
    for (at, &(k, stride)) in LAYERS.iter().enumerate() {
        let depthwise = ConvLayer { channels: (c, c), window: 3, stride, pad: 1, groups: c };
        let pointwise = ConvLayer { channels: (c, k), window: 1, stride: 1, pad: 0, groups: 1 };
        x = net.conv_norm_relu(&format!("layer{}.depthwise", at + 1), &x, depthwise);
        x = net.conv_norm_relu(&format!("layer{}.pointwise", at + 1), &x, pointwise);
        c = k;
    }
    net.classify(&x, 1024, 1000);
}

/// Builds an LSTM language model whose state is an input and an output, so that a text can be processed in
/// parts.
fn lstm(net: &mut NetworkBuilder) {
    const WORDS: usize = 10_000;
    const UNITS: usize = 200;
    // Range of the paper's random weights.
    const RANGE: (f64, f64) = (-0.1, 0.1);
    let steps = || Dim::Named("steps".to_owned());
    let tokens = net.input("tokens", DType::I64, vec![steps()]);
    let table = net.weight("embedding.weight".to_owned(), &[WORDS, UNITS], RANGE);
    let x = net.node("Gather", "embedding", &[&table, &tokens], vec![]);
    let batch_axis = net.constant("batch_axis".to_owned(), Tensor::vector(&[1]));
    let mut x = net.node("Unsqueeze", "embedding.batch", &[&x, &batch_axis], vec![]);
    for layer in 1..=2 {
        let state = [1, 1, UNITS];
        let [h, c] = ["h", "c"].map(|part| net.input(&format!("{part}{layer}"), DType::F32, sizes(state)));
        let mut weight = |what: &str, shape: &[usize]| net.weight(format!("lstm{layer}.{what}"), shape, RANGE);
        let w = weight("weight", &[1, 4 * UNITS, UNITS]);
        let r = weight("recurrence", &[1, 4 * UNITS, UNITS]);
        let b = weight("bias", &[1, 8 * UNITS]);
        let (y, h_out, c_out) = (format!("lstm{layer}"), format!("h{layer}_out"), format!("c{layer}_out"));
        let units = vec![("hidden_size", Attribute::Int(UNITS as i64))];
        net.nodes("LSTM", &[&x, &w, &r, &b, "", &h, &c], &[&y, &h_out, &c_out], units);
        x = net.node("Squeeze", &format!("{y}.one_way"), &[&y, &batch_axis], vec![]);
        net.output(&h_out, sizes(state));
        net.output(&c_out, sizes(state));
    }
    let x = net.node("Squeeze", "features", &[&x, &batch_axis], vec![]);
    net.dense("logits", &x, (UNITS, WORDS), RANGE.1);
    net.output("logits", vec![steps(), Dim::Size(WORDS)]);
}

fn dqn(net: &mut NetworkBuilder) {
    const ACTIONS: usize = 18;
    let mut x = net.input("frames", DType::F32, sizes([1, 4, 84, 84]));
    for (at, (channels, window, stride)) in
        [((4, 32), 8, 4), ((32, 64), 4, 2), ((64, 64), 3, 1)].into_iter().enumerate()
    {
        let y = net.conv(&format!("conv{}", at + 1), &x, ConvLayer { channels, window, stride, pad: 0, groups: 1 });
        x = net.relu(&y);
    }
    let x = net.node("Flatten", "features", &[&x], vec![]);
    let x = net.dense("hidden", &x, (64 * 7 * 7, 512), he(64 * 7 * 7));
    let x = net.relu(&x);
    net.dense("values", &x, (512, ACTIONS), he(512));
    net.output("values", sizes([1, ACTIONS]));
}

fn dcgan(net: &mut NetworkBuilder) {
    const CHANNELS: [usize; 5] = [1024, 512, 256, 128, 3];
    let x = net.input("noise", DType::F32, sizes([1, 100]));
    let x = net.dense("project", &x, (100, CHANNELS[0] * 16), he(100));
    let shape = net.constant("shape".to_owned(), Tensor::vector(&[1, CHANNELS[0] as i64, 4, 4]));
    let x = net.node("Reshape", "project.image", &[&x, &shape], vec![]);
    let x = net.batch_norm(&x, CHANNELS[0], SCALES);
    let mut x = net.relu(&x);
    for (at, pair) in CHANNELS.windows(2).enumerate() {
        let (name, [c, k]) = (format!("up{}", at + 1), [pair[0], pair[1]]);
        // Each result sums over 4 of the 16 positions of a window.
        let bound = he(4 * c);
        let w = net.weight(format!("{name}.weight"), &[c, k, 4, 4], (-bound, bound));
        let attributes = vec![both::<2>("kernel_shape", 4), both::<2>("strides", 2), both::<4>("pads", 1)];
        let y = net.node("ConvTranspose", &name, &[&x, &w], attributes);
        x = if at + 2 == CHANNELS.len() {
            net.node("Tanh", "image", &[&y], vec![])
        } else {
            let y = net.batch_norm(&y, k, SCALES);
            net.relu(&y)
        };
    }
    net.output("image", sizes([1, 3, 64, 64]));
}
