//! Numbers in the four types, made of a tape.

use certk_rs::Data;
use certk_rs::half::{bf16, f16};

use super::tape::{Noise, Tape};

#[derive(Debug, Clone)]
pub(crate) enum Stored {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// Unusual numbers: NaN, infinities, zeros, subnormals, the ends of ranges and a few more.
const ODD: [f64; 20] = [
    f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    -0.0,
    0.0,
    5e-324,
    1e-310,
    1.4e-45,
    -1e-40,
    f64::MAX,
    f64::MIN,
    3.402_823_466_385_288_6e38,
    -3.402_823_466_385_288_6e38,
    -1.701_411_733_192_644_3e38,
    65504.0,
    -65504.0,
    -32752.0,
    88.0,
    -104.0,
    1e17,
];

impl Stored {
    /// Whose type the tape says.
    pub(crate) fn new(tape: &mut Tape<'_>, n: usize) -> Self {
        let dtype = tape.below(4);
        Self::of_type(tape, n, dtype)
    }

    /// So many numbers: bits as they come, a few levels, or noise, of which some are odd.
    pub(crate) fn of_type(tape: &mut Tape<'_>, n: usize, dtype: usize) -> Self {
        let way = tape.below(8);
        if way == 7 {
            // Bits of the type itself, whatever they are.
            return match dtype {
                0 => Stored::F32(
                    (0..n).map(|_| f32::from_bits(tape.u64() as u32)).collect::<Vec<f32>>(),
                ),
                1 => Stored::F64((0..n).map(|_| tape.f64()).collect()),
                2 => Stored::F16((0..n).map(|_| f16::from_bits(tape.u16())).collect()),
                _ => Stored::Bf16((0..n).map(|_| bf16::from_bits(tape.u16())).collect()),
            };
        }
        let size = tape.one_of(&[1.0, 0.01, 0.3, 4.0, 30.0, 1e3, 1e-40, 1e30]);
        let mut numbers: Vec<f64> = match way {
            1 | 2 => (0..n).map(|_| size * f64::from(tape.u8().cast_signed()) / 16.0).collect(),
            _ => {
                let mut noise = Noise::new(tape.u64());
                let levels = tape.one_of(&[0.0, 0.0, 1.0, 0.25]);
                let draw = |noise: &mut Noise| match way {
                    3 => noise.uniform(),
                    4 => -noise.uniform().ln(),
                    5 => noise.normal().powi(3),
                    _ => noise.normal(),
                };
                (0..n)
                    .map(|_| {
                        let number = draw(&mut noise);
                        let at =
                            if levels > 0.0 { (number / levels).round() * levels } else { number };
                        size * at
                    })
                    .collect()
            }
        };
        if n > 0 {
            let odd = tape.below(8).saturating_sub(4);
            for _ in 0..odd {
                let at = tape.below(n);
                numbers[at] = ODD[tape.below(ODD.len())];
            }
        }
        Self::narrowed(&numbers, dtype)
    }

    /// Returns the numbers in a type; in half precision by way of f32, because from f64 some processors round once and some twice.
    pub(crate) fn narrowed(numbers: &[f64], dtype: usize) -> Self {
        match dtype {
            0 => Stored::F32(numbers.iter().map(|&x| x as f32).collect()),
            1 => Stored::F64(numbers.to_vec()),
            2 => Stored::F16(numbers.iter().map(|&x| f16::from_f32(x as f32)).collect()),
            _ => Stored::Bf16(numbers.iter().map(|&x| bf16::from_f32(x as f32)).collect()),
        }
    }

    /// Returns the numbers in every type.
    pub(crate) fn all(numbers: &[f64]) -> [Self; 4] {
        std::array::from_fn(|dtype| Self::narrowed(numbers, dtype))
    }

    pub(crate) fn data(&self) -> Data<'_> {
        match self {
            Stored::F32(list) => list.into(),
            Stored::F64(list) => list.into(),
            Stored::F16(list) => list.into(),
            Stored::Bf16(list) => list.into(),
        }
    }

    /// Returns the stored numbers in f64, exactly.
    pub(crate) fn wide(&self) -> Vec<f64> {
        match self {
            Stored::F32(list) => list.iter().map(|&x| x.into()).collect(),
            Stored::F64(list) => list.clone(),
            Stored::F16(list) => list.iter().map(|&x| x.into()).collect(),
            Stored::Bf16(list) => list.iter().map(|&x| x.into()).collect(),
        }
    }

    /// Half the most negative number of the type: what is added and not above it hides.
    pub(crate) fn hides_at(&self) -> f64 {
        match self {
            Stored::F32(_) => -1.701_411_733_192_644_3e38,
            Stored::F64(_) => f64::MIN / 2.0,
            Stored::F16(_) => -32752.0,
            // Its most negative number is -(2 - 2^-7) 2^127.
            Stored::Bf16(_) => -(2.0 - 2f64.powi(-7)) * 2f64.powi(126),
        }
    }

    /// Returns the place of the number type in the enumeration, from 0.
    pub(crate) fn dtype(&self) -> usize {
        match self {
            Stored::F32(_) => 0,
            Stored::F64(_) => 1,
            Stored::F16(_) => 2,
            Stored::Bf16(_) => 3,
        }
    }

    pub(crate) fn is_f64(&self) -> bool {
        matches!(self, Stored::F64(_))
    }
}
