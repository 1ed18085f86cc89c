//! What is certified, against what is true: every answer of the public functions beside exact arithmetic.

mod attention;
mod bounds;
mod exact;
mod keep_set;
mod masks;
mod montecarlo;
mod radius;
mod rows;
mod search;
