//! Properties that hold for any input. Inputs are made up, and made smaller where a property fails.

// Counts are small and never negative.
#![allow(clippy::cast_sign_loss)]

mod indexes;
mod made;
mod selections;
mod truth;
