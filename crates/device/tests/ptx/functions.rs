//! Elementary functions, for which a GPU has no C library.

use super::*;

/// Sines and cosines of f32 are those of f64, rounded: near multiples of π/2, of large arguments, and of
/// zeros and numbers that are none.
#[test]
fn sines_are_those_of_f64() {
    let mut x: Vec<f64> = vec![0.0, -0.0, f64::INFINITY, f64::NAN, 1e-40, -1e-30, 1e15, -3e38];
    x.extend((0..500).map(|k| f64::from(k) * std::f64::consts::FRAC_PI_2));
    x.extend((0..500).map(|k| (f64::from(k) - 250.0) * 0.37));
    x.extend((0..500).map(|k| (f64::from(k) / 12.0).exp2() * if k % 2 == 0 { 1.0 } else { -1.0 }));
    x.iter_mut().for_each(|x| *x = f64::from(*x as f32));
    let n = x.len();
    for (name, function) in [("sin", f64::sin as fn(f64) -> f64), ("cos", f64::cos)] {
        let text = format!(
            "nest:buffer x:f32[{n}] global input buffer y:f32[{n}] global output loops i
             run {{for i in {n} {{y[i] = {name}(x[i])}}}}"
        );
        let (workload, target) = (Workload::parse(&text).unwrap(), Target::named("sm_90a").unwrap());
        let task = Task::new(TemplateSetting { workload, target, n_threads: 1 }, None).unwrap();
        let kernels = lower_gpu(&task.program(&task.first_guess(0).unwrap()).unwrap()).unwrap();
        let code = ptx(&kernels, &task).unwrap();
        let got = emulator::run(&kernels, &code, &[x.clone(), vec![f64::NAN; n]], Order::Ascending).unwrap();
        let mut most: f64 = 0.0;
        for (x, y) in x.iter().zip(got.last().unwrap()) {
            let expected = function(*x);
            if expected.is_nan() || *x == 0.0 {
                let is_same = y.is_nan() && expected.is_nan() || y.to_bits() == expected.to_bits();
                assert!(is_same, "{name}({x}) is {y}");
            } else if x.abs() < 1e13 {
                most = most.max((y - expected).abs() / expected.abs().max(f64::from(f32::MIN_POSITIVE)));
            } else {
                assert!(y.abs() <= 1.0, "{name}({x}) is {y}");
            }
        }
        println!("{name}: relative error {most:.1e} at most");
        assert!(most < 6e-8, "{name}: {most:.1e}");
    }
}
