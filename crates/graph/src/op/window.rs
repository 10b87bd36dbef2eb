//! Sliding windows of convolutions and pools.

use super::Import;
use super::util::size;
use crate::OpError;
use crate::error::invalid;

/// Largest size; larger ones are mistakes, and would overflow.
const LARGEST: i64 = 1 << 31;

/// Padding policy (`auto_pad`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoPad {
    /// Explicit padding (`NOTSET`).
    Given,
    /// No padding.
    Valid,
    /// Padding so that the output's size is the input's divided by the stride, rounded up; an odd element
    /// goes to the end.
    SameUpper,
    /// Padding so that the output's size is the input's divided by the stride, rounded up; an odd element
    /// goes to the beginning.
    SameLower,
}

/// Attributes of sliding windows as a node declares them.
#[derive(Debug, Clone)]
pub struct WindowAttributes {
    /// Kernel size; `None` for a convolution takes it from the weights.
    pub kernel: Option<Vec<usize>>,
    /// Strides, 1 by default.
    pub strides: Option<Vec<usize>>,
    /// Dilations, 1 by default.
    pub dilations: Option<Vec<usize>>,
    /// Padding: all beginnings, then all ends; negative crops.
    pub pads: Option<Vec<i64>>,
    /// Padding policy.
    pub auto_pad: AutoPad,
    /// Whether the number of windows is rounded up (`ceil_mode`), so that the last one may extend past the
    /// padding.
    pub ceil: bool,
}

/// Windows over an image of a certain size, resolved for each spatial dimension.
#[derive(Debug, Clone)]
pub struct Geometry {
    /// Kernel size.
    pub kernel: Vec<usize>,
    /// Strides of the windows.
    pub strides: Vec<usize>,
    /// Dilations: distances of a window's elements.
    pub dilations: Vec<usize>,
    /// Padding before each dimension; negative crops.
    pub begins: Vec<i64>,
    /// Padding after each dimension; negative crops.
    pub ends: Vec<i64>,
    /// Number of windows in each dimension.
    pub out: Vec<usize>,
}

impl WindowAttributes {
    /// Reads the attributes of windows.
    ///
    /// # Errors
    /// If the attributes are not valid sizes.
    pub fn import(node: &Import) -> Result<WindowAttributes, OpError> {
        let sizes = |name: &str| -> Result<Option<Vec<usize>>, OpError> {
            let read = |&n: &i64| match n {
                1..=LARGEST => Ok(n as usize),
                _ => Err(invalid!("{name} has {n}")),
            };
            node.ints(name)?.map(|list| list.iter().map(read).collect()).transpose()
        };
        let known = [
            ("NOTSET", AutoPad::Given),
            ("VALID", AutoPad::Valid),
            ("SAME_UPPER", AutoPad::SameUpper),
            ("SAME_LOWER", AutoPad::SameLower),
            ("", AutoPad::Given),
        ];
        let pads = node.ints("pads")?;
        if let Some(n) = pads.iter().flatten().find(|n| !(-LARGEST..=LARGEST).contains(*n)) {
            return Err(invalid!("pads has {n}"));
        }
        Ok(WindowAttributes {
            kernel: sizes("kernel_shape")?,
            strides: sizes("strides")?,
            dilations: sizes("dilations")?,
            pads,
            auto_pad: node.one_of("auto_pad", "NOTSET", &known)?,
            ceil: false,
        })
    }

    /// Kernel, strides, dilations and padding as given, with the kernel's rank; the number of windows is not
    /// set yet.
    pub(super) fn given(&self, kernel: &[usize]) -> Result<Geometry, OpError> {
        let n = kernel.len();
        let list = |given: &Option<Vec<usize>>| match given {
            Some(list) if list.len() != n => Err(invalid!("{list:?} is not one number for each of {n} dimensions")),
            Some(list) => Ok(list.clone()),
            None => Ok(vec![1; n]),
        };
        if self.kernel.as_ref().is_some_and(|given| given != kernel) {
            return Err(invalid!("windows of {:?} do not fit weights of {kernel:?}", self.kernel));
        }
        let pads = self.pads.clone().unwrap_or_else(|| vec![0; 2 * n]);
        if pads.len() != 2 * n {
            return Err(invalid!("pads {pads:?} are not two for each of {n} dimensions"));
        }
        Ok(Geometry {
            kernel: kernel.to_vec(),
            strides: list(&self.strides)?,
            dilations: list(&self.dilations)?,
            begins: pads[..n].to_vec(),
            ends: pads[n..].to_vec(),
            out: vec![0; n],
        })
    }

    /// Resolves the windows of a kernel size over an image.
    ///
    /// # Errors
    /// If the image is too small.
    pub fn over(&self, image: &[usize], kernel: &[usize]) -> Result<Geometry, OpError> {
        if image.len() != kernel.len() || kernel.contains(&0) {
            return Err(invalid!("windows of {kernel:?} do not fit an image of {image:?}"));
        }
        let mut found = self.given(kernel)?;
        for d in 0..image.len() {
            let (n, stride) = (image[d] as i64, found.strides[d] as i64);
            let window = (kernel[d] as i64 - 1).checked_mul(found.dilations[d] as i64).filter(|&w| w < 1 << 40);
            let window = window.ok_or_else(|| invalid!("windows of {kernel:?} are too large"))? + 1;
            match self.auto_pad {
                AutoPad::Given => {}
                AutoPad::Valid => (found.begins[d], found.ends[d]) = (0, 0),
                AutoPad::SameUpper | AutoPad::SameLower => {
                    let wanted = (n + stride - 1) / stride;
                    let total = ((wanted - 1) * stride + window - n).max(0);
                    let smaller = total / 2;
                    found.begins[d] = if self.auto_pad == AutoPad::SameUpper { smaller } else { total - smaller };
                    found.ends[d] = total - found.begins[d];
                }
            }
            let room = n + found.begins[d] + found.ends[d] - window;
            let mut out = if self.ceil { (room + stride - 1).div_euclid(stride) } else { room.div_euclid(stride) } + 1;
            // A window that would begin after the image and its leading padding does not count.
            if self.ceil && (out - 1) * stride >= n + found.begins[d] {
                out -= 1;
            }
            if out < 0 || (room < 0 && !self.ceil) {
                return Err(invalid!("an image of {image:?} with its borders is smaller than windows of {kernel:?}"));
            }
            found.out[d] = size(out)?;
        }
        Ok(found)
    }
}

/// Shape of an image with its strides, in elements.
#[derive(Clone, Copy)]
struct ImagePlaces<'a> {
    shape: &'a [usize],
    strides: &'a [usize],
}

impl Geometry {
    /// Visits the elements of the image that the window at `at` reads: calls `act` with the index within the
    /// window and the offset in the image by its strides. Padding is skipped.
    pub fn for_window(&self, at: &[usize], image: &[usize], strides: &[usize], act: &mut impl FnMut(usize, usize)) {
        self.walk(at, ImagePlaces { shape: image, strides }, 0, [0; 2], act);
    }

    /// Visits the positions of a window along its dimensions from `d` on, starting at an index within the
    /// window and an offset in the image.
    fn walk(
        &self,
        at: &[usize],
        image: ImagePlaces,
        d: usize,
        [inside, place]: [usize; 2],
        act: &mut impl FnMut(usize, usize),
    ) {
        if d == image.shape.len() {
            return act(inside, place);
        }
        for k in 0..self.kernel[d] {
            let to = (at[d] * self.strides[d] + k * self.dilations[d]) as i64 - self.begins[d];
            if (0..image.shape[d] as i64).contains(&to) {
                let place = place + to as usize * image.strides[d];
                self.walk(at, image, d + 1, [inside * self.kernel[d] + k, place], act);
            }
        }
    }
}

/// Advances a multi-dimensional index in row-major order; false after the last.
pub fn advance(index: &mut [usize], shape: &[usize]) -> bool {
    for d in (0..index.len()).rev() {
        index[d] += 1;
        if index[d] < shape[d] {
            return true;
        }
        index[d] = 0;
    }
    false
}
