//! Timestamps in the forms of other tuners.

/// Returns the number of days from 1970-01-01 to a date of the proleptic Gregorian calendar;
/// [`civil_from_days`] is the inverse.
///
/// # Source
/// H. Hinnant, "chrono-compatible low-level date algorithms", `days_from_civil` and `civil_from_days`.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

/// Parses a time such as `2026-11-25T14:00:00+00:00` to seconds since 1970; `None` for any other text.
pub(crate) fn unix_time(text: &str) -> Option<u64> {
    let number = |part: &str, most: i64| part.parse::<i64>().ok().filter(|n| (0..=most).contains(n));
    let (date, time) = text.trim().split_at_checked(10)?;
    let mut date = date.split('-');
    let (year, month, day) = (number(date.next()?, 9999)?, number(date.next()?, 12)?, number(date.next()?, 31)?);
    let time = time.strip_prefix(['T', ' '])?;
    let (clock, rest) = time.split_at_checked(8)?;
    let mut clock = clock.split(':');
    let (hour, minute, second) = (number(clock.next()?, 23)?, number(clock.next()?, 59)?, number(clock.next()?, 60)?);
    let zone = rest.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    let offset = match zone.strip_prefix('-').map(|zone| (-1, zone)).or(zone.strip_prefix('+').map(|zone| (1, zone))) {
        Some((sign, zone)) => {
            let (hours, minutes) = zone.split_once(':')?;
            sign * (number(hours, 23)? * 3600 + number(minutes, 59)? * 60)
        }
        None => 0,
    };
    let seconds = days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
    u64::try_from(seconds).ok().filter(|_| month > 0 && day > 0)
}

/// Formats a time in seconds since 1970, with `between` between day and hour.
pub(crate) fn text_of(unix_time: u64, between: char) -> String {
    // The last second of the year 9999.
    let seconds = unix_time.min(253_402_300_799) as i64;
    let (year, month, day) = civil_from_days(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}{between}{hour:02}:{minute:02}:{second:02}+00:00")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(unix_time("1970-01-01 00:00:00"), Some(0));
        assert_eq!(unix_time("2026-11-25T14:00:00+00:00"), Some(1_795_615_200));
        assert_eq!(unix_time("2026-11-25 15:30:00.123456+01:30"), Some(1_795_615_200));
        assert_eq!(unix_time("2000-02-29T23:59:59Z"), Some(951_868_799));
        for text in ["", "yesterday", "2026-13-01 00:00:00", "1969-12-31 23:59:59", "2026-11-25", "ä026-11-25 1"] {
            assert_eq!(unix_time(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(seconds in 0u64..253_402_300_800, between in "[T ]") {
            let text = text_of(seconds, between.chars().next().unwrap());
            prop_assert_eq!(unix_time(&text), Some(seconds));
        }
    }
}
