//! The instruction-set levels: one for the whole process, and all with the same bits.

use std::sync::{Mutex, MutexGuard, PoisonError};

use certk_rs::force_simd_level;

/// The names that there are; a processor may lack some.
const LEVELS: [&str; 5] = ["portable", "avx2", "avx512", "amx", "neon"];

/// Waits until nobody else forces a level.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static FORCED: Mutex<()> = Mutex::new(());
    FORCED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a function at each level that this processor has.
pub(crate) fn at_each(mut run: impl FnMut(&'static str)) {
    let _alone = alone();
    for level in LEVELS {
        if force_simd_level(Some(level)).is_ok() {
            run(level);
        }
    }
    force_simd_level(None).unwrap();
}
