//! Hostile kernels: each costs a failed trial, and nothing else.

mod common;

use std::fs;
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use common::{command, json_of, text};

/// Kernel each of whose acts is something that no kernel may do; the first one is harmless.
const KERNEL: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

void plain(const float *x, float *y, int n) { for (int i = 0; i < n; i++) y[i] = 2 * x[i]; }

void kernel(const float *x, float *y, int n) {
    plain(x, y, n);
    int bad = 0;
#if ACT == 1
    bad = open("/etc/passwd", O_RDONLY) < 0;
#elif ACT == 2
    int s = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    bad = connect(s, (struct sockaddr *)&to, sizeof to) < 0;
#elif ACT == 3
    bad = fork() < 0;
#elif ACT == 4
    bad = kill(getppid(), SIGKILL) < 0;
#elif ACT == 5
    bad = ptrace(PTRACE_ATTACH, getppid(), 0, 0) < 0;
#elif ACT == 6
    for (;;) { char *p = malloc(1 << 26); if (!p) abort(); memset(p, 1, 1 << 26); }
#elif ACT == 7
    for (volatile int i = 0;; i++) {}
#elif ACT == 8
    int f = open(FILE_TO_LOSE, O_WRONLY | O_TRUNC);
    bad = f < 0 || write(f, "lost", 4) < 4;
#elif ACT == 9
    char *const words[] = {"/bin/sh", "-c", "echo lost > " FILE_TO_LOSE, 0};
    bad = execv(words[0], words) < 0;
#elif ACT == 10
    bad = syscall(SYS_tgkill, getppid(), getppid(), SIGKILL) < 0;
#endif
    if (bad) y[0] = -1;
}
"#;

#[test]
fn hostile_kernels_fail_and_do_nothing() {
    if Command::new("cc").arg("--version").output().is_err() {
        return println!("skipped: there is no compiler");
    }
    let folder = tempfile::tempdir().unwrap();
    let lost = folder.path().join("to-lose");
    fs::write(&lost, "kept").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    fs::write(folder.path().join("hostile.c"), KERNEL).unwrap();
    let description = format!(
        "name = \"hostile\"\nsource = \"hostile.c\"\nfunction = \"kernel\"\n\
         flags = [\"-O1\", \"-DPORT={port}\", '-DFILE_TO_LOSE=\"{}\"']\nconstants = {{ N = 64 }}\n\
         parameters = [{{ name = \"ACT\", values = \"range(11)\" }}]\n\
         arguments = [\n  {{ name = \"x\", type = \"float\", size = \"N\" }},\n  \
         {{ name = \"y\", type = \"float\", size = \"N\", role = \"out\" }},\n  \
         {{ name = \"n\", type = \"int\", value = \"N\" }},\n]\nreference = {{ function = \"plain\" }}\n",
        lost.display()
    );
    fs::write(folder.path().join("hostile.toml"), description).unwrap();
    let (kernel, db) = (folder.path().join("hostile.toml"), folder.path().join("records.db"));
    let more = ["--trials", "11", "--run-timeout", "2", "--memory", "300"];
    let arguments = [&["tune", "--kernel", text(&kernel), "--db", text(&db), "--no-race"][..], &more].concat();
    let tuned = json_of(&arguments, &command(&arguments).arg("--json").output().unwrap());
    let n_failed: u64 = tuned["errors"].as_object().unwrap().values().filter_map(serde_json::Value::as_u64).sum();
    assert_eq!((tuned["trials"].as_u64(), n_failed), (Some(11), 10), "{tuned}");
    assert_eq!(tuned["best"]["config"]["ACT"], 0, "{tuned}");
    assert_eq!(fs::read_to_string(&lost).unwrap(), "kept");
    std::thread::sleep(Duration::from_millis(50));
    assert!(listener.accept().is_err(), "a kernel has connected");
    let records = command(&["export", "--db", text(&db)]).output().unwrap();
    let records = String::from_utf8(records.stdout).unwrap();
    for act in [1, 2, 3, 4, 5, 8, 9, 10] {
        let record = records.lines().find(|line| line.contains(&format!("\"ACT\":{act}}}"))).unwrap();
        assert!(record.contains("forbidden to candidates"), "act {act}: {record}");
    }
}
