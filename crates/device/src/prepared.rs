//! Cache of buffers made by `prepare` parts, shared by all candidates with the same part.

use crate::memory::Fenced;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tilewright_ir::text::stmt_to_string;
use tilewright_ir::{BufferId, Program, Role, Stmt};

/// Buffers as filled by a `prepare` part, such as packed constant weights.
///
/// The buffers are read-only, so that no candidate can spoil them for the next one.
pub struct PreparedBuffers {
    /// Buffers by name.
    buffers: HashMap<String, Fenced>,
}

impl PreparedBuffers {
    /// Makes buffers filled by a `prepare` part read-only.
    ///
    /// # Errors
    /// If they cannot be made read-only.
    pub fn new(buffers: HashMap<String, Fenced>) -> std::io::Result<PreparedBuffers> {
        buffers.values().try_for_each(Fenced::make_read_only)?;
        Ok(PreparedBuffers { buffers })
    }

    /// Address of the buffer with this name.
    ///
    /// # Panics
    /// If there is no buffer with this name.
    pub fn pointer(&self, name: &str) -> *mut u8 {
        self.buffers[name].pointer()
    }

    fn n_bytes(&self) -> u64 {
        self.buffers.values().map(Fenced::n_bytes).sum()
    }
}

/// Key of a `prepare` part: its complete description.
#[derive(Clone, PartialEq)]
pub struct Recipe {
    /// Statements, and the declarations of the buffers that they touch.
    text: String,
    /// Names of the kept buffers that it fills.
    fills: Vec<String>,
}

impl Recipe {
    /// Key of a program's `prepare` part; `None` if that is empty, or fills buffers that the body also
    /// writes.
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

    /// Whether the part fills the buffer with this name.
    pub fn fills(&self, name: &str) -> bool {
        self.fills.iter().any(|n| n == name)
    }
}

/// Buffers that statements write.
fn written(block: &[Stmt]) -> BTreeSet<BufferId> {
    let mut found = BTreeSet::new();
    visit(block, &mut |s| found.extend(s.own_write().map(|(buffer, _)| buffer)));
    found
}

/// Buffers that statements read or write.
pub fn touched(block: &[Stmt]) -> BTreeSet<BufferId> {
    let mut found = BTreeSet::new();
    visit(block, &mut |s| s.for_each_own_buffer(&mut |buffer| found.extend([buffer])));
    found
}

fn visit(block: &[Stmt], f: &mut dyn FnMut(&Stmt)) {
    block.iter().for_each(|s| s.walk(&mut |s| f(s)));
}

/// Cache of prepared buffers, the most recently used ones.
pub struct PreparedCache {
    /// Entries, the most recently used last.
    entries: Vec<(Recipe, Arc<PreparedBuffers>)>,
    limit_bytes: u64,
}

impl PreparedCache {
    /// Makes a cache that evicts unused buffers beyond `limit_bytes`.
    pub fn new(limit_bytes: u64) -> PreparedCache {
        PreparedCache { entries: Vec::new(), limit_bytes }
    }

    /// Finds prepared buffers.
    pub fn get(&mut self, recipe: &Recipe) -> Option<Arc<PreparedBuffers>> {
        let at = self.entries.iter().position(|(r, _)| r == recipe)?;
        let entry = self.entries.remove(at);
        self.entries.push(entry);
        self.entries.last().map(|(_, prepared)| Arc::clone(prepared))
    }

    /// Adds prepared buffers.
    pub fn insert(&mut self, recipe: Recipe, prepared: Arc<PreparedBuffers>) {
        self.entries.push((recipe, prepared));
    }

    /// Evicts unused entries until `n_bytes` more fit the limit, and returns their buffers, made writable.
    pub fn forget_for(&mut self, n_bytes: u64) -> Vec<Fenced> {
        let mut held: u64 = self.entries.iter().map(|(_, p)| p.n_bytes()).sum::<u64>().saturating_add(n_bytes);
        let goes = |(_, prepared): &mut (Recipe, Arc<PreparedBuffers>)| {
            let goes = held > self.limit_bytes && Arc::strong_count(prepared) == 1;
            held -= if goes { prepared.n_bytes() } else { 0 };
            goes
        };
        let forgotten: Vec<_> = self.entries.extract_if(.., goes).collect();
        let buffers = forgotten.into_iter().filter_map(|(_, prepared)| Arc::into_inner(prepared));
        let buffers = buffers.flat_map(|prepared| prepared.buffers.into_values());
        buffers.filter(|buffer| buffer.make_writable().is_ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_in_use_makes_room() {
        let recipe = |text: &str| Recipe { text: text.to_owned(), fills: vec!["W.p".to_owned()] };
        let mut cache = PreparedCache::new(100_000);
        let mut prepare = |text: &str, n_bytes: u64| {
            let forgotten = cache.forget_for(n_bytes);
            let buffers = HashMap::from([("W.p".to_owned(), Fenced::new(n_bytes).unwrap())]);
            let prepared = Arc::new(PreparedBuffers::new(buffers).unwrap());
            cache.insert(recipe(text), Arc::clone(&prepared));
            let held = ["a", "b", "c"].map(|text| cache.get(&recipe(text)).is_some());
            (prepared, forgotten, held)
        };
        let (a, _, held) = prepare("a", 60_000);
        assert_eq!(held, [true, false, false]);
        // Entries in use stay, whatever their size.
        let (b, forgotten, held) = prepare("b", 60_000);
        assert_eq!((forgotten.len(), held), (0, [true, true, false]));
        drop((a, b));
        let (c, mut forgotten, held) = prepare("c", 30_000);
        assert_eq!((forgotten.len(), held), (1, [false, true, true]));
        // The buffer is writable again.
        forgotten[0].fill(1);
        assert_eq!((forgotten[0].n_bytes(), c.n_bytes()), (60_000, 30_000));
    }
}
