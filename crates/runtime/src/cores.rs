//! Work of the same kind, shared by all cores.

use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Maps items in parallel, in order, with a thread on each core; `own` makes the state of a thread.
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
        // Where the system refuses a thread, those that there are do it all.
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
