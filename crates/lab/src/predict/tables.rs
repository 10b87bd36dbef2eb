//! Tables of an evaluation, compared with the paper's.

use tilewright::format::{count, table};

use super::evaluate::{BaselineFacts, BeamFacts, EvaluatedModel, Evaluation, MeanStd};
use super::paper::BEAM_MODEL;

impl Evaluation {
    /// Formats the scores as tables, compared with the paper's; `split` describes how rows are held out.
    pub fn text(&self, split: &str) -> String {
        let Evaluation { models, baselines, paper, .. } = self;
        let cell = |MeanStd { mean, std }: MeanStd| format!("{:.2} ± {:.2}", 100.0 * mean, 100.0 * std);
        let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let head = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut text = format!(
            "{}: {}{}, a tenth held out by split {}, {}; in per cent, mean ± standard deviation\n",
            self.kernel,
            count(self.rows as u64, "row"),
            paper.map_or(String::new(), |row| format!(" (the paper has {})", row.n_rows)),
            split,
            count(self.seeds, "repetition"),
        );
        if !baselines.is_empty() {
            let mut rows = vec![head(&["classifier", "average", "paper", "perfect"])];
            for BaselineFacts { scores, baseline, .. } in baselines {
                rows.push(vec![
                    (*baseline).to_owned(),
                    cell(scores.average_accuracy),
                    figure(paper.and_then(|row| row.baseline(baseline))),
                    cell(scores.perfect),
                ]);
            }
            text += &format!("\nClassifiers (table II)\n{}", table(&rows));
        }
        let yes_or_no = |is: bool| if is { "yes" } else { "no" }.to_owned();
        let is_trained = |name: &str| models.iter().any(|model| model.model == name);
        let titled = [(false, "Models, first answer (table III)"), (true, "Models, best of k answers (table IV)")];
        for (is_wide, title) in titled {
            let names =
                ["model", "k", "constraints", "average", "paper", "perfect", "paper", "same kernel", "valid", "ms"];
            let mut rows = vec![head(&names)];
            for model in models {
                for BeamFacts { scores, width, is_constrained, query_ms, .. } in beams(model, is_wide) {
                    let theirs = paper.and_then(|row| row.model(model.model, *width, *is_constrained));
                    rows.push(vec![
                        model.model.to_owned(),
                        width.to_string(),
                        yes_or_no(*is_constrained),
                        cell(scores.average_accuracy),
                        figure(theirs.map(|(average, _)| average)),
                        cell(scores.perfect),
                        figure(theirs.map(|(_, perfect)| perfect)),
                        cell(scores.perfect_equivalent),
                        cell(scores.valid),
                        format!("{:.2}", query_ms.median),
                    ]);
                }
            }
            // The paper's best model serves for comparison, whatever was trained here.
            if let (Some(row), Some(model)) = (paper, models.first().filter(|_| !is_trained(BEAM_MODEL))) {
                for &BeamFacts { width, is_constrained, .. } in beams(model, is_wide) {
                    let Some((average, perfect)) = row.model(BEAM_MODEL, width, is_constrained) else { continue };
                    let [average, perfect] = [average, perfect].map(|theirs| figure(Some(theirs)));
                    let none = String::new;
                    let name = format!("{BEAM_MODEL} of the paper");
                    rows.push(vec![
                        name,
                        width.to_string(),
                        yes_or_no(is_constrained),
                        none(),
                        average,
                        none(),
                        perfect,
                    ]);
                }
            }
            if rows.len() > 1 {
                text += &format!("\n{title}\n{}", table(&rows));
            }
        }
        let mut rows = vec![head(&["model", "seed", "best epoch", "epochs", "ms to load"])];
        for (model, run) in models.iter().flat_map(|model| model.repetitions.iter().map(move |run| (model, run))) {
            let load_ms = format!("{:.1}", run.load_ms);
            let [seed, best, epochs] = [run.seed, run.best_epoch, run.epochs].map(|n| n.to_string());
            rows.push(vec![model.model.to_owned(), seed, best, epochs, load_ms]);
        }
        text + &format!("\nTrainings\n{}", table(&rows))
    }
}

/// Scores of a model by its first answer, or by the best of several.
fn beams(model: &EvaluatedModel, is_wide: bool) -> impl Iterator<Item = &BeamFacts> {
    model.beams.iter().filter(move |at| (at.width > 1) == is_wide)
}
