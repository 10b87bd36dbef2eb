//! Time of the calendar.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time since 1970.
pub fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
