//! The service as a library: its routes without a network, for the program and for what tries them out. The README says how to ask.

mod app;
mod asked;
mod auth;
mod bodies;
mod compute;
mod connections;
mod failure;
mod metrics;
mod select;
mod sessions;
mod settings;
mod tensors;
#[cfg(test)]
mod tests;

pub use app::{App, router};
pub use connections::serve;
pub use settings::Settings;
