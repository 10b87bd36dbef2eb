//! Illustrations of the papers that need no measurement: the points that searches visit in a small space, and
//! the distances of mutations.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::file::write_whole;
use tilewright::version::BUILD;
use tilewright_search::{Config, Outcome, Parameter, Space, Timing, Trial, build};

use super::folder::PAGE;
use super::folder::claim;
use super::results::markdown;
use super::{ExperimentResult, data};
use crate::OrFailed;
use crate::plot::{Bar, Layer, Marks, Plot, PlotAxis, Scale, colours, sheet};

/// Illustration, computed within a second.
pub struct Picture {
    /// Name on the command line.
    pub name: &'static str,
    /// Paper that it reproduces.
    pub paper: &'static str,
    /// Figure that it reproduces.
    pub figure: &'static str,
    /// Subject, in one line.
    pub compares: &'static str,
    /// Deviations from the paper, in one line.
    pub differs: &'static str,
    draw: fn(u64) -> ComputedPicture,
}

/// Computed picture.
struct ComputedPicture {
    /// Numbers for `data.json`.
    data: Json,
    plots: Vec<Plot>,
    /// Table; the first row is its header.
    table: Vec<Vec<String>>,
}

/// Table of illustrations.
pub const PICTURES: &[Picture] = &[
    Picture {
        name: "gemm-map",
        paper: "G-BFS and N-A2C",
        figure: "figures 5 and 6",
        compares: "what G-BFS and N-A2C visit of a map of two parameters with random hills",
        differs: "the paper does not say how its rewards are drawn: twelve random hills of random widths on 32 times 32 tilings; \
                  N-A2C walks 3 steps, as in the paper's experiments, not the 100 of its map",
        draw: map,
    },
    Picture {
        name: "opevo-walk",
        paper: "OpEvo",
        figure: "figure 1",
        compares: "how far a mutation goes on the graph of a factorization, for two values of q",
        differs: "the numbers of the paper's figure are not in its text: 16 as three factors, q of 0.3 and 0.7",
        draw: walk,
    },
];

/// Number of positions along a side of the map.
const SIDE: u64 = 32;
/// Number of trials of a search on the map, a quarter of its positions.
const N_VISITS: usize = 256;
/// Number of hills of the map.
const N_HILLS: usize = 12;
/// Colours from low ground to high.
const SHADES: [&str; 5] = ["#eef2f7", "#d0dcea", "#a9c0da", "#7d9fc6", "#4e79a7"];
/// Colours of visits by quarters of a run, the first ones first.
const VISITS: [&str; 4] = ["#f6d55c", "#f28e2b", "#e15759", "#7a1f2b"];

impl Picture {
    /// Illustration by name; `None` for an unknown one.
    pub fn named(name: &str) -> Option<&'static Picture> {
        PICTURES.iter().find(|picture| picture.name == name)
    }

    /// Computes the illustration from a seed, and writes data, plots and a page.
    ///
    /// # Errors
    /// Bad input if the folder holds something else; failure if files cannot be written.
    pub fn carry_out(&self, seed: u64, folder: Option<PathBuf>) -> Result<ExperimentResult, Error> {
        let Picture { name, paper, figure, compares, differs, draw } = self;
        let folder = folder.unwrap_or_else(|| Path::new("experiments").join(name));
        let mut own = json!({"experiment": name, "seed": seed});
        let (_claim, _) = claim(&folder, &own)?;
        let ComputedPicture { data: found, plots, table } = draw(seed);
        let command = format!("tilewright experiment {name} --seed {seed}");
        let facts = json!({"paper": paper, "figure": figure, "differs": differs, "command": command, "version": BUILD,
            "complete": true, "found": found});
        let facts = facts.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone()));
        own.as_object_mut().expect("it is one").extend(facts);
        data::write(&folder, &format!("{own:#}\n")).or_failed(data::path(&folder).display())?;
        let mut page = format!("# {name}\n\n{paper}: {compares} ({figure}).\nDiffers from the paper: {differs}.\n");
        let _ = write!(page, "\n`{command}`, version {BUILD}.\n\n{}\n![{compares}]({name}.svg)\n", markdown(&table));
        for (file, text) in [(format!("{name}.svg"), sheet(&plots, 2)), (PAGE.to_owned(), page)] {
            let path = folder.join(file);
            write_whole(&path, |file| file.write_all(text.as_bytes())).or_failed(path.display())?;
        }
        Ok(ExperimentResult { data: own, folder, n_runs: 1, n_complete: 1 })
    }
}

/// Hills on a map, each with its position, width and height.
struct Hills(Vec<([f64; 2], f64, f64)>);

impl Hills {
    fn random(seed: u64) -> Hills {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut hill = || {
            let place = [0; 2].map(|_| rng.random_range(0.0..SIDE as f64));
            (place, rng.random_range(1.5..6.0), rng.random_range(0.2..1.0))
        };
        Hills((0..N_HILLS).map(|_| hill()).collect())
    }

    /// Reward at a position, above 0.
    fn at(&self, place: [f64; 2]) -> f64 {
        let of_hill = |(middle, width, height): &([f64; 2], f64, f64)| {
            let distance = (place[0] - middle[0]).powi(2) + (place[1] - middle[1]).powi(2);
            height * (-distance / (2.0 * width * width)).exp()
        };
        0.05 + self.0.iter().map(of_hill).sum::<f64>()
    }
}

/// Runs both searches on a map of hills, with the same kind of random start.
fn map(seed: u64) -> ComputedPicture {
    let all = 1u64 << (SIDE - 1);
    let parameters = ["m", "n"].map(|name| Parameter::factorization(name, all, 2)).to_vec();
    let space = Arc::new(Space::new("map", parameters, Vec::new()).expect("invariant: the names differ"));
    let hills = Hills::random(seed);
    let place = |config: &Config| ["m", "n"].map(|name| space.factors(config, name)[0].ilog2().into());
    let reward = |config: &Config| hills.at(place(config));
    let everywhere = (0..space.size()).map(|index| space.config_at(index));
    let optimum = everywhere.clone().map(|config| reward(&config)).fold(0.0, f64::max);
    let square = |[x, y]: [f64; 2], inset: f64, text: String| Bar {
        x: (x + inset, x + 1.0 - inset),
        y: (y + inset, y + 1.0 - inset),
        text,
    };
    let ground: Vec<Layer> = SHADES
        .iter()
        .enumerate()
        .map(|(shade, &colour)| {
            let level = |share: f64| ((share * SHADES.len() as f64) as usize).min(SHADES.len() - 1);
            let of_level = everywhere.clone().filter(|config| level(reward(config) / optimum) == shade);
            let bars = of_level.map(|config| square(place(&config), 0.0, format!("{:.3}", reward(&config) / optimum)));
            Layer { label: String::new(), colour, marks: Marks::Bars(bars.collect()) }
        })
        .collect();
    let mut plots = Vec::new();
    let mut table = vec![["search", "trials", "best, of the optimum", "best at trial"].map(str::to_owned).to_vec()];
    let mut found = Vec::new();
    for text in ["gbfs:start=random", "na2c:start=random"] {
        let visits = visit(text, &space, seed, reward);
        let best =
            visits.iter().map(&reward).enumerate().fold((0, 0.0), |best, at| if at.1 > best.1 { at } else { best });
        let share = best.1 / optimum;
        table.push(vec![text.to_owned(), visits.len().to_string(), format!("{share:.3}"), (best.0 + 1).to_string()]);
        let places: Vec<[f64; 2]> = visits.iter().map(place).collect();
        found.push(json!({"search": text, "visits": places, "best_of_optimum": share, "best_at": best.0 + 1}));
        let quarter = visits.len().div_ceil(VISITS.len()).max(1);
        let of_quarter = |(at, places): (usize, &[[f64; 2]])| {
            let first = at * quarter;
            let bars =
                places.iter().enumerate().map(|(i, place)| square(*place, 0.25, format!("trial {}", first + i + 1)));
            let label = format!("trials {} to {}", first + 1, first + places.len());
            Layer { label, colour: VISITS[at], marks: Marks::Bars(bars.collect()) }
        };
        let visited = places.chunks(quarter).enumerate().map(of_quarter);
        plots.push(Plot {
            title: text.to_owned(),
            x: PlotAxis { label: "log₂ of the first factor of m".into(), scale: Scale::FromZero },
            y: PlotAxis { label: "log₂ of the first factor of n".into(), scale: Scale::FromZero },
            layers: ground.iter().cloned().chain(visited).collect(),
        });
    }
    ComputedPicture { data: json!({"optimum": optimum, "searches": found}), plots, table }
}

/// Configurations that a search tries, in order.
fn visit(text: &str, space: &Arc<Space>, seed: u64, reward: impl Fn(&Config) -> f64) -> Vec<Config> {
    let mut search = build(text, space, seed).unwrap_or_else(|error| panic!("invariant: {error}"));
    let mut visits = Vec::new();
    while visits.len() < N_VISITS {
        let proposed = search.propose((N_VISITS - visits.len()).min(5));
        if proposed.is_empty() {
            break;
        }
        let trial = |config: &Config| {
            let median_ns = 1.0 / reward(config);
            let timing = Timing::of_samples(&[median_ns], false);
            Trial { config: config.clone(), outcome: Outcome::Measured(timing) }
        };
        search.observe(&proposed.iter().map(trial).collect::<Vec<_>>());
        visits.extend(proposed);
    }
    visits
}

/// End points of q-random walks that begin at 16 · 1 · 1.
fn walk(_: u64) -> ComputedPicture {
    const QS: [f64; 2] = [0.3, 0.7];
    let space = Space::new("walk", vec![Parameter::factorization("f", 16, 3)], Vec::new());
    let space = space.expect("invariant: there is one name");
    let n = space.n_values(0);
    let factors = |rank: u64| space.factors(&Config::new([rank]), "f");
    let start = (0..n).find(|&rank| factors(rank) == [16, 1, 1]).expect("invariant: it is one of them");
    let mut steps = vec![None; n as usize];
    steps[start as usize] = Some(0usize);
    let mut frontier = vec![start];
    while let Some(rank) = frontier.first().copied() {
        frontier.remove(0);
        for next in space.rank_neighbours(0, rank) {
            if steps[next as usize].is_none() {
                steps[next as usize] = steps[rank as usize].map(|steps| steps + 1);
                frontier.push(next);
            }
        }
    }
    let ends = QS.map(|q| walk_ends(&space, start, q));
    let mut ranks: Vec<u64> = (0..n).collect();
    ranks.sort_by_key(|&rank| steps[rank as usize]);
    let name = |rank: u64| factors(rank).iter().map(u64::to_string).collect::<Vec<_>>().join("·");
    let labels = QS.map(|q| format!("q = {q}"));
    let mut table = vec![["factors", "steps away"].into_iter().map(str::to_owned).chain(labels.clone()).collect()];
    for &rank in &ranks {
        let away = steps[rank as usize].map_or("–".to_owned(), |steps| steps.to_string());
        let of_q = ends.iter().map(|ends| format!("{:.4}", ends[rank as usize]));
        table.push([name(rank), away].into_iter().chain(of_q).collect());
    }
    let layers = labels.iter().zip(colours(&labels)).zip(&ends).enumerate().map(|(at, ((label, colour), ends))| {
        let bars = ranks.iter().enumerate().map(|(place, &rank)| {
            let left = place as f64 - 0.4 + 0.4 * at as f64;
            let share = ends[rank as usize];
            Bar { x: (left, left + 0.38), y: (0.0, 100.0 * share), text: format!("{:.2} %", 100.0 * share) }
        });
        Layer { label: label.clone(), colour, marks: Marks::Bars(bars.collect()) }
    });
    let plot = Plot {
        title: "Where walks from 16·1·1 end, the nearest first".into(),
        x: PlotAxis { label: String::new(), scale: Scale::Categories(ranks.iter().map(|&rank| name(rank)).collect()) },
        y: PlotAxis { label: "%".into(), scale: Scale::FromZero },
        layers: layers.collect(),
    };
    let rows = ranks.iter().map(|&rank| {
        json!({"factors": factors(rank), "steps": steps[rank as usize], "share": ends.each_ref().map(|e| e[rank as usize])})
    });
    ComputedPicture { data: json!({"q": QS, "ends": rows.collect::<Vec<_>>()}), plots: vec![plot], table }
}

/// Shares of the values at which walks from one of them end: the series of `(1 − q)(I − qW)⁻¹`.
fn walk_ends(space: &Space, start: u64, q: f64) -> Vec<f64> {
    let n = space.n_values(0) as usize;
    let mut at = vec![0.0; n];
    at[start as usize] = 1.0;
    let mut ends = vec![0.0; n];
    // The shares of longer walks are below any digit shown.
    while at.iter().sum::<f64>() > 1e-12 {
        let mut next = vec![0.0; n];
        for (rank, mass) in at.iter().enumerate() {
            ends[rank] += (1.0 - q) * mass;
            let around = space.rank_neighbours(0, rank as u64);
            around.iter().for_each(|&other| next[other as usize] += q * mass / around.len() as f64);
        }
        at = next;
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walks_end_somewhere_and_nearer_with_a_smaller_q() {
        let ComputedPicture { data, table, .. } = walk(0);
        assert_eq!(table.len(), 1 + 15, "16 has 15 factorizations in three");
        let ends = data["ends"].as_array().unwrap();
        for q in 0..2 {
            let share = |row: &Json| row["share"][q].as_f64().unwrap();
            assert!((ends.iter().map(share).sum::<f64>() - 1.0).abs() < 1e-9);
        }
        assert!(ends[0]["share"][0].as_f64() > ends[0]["share"][1].as_f64(), "{}", ends[0]);
        assert_eq!((&ends[0]["steps"], &ends[14]["steps"]), (&0.into(), &4.into()));
    }

    #[test]
    fn searches_on_a_map_find_high_ground() {
        for seed in 0..3 {
            let ComputedPicture { data, plots, .. } = map(seed);
            for search in data["searches"].as_array().unwrap() {
                assert_eq!(search["visits"].as_array().unwrap().len(), N_VISITS);
                assert!(search["best_of_optimum"].as_f64().unwrap() > 0.3, "{seed}: {search}");
            }
            assert_eq!(plots.len(), 2);
        }
    }
}
