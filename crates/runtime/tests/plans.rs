//! Tests of plans: results of single and concurrent runs, and errors.

mod common;

use std::sync::Arc;

use common::*;
use tilewright_ir::{DType, Part};
use tilewright_runtime::{
    Context, CopiedRows, Host, Member, Members, Model, OpenDimension, Piece, Place, Plan, PlanError, PlanStep,
    RunError, RunSize, SharedPool, TensorSlice, Work,
};

#[test]
fn a_plan_runs_its_steps() {
    let threads = SharedPool::new(2).unwrap();
    for on_host in [false, true] {
        let model = model(on_host);
        assert_eq!(model.constants().len(), 2 * 320, "weights that only `prepare` reads are gone");
        let mut context = Context::new(&model, &threads).unwrap();
        let mut step_ns = vec![0; model.plan().steps.len()];
        for round in 0..20 {
            let x: Vec<f32> = (0..33).map(|i| (i * round) as f32 - 40.0).collect();
            // At an address that is aligned only to elements.
            let mut given = vec![0; 4];
            given.extend(bytes(&x));
            let mut y = vec![0; 66 * 4];
            context.run(&[&given[4..]], &mut [&mut y]).unwrap();
            assert_eq!(floats(&y), expected(&x, on_host));
            let mut again = vec![0; 66 * 4];
            context.profile(&[&given[4..]], &mut [&mut again], &mut step_ns).unwrap();
            assert_eq!(y, again);
        }
        assert!(step_ns.iter().all(|ns| *ns > 0));
    }
}

#[test]
fn contexts_run_at_the_same_time() {
    let (model, threads) = (model(true), SharedPool::new(3).unwrap());
    std::thread::scope(|scope| {
        for caller in 0..4 {
            let (model, threads) = (&model, &threads);
            scope.spawn(move || {
                let mut context = Context::new(model, threads).unwrap();
                let mut y = vec![0; 66 * 4];
                for round in 0..200 {
                    let x: Vec<f32> = (0..33).map(|i| (i * round + caller) as f32).collect();
                    context.run(&[&bytes(&x)], &mut [&mut y]).unwrap();
                    assert_eq!(floats(&y), expected(&x, true));
                }
            });
        }
    });
}

#[test]
fn what_a_run_is_passed_is_checked() {
    let mut context = Context::new(&model(false), &SharedPool::new(1).unwrap()).unwrap();
    let (x, mut y) = (vec![0; 33 * 4 + 4], vec![0; 66 * 4]);
    let mut check = |inputs: &[&[u8]], outputs: &mut [&mut [u8]], expected: &str| {
        assert_eq!(context.run(inputs, outputs).unwrap_err().to_string(), expected);
    };
    check(&[], &mut [&mut y], "the model has 1 inputs, 0 were passed");
    check(&[&x[..33 * 4]], &mut [], "the model has 1 outputs, 0 were passed");
    check(&[&x], &mut [&mut y], "`x` has 132 bytes, 136 were passed");
    check(&[&x[1..133]], &mut [&mut y], "`x` is to be aligned to 4 bytes");
    check(&[&x[..132]], &mut [&mut y[..128]], "`y` has 264 bytes, 128 were passed");
    // A step in this process fails.
    let mut failing = plan(true);
    let Work::Host { run, .. } = &mut failing.steps[3].work else { panic!("the last step is the host's") };
    *run = Host::Function(Arc::new(|_, _| Err("no".to_owned())));
    let model = Arc::new(Model::new(failing, codes()).unwrap());
    let mut context = Context::new(&model, &SharedPool::new(1).unwrap()).unwrap();
    let error = context.run(&[&x[..132]], &mut [&mut y]).unwrap_err();
    assert_eq!(error, RunError::Host { step: "last".to_owned(), why: "no".to_owned() });
}

#[test]
fn plans_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut Plan)| -> PlanError {
        let mut plan = plan(false);
        change(&mut plan);
        Model::new(plan, codes()).err().expect("it is refused")
    };
    fn arguments(plan: &mut Plan, step: usize) -> &mut Vec<TensorSlice> {
        match &mut plan.steps[step].work {
            Work::Kernel { arguments, .. } => arguments,
            _ => panic!("a kernel"),
        }
    }
    let check = |change: fn(&mut Plan), expected: &str| assert_eq!(refused(change).to_string(), expected);
    check(|plan| plan.steps[0].work = kernel(7), "step `half 0` names kernel 7, which does not exist");
    // A loop that does not end, one that does not begin, and one whose truth is no byte.
    check(
        |plan| plan.steps[0].work = Work::While { truth: TensorSlice { tensor: 0, offset: 0, n_bytes: 1 }, end: 1 },
        "step `half 0` names end of a loop 1, which does not exist",
    );
    check(
        |plan| plan.steps[1].work = Work::Again { to: 0 },
        "step `half 1` names end of a loop 1, which does not exist",
    );
    let of_four = |plan: &mut Plan| {
        plan.steps[0].work = Work::While { truth: TensorSlice { tensor: 0, offset: 0, n_bytes: 4 }, end: 1 };
        plan.steps[1].work = Work::Again { to: 0 };
    };
    let error = refused(of_four).to_string();
    assert!(error.starts_with("step `half 0`") && error.contains("4 bytes"), "{error}");
    check(|plan| arguments(plan, 0).truncate(2), "step `half 0` passes 2 arguments, its kernel takes 3");
    check(|plan| arguments(plan, 0)[0].tensor = 99, "step `half 0` names tensor 99, which does not exist");
    check(|plan| arguments(plan, 1)[2].n_bytes -= 4, "step `half 1` passes 128 bytes of `halves` where 132 are taken");
    check(|plan| arguments(plan, 1)[2].offset += 4, "step `half 1` goes beyond the end of `halves`");
    check(
        |plan| arguments(plan, 0)[2].offset = 2,
        "step `half 0` passes a part of `halves` that is not aligned to 4 bytes",
    );
    check(
        |plan| arguments(plan, 0)[2] = arguments(plan, 0)[0],
        "step `half 0` writes to `x`, which is an input or a constant",
    );
    check(
        |plan| plan.tensors[3].place = Place::Arena(64),
        "step `triple` writes to `tripled`, which overlaps `halves`",
    );
    check(
        |plan| arguments(plan, 0)[1] = arguments(plan, 0)[0],
        "step `half 0` prepares constants with `x`, which is not constant",
    );
    check(
        |plan| {
            plan.tensor("z", DType::F32, &[1], Place::Input(2));
        },
        "`z` is input or output 2, but one before it is missing or of another size",
    );
}

fn kernel(kernel: usize) -> Work {
    Work::Kernel {
        kernel,
        arguments: vec![],
        kept: vec![],
        parts: vec![Part::Body],
        all_threads: true,
        sizes: Vec::new(),
    }
}

#[test]
fn a_step_may_write_what_it_reads() {
    let mut plan = Plan::default();
    let x = plan.tensor("x", DType::F32, &[66], Place::Input(0));
    let y = plan.tensor("y", DType::F32, &[66], Place::Output(0));
    let (from, to) = (plan.whole(x), plan.whole(y));
    plan.steps.push(PlanStep { name: "copy".to_owned(), work: Work::Copy { from, to, rows: None }, guard: None });
    let arguments = vec![to, to];
    let work = Work::Kernel {
        kernel: 1,
        arguments,
        kept: vec![],
        parts: vec![Part::Body],
        all_threads: true,
        sizes: Vec::new(),
    };
    plan.steps.push(PlanStep { name: "in place".to_owned(), work, guard: None });
    let model = Arc::new(Model::new(plan, codes()).unwrap());
    let (x, mut y) = (vec![2.0; 66], vec![0; 66 * 4]);
    Context::new(&model, &SharedPool::new(1).unwrap()).unwrap().run(&[&bytes(&x)], &mut [&mut y]).unwrap();
    assert_eq!(floats(&y), vec![6.0; 66]);
}

/// Makes a plan that appends a row of two numbers to both heads of a state of 2 × 4 × 2, and returns the
/// whole state.
fn appending(change: fn(&mut CopiedRows)) -> Result<Model, PlanError> {
    let mut plan =
        Plan { dim: Some(OpenDimension { name: "past".to_owned(), least: 0, most: 3, step: 1 }), ..Plan::default() };
    plan.appends = 1;
    let x = plan.tensor("x", DType::F32, &[2, 1, 2], Place::Input(0));
    let all = plan.tensor("all", DType::F32, &[2, 4, 2], Place::State(0));
    let y = plan.tensor("y", DType::F32, &[2, 4, 2], Place::Output(0));
    let size = |factor: i64, term: i64| RunSize { factor, ..RunSize::constant(term) };
    let mut rows = CopiedRows { n: 2, pitches: [8, 32], offsets: [size(0, 0), size(8, 0)], n_bytes: size(0, 8) };
    change(&mut rows);
    let (from, to) = (plan.whole(x), plan.whole(all));
    let append = Work::Move { from, to, rows };
    plan.steps.push(PlanStep { name: "append".to_owned(), work: append, guard: None });
    let copy = Work::Copy { from: to, to: plan.whole(y), rows: None };
    plan.steps.push(PlanStep { name: "copy".to_owned(), work: copy, guard: None });
    Model::new(plan, Vec::new())
}

#[test]
fn states_stay_between_runs() {
    let model = Arc::new(appending(|_| {}).unwrap());
    let mut context = Context::new(&model, &SharedPool::new(1).unwrap()).unwrap();
    let mut expected = vec![0.0; 16];
    for run in 0..4 {
        let x = [1.0, 2.0, 3.0, 4.0].map(|x| x + 10.0 * run as f32);
        expected[2 * run..2 * run + 2].copy_from_slice(&x[..2]);
        expected[8 + 2 * run..8 + 2 * run + 2].copy_from_slice(&x[2..]);
        let mut y = bytes(&[-1.0; 16]);
        context.run(&[&bytes(&x)], &mut [&mut y]).unwrap();
        assert_eq!((floats(&y), context.past()), (expected.clone(), run as i64 + 1));
    }
    let mut y = bytes(&[-1.0; 16]);
    let full = context.run(&[&bytes(&[0.0; 4])], &mut [&mut y]);
    assert_eq!(full, Err(RunError::Full { name: "past".to_owned(), size: 4 }));
    assert_eq!((floats(&y), context.past()), (vec![-1.0; 16], 4));
    context.rewind(1).unwrap();
    assert!(context.rewind(2).is_err() && context.past() == 1);
    // A row out of bounds only at the largest size, a negative offset at the smallest, overlapping rows.
    for change in [
        (|rows| rows.offsets[1].term = 8) as fn(&mut CopiedRows),
        |rows| rows.offsets[1].term = -8,
        |rows| rows.pitches[1] = 4,
        |rows| rows.n = 3,
        |rows| rows.n_bytes.factor = 8,
        |rows| rows.pitches[0] = usize::MAX,
    ] {
        assert!(matches!(appending(change), Err(PlanError::Outside { .. })));
    }
}

/// Makes a plan that appends rows of two numbers, four or one at a time, to a state of six rows, and returns
/// them.
fn by_pieces(change: fn(&mut Plan)) -> Result<Model, PlanError> {
    let dim = |name: &str, least, most| Some(OpenDimension { name: name.to_owned(), least, most, step: 1 });
    let mut plan = Plan { dim: dim("past", 0, 5), rows: dim("tokens", 1, 4), appends: 1, ..Plan::default() };
    let size = |factor: i64, term: i64| RunSize { factor, ..RunSize::constant(term) };
    for n in [4, 1] {
        let x = plan.tensor("x", DType::F32, &[n, 2], Place::Input(0));
        let all = plan.tensor("all", DType::F32, &[6, 2], Place::State(0));
        let y = plan.tensor("y", DType::F32, &[n, 2], Place::Output(0));
        [x, y].into_iter().for_each(|at| plan.tensors[at].open = (n == 4).then(|| (0, size(1, 0))));
        let (from, to) = (plan.whole(x), plan.whole(all));
        let rows =
            CopiedRows { n: 1, pitches: [0; 2], offsets: [size(0, 0), size(8, 0)], n_bytes: size(0, 8 * n as i64) };
        let start = plan.steps.len();
        for (name, work) in
            [("append", Work::Move { from, to, rows }), ("copy", Work::Copy { from, to: plan.whole(y), rows: None })]
        {
            plan.steps.push(PlanStep { name: name.to_owned(), work, guard: None });
        }
        plan.pieces.push(Piece { items: 1, n: n as i64, most: 6 - n as i64, steps: start..start + 2 });
    }
    change(&mut plan);
    Model::new(plan, Vec::new())
}

#[test]
fn runs_are_made_of_pieces() {
    let model = Arc::new(by_pieces(|_| {}).unwrap());
    let mut context = Context::new(&model, &SharedPool::new(1).unwrap()).unwrap();
    let x: Vec<f32> = (1..=12).map(|x| x as f32).collect();
    // First the default, the smallest number; then pieces of four and one, three of one, and so on.
    for parts in [&[1, 5][..], &[4, 2], &[3, 3], &[2, 4]] {
        let (mut at, mut found) = (0, Vec::new());
        context.rewind(0).unwrap();
        for &n in parts {
            let said = context.set_dim("tokens", n as i64);
            if n > 4 {
                assert!(matches!(said, Err(RunError::BadSize { most: 4, .. })), "{said:?}");
                continue;
            }
            let mut y = bytes(&vec![-1.0; 2 * n]);
            context.run(&[&bytes(&x[2 * at..2 * (at + n)])], &mut [&mut y]).unwrap();
            found.extend(floats(&y));
            at += n;
            assert_eq!(context.past() as usize, at);
        }
        assert_eq!(
            (&found, floats(&context.state(0).unwrap()[..8 * at])),
            (&x[..2 * at].to_vec(), x[..2 * at].to_vec())
        );
    }
    let mut y = bytes(&[-1.0; 8]);
    context.rewind(3).unwrap();
    let full = context.run(&[&bytes(&x[..8])], &mut [&mut y]);
    assert_eq!(full, Err(RunError::Full { name: "past".to_owned(), size: 3 }));
    assert_eq!((floats(&y), context.past()), (vec![-1.0; 8], 3));
    // Pieces that start beyond the capacity, have no rows, have steps that do not exist, or cannot make up
    // the rows.
    for change in [
        (|plan| plan.pieces[0].most = 3) as fn(&mut Plan),
        |plan| plan.pieces[1].n = 0,
        |plan| plan.pieces[1].steps.end = 5,
        |plan| plan.pieces.swap(0, 1),
        |plan| plan.pieces.clear(),
        |plan| plan.rows = None,
    ] {
        let made = by_pieces(change).err();
        let is_refused = match &made {
            Some(PlanError::Missing { what, .. }) => *what == "piece",
            Some(PlanError::Outside { .. } | PlanError::Interface { .. }) => true,
            _ => false,
        };
        assert!(is_refused, "{made:?}");
    }
}

/// Makes a plan that returns its input, with steps for each of four shapes.
fn by_members() -> Plan {
    let dim = |name: &str, step| OpenDimension { name: name.to_owned(), least: 2, most: 2 + step, step };
    let mut plan = Plan::default();
    let mut members = Members { dims: vec![dim("h", 1), dim("w", 3)], each: Vec::new() };
    for [h, w] in [[3, 5], [3, 2], [2, 5], [2, 2]] {
        let x = plan.tensor("x", DType::F32, &[h, w], Place::Input(0));
        let y = plan.tensor("y", DType::F32, &[h, w], Place::Output(0));
        let work = Work::Copy { from: plan.whole(x), to: plan.whole(y), rows: None };
        plan.steps.push(PlanStep { name: "copy".to_owned(), work, guard: None });
        let (sizes, n) = (vec![h as i64, w as i64], plan.steps.len());
        members.each.push(Member { sizes, steps: n - 1..n, ports: vec![x, y] });
    }
    plan.members = Some(members);
    plan
}

#[test]
fn sizes_have_steps_of_their_own() {
    let model = Arc::new(Model::new(by_members(), Vec::new()).unwrap());
    let mut context = Context::new(&model, &SharedPool::new(1).unwrap()).unwrap();
    for (name, size, expected) in
        [("w", 2, [3, 2]), ("h", 2, [2, 2]), ("w", 3, [2, 2]), ("w", 5, [2, 5]), ("h", 4, [2, 5]), ("h", 3, [3, 5])]
    {
        let said = context.set_dim(name, size);
        assert!(said.is_ok() || matches!(said, Err(RunError::BadSize { .. })), "{said:?}");
        assert_eq!((said.is_ok(), &context.member().unwrap().sizes), (expected.contains(&size), &expected.to_vec()));
        let x: Vec<f32> = (0..expected.iter().product::<i64>()).map(|x| x as f32).collect();
        let mut y = bytes(&vec![-1.0; x.len()]);
        context.run(&[&bytes(&x)], &mut [&mut y]).unwrap();
        assert_eq!(floats(&y), x);
        let refused = context.run(&[&bytes(&x[1..])], &mut [&mut y]);
        assert!(matches!(refused, Err(RunError::Size { .. })), "{refused:?}");
    }
    // Steps that do not exist, an invalid or duplicate size, ports that belong to another member, are missing
    // or too large, a combination without steps, and an additional dimension.
    for change in [
        (|plan, members| members.each[3].steps.end = plan.steps.len() + 1) as fn(&Plan, &mut Members),
        |_, members| members.each[2].sizes[1] = 4,
        |_, members| members.each[2].sizes[1] = 2,
        |_, members| members.each[1].ports.swap(0, 1),
        |_, members| members.each[1].ports.truncate(1),
        |_, members| members.each.swap(0, 1),
        |_, members| members.each.truncate(3),
        |_, members| members.dims.truncate(1),
    ] {
        let mut plan = by_members();
        let mut members = plan.members.take().unwrap();
        change(&plan, &mut members);
        plan.members = Some(members);
        let made = Model::new(plan, Vec::new()).err();
        let is_refused = matches!(made, Some(PlanError::Missing { what: "member", .. } | PlanError::Interface { .. }));
        assert!(is_refused, "{made:?}");
    }
}

#[test]
fn runs_say_how_many_rows_there_are() {
    let model = Arc::new(open_model(2).unwrap());
    let mut context = Context::new(&model, &SharedPool::new(1).unwrap()).unwrap();
    let x: Vec<f32> = (0..32).map(|i| i as f32).collect();
    for size in [8, 1, 5, 2, 7] {
        context.set_dim("rows", size).unwrap();
        let n = 4 * size as usize;
        let mut y = bytes(&[-1.0; 32]);
        context.run(&[&bytes(&x[..n])], &mut [&mut y[..4 * n]]).unwrap();
        let expected: Vec<f32> = (0..32).map(|i| if i < n { 9.0 * i as f32 } else { -1.0 }).collect();
        assert_eq!(floats(&y), expected, "{size} rows");
        let refused = context.run(&[&bytes(&x)], &mut [&mut y[..4 * n]]);
        assert_eq!(refused.is_err(), size != 8, "{size} rows");
    }
    let said = |context: &mut Context, name: &str, size| context.set_dim(name, size).unwrap_err().to_string();
    assert_eq!(said(&mut context, "rows", 9), "rows=9 is not a size of the model (1..8 in steps of 1)");
    assert_eq!(said(&mut context, "words", 1), "the model has no open dimension `words` (there is rows)");
    assert_eq!(context.size(), Some(7));
}
