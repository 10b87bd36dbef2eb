//! Data parallelism over all cores.

use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Maps items in parallel, with a thread per core, and returns the results in order; `own` makes the state of
/// a thread.
pub fn on_all_cores<T: Send, R: Send, O>(
    items: Vec<T>,
    own: impl Fn() -> O + Sync,
    make: impl Fn(&mut O, T) -> R + Sync,
) -> Vec<R> {
    let n_threads = thread::available_parallelism().map_or(1, NonZero::get).min(items.len());
    let waiting = Mutex::new(items.into_iter().enumerate());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut own = own();
        let mut made = Vec::new();
        while let Some((at, item)) = next() {
            made.push((at, make(&mut own, item)));
        }
        made
    };
    let mut made = thread::scope(|scope| {
        // If a thread cannot be started, the others do all the work.
        let another = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let others: Vec<_> = (1..n_threads).map_while(another).collect();
        let mut made = work();
        others
            .into_iter()
            .for_each(|other| made.extend(other.join().expect("a thread that makes code does not panic")));
        made
    });
    made.sort_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items_and_a_thread_keeps_its_state() {
        let made = on_all_cores(
            (0..1000).collect(),
            || 0,
            |n_before, item: u32| {
                *n_before += 1;
                (item, *n_before)
            },
        );
        assert!(made.iter().map(|(item, _)| *item).eq(0..1000));
        // Each thread counts its own items, from 1 on.
        let n_firsts = made.iter().filter(|(_, n_before)| *n_before == 1).count();
        let n_threads = thread::available_parallelism().map_or(1, NonZero::get);
        assert!((1..=n_threads).contains(&n_firsts), "{n_firsts} threads");
        assert!(on_all_cores(Vec::<u32>::new(), || (), |(), item| item).is_empty());
    }
}
