//! Picture of README: speeds of whole models from docs/benchmarks.md. `BLESS=1` redraws it.

use std::path::Path;

use tilewright_lab::history::MedianCurve;
use tilewright_lab::plot::{Bar, Layer, Marks, NEUTRAL, Plot, PlotAxis, Scale, sheet};

/// Times of a model with one thread, in milliseconds.
struct Row {
    model: String,
    ours: f64,
    onnxruntime: f64,
    openvino: f64,
}

/// Reads the rows of the tables of whole models on a CPU, which precede the section's subsections.
fn rows(page: &str) -> Vec<Row> {
    let section = page.split("\n## ").find(|s| s.starts_with("Whole models")).expect("the page has the section");
    let section = section.split("\n### ").next().expect("a text has a beginning");
    let tables = section.lines().filter_map(|line| line.strip_prefix("| ")).map(|line| line.split(" | "));
    let rows = tables.filter_map(|mut cells| {
        let model = cells.next()?.trim_end_matches('†').split(',').next()?.trim().to_owned();
        let mut time = || cells.next()?.parse().ok();
        Some(Row { model, ours: time()?, onnxruntime: time()?, openvino: time()? })
    });
    rows.collect()
}

fn layer(label: &str, colour: &'static str, rows: &[Row], x: [f64; 2], theirs: impl Fn(&Row) -> f64) -> Layer {
    let bar = |(at, row): (usize, &Row)| {
        let (theirs, at) = (theirs(row), at as f64);
        let text = format!("{}: {:.3} ms, {label} {theirs:.3} ms", row.model, row.ours);
        Bar { x: (at + x[0], at + x[1]), y: (0.0, theirs / row.ours), text }
    };
    let label = format!("against {label}");
    Layer { label, colour, marks: Marks::Bars(rows.iter().enumerate().map(bar).collect()) }
}

#[test]
fn readmes_picture_shows_what_the_benchmarks_say() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let page = std::fs::read_to_string(docs.join("benchmarks.md")).expect("the page can be read");
    let rows = rows(&page);
    assert!(rows.len() >= 19, "{} rows were understood", rows.len());
    let even = vec![(-0.5, 1.0), (rows.len() as f64 - 0.5, 1.0)];
    let plot = Plot {
        title: "Speed of tuned models, one core of a Zen 4".into(),
        x: PlotAxis { label: String::new(), scale: Scale::Categories(rows.iter().map(|r| r.model.clone()).collect()) },
        y: PlotAxis { label: "times as fast".into(), scale: Scale::FromZero },
        layers: vec![
            layer("ONNX Runtime", "#4e79a7", &rows, [-0.38, 0.0], |r| r.onnxruntime),
            layer("OpenVINO", "#f28e2b", &rows, [0.0, 0.38], |r| r.openvino),
            Layer {
                label: "as fast".into(),
                colour: NEUTRAL,
                marks: Marks::Steps(MedianCurve { points: even, band: vec![] }),
            },
        ],
    };
    let (drawn, file) = (sheet(&[plot], 1), docs.join("speeds.svg"));
    if std::env::var("BLESS").is_ok_and(|v| v == "1") {
        std::fs::write(&file, &drawn).expect("the picture can be written");
    }
    let shown = std::fs::read_to_string(&file).expect("the picture is there (BLESS=1 draws it)");
    assert!(drawn == shown, "docs/speeds.svg is not what docs/benchmarks.md says (BLESS=1 draws it anew)");
}
