//! Conformance and quality of every row of [`SEARCHES`].

mod quick;

use std::sync::Arc;

use quick::quick;
use tilewright_search::{SEARCHES, Search, Space, build, conformance};

/// Searches with the operators and generations of their papers, or nearly.
const AS_IN_THE_PAPERS: [&str; 4] = [
    "genetic:population=50,generation=47,selection=fitness,start=random,crossover=one_point,mutation=0.1,steps=0",
    "opevo:generation=8,selection=fitness,q=0.5,start=random",
    "nose:population=30,generation=9,selection=fitness,start=random,crossover=one_point,mutation=0.3,steps=0,mutant=other",
    "lfbo:population=100,start=random,neighbours=300,children=30,trees=10",
];

fn maker(text: &'static str) -> impl Fn(&Arc<Space>, u64) -> Box<dyn Search> {
    move |space, seed| build(text, space, seed).unwrap()
}

#[test]
fn every_search_keeps_what_searches_promise() {
    std::thread::scope(|scope| {
        for text in SEARCHES.iter().map(|row| quick(row.name)).chain(AS_IN_THE_PAPERS) {
            let named = std::thread::Builder::new().name(text.to_owned());
            named.spawn_scoped(scope, move || conformance::check(maker(text))).unwrap();
        }
    });
}

#[test]
fn guided_searches_beat_random_on_a_smooth_landscape() {
    let guided =
        ["auto", "gbfs", "genetic", "gbfs:start=random", "simulated_annealing", "gbt:steps=100", "opevo", "nose"];
    let further = ["lfbo:trees=20", "gbt:steps=100,features=aligned", "nose:features=aligned"];
    for text in guided.into_iter().chain(further).chain(AS_IN_THE_PAPERS) {
        conformance::check_against_random(maker(text), 12, 600);
    }
}

/// Takes fewer runs, since these searches take milliseconds per trial.
#[test]
fn neural_searches_beat_random_on_a_smooth_landscape() {
    for text in ["na2c", "rnn_controller", "tree_gru:steps=20,updates=5"] {
        conformance::check_against_random(maker(text), 5, 300);
    }
}
