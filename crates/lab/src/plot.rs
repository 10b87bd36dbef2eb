//! Plots as SVG: step curves with bands, points, bars and box plots on linear, logarithmic and categorical
//! axes.
//!
//! Text and axes inherit the colour of the surrounding text, so that a plot fits light and dark pages alike.

use std::fmt::Write;

use tilewright_search::SEARCHES;

use crate::history::MedianCurve;
use crate::stats::Quartiles;

/// Width of a plot in user units, which are pixels at its natural size.
const WIDTH: f64 = 560.0;
/// Height of a plot.
const HEIGHT: f64 = 360.0;
/// Size of text.
const FONT: f64 = 13.0;
/// Approximate width of a character, relative to its font size.
const CHARACTER: f64 = 0.56;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 16.0;
/// Distance of the rows of a legend.
const LEGEND_ROW: f64 = 19.0;

/// Magnitudes that an axis can show; beyond them, ratios of numbers lose all digits.
const DRAWN: std::ops::RangeInclusive<f64> = 1e-100..=1e100;

/// Colours that stand out on white and on black; a search has a fixed one, by its index among the searches.
const COLOURS: [&str; 14] = [
    "#4e79a7", "#e15759", "#59a14f", "#f28e2b", "#af7aa1", "#17a2a2", "#b6992d", "#d37295", "#86603b", "#6b7f99",
    "#8cb23d", "#d14f8f", "#3d8fd1", "#7a6ad1",
];

/// Neutral colour.
pub const NEUTRAL: &str = "#808890";

/// Plot.
#[derive(Debug, Clone)]
pub struct Plot {
    /// Title above the plot.
    pub title: String,
    /// Horizontal axis, from left to right.
    pub x: PlotAxis,
    /// Vertical axis, from bottom to top.
    pub y: PlotAxis,
    /// Layers of the plot, from back to front.
    pub layers: Vec<Layer>,
}

/// Axis of a plot. Its range is derived from the data.
#[derive(Debug, Clone)]
pub struct PlotAxis {
    /// Quantity and unit.
    pub label: String,
    /// Scale of the values.
    pub scale: Scale,
}

/// Scale of an axis: the mapping of values to distances.
#[derive(Debug, Clone)]
pub enum Scale {
    /// Linear, from zero.
    FromZero,
    /// Logarithmic; only positive values are shown.
    Log,
    /// Categorical: value `i` is the centre of the `i`-th category.
    Categories(Vec<String>),
}

/// Layer of a plot: marks of one colour, with an entry in the legend.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Name in the legend; layers of the same name share an entry, an empty name has none.
    pub label: String,
    /// Colour of the marks.
    pub colour: &'static str,
    /// The marks.
    pub marks: Marks,
}

/// Marks of a layer.
#[derive(Debug, Clone)]
pub enum Marks {
    /// Step curve with a band.
    Steps(MedianCurve),
    /// Points.
    Points(Vec<(f64, f64)>),
    /// Bars.
    Bars(Vec<Bar>),
    /// Box plots: quartiles and median, whiskers to the extremes, and a point for each value.
    Boxes(Vec<Boxed>),
}

/// Bar.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Left and right end.
    pub x: (f64, f64),
    /// Lower and upper end.
    pub y: (f64, f64),
    /// Tooltip.
    pub text: String,
}

/// Box of a box plot, of at least one value.
#[derive(Debug, Clone)]
pub struct Boxed {
    /// The middle of the box.
    pub x: f64,
    /// The width of the box.
    pub width: f64,
    /// The values.
    pub values: Vec<f64>,
}

/// Assigns a colour to each label, distinct as long as colours last. A search with options gets the search's
/// colour, unless another label has it.
pub fn colours(labels: &[String]) -> Vec<&'static str> {
    let mut taken: Vec<&'static str> = Vec::new();
    for label in labels {
        let name = label.split([':', ' ']).next().unwrap_or_default();
        let own = SEARCHES.iter().position(|row| row.name == name).unwrap_or(0);
        let candidates = (own..own + COLOURS.len()).map(|at| COLOURS[at % COLOURS.len()]);
        let fresh = candidates.clone().find(|colour| !taken.contains(colour));
        taken.push(fresh.unwrap_or(COLOURS[taken.len() % COLOURS.len()]));
    }
    taken
}

/// Escapes text for XML and HTML, attributes included.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Other control characters are not allowed in XML.
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Arranges plots in a grid, as one SVG file.
pub fn sheet(plots: &[Plot], n_columns: usize) -> String {
    let n_columns = n_columns.clamp(1, plots.len().max(1));
    let (width, height) = (WIDTH * n_columns as f64, HEIGHT * plots.len().div_ceil(n_columns) as f64);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\"><style>svg{{color:#333}}@media (prefers-color-scheme:dark){{svg{{color:#ccc}}}}</style>"
    );
    for (at, plot) in plots.iter().enumerate() {
        let (x, y) = ((at % n_columns) as f64 * WIDTH, (at / n_columns) as f64 * HEIGHT);
        let _ = write!(out, "<g transform=\"translate({x} {y})\">{}</g>", plot.group());
    }
    out + "</svg>\n"
}

/// Range of an axis and its position in the picture.
struct Ruler<'a> {
    axis: &'a PlotAxis,
    range: (f64, f64),
    place: (f64, f64),
}

impl Ruler<'_> {
    /// Position of a value; `None` if it is outside the axis.
    fn at(&self, value: f64) -> Option<f64> {
        let ((low, high), (from, to)) = (self.range, self.place);
        let part = match self.axis.scale {
            Scale::Log if value <= 0.0 => return None,
            Scale::Log => (value / low).ln() / (high / low).ln(),
            Scale::FromZero | Scale::Categories(_) => (value - low) / (high - low),
        };
        // Apart from rounding, the range contains everything that is drawn.
        (-0.01..=1.01).contains(&part).then_some(from + part * (to - from))
    }

    /// Values with their texts.
    fn ticks(&self) -> Vec<(f64, String)> {
        match &self.axis.scale {
            Scale::FromZero => linear_ticks(self.range.1),
            Scale::Log => log_ticks(self.range),
            Scale::Categories(names) => names.iter().enumerate().map(|(i, name)| (i as f64, name.clone())).collect(),
        }
    }
}

fn linear_ticks(high: f64) -> Vec<(f64, String)> {
    let rough = high / 6.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * unit).into_iter().find(|step| *step >= rough).unwrap_or(rough);
    (0..).map(|i| f64::from(i) * step).take_while(|v| *v <= high * 1.0001).map(|v| (v, short(v))).collect()
}

fn log_ticks((low, high): (f64, f64)) -> Vec<(f64, String)> {
    let decades = (high / low).log10();
    let of_decade: &[f64] = if decades < 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    // If there are very many decades, only some are labelled.
    let every = (decades / 8.0).ceil().max(1.0) as i32;
    let exponents = (low.log10().floor() as i32..=high.log10().ceil() as i32).filter(|e| e % every == 0);
    let values = exponents.flat_map(|e| of_decade.iter().map(move |m| m * 10f64.powi(e)));
    values.filter(|v| (low * 0.999..=high * 1.001).contains(v)).map(|v| (v, short(v))).collect()
}

/// Formats a number of an axis.
fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    // Sums of steps have rounding errors.
    let text = format!("{scaled:.6}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * CHARACTER * FONT
}

impl Marks {
    /// Values along x and along y that must be within the axes.
    fn extent(&self) -> (Vec<f64>, Vec<f64>) {
        match self {
            Marks::Steps(MedianCurve { points, band }) => (
                points.iter().map(|p| p.0).collect(),
                points.iter().map(|p| p.1).chain(band.iter().flat_map(|b| [b.0, b.1])).collect(),
            ),
            Marks::Points(points) => points.iter().copied().unzip(),
            Marks::Bars(bars) => {
                (bars.iter().flat_map(|b| [b.x.0, b.x.1]).collect(), bars.iter().flat_map(|b| [b.y.0, b.y.1]).collect())
            }
            Marks::Boxes(boxes) => {
                (boxes.iter().map(|b| b.x).collect(), boxes.iter().flat_map(|b| b.values.iter().copied()).collect())
            }
        }
    }
}

impl Plot {
    /// Formats the plot as an SVG element.
    pub fn svg(&self) -> String {
        format!(
            "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">{}</svg>",
            escape(&self.title),
            self.group()
        )
    }

    fn range(&self, axis: &PlotAxis, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let values = values.filter(|v| DRAWN.contains(v));
        match &axis.scale {
            Scale::Categories(names) => (-0.5, names.len().max(1) as f64 - 0.5),
            Scale::FromZero => {
                let high = values.fold(0.0, f64::max);
                (0.0, if high > 0.0 { high * 1.04 } else { 1.0 })
            }
            Scale::Log => {
                let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
                match low < high {
                    true => (low / (high / low).powf(0.03), high * (high / low).powf(0.03)),
                    false if high > 0.0 => (low / 2.0, high * 2.0),
                    false => (0.1, 10.0),
                }
            }
        }
    }

    /// Entries of the legend, in rows that fit.
    fn legend(&self) -> Vec<Vec<(&str, &'static str)>> {
        let mut rows: Vec<Vec<(&str, &'static str)>> = Vec::new();
        let mut width = f64::INFINITY;
        for (at, layer) in self.layers.iter().enumerate() {
            if layer.label.is_empty() || self.layers[..at].iter().any(|earlier| earlier.label == layer.label) {
                continue;
            }
            let own = text_width(&layer.label) + 34.0;
            if width + own > WIDTH - LEFT - RIGHT {
                rows.push(Vec::new());
                width = 0.0;
            }
            width += own;
            rows.last_mut().expect("a row was begun").push((&layer.label, layer.colour));
        }
        rows
    }

    /// Contents of the SVG element.
    fn group(&self) -> String {
        let legend = self.legend();
        let top = 32.0 + LEGEND_ROW * legend.len() as f64 + 4.0;
        let names: &[String] = match &self.x.scale {
            Scale::Categories(names) => names,
            Scale::FromZero | Scale::Log => &[],
        };
        let widest = names.iter().map(|name| text_width(name)).fold(0.0, f64::max);
        let is_slanted = widest * names.len() as f64 > WIDTH - LEFT - RIGHT - 10.0 * names.len() as f64;
        let bottom = HEIGHT - if is_slanted { 30.0 + (widest * 0.6).min(110.0) } else { 48.0 };
        // A slanted name extends to the left of its position.
        let place = (WIDTH - LEFT - RIGHT) / names.len().max(1) as f64;
        let begins = names.iter().enumerate().map(|(at, name)| text_width(name) * 0.82 - (at as f64 + 0.5) * place);
        let left = if is_slanted { begins.fold(LEFT, |left, begin| left.max(begin + 4.0)) } else { LEFT };

        let extents: Vec<_> = self.layers.iter().map(|layer| layer.marks.extent()).collect();
        let x_range = self.range(&self.x, extents.iter().flat_map(|e| e.0.iter().copied()));
        let y_range = self.range(&self.y, extents.iter().flat_map(|e| e.1.iter().copied()));
        let x = Ruler { axis: &self.x, range: x_range, place: (left, WIDTH - RIGHT) };
        let y = Ruler { axis: &self.y, range: y_range, place: (bottom, top) };

        let mut out = format!("<g font-family=\"system-ui,sans-serif\" font-size=\"{FONT}\" fill=\"currentColor\">");
        let _ = write!(out, "<text x=\"{LEFT}\" y=\"18\" font-weight=\"600\">{}</text>", escape(&self.title));
        self.draw_legend(&legend, &mut out);
        self.draw_axes(&x, &y, is_slanted, &mut out);
        for layer in &self.layers {
            layer.draw(&x, &y, &mut out);
        }
        out + "</g>"
    }

    fn draw_legend(&self, rows: &[Vec<(&str, &'static str)>], out: &mut String) {
        for (at, row) in rows.iter().enumerate() {
            let (mut x, y) = (LEFT, 38.0 + LEGEND_ROW * at as f64);
            for (label, colour) in row {
                let text = escape(label);
                let _ = write!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{colour}\"/>\
                     <text x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
                    y - 10.0,
                    x + 17.0,
                    y + 0.5
                );
                x += text_width(label) + 34.0;
            }
        }
    }

    fn draw_axes(&self, x: &Ruler, y: &Ruler, is_slanted: bool, out: &mut String) {
        let ((left, right), (bottom, top)) = (x.place, y.place);
        for (value, text) in y.ticks() {
            let Some(at) = y.at(value) else { continue };
            let _ = write!(
                out,
                "<path d=\"M{left} {at:.1}H{right}\" stroke=\"currentColor\" stroke-opacity=\".15\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" opacity=\".8\">{}</text>",
                left - 6.0,
                at + FONT * 0.35,
                escape(&text)
            );
        }
        let is_category = matches!(x.axis.scale, Scale::Categories(_));
        for (value, text) in x.ticks() {
            let Some(at) = x.at(value) else { continue };
            if !is_category {
                let _ =
                    write!(out, "<path d=\"M{at:.1} {bottom:.1}v5\" stroke=\"currentColor\" stroke-opacity=\".5\"/>");
            }
            let (dy, turn) = if is_slanted {
                (14.0, format!(" text-anchor=\"end\" transform=\"rotate(-35 {at:.1} {:.1})\"", bottom + 14.0))
            } else {
                (19.0, " text-anchor=\"middle\"".to_owned())
            };
            let _ = write!(
                out,
                "<text x=\"{at:.1}\" y=\"{:.1}\"{turn} opacity=\".8\">{}</text>",
                bottom + dy,
                escape(&text)
            );
        }
        let _ = write!(
            out,
            "<path d=\"M{left} {bottom:.1}H{right}\" stroke=\"currentColor\" stroke-opacity=\".5\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            (left + right) / 2.0,
            HEIGHT - 9.0,
            escape(&x.axis.label),
            (top + bottom) / 2.0,
            escape(&y.axis.label)
        );
    }
}

impl Layer {
    fn draw(&self, x: &Ruler, y: &Ruler, out: &mut String) {
        let colour = self.colour;
        match &self.marks {
            Marks::Steps(MedianCurve { points, band }) => {
                let place = |(at, value): (f64, f64)| Some((x.at(at)?, y.at(value)?));
                let steps = |ends: &[(f64, f64)]| -> Vec<(f64, f64)> {
                    let placed: Vec<(f64, f64)> = ends.iter().filter_map(|p| place(*p)).collect();
                    let corners = placed.windows(2).flat_map(|w| [w[0], (w[1].0, w[0].1)]);
                    corners.chain(placed.last().copied()).collect()
                };
                let end = |which: fn(&(f64, f64)) -> f64| -> Vec<(f64, f64)> {
                    points.iter().zip(band).map(|(p, b)| (p.0, which(b))).collect()
                };
                let (low, high) = (steps(&end(|b| b.0)), steps(&end(|b| b.1)));
                let around: Vec<(f64, f64)> = low.into_iter().chain(high.into_iter().rev()).collect();
                if !around.is_empty() {
                    let _ = write!(out, "<path d=\"{}Z\" fill=\"{colour}\" fill-opacity=\".18\"/>", path(&around));
                }
                let _ = write!(
                    out,
                    "<path d=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-linejoin=\"round\"/>",
                    path(&steps(points))
                );
            }
            Marks::Points(points) => {
                // A line of zero length with round ends is a dot, and a path of them is short.
                let dots = points.iter().filter_map(|p| Some(format!("M{:.1} {:.1}h0", x.at(p.0)?, y.at(p.1)?)));
                let _ = write!(
                    out,
                    "<path d=\"{}\" stroke=\"{colour}\" stroke-width=\"4\" stroke-linecap=\"round\" \
                     stroke-opacity=\".55\"/>",
                    dots.collect::<String>()
                );
            }
            Marks::Bars(bars) => {
                for bar in bars {
                    let place = || Some((x.at(bar.x.0)?, x.at(bar.x.1)?, y.at(bar.y.0)?, y.at(bar.y.1)?));
                    let Some((left, right, bottom, top)) = place() else { continue };
                    let _ = write!(
                        out,
                        "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\">\
                         <title>{}</title></rect>",
                        (right - left).max(0.5),
                        (bottom - top).max(0.0),
                        escape(&bar.text)
                    );
                }
            }
            Marks::Boxes(boxes) => boxes.iter().for_each(|b| draw_box(b, colour, x, y, out)),
        }
    }
}

fn draw_box(boxed: &Boxed, colour: &str, x: &Ruler, y: &Ruler, out: &mut String) {
    let Some(q) = Quartiles::of(&boxed.values) else { return };
    let place = || {
        let of = |v| y.at(v);
        let ends = (x.at(boxed.x - boxed.width / 2.0)?, x.at(boxed.x)?, x.at(boxed.x + boxed.width / 2.0)?);
        Some((ends, [of(q.least)?, of(q.first)?, of(q.median)?, of(q.third)?, of(q.most)?]))
    };
    let Some(((left, middle, right), [least, first, median, third, most])) = place() else { return };
    let width = right - left;
    let _ = write!(
        out,
        "<g stroke=\"{colour}\" stroke-width=\"1.5\"><path d=\"M{middle:.1} {least:.1}V{first:.1}M{middle:.1} \
         {third:.1}V{most:.1}\"/><rect x=\"{left:.1}\" y=\"{third:.1}\" width=\"{width:.1}\" height=\"{:.1}\" \
         fill=\"{colour}\" fill-opacity=\".2\"/><path d=\"M{left:.1} {median:.1}h{width:.1}\" stroke-width=\"2.5\"/></g>",
        first - third
    );
    let dots = boxed.values.iter().filter_map(|v| Some(format!("M{middle:.1} {:.1}h0", y.at(*v)?)));
    let _ = write!(
        out,
        "<path d=\"{}\" stroke=\"{colour}\" stroke-width=\"4\" stroke-linecap=\"round\"/>",
        dots.collect::<String>()
    );
}

fn path(points: &[(f64, f64)]) -> String {
    let mut out = String::new();
    for (at, (x, y)) in points.iter().enumerate() {
        let _ = write!(out, "{}{x:.1} {y:.1}", if at == 0 { "M" } else { "L" });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(scale: Scale, range: (f64, f64)) -> String {
        let axis = PlotAxis { label: String::new(), scale };
        let ruler = Ruler { axis: &axis, range, place: (0.0, 100.0) };
        ruler.ticks().into_iter().map(|(_, text)| text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(ticks(Scale::FromZero, (0.0, 243.0)), "0 50 100 150 200");
        assert_eq!(ticks(Scale::FromZero, (0.0, 0.31)), "0 0.1 0.2 0.3");
        assert_eq!(ticks(Scale::FromZero, (0.0, 52_000.0)), "0 10k 20k 30k 40k 50k");
        assert_eq!(ticks(Scale::Log, (0.02, 3.0)), "0.02 0.05 0.1 0.2 0.5 1 2");
        assert_eq!(ticks(Scale::Log, (0.009, 20_000.0)), "0.01 0.1 1 10 100 1000 10k");
        assert_eq!(ticks(Scale::Categories(vec!["a".into(), "b".into()]), (-0.5, 1.5)), "a b");
    }

    #[test]
    fn a_search_keeps_its_colour_where_it_can() {
        let of = |labels: &[&str]| colours(&labels.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["gbt", "random"])[0], of(&["nose", "gbt"])[1]);
        let variants = of(&["gbt:objective=rank", "gbt:objective=regression"]);
        assert_eq!(variants[0], of(&["gbt"])[0]);
        assert_ne!(variants[0], variants[1]);
        assert_eq!(of(&["x"; 40]).len(), 40);
    }

    #[test]
    fn nothing_escapes_its_element() {
        assert_eq!(escape("<a b='c'>&\"\u{1}"), "&lt;a b=&#39;c&#39;&gt;&amp;&quot;\u{fffd}");
    }

    #[test]
    fn values_lie_where_the_axes_say() {
        let plot = Plot {
            title: "<title>".into(),
            x: PlotAxis { label: "trials".into(), scale: Scale::Log },
            y: PlotAxis { label: "GFLOP/s".into(), scale: Scale::FromZero },
            layers: vec![Layer {
                label: "random".into(),
                colour: NEUTRAL,
                marks: Marks::Steps(MedianCurve {
                    points: vec![(0.0, 1.0), (1.0, 50.0), (100.0, 100.0)],
                    band: vec![],
                }),
            }],
        };
        let svg = plot.svg();
        assert!(svg.contains("&lt;title&gt;") && !svg.contains("<title>"));
        // A trial 0 has no position on a logarithmic axis; the curve keeps 50 until 100 trials.
        let axis = PlotAxis { label: String::new(), scale: Scale::Log };
        let x = Ruler { axis: &axis, range: (1.0, 100.0), place: (0.0, 200.0) };
        assert_eq!((x.at(0.0), x.at(10.0)), (None, Some(100.0)));
        let curve = svg.split("stroke-width=\"2\"").next().unwrap().rsplit("d=\"").next().unwrap();
        let curve = curve.split('"').next().unwrap();
        assert_eq!(curve.matches(['M', 'L']).count(), 3, "{curve}");
    }
}
