//! Names of option values, shared with the Python package and stored files.

/// Reads and writes the names of an enum.
macro_rules! names {
    ($of:ty, $argument:literal, $problem:literal, { $($name:literal => $value:path),+ $(,)? }) => {
        impl std::str::FromStr for $of {
            type Err = $crate::Error;

            fn from_str(name: &str) -> Result<Self, $crate::Error> {
                match name {
                    $($name => Ok($value),)+
                    _ => Err($crate::Error::Option {
                        argument: $argument,
                        value: format!("{name:?}"),
                        problem: $problem,
                    }),
                }
            }
        }

        impl std::fmt::Display for $of {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $($value => $name,)+
                })
            }
        }
    };
}

pub(crate) use names;

#[cfg(test)]
mod tests {
    use crate::{Kind, OutputBound, Precision, Rung, Status};

    #[test]
    fn names_are_read_as_they_are_written() {
        macro_rules! back {
            ($of:ident: $($name:ident),+) => {$(
                assert_eq!($of::$name.to_string().parse(), Ok($of::$name));
            )+};
        }
        back!(Kind: Logits, LogProbs, Probs);
        back!(Precision: F64, F32, F16, Bf16);
        back!(Status: Certified, OverBudget, Empty);
        back!(Rung: Codes, Rescored, Dense, Coded);
        back!(OutputBound: Exact, Diameter, Ball, Spectral, Variance);
        let error = "scores".parse::<Kind>().unwrap_err().to_string();
        assert_eq!(error, "kind is \"scores\": use \"logits\", \"logprobs\" or \"probs\"");
        assert_eq!(format!("{:>8}|{:<6}|", Kind::Probs, Precision::F16), "   probs|float16|");
    }
}
