//! Tests of fleets on loopback, with a NATS server: proposals, sharing of work, fault tolerance, and rejected
//! connections.

mod broker;
mod faults;
mod port;
mod process;
mod refusals;
mod replay;
mod work;
