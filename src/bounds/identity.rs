//! Tail mass and divergence: `KL(P_hat || P) = -ln(1 - tau)` and back (arXiv 2512.07647; `TV(P, P_hat) = tau`).
//!
//! Both directions are strictly increasing and are rounded **up**, so upper bounds give upper bounds. The results
//! increase with the argument, float by float.

use crate::error::{Error, Place};
use crate::numerics::double_double::{DoubleDouble, ln_ratio, one_minus_exp, two_sum};
use crate::runtime::threads;

/// Below this, `-ln(1 - x)` and `1 - e^-x` differ from x by less than a float's step.
const LINEAR: f64 = 1.0 / (1u128 << 100) as f64;

/// Returns the divergence `KL(P_hat || P) = -ln(1 - tail_mass)`, in nats, of the renormalised kept set from the full
/// softmax.
///
/// `tail_mass` lies in [0, 1]; 0 gives exactly 0 and 1 gives infinity. The result is rounded up, by less than two float
/// steps, so an upper bound of the tail mass gives an upper bound of the divergence.
///
/// ```
/// let kl = certk_rs::bounds::kl_from_tail_mass(0.5)?;
/// assert!((kl - 2f64.ln()).abs() < 1e-15);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::TailMass`].
pub fn kl_from_tail_mass(tail_mass: f64) -> Result<f64, Error> {
    // A caller that flushes subnormal numbers to zero would take them for 0.
    let _modes = threads::default_floats();
    if !(0.0..=1.0).contains(&tail_mass) {
        return Err(Error::TailMass { place: Place(vec![]), value: tail_mass });
    }
    if tail_mass == 0.0 || tail_mass == 1.0 {
        return Ok(if tail_mass == 0.0 { 0.0 } else { f64::INFINITY });
    }
    if tail_mass < LINEAR {
        return Ok(tail_mass.next_up());
    }
    let (high, low) = two_sum(1.0, -tail_mass);
    // Positive, but the series may leave the sign of a zero open.
    Ok(ln_ratio(DoubleDouble::from(1.0), DoubleDouble { high, low }, 0).up().max(tail_mass))
}

/// Returns the tail mass `1 - e^{-kl}` of a divergence `KL(P_hat || P)` of `kl` nats.
///
/// `kl` is at least 0; infinity gives 1. The result is rounded up, by less than two float steps, and never above 1, so
/// an upper bound of the divergence gives an upper bound of the tail mass.
///
/// ```
/// use certk_rs::bounds::{kl_from_tail_mass, tail_mass_from_kl};
/// let back = tail_mass_from_kl(kl_from_tail_mass(0.25)?)?;
/// assert!(0.25 <= back && back < 0.25 + 1e-15);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Divergence`].
pub fn tail_mass_from_kl(kl: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    if !(0.0..=f64::INFINITY).contains(&kl) {
        return Err(Error::Divergence { place: Place(vec![]), value: kl });
    }
    if kl < LINEAR {
        return Ok(kl.abs());
    }
    // From 38 nats on, 1 is the closest float above.
    Ok(if kl < 38.0 { one_minus_exp(kl).up().min(1.0) } else { 1.0 })
}

/// Returns Pinsker's bound on a total variation distance, `sqrt(kl / 2)`, for a divergence of `kl` nats.
///
/// It holds for any two distributions. For a truncated distribution [`tail_mass_from_kl`] is the distance itself, and
/// so sharper. Above 1 the bound is trivial. Rounded up, by less than three float steps.
///
/// ```
/// use certk_rs::bounds::{pinsker, tail_mass_from_kl};
/// assert!((pinsker(0.02)? - 0.1).abs() < 1e-15);
/// assert!(tail_mass_from_kl(0.02)? < pinsker(0.02)?);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Divergence`].
pub fn pinsker(kl: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    if !(0.0..=f64::INFINITY).contains(&kl) {
        return Err(Error::Divergence { place: Place(vec![]), value: kl });
    }
    // The smallest subnormal number has no half.
    Ok(if kl == 0.0 || kl == f64::INFINITY {
        kl.abs()
    } else {
        (kl.next_up() / 2.0).sqrt().next_up()
    })
}

/// Returns the bound of Bretagnolle and Huber on a total variation distance, `sqrt(1 - e^-kl)`, for a divergence of
/// `kl` nats. It is never above 1 and, as [`pinsker`], holds for any two distributions. Rounded up, by less than three
/// float steps.
///
/// ```
/// use certk_rs::bounds::{bretagnolle_huber, pinsker};
/// assert!((bretagnolle_huber(2f64.ln())? - 0.5f64.sqrt()).abs() < 1e-15);
/// assert!(bretagnolle_huber(8.0)? < 1.0 && pinsker(8.0)? > 1.0);
/// # Ok::<(), certk_rs::Error>(())
/// ```
///
/// # Errors
/// [`Error::Divergence`].
pub fn bretagnolle_huber(kl: f64) -> Result<f64, Error> {
    let _modes = threads::default_floats();
    let square = tail_mass_from_kl(kl)?;
    Ok(if square == 0.0 || square == 1.0 { square } else { square.sqrt().next_up().min(1.0) })
}

/// Returns [`kl_from_tail_mass`] of every entry of an array.
///
/// # Errors
/// As [`kl_from_tail_mass`], naming the entry.
pub fn kl_from_tail_masses(tail_mass: &[f64], shape: &[usize]) -> Result<Vec<f64>, Error> {
    super::rows::each(shape, |i, place| {
        kl_from_tail_mass(tail_mass[i])
            .map_err(|_| Error::TailMass { place: place(), value: tail_mass[i] })
    })
}

/// Returns [`tail_mass_from_kl`], [`pinsker`] or [`bretagnolle_huber`] of every entry of an array.
///
/// # Errors
/// As those functions, naming the entry.
pub fn of_divergences(
    kl: &[f64],
    shape: &[usize],
    bound: fn(f64) -> Result<f64, Error>,
) -> Result<Vec<f64>, Error> {
    super::rows::each(shape, |i, place| {
        bound(kl[i]).map_err(|_| Error::Divergence { place: place(), value: kl[i] })
    })
}
