//! Tests of parts that run from many threads and sessions at once, on a mock of ONNX Runtime.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null;
use std::sync::Arc;

use bytes::Bytes;
use tilewright_graph::{DType, Declared, Dim, Tensor, TensorType};

use crate::api::{
    KernelContext, Logger, LoopPiece, OrtApi, OrtApiBase, SLOTS, Status, TensorInfo, Value as TensorValue, nothing,
};
use crate::claim::{Claim, claim};
use crate::draft::{DraftNode, DraftValue, SessionGraph};
use crate::log::Log;
use crate::options::{Claims, LogLines, ProviderOptions};
use crate::part::{PartOfModel, SessionState};

/// Number of rows and of columns of the weights.
const SIDE: usize = 48;
/// Number of an element type in ONNX Runtime: f32.
const F32: c_int = 1;

/// Tensor of a run.
struct Passed {
    shape: Vec<i64>,
    elements: Vec<f32>,
}

/// Run of a fused node with one output.
struct Run {
    inputs: Vec<Passed>,
    output: Passed,
}

unsafe extern "C" fn input(run: *const KernelContext, at: usize, out: *mut *const TensorValue) -> *mut Status {
    // SAFETY: the run belongs to the test, and is alive.
    let run = unsafe { &*run.cast::<Run>() };
    // SAFETY: there is room.
    unsafe { *out = std::ptr::from_ref(&run.inputs[at]).cast() };
    nothing()
}

unsafe extern "C" fn output(
    run: *mut KernelContext,
    _: usize,
    dims: *const i64,
    rank: usize,
    out: *mut *mut TensorValue,
) -> *mut Status {
    // SAFETY: as above; the run is not shared, and the shape has `rank` dimensions.
    unsafe {
        let output = &mut (*run.cast::<Run>()).output;
        output.shape = std::slice::from_raw_parts(dims, rank).to_vec();
        output.elements = vec![f32::NAN; output.shape.iter().product::<i64>() as usize];
        *out = std::ptr::from_mut(output).cast();
    }
    nothing()
}

unsafe extern "C" fn tensor_data(value: *mut TensorValue, out: *mut *mut c_void) -> *mut Status {
    // SAFETY: the tensor belongs to the test.
    unsafe { *out = (*value.cast::<Passed>()).elements.as_mut_ptr().cast() };
    nothing()
}

unsafe extern "C" fn tensor_info(value: *const TensorValue, out: *mut *mut TensorInfo) -> *mut Status {
    // SAFETY: there is room; a tensor serves as its own type information.
    unsafe { *out = value.cast_mut().cast() };
    nothing()
}

unsafe extern "C" fn element_type(_: *const TensorInfo, out: *mut c_int) -> *mut Status {
    // SAFETY: there is room.
    unsafe { *out = F32 };
    nothing()
}

unsafe extern "C" fn rank(info: *const TensorInfo, out: *mut usize) -> *mut Status {
    // SAFETY: the pointer is to a tensor of the test.
    unsafe { *out = (*info.cast::<Passed>()).shape.len() };
    nothing()
}

unsafe extern "C" fn dims(info: *const TensorInfo, out: *mut i64, rank: usize) -> *mut Status {
    // SAFETY: as above, with `rank` dimensions.
    unsafe { (*info.cast::<Passed>()).shape.as_ptr().copy_to(out, rank) };
    nothing()
}

unsafe extern "C" fn dim_names(_: *const TensorInfo, out: *mut *const c_char, rank: usize) -> *mut Status {
    // SAFETY: there is room for `rank` names; no dimension has one.
    unsafe { std::slice::from_raw_parts_mut(out, rank) }.fill(null());
    nothing()
}

unsafe extern "C" fn release_tensor_info(_: *mut TensorInfo) {}

unsafe extern "C" fn parallel_for(
    _: *const KernelContext,
    piece: LoopPiece,
    total: usize,
    _: usize,
    data: *mut c_void,
) -> *mut Status {
    let data = data as usize;
    std::thread::scope(|scope| {
        for index in 0..total {
            // SAFETY: the data outlives all pieces, which may run at the same time.
            scope.spawn(move || unsafe { piece(data as *mut c_void, index) });
        }
    });
    nothing()
}

unsafe extern "C" fn log(
    _: *const Logger,
    _: c_int,
    message: *const c_char,
    _: *const c_char,
    _: c_int,
    _: *const c_char,
) -> *mut Status {
    // SAFETY: the string is zero-terminated.
    panic!("{}", unsafe { crate::api::text(message) });
}

/// Functions by their names; every other one is null.
const FUNCTIONS: &[(&str, *const c_void)] = &[
    ("GetTensorMutableData", tensor_data as *const c_void),
    ("GetTensorElementType", element_type as *const c_void),
    ("GetDimensionsCount", rank as *const c_void),
    ("GetDimensions", dims as *const c_void),
    ("GetSymbolicDimensions", dim_names as *const c_void),
    ("GetTensorTypeAndShape", tensor_info as *const c_void),
    ("KernelContext_GetInput", input as *const c_void),
    ("KernelContext_GetOutput", output as *const c_void),
    ("ReleaseTensorTypeAndShapeInfo", release_tensor_info as *const c_void),
    ("Logger_LogMessage", log as *const c_void),
    ("KernelContext_ParallelFor", parallel_for as *const c_void),
];

unsafe extern "C" fn table(_: u32) -> *const *const c_void {
    let mut table = vec![null(); 1 + SLOTS.iter().map(|(_, slot)| slot).max().expect("there are some")];
    for (name, function) in FUNCTIONS {
        let (_, slot) = SLOTS.iter().find(|(known, _)| known == name).expect("the name of a function");
        table[*slot] = *function;
    }
    Box::leak(table.into_boxed_slice()).as_ptr()
}

unsafe extern "C" fn no_version() -> *const c_char {
    null()
}

/// Weight at a row and a column.
fn weight(row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3) % 11) as f32 - 5.0
}

/// Makes the graph of `Relu(x · w)`, with a fixed number of rows, or an open one if `rows` is `None`.
fn draft(rows: Option<usize>) -> SessionGraph {
    let rows = rows.map_or(Dim::Named("rows".to_owned()), Dim::Size);
    let declared = Some(Declared { dtype: DType::F32, dims: Some(vec![rows, Dim::Size(SIDE)]) });
    let value = |name: &str| DraftValue { name: name.to_owned(), declared: declared.clone(), constant: None };
    let elements = (0..SIDE * SIDE).flat_map(|at| weight(at / SIDE, at % SIDE).to_ne_bytes()).collect::<Vec<u8>>();
    let weights = Tensor::new(TensorType::new(DType::F32, vec![SIDE; 2]), Bytes::from(elements));
    let square = Declared { dtype: DType::F32, dims: Some(vec![Dim::Size(SIDE); 2]) };
    let weights = DraftValue { name: "w".to_owned(), declared: Some(square), constant: weights };
    let node = |op: &str, inputs: &[usize], output: usize| DraftNode {
        op: op.to_owned(),
        inputs: inputs.iter().copied().map(Some).collect(),
        outputs: vec![Some(output)],
        ..DraftNode::default()
    };
    SessionGraph {
        values: vec![value("x"), weights, value("a"), value("y")],
        nodes: vec![node("MatMul", &[0, 1], 2), node("Relu", &[2], 3)],
        outputs: vec![3],
        opset: 17,
        ..SessionGraph::default()
    }
}

/// Makes the state of a session, with its files in a folder.
fn session(folder: &Path, change: impl FnOnce(&mut ProviderOptions)) -> Arc<SessionState> {
    let base = OrtApiBase { get_api: table, get_version: no_version };
    // SAFETY: the base is valid.
    let api = unsafe { OrtApi::of(&raw const base) }.expect("a table");
    // SAFETY: the logger is never used.
    let log = unsafe { Log::new(api, null(), LogLines::Problems) };
    let place = |name: &str| Some(folder.join(name));
    let mut options = ProviderOptions {
        database: place("none.db"),
        cache: place("cache"),
        threads: Some(2),
        ..ProviderOptions::default()
    };
    change(&mut options);
    Arc::new(SessionState::new(api, log, options, None).expect("surroundings"))
}

/// Compiles a draft as one part, which does not keep any of its weights.
fn part(session: &Arc<SessionState>, draft: SessionGraph) -> PartOfModel {
    let Claim { parts, graph, .. } = claim(&draft, Claims::All, 1);
    let [nodes] = <[_; 1]>::try_from(parts).expect("one part");
    let weights = draft.values[1].constant.as_ref().expect("weights").bytes().clone();
    let part = PartOfModel::new(session, &draft, nodes, session.known().with_graph(graph)).expect("a part");
    drop(draft);
    assert!(weights.is_unique(), "nobody keeps constants");
    part
}

/// Runs a part on `rows` rows of numbers from a seed, and checks the result.
fn run(part: &PartOfModel, rows: usize, seed: usize) {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let positions = part.positions(&names(&["x", "w"]), &names(&["y"])).expect("positions");
    let x: Vec<f32> = (0..rows * SIDE).map(|at| ((at + seed) % 9) as f32 - 4.0).collect();
    let of_row =
        |row: usize, column: usize| (0..SIDE).map(|k| x[row * SIDE + k] * weight(k, column)).sum::<f32>().max(0.0);
    let expected: Vec<f32> = (0..rows * SIDE).map(|at| of_row(at / SIDE, at % SIDE)).collect();
    let shape = vec![rows as i64, SIDE as i64];
    let weights = (0..SIDE * SIDE).map(|at| weight(at / SIDE, at % SIDE)).collect();
    let w = Passed { shape: vec![SIDE as i64; 2], elements: weights };
    let inputs = vec![Passed { shape: shape.clone(), elements: x.clone() }, w];
    let output = Passed { shape: Vec::new(), elements: Vec::new() };
    let mut under_way = Run { inputs, output };
    // SAFETY: the run is active, and the positions are those of its node.
    let outcome = unsafe { part.run(&positions, (&raw mut under_way).cast()) };
    assert_eq!(outcome, Ok(()));
    assert_eq!((under_way.output.shape, under_way.output.elements), (shape, expected));
}

/// Runs a part from eight threads, each run on two threads.
fn check(fixed: Option<usize>, n_runs: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let part = part(&session(folder.path(), |_| {}), draft(fixed));
    // Code for the sizes of a run is made from the constants passed to that run.
    assert_eq!(part.needs_constants(), fixed.is_none());
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let part = &part;
            scope.spawn(move || {
                for at in 0..n_runs {
                    run(part, fixed.unwrap_or(1 + (thread + at) % 5), thread * 5 + at);
                }
            });
        }
    });
}

#[test]
fn a_part_of_one_size_runs_in_many_threads() {
    check(Some(40), 50);
}

/// Several threads use new sizes at once, and code for them is made while others run.
#[test]
fn a_part_of_open_size_runs_in_many_threads() {
    check(None, 50);
}

/// Sessions share a part; either may end first, and the part is released after both.
#[test]
fn sessions_share_a_part() {
    let folder = tempfile::tempdir().expect("a folder");
    let [first, second] = [0, 1].map(|_| part(&session(folder.path(), |_| {}), draft(Some(40))));
    assert!(Arc::ptr_eq(first.model(), second.model()));
    let model = Arc::downgrade(first.model());
    std::thread::scope(|scope| {
        for (part, n_runs) in [(first, 5), (second, 50)] {
            scope.spawn(move || (0..n_runs).for_each(|seed| run(&part, 40, seed)));
        }
    });
    assert_eq!(model.strong_count(), 0);
}

/// Sessions with different settings or parts share nothing.
#[test]
fn other_parts_are_not_shared() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut parts = vec![part(&session(folder.path(), |_| {}), draft(Some(40)))];
    let settings: [fn(&mut ProviderOptions); 4] = [
        |options| options.threads = Some(1),
        |options| options.exact = true,
        |options| options.bf16 = true,
        |options| options.database = options.database.as_ref().map(|file| file.with_extension("other")),
    ];
    parts.extend(settings.map(|change| part(&session(folder.path(), change), draft(Some(40)))));
    let mut drafts = [draft(Some(39)), draft(Some(40)), draft(Some(40))];
    let mut weights = drafts[1].values[1].constant.as_ref().expect("weights").bytes().to_vec();
    weights[4 * SIDE] ^= 1;
    drafts[1].values[1].constant = Tensor::new(TensorType::new(DType::F32, vec![SIDE; 2]), weights.into());
    drafts[2].nodes[1].op = "Abs".to_owned();
    parts.extend(drafts.map(|draft| part(&session(folder.path(), |_| {}), draft)));
    for (at, part) in parts.iter().enumerate() {
        assert!(parts[..at].iter().all(|other| !Arc::ptr_eq(part.model(), other.model())), "part {at}");
    }
}
