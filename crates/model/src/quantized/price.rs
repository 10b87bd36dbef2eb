//! Cost comparison of integer and floating-point convolutions.

use tilewright::Choice;
use tilewright_graph::op::ConvShape;
use tilewright_ir::op::{Epilogue, EpilogueFunction, Layout, Structure};
use tilewright_ir::{DType as ElementType, Target};

use crate::fuse::convolution_of;
use crate::import::window_of;
use crate::layouts::takes_blocks;
use crate::rules::n_merged;

/// Cycles to dequantize an element of the input, and to quantize an element of the result.
const CONVERSIONS: [f64; 2] = [0.12, 0.35];

/// Whether an integer convolution of operands of these types is estimated to be faster than a floating-point
/// one, by the analytical models of their first guesses. For the floating-point convolution, the conversions
/// of operands and result are included. Products need not be compared: integer ones take a quarter of the
/// time.
pub fn convolution_pays(found: &ConvShape, factors: [ElementType; 2], target: &Target) -> bool {
    pays(found, factors, target).unwrap_or(false)
}

fn pays(found: &ConvShape, factors: [ElementType; 2], target: &Target) -> Option<bool> {
    let of_integers = integer_cycles(found, factors, target)?;
    let n_elements = [found.n * found.c * found.image.iter().product::<usize>(), found.out().iter().product()];
    let conversions: f64 = n_elements.iter().zip(CONVERSIONS).map(|(n, cycles)| *n as f64 * cycles).sum();
    Some(of_integers < cycles(found, None, &[EpilogueFunction::Bias], target)? + conversions)
}

/// Estimate of the cycles of an integer convolution of operands of these types, whose result is quantized.
pub fn integer_cycles(found: &ConvShape, factors: [ElementType; 2], target: &Target) -> Option<f64> {
    let closed = [EpilogueFunction::Init, EpilogueFunction::Dequant, EpilogueFunction::QuantU8];
    cycles(found, Some(factors), &closed, target)
}

fn cycles(
    found: &ConvShape,
    factors: Option<[ElementType; 2]>,
    epilogue: &[EpilogueFunction],
    target: &Target,
) -> Option<f64> {
    let found = &factors.map_or(found.clone(), |_| merged(found));
    let conv = window_of(found, false)?;
    let whole = |list: Vec<usize>| list.into_iter().map(|n| n as i64).collect::<Vec<_>>();
    let x = whole([&[found.n, found.c][..], &found.image].concat());
    let w = whole([&[found.m, found.c / found.groups][..], &found.geometry.kernel].concat());
    let block = target.lanes(ElementType::F32);
    let epilogue = epilogue.iter().map(|function| Epilogue::new(*function, &[])).collect::<Option<_>>()?;
    let workload = convolution_of(&conv, &x, &w, found.m as i64, factors, false).ok()?;
    let Structure::Window(window) = workload.structure() else { return None };
    let in_blocks = takes_blocks(&window, block);
    let channels = [found.c, found.m].map(|n| if in_blocks && n as i64 % block == 0 { block } else { 1 });
    let workload = workload.with_epilogue(epilogue).ok()?.with_constants(vec!["w".to_owned()]).ok()?;
    let workload = workload.with_layout(Layout::of_channels(channels)).ok()?;
    Choice::guess(&workload, target, 1, None).ok()?.estimate()
}

/// Convolution of integers whose groups have been merged to whole blocks of channels, all channels added that
/// this takes.
fn merged(found: &ConvShape) -> ConvShape {
    let [outputs, inputs] = [found.m, found.c].map(|n| n / found.groups);
    let mut found = found.clone();
    if let Some(n) = n_merged(outputs as i64, inputs as i64).filter(|_| found.groups > 1) {
        found.groups = found.groups.div_ceil(n as usize);
        [found.m, found.c] = [outputs, inputs].map(|channels| channels * n as usize * found.groups);
    }
    found
}
