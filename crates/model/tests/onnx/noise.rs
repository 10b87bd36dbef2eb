//! Random numbers: the same as the reference's for a seed, otherwise new ones in each run.

use tilewright_graph::{Bindings, Graph, Tensor, evaluate, specialise};
use tilewright_model::Runner;
use tilewright_runtime::{OpenDimension, SharedPool};

use crate::blocks::graph_of;
use crate::libraries::{write_case, wrong_outputs};
use crate::open::{check, check_items, inputs, is_near};
use crate::{Case, compiled};

/// Statements whose nodes have a seed, or none.
fn statements(seed: &str) -> String {
    "a = RandomNormalLike[mean=0.5,scale=2.0SEED](x)
     b = RandomUniformLike[low=-1.0,high=3.0SEED](x)
     c = RandomNormal[shape=7 501SEED]()
     wide = RandomUniform[shape=7 501,dtype=11SEED]()
     d = Cast[to=1](wide)
     share = number[0.25]
     sizes = numbers[7 501]
     shares = Expand(share, sizes)
     chosen = Bernoulli[dtype=7SEED](shares)
     e = Cast[to=1](chosen)"
        .replace("SEED", seed)
}

fn run(runner: &mut Runner, given: &[(String, Tensor)]) -> Vec<Tensor> {
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    runner.run().unwrap();
    runner.outputs().into_iter().map(|(_, tensor)| tensor).collect()
}

fn runner_of(graph: &Graph) -> Runner {
    Runner::new(&compiled(graph).unwrap(), &SharedPool::new(1).unwrap()).unwrap()
}

const PORTS: [&str; 2] = ["x[7 501]", "a[7 501], b[7 501], c[7 501], d[7 501], e[7 501]"];

fn special(statements: &str) -> Graph {
    let special = specialise(&graph_of(PORTS[0], PORTS[1], statements), &Bindings::default());
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    special.graph
}

#[test]
fn random_numbers_of_a_seed_are_the_reference_s() {
    let graph = special(&statements(",seed=4.5"));
    assert!(!graph.is_random());
    let given = inputs(&graph, 1, None);
    let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
    let wanted = evaluate(&graph, &named).unwrap();
    let mut runner = runner_of(&graph);
    for _ in 0..2 {
        for (found, wanted) in run(&mut runner, &given).iter().zip(&wanted) {
            assert!(is_near(found, wanted), "{found:?}, and should be {wanted:?}");
        }
    }
}

/// Means are off by less than six of their deviations, and deviations by less than ten per cent.
#[test]
fn random_numbers_without_a_seed_are_new_in_each_run() {
    let graph = special(&statements(""));
    assert!(graph.is_random());
    let given = inputs(&graph, 1, None);
    let mut runner = runner_of(&graph);
    let runs = [run(&mut runner, &given), run(&mut runner, &given)];
    let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
    let all = [&runs[0], &runs[1], &evaluate(&graph, &named).unwrap()];
    let expected =
        [(0.5, 2.0), (1.0, 4.0 / 12f64.sqrt()), (0.0, 1.0), (0.5, 1.0 / 12f64.sqrt()), (0.25, 0.1875f64.sqrt())];
    for own in all {
        for (tensor, (mean, deviation)) in own.iter().zip(expected) {
            let numbers = tensor.floats();
            let n = numbers.len() as f64;
            let found = numbers.iter().sum::<f64>() / n;
            let spread = (numbers.iter().map(|x| (x - found).powi(2)).sum::<f64>() / n).sqrt();
            assert!((found - mean).abs() < 6.0 * deviation / n.sqrt(), "mean {found} of {mean}");
            assert!((spread / deviation - 1.0).abs() < 0.1, "deviation {spread} of {deviation}");
        }
        // Uniform numbers stay within their bounds.
        assert!(own[1].floats().iter().all(|x| (-1.0..=3.0).contains(x)));
        assert!(own[3].floats().iter().all(|x| (0.0..=1.0).contains(x)));
    }
    for (at, ((first, second), third)) in all[0].iter().zip(all[1]).zip(all[2]).enumerate() {
        assert!(first != second && second != third, "output {at} comes again");
    }
    // Normal numbers of two nodes are not the same.
    assert!((runs[0][0].floats()[0] - 0.5) / 2.0 != runs[0][2].floats()[0]);
}

#[test]
fn random_numbers_take_any_number_of_rows() {
    let dim = OpenDimension { name: "rows".to_owned(), least: 1, most: 13, step: 1 };
    let ports = ["x[rows 6]", "y[rows 6], z[rows 6]"];
    check(
        &dim,
        ports,
        "noise = RandomNormalLike[seed=2.0](x)
         y = Add(noise, x)
         noises = RandomUniformLike(x)
         none = Sub(noises, noises)
         z = Add(none, x)",
    );
    let items = OpenDimension { name: "batch".to_owned(), least: 1, most: 3, step: 1 };
    check_items(
        &items,
        &dim,
        ["x[batch rows 6]", "z[batch rows 6]"],
        "noises = RandomNormalLike(x)
         none = Sub(noises, noises)
         z = Add(none, x)",
    );
}

#[test]
fn libraries_have_the_random_numbers_of_a_seed() {
    if tilewright_codegen::llvm_version().is_none() {
        return;
    }
    let graph = special(&statements(",seed=4.5"));
    let given = inputs(&graph, 1, None);
    let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
    let outputs = evaluate(&graph, &named).unwrap();
    let model = crate::blocks::file_of(17, PORTS[0], PORTS[1], &statements(",seed=4.5"));
    let sets = vec![(given.into_iter().map(|(_, x)| x).collect(), outputs)];
    let case = Case { name: "noise".to_owned(), model, sets };
    let folder = tempfile::tempdir().unwrap();
    let expected = write_case(&case, "noise", folder.path()).unwrap().unwrap();
    assert_eq!(wrong_outputs(folder.path(), &[("noise".to_owned(), expected)]), Vec::<String>::new());
}
