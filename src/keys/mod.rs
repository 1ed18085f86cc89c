//! Keys scored by what is known about them: codes, the Gram certificate, and searches that end exact.

mod codes;
mod gram;
mod mass;
