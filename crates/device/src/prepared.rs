//! What `prepare` parts have made, kept for all candidates that ask for the same.

use crate::memory::Fenced;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
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
        let mut touched = written;
        visit(&program.prepare, &mut |s| s.for_each_own_read(&mut |buffer, _| touched.extend([buffer])));
        let declared = touched.iter().map(|&buffer| format!("{:?}\n", program.buffer(buffer)));
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

fn visit(block: &[Stmt], f: &mut dyn FnMut(&Stmt)) {
    block.iter().for_each(|s| s.walk(&mut |s| f(s)));
}

/// The prepared buffers that were asked for last.
pub struct Cache {
    /// Most recently used last.
    entries: Vec<(Recipe, Rc<Prepared>)>,
    limit_bytes: u64,
}

impl Cache {
    /// One that forgets what is not in use beyond so many bytes.
    pub fn new(limit_bytes: u64) -> Cache {
        Cache { entries: Vec::new(), limit_bytes }
    }

    /// What a recipe has made.
    pub fn get(&mut self, recipe: &Recipe) -> Option<Rc<Prepared>> {
        let at = self.entries.iter().position(|(r, _)| r == recipe)?;
        let entry = self.entries.remove(at);
        self.entries.push(entry);
        self.entries.last().map(|(_, prepared)| Rc::clone(prepared))
    }

    /// Remembers it.
    pub fn insert(&mut self, recipe: Recipe, prepared: Rc<Prepared>) {
        self.entries.push((recipe, prepared));
        let mut n_bytes: u64 = self.entries.iter().map(|(_, p)| p.n_bytes()).sum();
        self.entries.retain(|(_, p)| {
            let stays = n_bytes <= self.limit_bytes || Rc::strong_count(p) > 1;
            n_bytes -= if stays { 0 } else { p.n_bytes() };
            stays
        });
    }
}
