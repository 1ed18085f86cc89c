//! What a session may be called: what is also the name of a file, and of no other file than its own.

use crate::failure::Failure;

/// Letters, digits, `.`, `-` and `_`, a letter or a digit first.
pub(crate) fn valid(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    first && name.len() <= 100 && name.bytes().all(inner)
}

pub(crate) fn check(name: &str) -> Result<(), Failure> {
    if valid(name) {
        return Ok(());
    }
    let problem = "a session's name has 1 to 100 letters, digits, dots, dashes and underscores, a letter or a digit first";
    Err(Failure::input(problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere() {
        for name in ["a", "7", "Layer-3.head_2", &"x".repeat(100)] {
            assert!(valid(name), "{name}");
        }
        for name in
            ["", ".", "..", "../a", "a/b", "a\\b", ".a", "-a", "a b", "a\0", "ä", &"x".repeat(101)]
        {
            assert!(!valid(name), "{name}");
        }
    }
}
