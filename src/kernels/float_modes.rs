//! Default floating-point modes while kernels run.

/// Puts rounding to nearest, no flush-to-zero, back in force, and restores the thread's own modes when dropped.
///
/// A host may have set flush-to-zero or another rounding direction on its thread; the proofs assume neither.
#[derive(Debug)]
pub(crate) struct DefaultFloats {
    #[cfg(target_arch = "x86_64")]
    saved: u32,
}

#[cfg(target_arch = "x86_64")]
impl DefaultFloats {
    /// All exceptions masked, round to nearest, denormals honoured.
    const DEFAULT: u32 = 0x1f80;

    pub(crate) fn set() -> Self {
        let (mut saved, default) = (0u32, Self::DEFAULT);
        // SAFETY: SSE is part of x86-64; both instructions access the four bytes of a local variable.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut saved, options(nostack));
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const default, options(nostack));
        }
        DefaultFloats { saved }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for DefaultFloats {
    fn drop(&mut self) {
        // SAFETY: the value was read by `stmxcsr` on this thread (the type is neither Send nor shared).
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const self.saved, options(nostack)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl DefaultFloats {
    pub(crate) fn set() -> Self {
        DefaultFloats {}
    }
}
