//! What holds of any input, over inputs that are made up and made smaller where something does not hold.

// Counts are small and never negative.
#![allow(clippy::cast_sign_loss)]

mod indexes;
mod made;
mod selections;
mod truth;
