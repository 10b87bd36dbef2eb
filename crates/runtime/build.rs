//! Compiles the host operators.
fn main() {
    println!("cargo::rerun-if-changed=host");
    cc::Build::new()
        .file("host/host.c")
        .include("host")
        // Numbers are rounded alike wherever the functions run.
        .flag("-ffp-contract=off")
        .opt_level(2)
        .compile("tilewright_host");
}
