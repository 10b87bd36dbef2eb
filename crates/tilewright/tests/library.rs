//! The library in a program: the example, and requests that are refused.

use std::path::PathBuf;
use std::process::Command;

use tilewright::{Best, Element, Kernel, Request, Session, Workload, bf16, f16};

/// Program of `examples/`, which cargo builds with the tests.
fn example(name: &str) -> PathBuf {
    let this = std::env::current_exe().expect("a test has a path");
    this.ancestors().nth(2).expect("it is in a folder of the target folder").join("examples").join(name)
}

#[test]
fn the_example_tunes_and_calls_a_kernel() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("records.db");
    let run =
        |database: &PathBuf| Command::new(example("matmul")).arg(database).output().expect("the example is built");
    let output = run(&database);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("GFLOP/s") && text.contains("3072 sums of 32 products, each 16"), "{text}");
    // Records are available to other sessions.
    let session = Session::open(&database).unwrap();
    let workload = Workload::parse("matmul:m=64,n=48,k=32").unwrap();
    assert!(session.best(&workload, 1).unwrap().is_some_and(|best| best.is_confirmed));
    assert!(session.best(&workload, 2).unwrap().is_none());
    let error = session.kernel(&workload, 2).err().expect("nothing is recorded");
    assert!(error.is_input() && error.to_string().contains("tune it first"), "{error}");
}

/// Kernel of a template's first guess.
fn kernel(text: &str, threads: usize) -> Kernel {
    let task = Request::parse(text).unwrap().threads(threads).task().unwrap();
    let workload = &task.setting.workload;
    let guess = task.first_guess(0).expect("the template has a model");
    let config = task.space.config_to_json(&guess);
    let best = Best::new(workload, task.template.name.to_owned(), config, 1.0);
    Kernel::new(workload, &best, threads).unwrap()
}

#[test]
fn constants_are_read_once_until_they_are_forgotten() {
    let mut kernel = kernel("dense:m=2,n=40,k=33,const=w", 2);
    let sizes: Vec<usize> = kernel.arguments().iter().map(|argument| argument.n_elements()).collect();
    let (x, mut y) = (vec![1f32; sizes[0]], vec![0.0; sizes[2]]);
    let mut run = |w: f32, forget: bool| {
        if forget {
            kernel.forget_constants();
        }
        kernel.run(&[&x, &vec![w; sizes[1]]], &mut [&mut y]).unwrap();
        assert!(y.iter().all(|&sum| sum == y[0]));
        y[0]
    };
    assert_eq!(run(1.0, false), 33.0);
    assert_eq!(run(2.0, false), 33.0);
    assert_eq!(run(2.0, true), 66.0);
}

#[test]
fn what_does_not_fit_is_refused_in_a_line() {
    let mut kernel = kernel("matmul:m=8,n=8,k=8", 1);
    let mut c = vec![0f32; 64];
    let error = kernel.run(&[&[0.0; 64], &[0.0; 63]], &mut [&mut c]).unwrap_err();
    assert!(error.is_input());
    let text = error.to_string();
    assert!(text.contains("[64, 63]") && text.contains("A[64], B[64]") && !text.contains('\n'), "{text}");
    let error = Request::parse("matmul:m=0,n=8,k=8").unwrap_err();
    assert!(error.is_input(), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let session = Session::open(folder.path()).unwrap();
    let error = session.tune(&Request::parse("matmul-256").unwrap()).unwrap_err();
    assert!(error.is_input() && error.to_string().contains("it is a folder"), "{error}");
}

#[test]
fn a_session_can_be_given_to_another_thread() {
    fn is_send<T: Send + Sync>() {}
    is_send::<Session>();
}

#[test]
fn kernels_take_elements_of_every_type() {
    fn check<E: Element + PartialEq + std::fmt::Debug + Default>(values: [E; 3]) {
        let dtype = E::DTYPE.name();
        let mut kernel = kernel(
            &format!(
                "nest:buffer x:{dtype}[3] global input buffer y:{dtype}[3] global output loops i \
                 run {{for i in 3 {{y[i] = x[i]}}}}"
            ),
            1,
        );
        let mut copy = [E::default(); 3];
        kernel.run(&[&values], &mut [&mut copy]).unwrap();
        assert_eq!(copy, values, "{dtype}");
    }
    check([f32::MIN, -1.5, f32::INFINITY]);
    check([f64::MAX, 1e-300, 0.1]);
    check([f16::MAX, f16::from_f32(0.1), f16::NEG_INFINITY]);
    check([bf16::MAX, bf16::from_f32(0.1), bf16::NEG_INFINITY]);
    check([i8::MIN, -1, i8::MAX]);
    check([u8::MIN, 128, u8::MAX]);
    check([i16::MIN, -1, i16::MAX]);
    check([u16::MIN, 1 << 15, u16::MAX]);
    check([i32::MIN, -1, i32::MAX]);
    check([u32::MIN, 1 << 31, u32::MAX]);
    check([i64::MIN, -1, i64::MAX]);
    check([u64::MIN, 1 << 63, u64::MAX]);
    check([true, false, true]);
}

#[test]
fn a_wrong_type_is_named_beside_the_right_one() {
    let mut kernel = kernel("matmul:m=4,n=4,k=4,dtype=f64", 1);
    let mut c = [0.0f64; 16];
    kernel.run(&[&[1.0; 16], &[0.5; 16]], &mut [&mut c]).unwrap();
    assert_eq!(c, [2.0; 16]);
    let error = kernel.run(&[&[1f32; 16], &[0.5; 16]], &mut [&mut [0.0; 16]]).unwrap_err();
    let text = error.to_string();
    assert!(error.is_input() && text.contains("A of matmul") && text.contains("holds f64, not f32"), "{text}");
    let error = kernel.run_mixed(&[&[1.0; 16], &vec![1u8; 16]], &mut [&mut c]).unwrap_err().to_string();
    assert!(error.contains("B of matmul") && error.contains("holds f64, not u8"), "{error}");
}
