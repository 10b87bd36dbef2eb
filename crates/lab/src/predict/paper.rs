//! Figures of the paper, for comparison with ours.
//!
//! # Source
//! "Optimal Kernel Tuning Parameter Prediction using Deep Sequence Models", tables II, III and IV. Its data
//! are not public: those of MIOpen's repository are close in number, but not the same.

/// Average accuracy and perfect prediction, in per cent.
pub type Figures = (f64, f64);

/// Baselines of table II, by our names.
pub const BASELINES: [&str; 5] = ["decision-tree", "naive-bayes", "k-nn", "svc", "random-forest"];
/// Models of table III, by our names.
pub const MODELS: [&str; 5] = ["enc-dec", "attn", "attn-2", "hybrid", "hybrid-2"];
/// Model of table IV.
pub const BEAM_MODEL: &str = "hybrid-2";
/// Beam widths of table IV.
pub const WIDTHS: [usize; 4] = [10, 30, 50, 100];

/// Figures of a kernel with one data type.
#[derive(Debug)]
pub struct PaperRow {
    /// The kernel.
    pub kernel: &'static str,
    /// Value of the field `data_type`.
    pub data_type: &'static str,
    /// Number of rows of the paper's table.
    pub n_rows: usize,
    /// Table II: average accuracy by [`BASELINES`].
    pub baselines: [f64; 5],
    /// Table III, by [`MODELS`].
    pub models: [Figures; 5],
    /// Table IV without constraints, by [`WIDTHS`].
    pub beam: [Figures; 4],
    /// Table IV with constraints, by [`WIDTHS`]; the paper has none for ConvAsmBwdWrW3x3.
    pub constrained: Option<[Figures; 4]>,
}

/// Rows of the paper's tables.
#[rustfmt::skip]
pub const PAPER: &[PaperRow] = &[
    PaperRow {
        kernel: "ConvAsm1x1U", data_type: "FP32", n_rows: 7038,
        baselines: [61.52, 48.45, 52.18, 52.16, 64.80],
        models: [(55.27, 4.26), (55.47, 2.13), (56.71, 1.85), (63.25, 6.96), (62.59, 6.53)],
        beam: [(79.79, 19.60), (87.48, 28.55), (90.04, 33.24), (92.97, 39.20)],
        constrained: Some([(79.99, 19.89), (88.23, 30.40), (91.16, 34.52), (94.07, 40.91)]),
    },
    PaperRow {
        kernel: "ConvAsm1x1U", data_type: "FP16", n_rows: 3291,
        baselines: [78.25, 58.15, 62.53, 61.14, 80.34],
        models: [(79.85, 31.21), (80.57, 27.27), (80.87, 30.00), (82.16, 31.21), (82.23, 31.52)],
        beam: [(94.58, 67.88), (97.58, 76.36), (98.48, 80.30), (99.02, 82.73)],
        constrained: Some([(95.27, 68.48), (98.30, 78.79), (99.20, 81.52), (99.62, 87.27)]),
    },
    PaperRow {
        kernel: "ConvOclDirectFwd1x1", data_type: "FP32", n_rows: 21_124,
        baselines: [77.58, 68.41, 68.77, 69.32, 79.02],
        models: [(82.84, 15.76), (82.33, 15.05), (82.78, 16.75), (82.63, 15.52), (83.64, 18.93)],
        beam: [(96.90, 69.85), (98.73, 87.17), (98.93, 91.81), (99.33, 94.94)],
        constrained: Some([(97.20, 72.50), (98.82, 90.49), (99.42, 93.94), (99.77, 95.79)]),
    },
    PaperRow {
        kernel: "ConvOclDirectFwd1x1", data_type: "FP16", n_rows: 3349,
        baselines: [81.49, 72.87, 76.58, 76.35, 82.19],
        models: [(87.06, 30.15), (86.07, 25.37), (85.57, 26.27), (87.10, 29.25), (86.73, 31.34)],
        beam: [(97.65, 79.10), (99.20, 85.97), (99.44, 88.36), (99.73, 91.04)],
        constrained: Some([(97.68, 79.70), (99.27, 86.57), (99.50, 89.25), (99.80, 91.64)]),
    },
    PaperRow {
        kernel: "ConvAsmBwdWrW1x1", data_type: "FP32", n_rows: 5100,
        baselines: [71.00, 66.00, 70.71, 71.43, 74.96],
        models: [(75.39, 8.24), (74.00, 4.31), (73.63, 4.51), (75.96, 10.39), (75.78, 10.00)],
        beam: [(90.04, 34.90), (95.39, 47.45), (96.65, 54.31), (97.92, 65.10)],
        constrained: Some([(90.12, 36.47), (96.22, 52.94), (97.84, 60.00), (98.71, 71.37)]),
    },
    PaperRow {
        kernel: "ConvAsmBwdWrW1x1", data_type: "FP16", n_rows: 1606,
        baselines: [73.04, 61.37, 66.46, 66.09, 75.34],
        models: [(77.08, 12.53), (75.52, 11.18), (74.72, 12.42), (76.58, 8.07), (77.76, 13.66)],
        beam: [(92.05, 40.37), (96.83, 57.76), (97.33, 62.73), (98.63, 67.08)],
        constrained: Some([(92.17, 44.10), (97.39, 62.11), (99.19, 65.84), (99.50, 73.29)]),
    },
    PaperRow {
        kernel: "ConvAsmBwdWrW3x3", data_type: "FP32", n_rows: 698,
        baselines: [60.63, 47.10, 52.66, 55.07, 65.70],
        models: [(73.43, 11.59), (65.46, 7.25), (72.46, 11.94), (75.24, 12.86), (75.48, 15.43)],
        beam: [(94.29, 58.57), (98.10, 81.43), (99.29, 87.14), (99.52, 91.43)],
        constrained: None,
    },
    PaperRow {
        kernel: "ConvAsmBwdWrW3x3", data_type: "FP16", n_rows: 447,
        baselines: [67.04, 51.11, 60.37, 68.15, 72.22],
        models: [(76.67, 17.78), (77.41, 13.33), (75.93, 11.11), (77.78, 17.78), (79.26, 22.22)],
        beam: [(96.67, 77.78), (99.63, 88.89), (100.00, 91.11), (100.00, 95.56)],
        constrained: None,
    },
];

impl PaperRow {
    /// Row of a kernel and a data type, if the paper has it.
    pub fn of(kernel: &str, data_type: &str) -> Option<&'static PaperRow> {
        PAPER.iter().find(|row| row.kernel == kernel && row.data_type == data_type)
    }

    /// Average accuracy of a baseline (table II), if any.
    pub fn baseline(&self, name: &str) -> Option<f64> {
        BASELINES.iter().position(|known| *known == name).map(|at| self.baselines[at])
    }

    /// Figures of a model with some beam width (tables III and IV), if any.
    pub fn model(&self, name: &str, width: usize, is_constrained: bool) -> Option<Figures> {
        if width == 1 && !is_constrained {
            return MODELS.iter().position(|known| *known == name).map(|at| self.models[at]);
        }
        let at = WIDTHS.iter().position(|known| *known == width).filter(|_| name == BEAM_MODEL)?;
        if is_constrained { Some(self.constrained?[at]) } else { Some(self.beam[at]) }
    }
}
