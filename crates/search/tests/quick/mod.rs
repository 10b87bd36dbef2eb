//! Options under which searches take little time.

/// Options of a search for tests: cost models with little training and annealing, and small networks.
pub fn quick(name: &'static str) -> &'static str {
    match name {
        "gbt" => "gbt:steps=20,batch=32",
        "tree_gru" => "tree_gru:width=8,steps=2,chains=8,updates=1,batch=64",
        "na2c" => "na2c:width=8",
        "rnn_controller" => "rnn_controller:width=8",
        "lfbo" => "lfbo:trees=5,neighbours=20",
        _ => name,
    }
}
