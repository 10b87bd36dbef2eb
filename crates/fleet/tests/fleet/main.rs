//! Fleets on loopback, with a NATS server: what they propose, how they share work, what they survive, what
//! they refuse.

mod broker;
mod faults;
mod port;
mod process;
mod refusals;
mod replay;
mod work;
