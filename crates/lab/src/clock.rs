//! Formatting of dates and times.

/// Formats a Unix time in seconds as date and time in UTC.
pub fn utc(unix_time: u64) -> String {
    // Days of a calendar whose years begin in March, so that leap days are last: 146,097 days in 400 years.
    let days = unix_time / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let day = day - (153 * from_march + 2) / 5 + 1;
    let (hour, minute) = (unix_time / 3600 % 24, unix_time / 60 % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_798_761_540), "2026-12-31 23:59 UTC");
    }
}
