//! Threads of this process's OpenMP runtime, libgomp, which PyTorch's wheels for Linux include.
//!
//! After a parallel region they spin for some milliseconds, and occupy the cores that threads of another pool would
//! need. Calls between such regions are faster on the same threads.

#[cfg(target_os = "linux")]
mod linux {
    use std::any::Any;
    use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::{Mutex, OnceLock, PoisonError};

    use crate::kernels::forks;

    // SAFETY: to be called as `Team::run` does.
    type Region = unsafe extern "C" fn(*mut c_void);
    type Parallel = unsafe extern "C" fn(Region, *mut c_void, c_uint, c_uint);
    type Number = unsafe extern "C" fn() -> c_int;

    /// Entry points of libgomp, named as in its source (`libgomp/libgomp_g.h` and `omp.h`).
    #[derive(Debug, Clone, Copy)]
    pub(super) struct Team {
        parallel: Parallel,
        in_parallel: Number,
        max_threads: Number,
        /// A forked child has no such threads, but libgomp does not know it.
        process: (u32, usize),
    }

    /// Data of a parallel region.
    struct Told<'a> {
        work: &'a (dyn Fn() + Sync),
        panic: Mutex<Option<Box<dyn Any + Send>>>,
    }

    unsafe extern "C" fn region(told: *mut c_void) {
        // SAFETY: `run` passes a `Told` that lives until all threads have left the region.
        let told = unsafe { &*told.cast::<Told<'_>>() };
        // A panic must not unwind through a C function.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(told.work)) {
            told.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }

    impl Team {
        /// Returns the team of the loaded library, if there is one.
        pub(super) fn find() -> Option<Team> {
            static FOUND: OnceLock<Team> = OnceLock::new();
            let process = (std::process::id(), forks());
            // A forked child has one thread, and waiting for the others would never end.
            if process.1 > 0 || FOUND.get().is_none() && alone() {
                return None;
            }
            let team = if let Some(team) = FOUND.get() {
                *team
            } else {
                // The library may be loaded later.
                let team = look(process)?;
                *FOUND.get_or_init(|| team)
            };
            (team.process == process).then_some(team)
        }

        /// Runs work here and on other threads of the team, on at most `lanes` in all. Returns `false` if it did not
        /// run.
        pub(super) fn run(self, lanes: usize, work: &(dyn Fn() + Sync)) -> bool {
            // SAFETY: it takes nothing and gives a number.
            if unsafe { (self.in_parallel)() } != 0 {
                return false;
            }
            // SAFETY: as above. It is what torch.set_num_threads has set; where a thread cannot be had libgomp ends the process, so
            // that no more are asked for than the host has itself.
            let most = unsafe { (self.max_threads)() };
            let lanes = usize::try_from(most).map_or(1, |most| most.min(lanes));
            let Ok(lanes) = c_uint::try_from(lanes) else { return false };
            if lanes < 2 {
                return false;
            }
            let mut told = Told { work, panic: Mutex::new(None) };
            let pointer: *mut Told<'_> = &raw mut told;
            // SAFETY: `region` runs on each thread of a team, this one among them, with the pointer that is given here, and the call
            // returns when all have left it (`GOMP_parallel` ends with a barrier). What it points to is shared: `work` is
            // `Sync`, the rest a lock. Flags of 0 ask for nothing.
            unsafe { (self.parallel)(region, pointer.cast(), lanes, 0) };
            if let Some(panic) = told.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
                resume_unwind(panic);
            }
            true
        }
    }

    /// Returns `true` if this process has one thread.
    fn alone() -> bool {
        std::fs::read_dir("/proc/self/task").map_or(true, |tasks| tasks.take(2).count() < 2)
    }

    /// Records the name of a library, if it is a libgomp.
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        names: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes what it knows of a library, whose name is a string of C or nothing, and the list given below.
        unsafe {
            let (name, names) = ((*info).dlpi_name, &mut *names.cast::<Vec<CString>>());
            if !name.is_null()
                && CStr::from_ptr(name).to_bytes().windows(7).any(|w| w == b"libgomp")
            {
                names.push(CStr::from_ptr(name).to_owned());
            }
        }
        0
    }

    /// Finds the library among those that are loaded.
    fn look(process: (u32, usize)) -> Option<Team> {
        let mut names: Vec<CString> = Vec::new();
        let list: *mut Vec<CString> = &raw mut names;
        // SAFETY: the function above is called for each library, one after another, before this returns.
        unsafe { libc::dl_iterate_phdr(Some(note), list.cast()) };
        // Of several, prefer the one of PyTorch.
        names.sort_by_key(|name| !name.to_bytes().windows(5).any(|w| w == b"torch"));
        let symbol = |library: *mut c_void, name: &CStr| -> Option<*mut c_void> {
            // SAFETY: a library that is loaded and a name.
            let found = unsafe { libc::dlsym(library, name.as_ptr().cast::<c_char>()) };
            (!found.is_null()).then_some(found)
        };
        names.iter().find_map(|name| {
            // SAFETY: a name of the loader's own; nothing is loaded that is not there already. It is never closed, so that it stays.
            let library =
                unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
            if library.is_null() {
                return None;
            }
            let parallel = symbol(library, c"GOMP_parallel")?;
            let in_parallel = symbol(library, c"omp_in_parallel")?;
            let max_threads = symbol(library, c"omp_get_max_threads")?;
            // SAFETY: these are the functions of that name in libgomp, whose types have not changed since GCC 4.9 and ever.
            let (parallel, in_parallel, max_threads) = unsafe {
                (
                    std::mem::transmute::<*mut c_void, Parallel>(parallel),
                    std::mem::transmute::<*mut c_void, Number>(in_parallel),
                    std::mem::transmute::<*mut c_void, Number>(max_threads),
                )
            };
            Some(Team { parallel, in_parallel, max_threads, process })
        })
    }
}

/// Runs work here and at the same time on other threads of the OpenMP runtime, on at most `lanes` in all, and waits for
/// all of them. Returns `false`, without running it, if there is no runtime, inside a parallel region, and in a forked
/// child.
pub(crate) fn with_team(lanes: usize, work: &(dyn Fn() + Sync)) -> bool {
    #[cfg(target_os = "linux")]
    return linux::Team::find().is_some_and(|team| team.run(lanes, work));
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (lanes, work);
        false
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Returns `true` if there is a runtime: a package of C compilers, which may be missing.
    fn loaded() -> bool {
        // SAFETY: the runtime's initialisation does nothing to this program.
        !unsafe { libc::dlopen(c"libgomp.so.1".as_ptr(), libc::RTLD_LAZY) }.is_null()
    }

    #[test]
    fn a_team_does_all_work_and_hands_panics_on() {
        if !loaded() || std::env::var_os("OMP_NUM_THREADS").is_some() {
            eprintln!("there is no libgomp here, or it was told how many threads to have");
            return;
        }
        // Another thread, so that this one is not alone.
        let (begun, end) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.wait();
                end.wait();
            });
            begun.wait();
            let runs = AtomicUsize::new(0);
            assert!(!with_team(1, &|| ()));
            for lanes in [2, 3, 7, 4000] {
                runs.store(0, Ordering::Relaxed);
                let ran = with_team(lanes, &|| {
                    runs.fetch_add(1, Ordering::Relaxed);
                    // Inside a parallel region no other is begun.
                    assert!(!with_team(2, &|| ()));
                });
                // On a machine of one thread there is no team; else at most its threads.
                let most = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                assert_eq!(ran, most > 1);
                assert!(!ran || (1..=lanes.min(most)).contains(&runs.load(Ordering::Relaxed)));
            }
            for _ in 0..20 {
                let first = AtomicUsize::new(0);
                let panic = std::panic::catch_unwind(|| {
                    let work = || assert_ne!(first.fetch_add(1, Ordering::Relaxed), 0);
                    assert!(with_team(3, &work), "no team");
                });
                assert!(panic.is_err());
            }
            end.wait();
        });
    }
}
