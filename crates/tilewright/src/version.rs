//! Version of this build.

/// Release. Results that depend on code which changes only between releases, such as a trained model or an
/// experiment, are reused within one.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Release and commit, if the build knows it: `0.2.0+g148a5269c`, with a further number for uncommitted
/// changes. It is recorded in everything written.
pub const BUILD: &str = env!("TILEWRIGHT_BUILD");

/// Release of a build.
pub fn release_of(build: &str) -> &str {
    build.split('+').next().unwrap_or(build)
}
