//! What `prepare` parts have made, kept for all candidates that ask for the same.

use crate::memory::Fenced;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tilewright_ir::text::stmt_to_string;
use tilewright_ir::{BufferId, Program, Role, Stmt};

/// The contents of kept buffers as one `prepare` part leaves them: constant weights in the layout that a schedule chose,
/// say. Most candidates of a search share theirs with others, and both the code and its run cost as much as a kernel's.
///
/// The buffers are read-only, so that no candidate can spoil them for the next one.
pub struct Prepared {
    /// By the buffers' names.
    buffers: HashMap<String, Fenced>,
}

impl Prepared {
    /// Takes buffers that a `prepare` part has filled.
    ///
    /// # Errors
    /// Where they cannot be made read-only.
    pub fn new(buffers: HashMap<String, Fenced>) -> std::io::Result<Prepared> {
        buffers.values().try_for_each(Fenced::make_read_only)?;
        Ok(Prepared { buffers })
    }

    /// Where the buffer of a name begins.
    ///
    /// # Panics
    /// Where there is none of that name.
    pub fn pointer(&self, name: &str) -> *mut u8 {
        self.buffers[name].pointer()
    }

    fn n_bytes(&self) -> u64 {
        self.buffers.values().map(Fenced::n_bytes).sum()
    }
}

/// What says everything about a `prepare` part.
#[derive(Clone, PartialEq)]
pub struct Recipe {
    /// Its statements, and the declarations of what they touch.
    text: String,
    /// Names of the kept buffers that it fills.
    fills: Vec<String>,
}

impl Recipe {
    /// The recipe of a program's `prepare` part; none where that does nothing, or fills what the body writes too.
    pub fn of(program: &Program) -> Option<Recipe> {
        let (written, in_body) = (written(&program.prepare), written(&program.body));
        if written.is_empty() || !written.is_disjoint(&in_body) {
            return None;
        }
        let fills = written.iter().map(|&b| program.buffer(b)).filter(|b| b.role == Role::Kept);
        let fills = fills.map(|b| b.name.clone()).collect();
        let declared = touched(&program.prepare).into_iter().map(|buffer| format!("{:?}\n", program.buffer(buffer)));
        let text = declared.chain(program.prepare.iter().map(|s| stmt_to_string(program, s))).collect();
        Some(Recipe { text, fills })
    }

    /// Whether it fills the buffer of a name.
    pub fn fills(&self, name: &str) -> bool {
        self.fills.iter().any(|n| n == name)
    }
}

/// The buffers that statements write.
fn written(block: &[Stmt]) -> BTreeSet<BufferId> {
    let mut found = BTreeSet::new();
    visit(block, &mut |s| found.extend(s.own_write().map(|(buffer, _)| buffer)));
    found
}

/// The buffers that statements read or write.
pub fn touched(block: &[Stmt]) -> BTreeSet<BufferId> {
    let mut found = written(block);
    visit(block, &mut |s| s.for_each_own_read(&mut |buffer, _| found.extend([buffer])));
    found
}

fn visit(block: &[Stmt], f: &mut dyn FnMut(&Stmt)) {
    block.iter().for_each(|s| s.walk(&mut |s| f(s)));
}

/// The prepared buffers that were asked for last, and memory for further ones.
pub struct Cache {
    /// Most recently used last.
    entries: Vec<(Recipe, Arc<Prepared>)>,
    limit_bytes: u64,
    /// What was forgotten, to be filled anew.
    spare: Vec<Fenced>,
}

impl Cache {
    /// One that forgets what is not in use beyond so many bytes.
    pub fn new(limit_bytes: u64) -> Cache {
        Cache { entries: Vec::new(), limit_bytes, spare: Vec::new() }
    }

    /// What a recipe has made.
    pub fn get(&mut self, recipe: &Recipe) -> Option<Arc<Prepared>> {
        let at = self.entries.iter().position(|(r, _)| r == recipe)?;
        let entry = self.entries.remove(at);
        self.entries.push(entry);
        self.entries.last().map(|(_, prepared)| Arc::clone(prepared))
    }

    /// A buffer to prepare something in, with anything in it, that can best be resized to so many bytes.
    ///
    /// # Errors
    /// Where memory does not suffice.
    pub fn spare(&mut self, n_bytes: u64) -> std::io::Result<Fenced> {
        self.forget_beyond(self.limit_bytes.saturating_sub(n_bytes));
        // The smallest that will do, or else the largest.
        self.spare.sort_unstable_by_key(Fenced::capacity);
        let fitting = self.spare.partition_point(|buffer| buffer.capacity() < n_bytes);
        match self.spare.len().checked_sub(1) {
            Some(last) => Ok(self.spare.remove(fitting.min(last))),
            None => Fenced::new(0),
        }
    }

    /// Remembers it.
    pub fn insert(&mut self, recipe: Recipe, prepared: Arc<Prepared>) {
        self.entries.push((recipe, prepared));
        self.forget_beyond(self.limit_bytes);
    }

    fn forget_beyond(&mut self, limit_bytes: u64) {
        let mut n_bytes: u64 = self.entries.iter().map(|(_, p)| p.n_bytes()).sum();
        let goes = |(_, prepared): &mut (Recipe, Arc<Prepared>)| {
            let goes = n_bytes > limit_bytes && Arc::strong_count(prepared) == 1;
            n_bytes -= if goes { prepared.n_bytes() } else { 0 };
            goes
        };
        let forgotten: Vec<_> = self.entries.extract_if(.., goes).collect();
        let buffers = forgotten.into_iter().filter_map(|(_, prepared)| Arc::into_inner(prepared));
        let buffers = buffers.flat_map(|prepared| prepared.buffers.into_values());
        self.spare.extend(buffers.filter(|buffer| buffer.make_writable().is_ok()));
        let mut n_spare: u64 = self.spare.iter().map(Fenced::capacity).sum();
        while n_spare > self.limit_bytes
            && let Some(buffer) = self.spare.pop()
        {
            n_spare -= buffer.capacity();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forgotten_is_filled_anew() {
        let recipe = |text: &str| Recipe { text: text.to_owned(), fills: vec!["W.p".to_owned()] };
        let mut cache = Cache::new(100_000);
        let mut prepare = |text: &str, n_bytes: u64| {
            let mut buffer = cache.spare(n_bytes).unwrap();
            buffer.resize(n_bytes).unwrap();
            buffer.fill(1);
            let prepared = Arc::new(Prepared::new(HashMap::from([("W.p".to_owned(), buffer)])).unwrap());
            cache.insert(recipe(text), Arc::clone(&prepared));
            let held = ["a", "b", "c"].map(|text| cache.get(&recipe(text)).is_some());
            (prepared, held)
        };
        let (a, held) = prepare("a", 60_000);
        assert_eq!(held, [true, false, false]);
        // What is in use stays, whatever its size.
        let (b, held) = prepare("b", 60_000);
        assert_eq!(held, [true, true, false]);
        let places = [a, b].map(|prepared| prepared.pointer("W.p"));
        let (c, held) = prepare("c", 50_000);
        assert_eq!((held, places.contains(&c.pointer("W.p"))), ([false, false, true], true));
        assert_eq!(c.n_bytes(), 50_000);
    }
}
