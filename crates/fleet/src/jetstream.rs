//! Streams and consumers on the server (JetStream), as far as a fleet uses them.
//!
//! # Source
//! Requests are in JSON, as supported by servers since version 2.9:
//! <https://docs.nats.io/reference/reference-protocols/nats_api_reference>.

use std::time::Duration;

use data_encoding::BASE64;
use serde_json::{Value as Json, json};

use crate::error::Error;
use crate::nats::{Client, ReceivedMessage};
use crate::protocol::{DEVICES, RESULTS, TASKS, VERSION, class_consumer, device_consumer, device_subject};

/// Timeout of the server's replies.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Time without an announcement after which a device counts as offline.
pub const DEVICE_AGE: Duration = Duration::from_secs(30);
/// Time for which tasks are stored, and time for which results are stored.
const TASK_AGE: Duration = Duration::from_secs(3600);
const RESULT_AGE: Duration = Duration::from_secs(24 * 3600);
/// Time for which the server recognises duplicates.
const WINDOW: Duration = Duration::from_secs(120);
/// Maximum number of deliveries of a task; the tuner ends a task that crashes machines before that.
const MOST_DELIVERIES: u32 = 8;

/// Error code of a missing stream or consumer.
const NOT_FOUND: u64 = 404;

fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// Sends a request and returns the answer; the inner error is the code and text of an error of the server.
fn ask(client: &mut Client, subject: &str, payload: &Json) -> Result<Result<Json, (u64, String)>, Error> {
    let payload = if payload.is_null() { Vec::new() } else { payload.to_string().into_bytes() };
    let answer = client.request(subject, &payload, PATIENCE)?;
    let Some(answer) = answer else { return Err(Error::NoStreams { why: "it does not answer".to_owned() }) };
    if answer.status == Some(503) {
        return Err(Error::NoStreams { why: "it knows no streams".to_owned() });
    }
    let json: Json = serde_json::from_slice(&answer.payload).map_err(|error| Error::Odd(error.to_string()))?;
    Ok(match json.get("error") {
        None => Ok(json),
        Some(error) => {
            let text = error["description"].as_str().unwrap_or("it does not say why").to_owned();
            Err((error["code"].as_u64().unwrap_or(0), text))
        }
    })
}

fn must(client: &mut Client, subject: &str, payload: &Json) -> Result<Json, Error> {
    ask(client, subject, payload)?.map_err(|(_, why)| Error::NoStreams { why })
}

/// Creates the streams unless they exist.
///
/// # Errors
/// If the server does not support streams.
pub fn make_streams(client: &mut Client) -> Result<(), Error> {
    let work = |age| json!({"retention": "workqueue", "max_age": ns(age), "duplicate_window": ns(WINDOW)});
    let last = json!({"max_msgs_per_subject": 1, "max_age": ns(DEVICE_AGE), "duplicate_window": ns(DEVICE_AGE)});
    let streams = [
        (TASKS, format!("tw.{VERSION}.task.>"), work(TASK_AGE)),
        (RESULTS, format!("tw.{VERSION}.result.>"), work(RESULT_AGE)),
        (DEVICES, device_subject(">"), last),
    ];
    for (name, subject, mut config) in streams {
        config["name"] = json!(name);
        config["subjects"] = json!([subject]);
        config["storage"] = json!("file");
        config["num_replicas"] = json!(1);
        // A stream made by another version is fine, too.
        if let Err((NOT_FOUND, _)) = ask(client, &format!("$JS.API.STREAM.INFO.{name}"), &Json::Null)? {
            must(client, &format!("$JS.API.STREAM.CREATE.{name}"), &config)?;
        }
    }
    Ok(())
}

/// Creates a consumer unless it exists. A server that was killed may have lost a stream's last sequence
/// number; a consumer that remembers a later number then gets no messages, and is created again.
fn make_consumer(client: &mut Client, stream: &str, name: &str, config: &Json) -> Result<(), Error> {
    let mut config = config.clone();
    config["durable_name"] = json!(name);
    config["ack_policy"] = json!("explicit");
    config["deliver_policy"] = json!("all");
    config["max_ack_pending"] = json!(10_000);
    let request = json!({"stream_name": stream, "config": config});
    let create = format!("$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{name}");
    let consumer = must(client, &create, &request)?;
    let info = must(client, &format!("$JS.API.STREAM.INFO.{stream}"), &Json::Null)?;
    let (delivered, last) = (consumer["delivered"]["stream_seq"].as_u64(), info["state"]["last_seq"].as_u64());
    if delivered > last {
        let _ = ask(client, &format!("$JS.API.CONSUMER.DELETE.{stream}.{name}"), &Json::Null)?;
        must(client, &create, &request)?;
    }
    Ok(())
}

/// Creates the consumer of a class's tasks; a device loses a task whose lease it does not renew.
///
/// # Errors
/// As [`make_streams`].
pub fn make_class(client: &mut Client, class: &str, lease: Duration) -> Result<(), Error> {
    let config = json!({
        "filter_subject": format!("tw.{VERSION}.task.{class}.any.*"),
        "ack_wait": ns(lease), "max_deliver": MOST_DELIVERIES,
    });
    make_consumer(client, TASKS, &class_consumer(class), &config)
}

/// Creates the consumer of a device's own tasks.
///
/// # Errors
/// As [`make_streams`].
pub fn make_device(client: &mut Client, class: &str, device: &str, lease: Duration) -> Result<(), Error> {
    let config = json!({
        "filter_subject": format!("tw.{VERSION}.task.{class}.{device}.*"),
        "ack_wait": ns(lease), "max_deliver": MOST_DELIVERIES,
    });
    make_consumer(client, TASKS, &device_consumer(device), &config)
}

/// Creates the consumer of a run's results. An unacknowledged result is delivered again.
///
/// # Errors
/// As [`make_streams`].
pub fn make_run(client: &mut Client, run: &str) -> Result<(), Error> {
    let config = json!({"filter_subject": format!("tw.{VERSION}.result.{run}.*"), "ack_wait": ns(TASK_AGE)});
    make_consumer(client, RESULTS, run, &config)
}

/// Deletes a run: its tasks and results.
///
/// # Errors
/// If the connection ends.
pub fn forget_run(client: &mut Client, run: &str) -> Result<(), Error> {
    purge_tasks(client, run)?;
    let _ = ask(client, &format!("$JS.API.CONSUMER.DELETE.{RESULTS}.{run}"), &Json::Null)?;
    let of_run = json!({"filter": format!("tw.{VERSION}.result.{run}.*")});
    let _ = ask(client, &format!("$JS.API.STREAM.PURGE.{RESULTS}"), &of_run)?;
    Ok(())
}

/// Deletes the tasks of a run.
///
/// # Errors
/// If the connection ends.
pub fn purge_tasks(client: &mut Client, run: &str) -> Result<(), Error> {
    let of_run = json!({"filter": format!("tw.{VERSION}.task.*.*.{run}")});
    let _ = ask(client, &format!("$JS.API.STREAM.PURGE.{TASKS}"), &of_run)?;
    Ok(())
}

/// Number of a run's tasks on the server, including unacknowledged ones; `None` if there is no stream of
/// tasks.
///
/// # Errors
/// If the connection ends.
pub fn n_tasks(client: &mut Client, run: &str) -> Result<Option<u64>, Error> {
    let of_run = json!({"subjects_filter": format!("tw.{VERSION}.task.*.*.{run}")});
    Ok(match ask(client, &format!("$JS.API.STREAM.INFO.{TASKS}"), &of_run)? {
        Err(_) => None,
        Ok(info) => {
            let subjects = info["state"]["subjects"].as_object();
            Some(subjects.into_iter().flatten().filter_map(|(_, n)| n.as_u64()).sum())
        }
    })
}

/// Number of messages that a consumer has not received or not acknowledged; `None` if the consumer does not
/// exist.
///
/// # Errors
/// If the connection ends.
pub fn n_left(client: &mut Client, stream: &str, consumer: &str) -> Result<Option<u64>, Error> {
    let info = ask(client, &format!("$JS.API.CONSUMER.INFO.{stream}.{consumer}"), &Json::Null)?.ok();
    let number = |info: &Json, name: &str| info[name].as_u64().unwrap_or(0);
    Ok(info.map(|info| number(&info, "num_pending") + number(&info, "num_ack_pending")))
}

/// Last message of each subject of a stream.
///
/// # Errors
/// If the connection ends or the server does not answer.
pub fn last_of_each(client: &mut Client, stream: &str) -> Result<Vec<Vec<u8>>, Error> {
    let all = json!({"subjects_filter": ">"});
    let Ok(info) = ask(client, &format!("$JS.API.STREAM.INFO.{stream}"), &all)? else { return Ok(Vec::new()) };
    let mut subjects: Vec<String> =
        info["state"]["subjects"].as_object().into_iter().flatten().map(|(subject, _)| subject.clone()).collect();
    subjects.sort();
    let mut found = Vec::new();
    for subject in subjects {
        let last = json!({"last_by_subj": subject});
        // The message may have been removed meanwhile.
        if let Ok(answer) = ask(client, &format!("$JS.API.STREAM.MSG.GET.{stream}"), &last)? {
            let data = answer["message"]["data"].as_str();
            found.extend(data.and_then(|text| BASE64.decode(text.as_bytes()).ok()));
        }
    }
    Ok(found)
}

/// Requests `n` messages, which are delivered to an inbox, or a status instead of them.
pub fn pull(client: &Client, stream: &str, consumer: &str, n: u64, inbox: &str, expires: Option<Duration>) {
    let request = match expires {
        Some(expires) => json!({"batch": n, "expires": ns(expires)}),
        None => json!({"batch": n, "no_wait": true}),
    };
    let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}");
    client.link().publish(&subject, Some(inbox), None, request.to_string().as_bytes());
}

/// Publishes a message to a stream, and returns whether it is stored; a duplicate with a known id counts as
/// stored.
///
/// # Errors
/// If the connection ends.
pub fn keep(client: &mut Client, subject: &str, id: Option<&str>, payload: &[u8]) -> Result<bool, Error> {
    let answer = client.request_as(subject, id, payload, PATIENCE)?;
    Ok(answer.is_some_and(|answer| is_kept(&answer)))
}

/// Whether a reply confirms that a message is stored.
pub fn is_kept(answer: &ReceivedMessage) -> bool {
    let json = serde_json::from_slice::<Json>(&answer.payload).unwrap_or_default();
    answer.status.is_none() && json.get("error").is_none() && json.get("seq").is_some()
}

/// Number of deliveries of a message, from its acknowledgement subject.
pub fn n_deliveries(ack: &str) -> u64 {
    let words: Vec<&str> = ack.split('.').collect();
    // $JS.ACK.STREAM.CONSUMER.DELIVERED.SEQUENCE.SEQUENCE.TIME.PENDING, or with domain and account before the
    // stream.
    let at = if words.len() >= 11 { 6 } else { 4 };
    words.get(at).and_then(|n| n.parse().ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deliveries_are_counted_by_the_subject() {
        assert_eq!(n_deliveries("$JS.ACK.TW_TASKS.class-lab.3.10.12.1700000000.0"), 3);
        assert_eq!(n_deliveries("$JS.ACK._.acc.TW_TASKS.class-lab.2.10.12.1700000000.0.random"), 2);
    }
}
