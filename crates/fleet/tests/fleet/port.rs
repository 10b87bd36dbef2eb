//! Ports for servers of tests.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Port that no other server of this process uses, below the ephemeral ports of clients.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let nth = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (nth % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
