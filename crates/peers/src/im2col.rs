//! Convolution as a matrix multiplication by OpenBLAS: W`[k, c·r·s]` times the columns of X under the filter.
//!
//! The copy is our own. It is made for a block of output pixels at a time, so that OpenBLAS finds it in a
//! cache; the width of the block, and whether the threads are ours or OpenBLAS's, are chosen by measurement.
//! A pointwise convolution of stride 1 multiplies with X itself.

use tilewright_ir::op::EpilogueFunction;

use super::Unavailable;
use super::library::Means;
use super::openblas::{Blas, BlasGemm, GemmCall, ThreadedCall, WayMaker};
use super::operands::{CpuElement, FencedElements, Operands};
use super::problem::{ConvProblem, LibraryProblem};
use super::threads::{LoopThreads, SharedPointers};
use super::worker::{Prepared, RunFunction};

/// Widths of a block worth trying, in output pixels, besides a whole image.
const BLOCK_WIDTHS: [usize; 3] = [128, 512, 2048];

/// Loads OpenBLAS and chooses block width and threads for the operands' problem.
pub(super) fn prepare<T: CpuElement>(operands: &mut Operands<T>, means: &Means) -> Result<Prepared<T>, Unavailable> {
    let threads = means.threads;
    let LibraryProblem::Conv(conv) = operands.problem.kernel else { panic!("it computes convolutions only") };
    for step in &operands.problem.epilogue {
        if !matches!(
            step.function(),
            EpilogueFunction::Bias | EpilogueFunction::Add | EpilogueFunction::Relu | EpilogueFunction::Clip
        ) {
            let reason = format!("a loop after OpenBLAS is no match for {step}");
            return Err(Unavailable::Unsupported { reason });
        }
    }
    let pixels: usize = conv.output().iter().product();
    let blas = Blas::<T>::load(means, &[conv.k, n_taps(&conv), pixels])?;
    let gemm = blas.gemm;
    let mut ways: Vec<WayMaker<'_, T>> = Vec::new();
    let name = |width: usize| {
        let copied = if conv.is_pointwise() { "no copy" } else { "im2col" };
        format!("{copied}, gemm of {width} pixels")
    };
    // Blocks pay off if they keep the copy in a cache.
    let narrower = BLOCK_WIDTHS.into_iter().filter(|&width| width < pixels && !conv.is_pointwise());
    for width in narrower.chain([pixels]) {
        ways.push(Box::new(move || ThreadedCall {
            name: name(width),
            threads,
            run: convolve(gemm, conv, width, LoopThreads::new(1), threads),
        }));
    }
    if threads > 1 {
        let share = pixels.div_ceil(threads);
        for width in BLOCK_WIDTHS.into_iter().filter(|&width| width < share).chain([share]) {
            ways.push(Box::new(move || ThreadedCall {
                name: format!("{} on {threads} threads of ours", name(width)),
                threads: 1,
                run: convolve(gemm, conv, width, LoopThreads::new(threads), 1),
            }));
        }
    }
    blas.fastest(ways, operands, threads)
}

/// Number of rows of the copy for one group's channels.
fn n_taps(conv: &ConvProblem) -> usize {
    conv.c / conv.groups * conv.filter[0] * conv.filter[1]
}

/// Computes blocks of `width` pixels, distributed over `threads`; each is copied by `n_copying` threads.
fn convolve<T: CpuElement>(
    gemm: BlasGemm<T>,
    conv: ConvProblem,
    width: usize,
    mut threads: LoopThreads,
    n_copying: usize,
) -> RunFunction<T> {
    let pixels: usize = conv.output().iter().product();
    let image_len = conv.image[0] * conv.image[1];
    let (c_group, k_group, taps) = (conv.c / conv.groups, conv.k / conv.groups, n_taps(&conv));
    let n_blocks = pixels.div_ceil(width);
    let copy_len = if conv.is_pointwise() { 0 } else { taps * width.min(pixels) };
    let mut copies: Vec<FencedElements<T>> = (0..threads.n()).map(|_| FencedElements::zeros(copy_len)).collect();
    Box::new(move |operands| {
        let copies: Vec<_> = copies.iter_mut().map(|copy| SharedPointers(copy.as_mut_ptr())).collect();
        let y = SharedPointers(operands.c.as_mut_ptr());
        let (x, w, operands) = (&operands.a, &operands.b, &*operands);
        threads.for_each(conv.n * conv.groups * n_blocks, |task, thread| {
            // The block index changes fastest, so that neighbouring tasks share W.
            let (block, group, image) = (task % n_blocks, task / n_blocks % conv.groups, task / n_blocks / conv.groups);
            let begin = block * width;
            let n_pixels = width.min(pixels - begin);
            let x = &x[(image * conv.c + group * c_group) * image_len..][..c_group * image_len];
            let (columns, ld) = if conv.is_pointwise() {
                (x[begin..].as_ptr(), pixels)
            } else {
                // SAFETY: each thread has its own copy, of at least this many elements.
                let copy = unsafe { std::slice::from_raw_parts_mut(copies[thread].get(), taps * n_pixels) };
                copy_columns(&conv, x, copy, begin, n_pixels, n_copying);
                (copy.as_ptr(), n_pixels)
            };
            let w = &w[group * k_group * taps..][..k_group * taps];
            let y_begin = (image * conv.k + group * k_group) * pixels + begin;
            let call = GemmCall { m: k_group, n: n_pixels, k: taps, a: (taps, false), b: (ld, false), ldc: pixels };
            // SAFETY: the sizes and leading dimensions stay within W, the copy or X, and Y; no two blocks
            // share a part of Y.
            unsafe { call.call(gemm, w.as_ptr(), columns, y.get().add(y_begin)) };
            for row in 0..k_group {
                let at = y_begin + row * pixels;
                // SAFETY: the same part of Y, after the call.
                let y = unsafe { std::slice::from_raw_parts_mut(y.get().add(at), n_pixels) };
                finish(operands, y, at, group * k_group + row);
            }
        });
        Ok(())
    })
}

/// Elements of X under the filter for `n_pixels` outputs from `begin` on: a row for each tap.
fn copy_columns<T: CpuElement>(
    conv: &ConvProblem,
    x: &[T],
    copy: &mut [T],
    begin: usize,
    n_pixels: usize,
    n_threads: usize,
) {
    let n_filter = conv.filter[0] * conv.filter[1];
    let image_len = conv.image[0] * conv.image[1];
    let copy_rows = |first: usize, rows: &mut [T]| {
        for (row, out) in rows.chunks_exact_mut(n_pixels).enumerate() {
            let (channel, tap) = ((first + row) / n_filter, (first + row) % n_filter);
            let tap = [tap / conv.filter[1], tap % conv.filter[1]];
            copy_row(conv, &x[channel * image_len..][..image_len], tap, out, begin);
        }
    };
    if n_threads == 1 {
        return copy_rows(0, copy);
    }
    // Short-lived threads: persistent ones would wait for the next block on cores that OpenBLAS's own threads
    // need.
    let share = (copy.len() / n_pixels).div_ceil(n_threads);
    std::thread::scope(|scope| {
        for (part, rows) in copy.chunks_mut(share * n_pixels).enumerate() {
            let copy_rows = &copy_rows;
            scope.spawn(move || copy_rows(part * share, rows));
        }
    });
}

/// Copies the elements of a channel `x` under a tap, for the outputs from pixel `begin` on.
fn copy_row<T: CpuElement>(conv: &ConvProblem, x: &[T], tap: [usize; 2], out: &mut [T], begin: usize) {
    let [_, n_columns] = conv.output();
    let (width, stride) = (conv.image[1], conv.stride[1]);
    // Outputs of one row whose column of X exists: q·stride + offset is from pad to pad + width.
    let (offset, pad) = (tap[1] * conv.dilation[1], conv.pad_begin[1]);
    let first = pad.saturating_sub(offset).div_ceil(stride);
    let end = (pad + width).saturating_sub(offset).div_ceil(stride).max(first);
    let mut done = 0;
    while done < out.len() {
        let (p, q) = ((begin + done) / n_columns, (begin + done) % n_columns);
        let n_here = (n_columns - q).min(out.len() - done);
        let here = &mut out[done..done + n_here];
        done += n_here;
        let Some(row) = conv.input_at(0, p, tap[0]) else {
            here.fill(T::ZERO);
            continue;
        };
        let inside = first.clamp(q, q + n_here) - q..end.clamp(q, q + n_here) - q;
        here[..inside.start].fill(T::ZERO);
        here[inside.end..].fill(T::ZERO);
        if inside.is_empty() {
            continue;
        }
        let from = row * width + (q + inside.start) * stride + offset - pad;
        let to = &mut here[inside];
        if stride == 1 {
            to.copy_from_slice(&x[from..from + to.len()]);
        } else {
            for (to, from) in to.iter_mut().zip(x[from..].iter().step_by(stride)) {
                *to = *from;
            }
        }
    }
}

/// Applies the epilogue to `y`, which begins at element `at` of the result and belongs to one channel.
fn finish<T: CpuElement>(operands: &Operands<T>, y: &mut [T], at: usize, channel: usize) {
    for (step, further) in operands.problem.epilogue.iter().zip(&operands.further) {
        match (step.function(), step.numbers()) {
            (EpilogueFunction::Bias, _) => y.iter_mut().for_each(|y| *y = *y + further[channel]),
            (EpilogueFunction::Add, _) => {
                y.iter_mut().zip(&further[at..]).for_each(|(y, residual)| *y = *y + *residual)
            }
            (EpilogueFunction::Relu, _) => clip(y, T::ZERO, T::from_f64(f64::INFINITY)),
            (EpilogueFunction::Clip, &[low, high]) => clip(y, T::from_f64(low), T::from_f64(high)),
            _ => unreachable!("{step} is refused before"),
        }
    }
}

fn clip<T: CpuElement>(y: &mut [T], low: T, high: T) {
    for y in y {
        let above = if *y < low { low } else { *y };
        *y = if above > high { high } else { above };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operands::tests::operands_of;

    #[test]
    fn blocks_of_any_width_on_any_threads_make_the_whole() {
        let blas = match Blas::<f32>::load(&Means { threads: 1, folder: None, gpu: None }, &[]) {
            Ok(blas) => blas,
            Err(reason) => return eprintln!("skipped: {reason}"),
        };
        let sizes = "conv2d:n=2,c=4,h=9,w=8,k=6,r=3,s=2,pad_top=1,pad_left=2,pad_bottom=2";
        for more in ["stride_h=2,dilation_w=2,groups=2", "stride_w=3,dilation_h=2,groups=2", "stride_h=2,dilation_w=2"]
        {
            let mut operands = operands_of::<f32>(&format!("{sizes},{more}"));
            let LibraryProblem::Conv(conv) = operands.problem.kernel else { panic!("it is a convolution") };
            for width in [1, 7, 64, 1000] {
                for (threads, n_copying) in [(1, 1), (2, 1), (1, 3)] {
                    operands.clear_c();
                    let mut run = convolve(blas.gemm, conv, width, LoopThreads::new(threads), n_copying);
                    run(&mut operands).expect("nothing can fail");
                    operands.check().unwrap_or_else(|wrong| panic!("{more}, {width} pixels: {wrong}"));
                }
            }
        }
    }
}
