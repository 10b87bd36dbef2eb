//! Version of this build.

/// The release. What follows from code that changes only between releases, a trained model or a run of an
/// experiment, is used again within one.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// The release, and the commit where the build knew it: `0.2.0+g148a5269c`, with a number more for changes
/// that were not committed. Whatever is written down names it.
pub const BUILD: &str = env!("TILEWRIGHT_BUILD");

/// The release that a build is of.
pub fn release_of(build: &str) -> &str {
    build.split('+').next().unwrap_or(build)
}
