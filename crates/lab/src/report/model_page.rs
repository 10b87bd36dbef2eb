//! Page about a model: its graph, profile, kernels, and the progress of the search.

use std::fmt::Write;

use tilewright::format::{count, digits, duration, grouped, percent};

use super::layout::{EdgeEnd, GraphLayout, layout};
use super::model::{GraphNode, ModelFacts, StepFacts, TaskFacts};
use super::page::{document, table};
use crate::history::MedianCurve;
use crate::plot::{Layer, Marks, Plot, PlotAxis, Scale, colours, escape};

/// Width of a step, and heights of nodes.
const WIDE: f64 = 256.0;
const HIGH: f64 = 78.0;
const LOW: f64 = 24.0;
/// Distance between layers, with room for a tensor's type.
const BETWEEN: f64 = 40.0;
/// Number of characters that fit in a line of a step, in bold and plain, and the width of a character
/// elsewhere.
const TITLE: usize = 29;
const LINE: usize = 38;
const CHARACTER: f64 = 6.6;
/// Maximum number of characters of a step's title in a table.
const CELL: usize = 48;
/// Colour of steps that take much time.
const HOT: &str = "#e15759";
/// Width of the chart of turns, height of one of its rows, and the width of its names.
const TURNS: f64 = 1060.0;
const ROW: f64 = 18.0;
const NAMES: f64 = 390.0;

/// Formats the page about a model.
pub fn model_page(facts: &ModelFacts) -> String {
    let n_kernels = facts.steps.iter().filter(|step| step.step.kind == "kernel").count();
    let line = format!(
        "{}, {} different, {} by {} on {} ({}); records in {}",
        count(n_kernels as u64, "kernel"),
        facts.tasks.len(),
        duration(facts.ms_median * 1e6),
        count(facts.threads as u64, "thread"),
        facts.cpu,
        facts.target,
        facts.db
    );
    let mut body =
        "<p><a href=\"#profile\">Profile</a> · <a href=\"#kernels\">Kernels</a> · <a href=\"#graph\">Graph</a> · \
                    <a href=\"#search\">Search</a></p>\n"
            .to_owned();
    body += &summary(facts);
    body += "<h2 id=\"profile\">Profile</h2>\n";
    body += &profile(facts);
    body += "<h2 id=\"kernels\">Kernels</h2>\n";
    body += &kernels(facts);
    body += "<h2 id=\"graph\">Graph</h2>\n<p class=\"note\">What a run does, from inputs above to outputs below: each box is \
             a step with its place in the order, the model's nodes that it is, what it reads and computes, its time, its speed and its share of the \
             whole, which the bar and the colour show as well. Lines are tensors. Weights are not drawn.</p>\n";
    body += &graph(facts);
    body += "<h2 id=\"search\">Search</h2>\n";
    body += &search(facts);
    document(&facts.model, &line, &body)
}

fn summary(facts: &ModelFacts) -> String {
    let whole = |of: fn(&TaskFacts) -> Option<f64>| {
        let sum: Option<f64> = facts.tasks.iter().map(|task| Some(of(task)? * task.times as f64)).sum();
        sum.filter(|_| !facts.tasks.is_empty())
    };
    let ms = |ms: Option<f64>| ms.map_or("unknown".to_owned(), |ms| duration(ms * 1e6));
    let (before, after) = (whole(|task| task.ms_before), whole(|task| task.ms_after));
    let n_steps = |kind: &str| facts.steps.iter().filter(|step| step.step.kind == kind).count().to_string();
    // Some copies are kernels, which transpose data.
    let n_copies = facts.steps.iter().filter(|step| title(step) == "copy").count();
    let n_guessed = facts.tasks.iter().filter(|task| !task.is_recorded).count();
    let items = [
        ("a run", duration(facts.ms_median * 1e6)),
        ("its steps together", duration(facts.ms_steps * 1e6)),
        ("kernels at their first trials", ms(before)),
        ("kernels tuned", ms(after)),
        ("faster than at first", before.zip(after).map_or("–".to_owned(), |(b, a)| format!("{:.2} times", b / a))),
        ("kernels not tuned", n_guessed.to_string()),
        ("operators without code", n_steps("host")),
        ("copies", n_copies.to_string()),
        ("memory on the way", format!("{} bytes", grouped(facts.arena_bytes as u64))),
        ("time of the search", format!("{:.0} s", facts.search.seconds)),
    ];
    let item = |(name, value): (&str, String)| format!("<div><dt>{name}</dt><dd>{value}</dd></div>\n");
    format!("<dl class=\"facts\">{}</dl>\n", items.map(item).concat())
}

/// Shortens text to at most `most` characters.
fn brief(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

/// Title of a kernel, in a few words: its operator, the attributes that distinguish it from others of its
/// kind, and its prologue and epilogue.
fn title(step: &StepFacts) -> String {
    let label = &step.step.label;
    if step.step.kind != "kernel" {
        return label.clone();
    }
    let Some((operator, attributes)) = label.split_once(':').filter(|(operator, _)| *operator != "nest") else {
        let kind = label.trim_start_matches("nest:").split(' ').next().unwrap_or_default();
        return kind.to_owned();
    };
    let of = |name: &str| {
        let mut pairs = attributes.split(',').filter_map(|pair| pair.split_once('='));
        pairs.find(|(known, _)| *known == name).map(|(_, value)| value)
    };
    let sizes = match (of("m"), of("n"), of("k"), of("r"), of("s")) {
        (.., Some(r), Some(s)) => format!(" {r}×{s}"),
        (Some(m), Some(n), Some(k), ..) => format!(" {m}×{n}×{k}"),
        _ => String::new(),
    };
    let stride = of("stride").map_or(String::new(), |stride| format!(" /{stride}"));
    let prologue = of("prologue").map_or(String::new(), |names| format!("{names} → "));
    let epilogue = of("epilogue").map_or(String::new(), |names| format!(" + {}", names.replace('+', " + ")));
    format!("{prologue}{operator}{sizes}{stride}{epilogue}")
}

/// Size of a node in the drawing.
fn size(node: &GraphNode) -> (f64, f64) {
    match node.kind {
        "step" => (WIDE, HIGH),
        _ => ((caption(node).chars().count() as f64 * CHARACTER + 20.0).min(WIDE), LOW),
    }
}

/// Caption of a node that is not a step.
fn caption(node: &GraphNode) -> String {
    match node.kind {
        "join" => format!("joined: {}", node.ty),
        _ => brief(&format!("{}: {}", node.name, node.ty), LINE - 6),
    }
}

fn graph(facts: &ModelFacts) -> String {
    let (nodes, edges) = (&facts.nodes, &facts.edges);
    let sizes: Vec<(f64, f64)> = nodes.iter().map(size).collect();
    let widths: Vec<f64> = sizes.iter().map(|size| size.0).collect();
    let ends: Vec<(usize, usize)> = edges.iter().map(|edge| (edge.from, edge.to)).collect();
    let found = layout(&widths, &ends);
    let mut heights = vec![LOW; found.n_layers];
    for (layer, (_, height)) in found.layers.iter().zip(&sizes) {
        heights[*layer] = f64::max(heights[*layer], *height);
    }
    let mut tops = vec![2.0];
    heights.iter().for_each(|height| tops.push(tops[tops.len() - 1] + height + BETWEEN));
    let picture = Drawn { facts, found: &found, sizes: &sizes, tops: &tops, heights: &heights };
    // The types beside the edges need room as well.
    let (width, height) = (found.width + 110.0, tops[tops.len() - 1] - BETWEEN + 4.0);
    format!(
        "<div class=\"graph\"><svg width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"-2 0 {width:.0} {height:.0}\" \
         role=\"img\" aria-label=\"Graph of {}\" font-family=\"system-ui,sans-serif\" font-size=\"12\" \
         fill=\"currentColor\">{}{}</svg></div>\n",
        escape(&facts.model),
        picture.lines(),
        picture.boxes()
    )
}

/// Drawing of a laid-out graph.
struct Drawn<'a> {
    facts: &'a ModelFacts,
    found: &'a GraphLayout,
    sizes: &'a [(f64, f64)],
    tops: &'a [f64],
    heights: &'a [f64],
}

impl Drawn<'_> {
    /// Top of a node.
    fn top(&self, node: usize) -> f64 {
        let layer = self.found.layers[node];
        self.tops[layer] + (self.heights[layer] - self.sizes[node].1) / 2.0
    }

    /// Upper and lower end of the item at the end of a segment.
    fn span(&self, end: &EdgeEnd) -> (f64, f64) {
        match end.node {
            Some(node) => (self.top(node), self.top(node) + self.sizes[node].1),
            None => (self.tops[end.layer], self.tops[end.layer] + self.heights[end.layer]),
        }
    }

    /// Lines of tensors, labelled with their types below the producing node.
    fn lines(&self) -> String {
        let mut out = String::new();
        let Drawn { facts, found, .. } = self;
        let mut arriving: Vec<Vec<(f64, usize)>> = vec![Vec::new(); facts.nodes.len()];
        for (at, piece) in found.pieces.iter().enumerate() {
            piece.to.node.iter().for_each(|&node| arriving[node].push((piece.from.at, at)));
        }
        // Lines end beside each other.
        let mut shifts = vec![0.0; found.pieces.len()];
        for (node, lines) in arriving.iter_mut().enumerate() {
            lines.sort_by(|a, b| a.0.total_cmp(&b.0));
            let n = lines.len() as f64;
            let step = f64::min(22.0, (self.sizes[node].0 - 24.0) / n);
            lines.iter().zip(0..).for_each(|(&(_, at), i)| shifts[at] = (f64::from(i) - (n - 1.0) / 2.0) * step);
        }
        for (piece, shift) in found.pieces.iter().zip(shifts) {
            let (_, from) = self.span(&piece.from);
            let (to, below) = self.span(&piece.to);
            let (x, y) = (piece.from.at, piece.to.at + shift);
            let half = (to - from) / 2.0;
            let mut path =
                format!("M{x:.1} {from:.1}C{x:.1} {:.1} {y:.1} {:.1} {y:.1} {to:.1}", from + half, to - half);
            if piece.to.node.is_none() {
                let _ = write!(path, "V{below:.1}");
            }
            let tensor = facts.edges.iter().find(|edge| edge.from == piece.source);
            let title = tensor.map_or(String::new(), |edge| format!("{} {}", edge.tensor, edge.ty));
            let _ = write!(
                out,
                "<path d=\"{path}\" fill=\"none\" stroke=\"#808890\" stroke-width=\"1.4\"><title>{}</title></path>",
                escape(&title)
            );
        }
        for (at, node) in facts.nodes.iter().enumerate() {
            let is_read = facts.edges.iter().any(|edge| edge.from == at);
            if node.kind == "step" && is_read {
                let (x, y) = (found.middles[at] + 6.0, self.top(at) + HIGH + 14.0);
                let _ = write!(
                    out,
                    "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"10.5\" opacity=\".75\">{}</text>",
                    escape(&node.ty)
                );
            }
        }
        out
    }

    fn boxes(&self) -> String {
        let mut out = String::new();
        let most = self.facts.steps.iter().map(|step| step.share).fold(1e-12, f64::max);
        for (at, node) in self.facts.nodes.iter().enumerate() {
            let (width, height) = self.sizes[at];
            let (left, top) = (self.found.middles[at] - width / 2.0, self.top(at));
            match node.step {
                Some(step) => out += &self.step(node, step, (left, top), most),
                None => {
                    let round = if node.kind == "join" { 3.0 } else { LOW / 2.0 };
                    let _ = write!(
                        out,
                        "<g><rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height}\" rx=\"{round}\" \
                         fill=\"#80889022\" stroke=\"#808890\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" \
                         font-size=\"11\">{}</text><title>{} {} {}</title></g>",
                        left + width / 2.0,
                        top + 16.0,
                        escape(&caption(node)),
                        node.kind,
                        escape(&node.name),
                        escape(&node.ty)
                    );
                }
            }
        }
        out
    }

    fn step(&self, node: &GraphNode, at: usize, (left, top): (f64, f64), most: f64) -> String {
        let step = &self.facts.steps[at];
        let reads = self.facts.edges.iter().filter(|edge| self.facts.nodes[edge.to].step == Some(at));
        let reads: Vec<&str> = reads.map(|edge| edge.ty.trim_start_matches("f32")).collect();
        let shapes = format!("{} → {}", reads.join(" "), node.ty.trim_start_matches("f32"));
        let speed = step.step.gflops.map_or(String::new(), |gflops| format!(" · {} GFLOP/s", digits(gflops)));
        let time = format!("{}{speed} · {}", duration(step.step.us * 1e3), percent(step.share));
        let heat = step.share / most;
        format!(
            "<g class=\"step\" id=\"n{at}\"><rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{WIDE}\" height=\"{HIGH}\" rx=\"5\" \
             fill=\"{HOT}\" fill-opacity=\"{:.3}\" stroke=\"currentColor\" stroke-opacity=\".55\"/>\
             <rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"4\" fill=\"{HOT}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" font-weight=\"600\">{}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" font-size=\"10.5\"><a href=\"#s{at}\">{}</a></text>\
             <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10.5\" opacity=\".8\">{}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10.5\">{}</text><text x=\"{:.1}\" y=\"{:.1}\">{}</text>\
             <title>{}\n{}\n{}</title></g>",
            0.04 + 0.46 * heat,
            left + 1.0,
            top + HIGH - 5.0,
            (WIDE - 2.0) * heat,
            left + 8.0,
            top + 17.0,
            escape(&brief(&title(step), TITLE)),
            left + WIDE - 7.0,
            top + 17.0,
            at + 1,
            left + 8.0,
            top + 32.0,
            escape(&brief(&step.step.name, LINE)),
            left + 8.0,
            top + 48.0,
            escape(&brief(&shapes, LINE)),
            left + 8.0,
            top + 65.0,
            escape(&time),
            escape(&step.step.name),
            escape(&step.step.label),
            escape(&shapes)
        )
    }
}

/// Bar that shows a share.
fn bar(part: f64) -> String {
    format!("<span class=\"bar\" style=\"width:{:.2}rem\"></span>", 8.0 * part.clamp(0.0, 1.0))
}

fn profile(facts: &ModelFacts) -> String {
    let mut by_time: Vec<usize> = (0..facts.steps.len()).collect();
    by_time.sort_by(|&a, &b| facts.steps[b].step.us.total_cmp(&facts.steps[a].step.us));
    let most = facts.steps.iter().map(|step| step.share).fold(1e-12, f64::max);
    let row = |at: usize| {
        let StepFacts { step, share, .. } = &facts.steps[at];
        vec![
            format!("<a class=\"number\" href=\"#n{at}\" id=\"s{at}\">{}</a>", at + 1),
            escape(&brief(&title(&facts.steps[at]), CELL)),
            duration(step.us * 1e3),
            percent(*share),
            bar(share / most),
            step.gflops.map_or("–".to_owned(), digits),
            step.gflops.zip(facts.peak_gflops).map_or("–".to_owned(), |(gflops, peak)| percent(gflops / peak)),
            format!("<div class=\"names\">{}</div>", escape(&step.name)),
        ]
    };
    let mut rows: Vec<Vec<String>> = by_time.into_iter().map(row).collect();
    let sum = duration(facts.ms_steps * 1e6);
    rows.push(["", "all steps", &sum, "100.0 %", "", "", "", ""].map(str::to_owned).to_vec());
    let peak = facts.peak_gflops.map_or(String::new(), |peak| {
        let threads = count(facts.threads as u64, "thread");
        format!(" The peak is what {threads} can do in f32, as measured here: {} GFLOP/s.", digits(peak))
    });
    let text = "The median of each step over runs, the slowest first.";
    let head = ["step", "<what", "time", "share", "<", "GFLOP/s", "of peak", "<the model's nodes"];
    format!("<p class=\"note\">{text}{peak}</p>\n") + &table(&head, &rows)
}

fn kernels(facts: &ModelFacts) -> String {
    let ms = |ms: Option<f64>| ms.map_or("–".to_owned(), |ms| duration(ms * 1e6));
    let head = [
        "<kernel",
        "a run has",
        "<template",
        "first",
        "now",
        "times as fast",
        "GFLOP/s",
        "trials",
        "failed",
        "turns",
        "s",
        "<configuration",
    ];
    let mut order: Vec<&TaskFacts> = facts.tasks.iter().collect();
    let weight = |task: &TaskFacts| task.ms_after.or(task.ms_before).unwrap_or(0.0) * task.times as f64;
    order.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
    let row = |task: &TaskFacts| {
        let parameters = task.config.as_object().into_iter().flatten().map(|(name, value)| match value.as_str() {
            Some(text) => format!("{name}={text}"),
            None => format!("{name}={value}"),
        });
        let whence = if task.is_recorded { "recorded" } else { "guessed" };
        vec![
            format!("<div class=\"names\" title=\"{}\">{}</div>", escape(&task.workload), escape(&task.label)),
            format!("{}×", task.times),
            escape(&task.template),
            ms(task.ms_before),
            ms(task.ms_after),
            task.ms_before
                .zip(task.ms_after)
                .map_or("–".to_owned(), |(before, after)| format!("{:.2}", before / after)),
            task.gflops.map_or("–".to_owned(), digits),
            grouped(task.trials),
            grouped(task.failed),
            grouped(task.turns),
            format!("{:.1}", task.seconds),
            format!(
                "<details><summary>{whence}</summary><code>{}</code></details>",
                escape(&parameters.collect::<Vec<_>>().join(" "))
            ),
        ]
    };
    let text = "Those that weigh most come first. The first time is that of the first valid trial; both are of the kernel \
                by itself, as the search measures it, so that a run's own times differ.";
    format!("<p class=\"note\">{text}</p>\n") + &table(&head, &order.into_iter().map(row).collect::<Vec<_>>())
}

fn search(facts: &ModelFacts) -> String {
    let search = &facts.search;
    if search.turns.is_empty() {
        return "<p>Nothing is recorded of the search of these kernels.</p>\n".to_owned();
    }
    let mut out = format!(
        "<p class=\"note\">{:.0} s of search in {}, by what records say of when trials ended; pauses and races are left out. \
         A bar is a stretch in which one kernel had its turn. Kernels that other models have as well may have been tuned with \
         them.</p>\n",
        search.seconds,
        count(search.turns.len() as u64, "turn")
    );
    let shown: Vec<usize> = (0..facts.tasks.len()).filter(|&at| facts.tasks[at].turns > 0).collect();
    let height = shown.len() as f64 * ROW + 26.0;
    let x = |seconds: f64| NAMES + (TURNS - NAMES - 80.0) * seconds / search.seconds.max(1e-9);
    let _ = write!(
        out,
        "<div class=\"scroll\"><svg width=\"{TURNS}\" height=\"{height}\" viewBox=\"0 0 {TURNS} {height}\" role=\"img\" \
         aria-label=\"Turns of the search\" font-family=\"system-ui,sans-serif\" font-size=\"11\" fill=\"currentColor\">"
    );
    for (row, &at) in shown.iter().enumerate() {
        let (task, top) = (&facts.tasks[at], row as f64 * ROW);
        let _ = write!(
            out,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}<title>{}</title></text>\
             <path d=\"M{NAMES} {:.1}H{:.1}\" stroke=\"#808890\" stroke-opacity=\".3\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{:.1} s</text>",
            NAMES - 8.0,
            top + 13.0,
            escape(&brief(&task.label, 52)),
            escape(&task.label),
            top + 9.0,
            x(search.seconds),
            x(search.seconds) + 6.0,
            top + 13.0,
            task.seconds
        );
        for turn in search.turns.iter().filter(|turn| turn.task == at) {
            let _ = write!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"11\" fill=\"#4e79a7\"><title>{} in {:.1} s</title></rect>",
                x(turn.from),
                top + 3.5,
                (x(turn.to) - x(turn.from)).max(0.8),
                count(turn.trials, "trial"),
                turn.to - turn.from
            );
        }
    }
    let _ = writeln!(
        out,
        "<text x=\"{NAMES}\" y=\"{:.1}\">0 s</text><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} s</text></svg></div>",
        height - 6.0,
        x(search.seconds),
        height - 6.0,
        search.seconds
    );
    if search.curve.len() > 1 {
        let band = search.curve.iter().map(|&(_, ms)| (ms, ms)).collect();
        let plot = Plot {
            title: "All kernels of a run together, each at its best trial so far".into(),
            x: PlotAxis { label: "time of the search, s".into(), scale: Scale::FromZero },
            y: PlotAxis { label: "ms".into(), scale: Scale::FromZero },
            layers: vec![Layer {
                label: String::new(),
                colour: colours(&[String::new()])[0],
                marks: Marks::Steps(MedianCurve { points: search.curve.clone(), band }),
            }],
        };
        out += &format!("<div class=\"plots\"><div>{}</div></div>\n", plot.svg());
    }
    out
}
