//! Pinning of threads to CPUs.

/// Pins the calling thread to these CPUs.
pub fn pin_thread(cpus: &[usize]) {
    pin(0, cpus);
}

/// Pins the main thread of a process to these CPUs; 0 is the calling thread.
pub fn pin(process: libc::pid_t, cpus: &[usize]) {
    // SAFETY: the set is plain data, and its size is passed with it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &cpu in cpus {
            libc::CPU_SET(cpu, &mut set);
        }
        libc::sched_setaffinity(process, size_of::<libc::cpu_set_t>(), &set);
    }
}
