//! `network`: networks of the literature as ONNX models with seeded weights, and new weights for a model.

use std::path::PathBuf;

use anyhow::Context;
use bytes::Bytes;
use clap::Args;
use serde_json::{Value as Json, json};
use tilewright_graph::networks::NETWORKS;
use tilewright_graph::onnx;
use tilewright_model::weights_beside;

use super::read_file;
use crate::error::{bad_input, one_line};
use crate::output::{grouped, table, writable, write_result, write_result_of};

/// Word that requests new weights for a model, in place of a network's name.
const REWEIGHT: &str = "reweight";

/// Arguments of `network`.
#[derive(Args, Debug)]
#[command(
    after_help = "Without a name it lists the networks. `network reweight MODEL.onnx -o FILE` gives a model new \
    weights: for topologies that come with weights of no use."
)]
pub struct NetworkArgs {
    /// Network, or `reweight`
    name: Option<String>,
    /// Model that gets new weights
    #[arg(value_name = "MODEL.onnx")]
    model: Option<PathBuf>,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Lists networks, or writes a model.
///
/// # Errors
/// Bad input if there is no such network, or the file is not a model; failure if the result cannot be
/// written.
pub fn run(args: &NetworkArgs, as_json: bool) -> anyhow::Result<()> {
    let Some(name) = args.name.as_deref() else {
        let rows: Vec<Vec<String>> =
            NETWORKS.iter().map(|row| vec![row.name.to_owned(), row.text.to_owned()]).collect();
        let json: Vec<Json> = NETWORKS.iter().map(|row| json!({"name": row.name, "text": row.text})).collect();
        return write_result(as_json, &json!(json), &table(&rows));
    };
    let Some(output) = &args.output else {
        return Err(bad_input(format!("where shall {name} be written (give -o FILE.onnx)")));
    };
    let place = writable(output, as_json, "another -o")?;
    let file = match (name, &args.model) {
        (REWEIGHT, Some(path)) => {
            let file = Bytes::from(read_file(path, "an ONNX model")?);
            onnx::reweight(&file, &mut weights_beside(path), args.seed)
                .map_err(|error| bad_input(format!("{}: {}", path.display(), one_line(&error.to_string()))))?
        }
        (REWEIGHT, None) => {
            return Err(bad_input("which model shall have new weights (give MODEL.onnx behind reweight)"));
        }
        (_, Some(path)) => {
            let path = path.display();
            return Err(bad_input(format!("{name} takes no model (leave {path} out, or give reweight {path})")));
        }
        (_, None) => {
            let Some(network) = NETWORKS.iter().find(|row| row.name == name) else {
                let known = NETWORKS.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
                return Err(bad_input(format!("no network is called `{name}`; there are {known}, and {REWEIGHT}")));
            };
            onnx::write(&network.build(args.seed))
        }
    };
    place.write(|to| to.write_all(&file)).with_context(|| format!("cannot write {}", output.display()))?;
    let json = json!({"name": name, "seed": args.seed, "file": output.display().to_string(), "bytes": file.len()});
    write_result_of(&place, as_json, &json, &format!("{}: {} bytes\n", output.display(), grouped(file.len() as u64)))
}
