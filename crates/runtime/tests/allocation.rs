//! Test that a run allocates nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use tilewright_runtime::{Context, SharedPool};

struct Counting;

static N_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator, and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        N_ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_run_allocates_nothing() {
    let model = model(true);
    let mut context = Context::new(&model, &SharedPool::new(2).unwrap()).unwrap();
    let (x, mut y) = (bytes(&[1.5; 33]), vec![0; 66 * 4]);
    let mut step_ns = vec![0; model.plan().steps.len()];
    // The first run includes allocations of starting threads.
    context.run(&[&x], &mut [&mut y]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let before = N_ALLOCATIONS.load(Ordering::SeqCst);
    for _ in 0..100 {
        context.run(&[&x], &mut [&mut y]).unwrap();
        context.profile(&[&x], &mut [&mut y], &mut step_ns).unwrap();
    }
    assert_eq!(N_ALLOCATIONS.load(Ordering::SeqCst), before);
    assert_eq!(floats(&y), expected(&[1.5; 33], true));

    let model = Arc::new(open_model(300).unwrap());
    let mut context = Context::new(&model, &SharedPool::new(1).unwrap()).unwrap();
    let (x, mut y) = (bytes(&[0.0; 32]), vec![0; 128]);
    let before = N_ALLOCATIONS.load(Ordering::SeqCst);
    for size in (1..=8).chain((1..=8).rev()) {
        context.set_dim("rows", size).unwrap();
        let n_bytes = 16 * size as usize;
        context.run(&[&x[..n_bytes]], &mut [&mut y[..n_bytes]]).unwrap();
    }
    assert_eq!(N_ALLOCATIONS.load(Ordering::SeqCst), before);
}
