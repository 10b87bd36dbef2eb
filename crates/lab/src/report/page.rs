//! Page about records: tables and plots in one HTML file, without scripts or external resources.

use tilewright::format::{count, digits, duration, grouped, percent};
use tilewright::version::BUILD;
use tilewright::{ParetoPoint, one_line, since_1970};
use tilewright_search::Seconds;

use super::facts::{BestConfig, OutcomeFacts, ParetoFacts, PromiseFacts, ReportSubject, TemplateFacts};
use crate::clock::utc;
use crate::history::{Curve, SearchRun, TrialPoint, median_curve};
use crate::plot::{Bar, Layer, Marks, NEUTRAL, Plot, PlotAxis, Scale, colours, escape};
use crate::stats::Quartiles;

const STYLE: &str = "
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;padding:1rem clamp(.7rem,3vw,2.5rem) 4rem;max-width:1300px}
h1{font-size:1.6rem;margin:.4rem 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:3rem 0 .3rem;padding-top:1rem;border-top:2px solid var(--line);overflow-wrap:anywhere}
h3{font-size:1rem;margin:1.6rem 0 .4rem}
p{margin:.4rem 0;max-width:75ch}
.note{opacity:.75;font-size:.87rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1rem 1.5rem;margin:1rem 0}
.plot{width:100%;height:auto;display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.25rem .7rem .25rem 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600}
th:first-child,td:first-child,td.text,th.text{text-align:left}
td.wrap{white-space:normal;overflow-wrap:anywhere;min-width:12rem;text-align:left}
.bar{display:inline-block;height:.7rem;border-radius:2px;background:#4e79a7;vertical-align:middle}
td.wide{width:min(22rem,40vw);text-align:left}
td a{display:inline-block;white-space:normal;overflow-wrap:anywhere;min-width:11rem}
td a.number{min-width:0}
dl{columns:15rem;margin:.4rem 0;font-size:.9rem}
dl div{display:flex;justify-content:space-between;gap:1rem;border-bottom:1px solid var(--line);break-inside:avoid;padding:.2rem 0}
dd{margin:0;text-align:right;overflow-wrap:anywhere}
.facts{columns:19rem}.facts dd{white-space:nowrap}
pre{overflow-x:auto;background:var(--soft);padding:.7rem;border-radius:4px;font-size:.82rem}
summary{cursor:pointer}
a{color:inherit}
.names{white-space:normal;overflow-wrap:anywhere;min-width:12rem;max-width:26rem;text-align:left}
.graph{overflow:auto;max-height:80vh;resize:vertical;border:1px solid var(--line);border-radius:4px;margin:1rem 0}
.graph svg{display:block;margin:0 auto;padding:12px}
.graph a{text-decoration:none}
.step:target rect:first-child{stroke-width:3}
@media(max-width:40rem){td.text{white-space:normal;min-width:7.5rem}}
code{display:block;white-space:normal;overflow-wrap:anywhere;min-width:16rem;text-align:left}
";

/// Colour of a Pareto set among all trials.
const PARETO: &str = "#e15759";

/// Formats the page about these subjects.
pub fn page(database: &str, subjects: &[ReportSubject]) -> String {
    let n_trials: u64 = subjects.iter().map(|subject| subject.trials).sum();
    let (trials, workloads) = (count(n_trials, "trial"), count(subjects.len() as u64, "workload"));
    let mut body = overview(subjects);
    for (at, subject) in subjects.iter().enumerate() {
        body += &section(at, subject);
    }
    document("Tilewright report", &format!("{trials} of {workloads} in {database}"), &body)
}

/// Formats an HTML document with a title, a subtitle and a body.
pub fn document(title: &str, line: &str, body: &str) -> String {
    let (title, made) = (escape(title), utc(since_1970().as_secs()));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n\
         <p class=\"note\">{}; made on {made} by version {BUILD}.</p>\n{body}</body></html>\n",
        escape(line)
    )
}

/// Formats a table that scrolls horizontally in narrow windows. The first column, and those whose header
/// begins with `<`, are text; cells are HTML.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let text = |at: usize| head.get(at).is_some_and(|h| h.starts_with('<'));
    let class = |at: usize| if text(at) { " class=\"text\"" } else { "" };
    let mut out = "<div class=\"scroll\"><table><thead><tr>".to_owned();
    for (at, name) in head.iter().enumerate() {
        out += &format!("<th{}>{}</th>", class(at), escape(name.trim_start_matches('<')));
    }
    out += "</tr></thead><tbody>\n";
    for row in rows {
        out += "<tr>";
        for (at, cell) in row.iter().enumerate() {
            out += &format!("<td{}>{cell}</td>", class(at));
        }
        out += "</tr>\n";
    }
    out + "</tbody></table></div>\n"
}

fn overview(subjects: &[ReportSubject]) -> String {
    let head = ["workload", "best", "time", "<search", "<template", "trials", "failed", "threads", "<target"];
    let row = |(at, subject): (usize, &ReportSubject)| {
        let best = subject.best.as_ref();
        let text = |of: &dyn Fn(&BestConfig) -> String| best.map_or("none".to_owned(), of);
        let failed: u64 = subject.searches.iter().map(|s| s.failed).sum();
        vec![
            format!("<a href=\"#w{at}\">{}</a>", escape(&subject.workload)),
            text(&|best| in_units(subject, best.ms_median * 1e6)),
            text(&|best| if subject.metric.is_some() { String::new() } else { duration(best.ms_median * 1e6) }),
            text(&|best| escape(&best.search)),
            text(&|best| escape(&best.template)),
            grouped(subject.trials),
            grouped(failed),
            subject.threads.to_string(),
            escape(&subject.target),
        ]
    };
    table(&head, &subjects.iter().enumerate().map(row).collect::<Vec<_>>())
}

fn section(at: usize, subject: &ReportSubject) -> String {
    let mut out = format!("<h2 id=\"w{at}\">{}</h2>\n", escape(&subject.workload));
    out += &format!("<p class=\"note\">{}, {}</p>\n", escape(&subject.target), count(subject.threads, "thread"));
    if subject.passed_over.total() > 0 {
        out += &format!("<p class=\"note\">{}.</p>\n", subject.passed_over);
    }
    if let Some(best) = &subject.best {
        out += &format!(
            "<p>Best: <b>{}</b>{}{}.</p>\n",
            in_units(subject, best.ms_median * 1e6),
            if subject.metric.is_some() { String::new() } else { format!(", {}", duration(best.ms_median * 1e6)) },
            match (best.confirmed, best.margin) {
                (true, Some(margin)) => format!(", in a race with the other leaders ahead by {}", percent(margin)),
                (true, None) => ", measured again at the end of its run".to_owned(),
                (false, _) => ", a single trial that was not raced".to_owned(),
            }
        );
    }
    let plots =
        [best_so_far(subject, Against::Trials), best_so_far(subject, Against::Seconds), space(subject), time(subject)];
    out += &format!("<div class=\"plots\">{}</div>\n", plots.map(|plot| format!("<div>{}</div>", plot.svg())).concat());
    out += &subject.pareto.as_ref().map_or(String::new(), pareto);
    out += "<h3>Searches</h3>\n";
    out += &searches(subject);
    out += "<p class=\"note\">Over several seeds the median, in brackets the quartiles; bands in the plots are quartiles as \
            well. Runs that share a database learn from each other's trials and measure no configuration twice, so they \
            compare only where each had a database of its own.</p>\n";
    out += "<h3>How trials ended, and where their time went</h3>\n";
    out += &outcomes(&subject.outcomes);
    out += "<p class=\"note\">Candidates are built side by side, so building may sum up to more than the clock shows.</p>\n";
    for template in &subject.templates {
        out += &importance(template);
        out += &outlook(template, subject);
    }
    subject.best.iter().for_each(|best| out += &configuration(best));
    out
}

/// Trade-offs between metrics: the leading one plotted against each other one, and the Pareto set as a table.
fn pareto(facts: &ParetoFacts) -> String {
    let number = |point: &ParetoPoint, at: usize| point.values.values().nth(at).and_then(serde_json::Value::as_f64);
    let plot = |at: usize| {
        let all = facts.values.iter().map(|values| (values[0], values[at])).collect();
        let set = facts.set.iter().filter_map(|point| Some((number(point, 0)?, number(point, at)?))).collect();
        // A metric of 0 has no position on a logarithmic axis.
        let scale = |at: usize| match facts.values.iter().any(|values| values[at] == 0.0) {
            true => Scale::FromZero,
            false => Scale::Log,
        };
        let axis = |at: usize| PlotAxis { label: facts.metrics[at].clone(), scale: scale(at) };
        let layer = |label: &str, colour, points| Layer { label: label.into(), colour, marks: Marks::Points(points) };
        let layers = vec![layer("trials", NEUTRAL, all), layer("Pareto set", PARETO, set)];
        let title = format!("{} against {}", facts.metrics[at], facts.metrics[0]);
        Plot { title, x: axis(0), y: axis(at), layers }
    };
    let plots: String = (1..facts.metrics.len()).map(|at| format!("<div>{}</div>", plot(at).svg())).collect();
    let row = |point: &ParetoPoint| {
        let values = (0..facts.metrics.len()).map(|at| number(point, at).map_or(String::new(), digits));
        std::iter::once(escape(&point.config.to_string())).chain(values).collect()
    };
    let head: Vec<&str> = std::iter::once("<configuration").chain(facts.metrics.iter().map(String::as_str)).collect();
    format!(
        "<h3>The Pareto set</h3>\n<p class=\"note\">No other trial is as good as one of these by every metric and \
         better by one.</p>\n<div class=\"plots\">{plots}</div>\n{}",
        table(&head, &facts.set.iter().map(row).collect::<Vec<_>>())
    )
}

/// Quantity of a subject for a cost, with its unit, or after its name.
fn in_units(subject: &ReportSubject, cost_ns: f64) -> String {
    let (quantity, unit) = (digits(subject.quantity(cost_ns)), subject.unit());
    if subject.metric.is_some() { format!("{} {quantity}", escape(unit)) } else { format!("{quantity} {unit}") }
}

/// Quantity on the horizontal axis of a best-so-far curve.
#[derive(Clone, Copy)]
enum Against {
    Trials,
    Seconds,
}

fn best_so_far(subject: &ReportSubject, against: Against) -> Plot {
    let labels: Vec<String> = subject.searches.iter().map(|search| search.label(subject)).collect();
    let curve = |run: &SearchRun| -> Curve {
        let position = |n: u64, trial: &TrialPoint| match against {
            Against::Trials => n as f64,
            Against::Seconds => trial.elapsed_s,
        };
        run.best_so_far(position, |ns| subject.quantity(ns))
    };
    let layers = subject.searches.iter().zip(&labels).zip(colours(&labels)).map(|((search, label), colour)| Layer {
        label: label.clone(),
        colour,
        marks: Marks::Steps(median_curve(&search.members.iter().map(curve).collect::<Vec<_>>())),
    });
    let (title, unit) = match against {
        Against::Trials => ("Best so far against trials", "trials of a run"),
        Against::Seconds => ("Best so far against time", "time since the start of a run, s"),
    };
    Plot {
        title: title.into(),
        x: PlotAxis { label: unit.into(), scale: Scale::Log },
        y: PlotAxis { label: subject.unit().into(), scale: Scale::FromZero },
        layers: layers.collect(),
    }
}

fn space(subject: &ReportSubject) -> Plot {
    let mut kinds: Vec<String> = Vec::new();
    for point in &subject.points {
        if !kinds.contains(&point.kind) {
            kinds.push(point.kind.clone());
        }
    }
    let numbered = || subject.points.iter().enumerate().map(|(at, point)| (at as f64 + 1.0, point));
    let mut layers = Vec::new();
    let failed: Vec<_> = numbered().filter(|(_, p)| p.cost_ns.is_none()).map(|(n, _)| (n, 0.0)).collect();
    if !failed.is_empty() {
        layers.push(Layer { label: "failed".into(), colour: NEUTRAL, marks: Marks::Points(failed) });
    }
    for (kind, colour) in kinds.iter().zip(colours(&kinds)) {
        let own = numbered().filter(|(_, point)| point.kind == *kind);
        let own = own.filter_map(|(n, point)| Some((n, subject.quantity(point.cost_ns?))));
        layers.push(Layer { label: kind.clone(), colour, marks: Marks::Points(own.collect()) });
    }
    Plot {
        title: "Every trial".into(),
        x: PlotAxis { label: "trials in the order of recording".into(), scale: Scale::FromZero },
        y: PlotAxis { label: subject.unit().into(), scale: Scale::FromZero },
        layers,
    }
}

/// Function that returns a part of a trial's time, in seconds.
type TrialTimePart = fn(&Seconds) -> f64;

/// Parts of a trial's time, with their colours.
const PARTS: [(&str, &str, TrialTimePart); 3] = [
    ("build", "#4e79a7", |seconds| seconds.build),
    ("run", "#59a14f", |seconds| seconds.run),
    ("verify", "#f28e2b", |seconds| seconds.verify),
];

fn time(subject: &ReportSubject) -> Plot {
    let labels: Vec<String> = subject.searches.iter().map(|search| search.label(subject)).collect();
    let mut below = vec![0.0; labels.len()];
    let mut layers = Vec::new();
    for (name, colour, of) in PARTS {
        let bars = subject.searches.iter().enumerate().map(|(at, search)| {
            let seconds = of(&search.seconds_in);
            let (from, middle) = (below[at], at as f64);
            below[at] += seconds;
            Bar { x: (middle - 0.3, middle + 0.3), y: (from, below[at]), text: format!("{name}: {seconds:.1} s") }
        });
        layers.push(Layer { label: name.into(), colour, marks: Marks::Bars(bars.collect()) });
    }
    Plot {
        title: "Time in candidates, summed over all of them".into(),
        x: PlotAxis { label: String::new(), scale: Scale::Categories(labels) },
        y: PlotAxis { label: "s".into(), scale: Scale::FromZero },
        layers,
    }
}

fn searches(subject: &ReportSubject) -> String {
    let of_best = format!("best {}", subject.unit());
    let head = [
        "search",
        "<template",
        "runs",
        "trials",
        "failed",
        of_best.as_str(),
        "trials to 95 %",
        "seconds to 95 %",
        "runs that reach it",
        "seconds",
        "trials/s",
    ];
    let rows = subject.searches.iter().map(|search| {
        let bests: Vec<f64> = search.best_ns.iter().map(|ns| subject.quantity(*ns)).collect();
        let best = Quartiles::of(&bests).map_or("none".to_owned(), |q| match search.runs {
            1 => digits(q.median),
            _ => format!("{} ({}–{})", digits(q.median), digits(q.first), digits(q.third)),
        });
        let number = |value: Option<f64>| value.map_or("–".to_owned(), digits);
        let rate = if search.seconds > 0.0 { digits(search.trials as f64 / search.seconds) } else { "–".to_owned() };
        vec![
            escape(&search.search),
            escape(&search.template),
            search.runs.to_string(),
            grouped(search.trials),
            grouped(search.failed),
            best,
            search.near_best.trials.map_or("–".to_owned(), |n| grouped(n.ceil())),
            number(search.near_best.seconds),
            format!("{} of {}", search.near_best.runs, search.runs),
            format!("{:.1}", search.seconds),
            rate,
        ]
    });
    table(&head, &rows.collect::<Vec<_>>())
}

fn outcomes(outcomes: &[OutcomeFacts]) -> String {
    let rows = outcomes.iter().map(|facts| {
        let Seconds { build, run, verify } = facts.seconds_in;
        let all = build + run + verify;
        let mut row = vec![escape(facts.class), grouped(facts.trials)];
        row.extend([all, build, run, verify].map(|seconds| format!("{seconds:.2}")));
        let example: String = facts.example.as_deref().unwrap_or_default().chars().take(300).collect();
        row.push(escape(&one_line(&example)));
        row
    });
    table(&["outcome", "trials", "s", "build s", "run s", "verify s", "<the first message"], &rows.collect::<Vec<_>>())
}

fn importance(facts: &TemplateFacts) -> String {
    let name = escape(&facts.template);
    let mut out = format!("<h3>What matters in {name}</h3>\n");
    let Some(r_squared) = facts.r_squared else {
        return out + &format!("<p class=\"note\">{}</p>\n", facts.not_known.as_deref().unwrap_or_default());
    };
    out += &format!(
        "<p class=\"note\">Permutation importance: boosted trees learn the logarithm of the time from three quarters of the \
         trials and explain {} of its variance on the rest; a parameter counts for as much of that as is lost where its \
         values are shuffled. What a search settled early looks unimportant.</p>\n",
        percent(r_squared.max(0.0))
    );
    if r_squared <= 0.1 {
        return out + "<p>The model has learnt too little to say more.</p>\n";
    }
    let most = facts.importance.first().map_or(1.0, |(_, share)| share.max(1e-9));
    let rows = facts.importance.iter().filter(|(_, share)| *share > 0.001).map(|(parameter, share)| {
        let bar = format!("<span class=\"bar\" style=\"width:{:.1}%\"></span>", 90.0 * share / most);
        format!("<tr><td>{}</td><td>{share:.3}</td><td class=\"wide\">{bar}</td></tr>\n", escape(parameter))
    });
    let head = "<tr><th>parameter</th><th>lost R²</th><th></th></tr>";
    out + &format!(
        "<div class=\"scroll\"><table><thead>{head}</thead><tbody>\n{}</tbody></table></div>\n",
        rows.collect::<String>()
    )
}

/// Expectations of further trials; constraints of commands and kernels are not recorded.
fn outlook(facts: &TemplateFacts, subject: &ReportSubject) -> String {
    let mut out = format!("<h3>What is not known yet of {}</h3>\n", escape(&facts.template));
    out += &match facts.expected_gain {
        Some(gain) => format!(
            "<p>As many trials again are expected to gain <b>{}</b>, by the gaps between the fastest of the later half.</p>\n",
            percent(gain)
        ),
        None => "<p class=\"note\">Too few trials to expect anything of more.</p>\n".to_owned(),
    };
    let Some(widened) = facts.widened.filter(|_| !facts.promising.is_empty()) else { return out };
    let is_own = tilewright::is_own(&subject.workload);
    let aside = if is_own { " Conditions of the command are not on record, and left aside." } else { "" };
    out += &format!(
        "<p class=\"note\">Beliefs of a Gaussian process, as the search auto has, about what was not measured; its spread is \
         multiplied by {}, so that four of five trials that were held out are within their intervals.{aside}</p>\n",
        digits(widened)
    );
    let shown = |ms: f64| match subject.metric {
        Some(_) => digits(subject.quantity(ms * 1e6)),
        None => duration(ms * 1e6),
    };
    let row = |promise: &PromiseFacts| {
        let mut interval = promise.ms_interval;
        if subject.quantity(interval[0]) > subject.quantity(interval[1]) && subject.metric.is_some() {
            interval.reverse();
        }
        let [low, high] = interval.map(&shown);
        let parameters = promise.config.as_object().into_iter().flatten();
        let config: Vec<String> = parameters.map(|(name, value)| format!("{name}={value}")).collect();
        vec![escape(&config.join(" ")), shown(promise.ms_median), format!("{low} to {high}"), percent(promise.chance)]
    };
    let quantity = if subject.metric.is_some() { subject.unit() } else { "time" };
    let head = ["<not measured", quantity, "four of five", "better than the best"];
    out + &table(&head, &facts.promising.iter().map(row).collect::<Vec<_>>())
}

fn configuration(best: &BestConfig) -> String {
    let value = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let parameters = best.config.as_object().into_iter().flatten();
    let items: String = parameters
        .map(|(name, v)| format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(&value(v))))
        .collect();
    let found = if best.search.is_empty() {
        String::new()
    } else {
        format!(", found by {} with seed {}", escape(&best.search), best.seed)
    };
    format!(
        "<h3>The best configuration</h3>\n<p class=\"note\">Template {}{found}.</p>\n<dl>{items}</dl>\
         <details><summary>Schedule steps</summary><pre>{}</pre></details>\n",
        escape(&best.template),
        escape(&best.steps)
    )
}
