//! Default floating-point modes while kernels run.

/// Restores rounding to nearest without flush-to-zero, and on drop the thread's own modes.
///
/// A host may have set flush-to-zero or another rounding direction on its thread; the proofs assume neither. On
/// architectures whose mode register is unknown here, it does nothing.
#[derive(Debug)]
pub struct DefaultFloats {
    saved: register::Modes,
    /// Not `Send`: modes belong to a thread.
    _here: std::marker::PhantomData<*const ()>,
}

impl DefaultFloats {
    /// Sets the default modes.
    pub fn set() -> Self {
        let saved = register::read();
        register::write(register::DEFAULT);
        DefaultFloats { saved, _here: std::marker::PhantomData }
    }
}

impl Drop for DefaultFloats {
    fn drop(&mut self) {
        register::write(self.saved);
    }
}

/// MXCSR.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod register {
    pub(super) type Modes = u32;

    /// All exceptions masked, round to nearest, denormals honoured.
    pub(super) const DEFAULT: Modes = 0x1f80;

    pub(super) fn read() -> Modes {
        let mut modes = 0;
        // SAFETY: SSE is part of x86-64; the instruction writes the four bytes of a local variable.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut modes, options(nostack)) };
        modes
    }

    pub(super) fn write(modes: Modes) {
        // SAFETY: SSE is part of x86-64; the value is the default or was read by `stmxcsr`, so no reserved bit is set.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const modes, options(nostack)) };
    }
}

/// FPCR.
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod register {
    pub(super) type Modes = u64;

    /// Round to nearest, subnormals of all formats honoured, no trap.
    pub(super) const DEFAULT: Modes = 0;

    pub(super) fn read() -> Modes {
        let modes;
        // SAFETY: the register can be read at every privilege level.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) modes, options(nomem, nostack)) };
        modes
    }

    pub(super) fn write(modes: Modes) {
        // SAFETY: the register can be written at every privilege level; the value is the default or was read from it.
        unsafe { std::arch::asm!("msr fpcr, {}", in(reg) modes, options(nostack)) };
    }
}

// Miri has no such registers.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod register {
    pub(super) type Modes = ();

    pub(super) const DEFAULT: Modes = ();

    pub(super) fn read() -> Modes {}

    pub(super) fn write(_modes: Modes) {}
}

#[cfg(all(test, not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use std::hint::black_box;

    use super::*;

    /// Subnormals flushed to zero (on x86 also as inputs), and rounding upward.
    #[cfg(target_arch = "x86_64")]
    const OTHER: register::Modes = 0x1f80 | 1 << 15 | 1 << 6 | 0b10 << 13;
    #[cfg(target_arch = "aarch64")]
    const OTHER: register::Modes = 1 << 24 | 0b01 << 22;

    /// Returns `true` if subnormals survive, and the rounded value of a third.
    fn seen() -> (bool, f64) {
        (black_box(f64::MIN_POSITIVE) / black_box(4.0) > 0.0, black_box(1.0) / black_box(3.0))
    }

    #[test]
    fn modes_of_a_host_are_put_aside_and_back() {
        let before = register::read();
        let as_usual = seen();
        register::write(OTHER);
        let theirs = seen();
        let guard = DefaultFloats::set();
        let guarded = seen();
        drop(guard);
        let again = seen();
        register::write(before);
        assert_eq!(as_usual, (true, 1.0 / 3.0));
        assert_eq!(theirs, (false, (1f64 / 3.0).next_up()));
        assert_eq!(guarded, as_usual);
        assert_eq!(again, theirs);
    }
}
