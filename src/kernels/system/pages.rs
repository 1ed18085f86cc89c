//! Pages of memory backed by a file or a swap area: presence, and read-ahead.

/// Pages per query.
#[cfg(target_os = "linux")]
const WINDOW: usize = 512;

/// Returns the bytes of a page, if the system supports read-ahead.
pub(crate) fn page_size() -> Option<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a query without side effects; -1 if there is no answer.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).ok().filter(|size| size.is_power_of_two())
    }
    #[cfg(not(target_os = "linux"))]
    None
}

/// Requests the wanted pages from number `first` on (an address divided by the page size) that are not in memory,
/// without waiting. A page fault would also read around the place, megabytes on some systems.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
pub(crate) fn ask_for_pages(first: usize, wanted: &[bool]) {
    #[cfg(target_os = "linux")]
    {
        let Some(page) = page_size() else { return };
        let mut window = Window { page, first: 0, here: [0; WINDOW], count: 0 };
        let mut at = 0;
        while at < wanted.len() {
            if !wanted[at] || window.has(first + at) {
                at += 1;
                continue;
            }
            let from = at;
            while at < wanted.len() && wanted[at] && !window.has(first + at) {
                at += 1;
            }
            let start = ((first + from) * page) as *mut libc::c_void;
            // SAFETY: advice to read ahead changes neither what is in memory nor its protection, whatever is there.
            unsafe { libc::madvise(start, (at - from) * page, libc::MADV_WILLNEED) };
        }
    }
}

/// The system's answer about some consecutive pages.
#[cfg(target_os = "linux")]
struct Window {
    page: usize,
    first: usize,
    here: [u8; WINDOW],
    count: usize,
}

#[cfg(target_os = "linux")]
impl Window {
    /// Returns `true` if a page is in memory. Without an answer it counts as absent, and at worst is requested in vain.
    fn has(&mut self, number: usize) -> bool {
        if !(self.first..self.first + self.count).contains(&number) {
            (self.first, self.count) = (number, WINDOW);
            self.here.fill(0);
            let start = (number * self.page) as *mut libc::c_void;
            // SAFETY: the system writes a byte for each of the pages, for which there is room; memory that is not mapped is
            // an error, before which it has answered for what lies in front.
            unsafe { libc::mincore(start, WINDOW * self.page, self.here.as_mut_ptr().cast()) };
        }
        self.here[number - self.first] & 1 != 0
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Holds for any memory, also behind its end.
    #[test]
    fn asking_changes_nothing() {
        let Some(page) = page_size() else { return };
        let data: Vec<u8> = (0..3 * WINDOW * page).map(|i| i as u8).collect();
        let before = data.clone();
        ask_for_pages(data.as_ptr() as usize / page, &vec![true; 4 * WINDOW]);
        ask_for_pages(1, &[true, false, true]);
        assert_eq!(data, before);
    }

    #[test]
    fn pages_that_were_written_are_here() {
        let Some(page) = page_size() else { return };
        let data = vec![1u8; 2 * WINDOW * page];
        let first = (data.as_ptr() as usize).div_ceil(page);
        let mut window = Window { page, first: 0, here: [0; WINDOW], count: 0 };
        assert!((first..first + 2 * WINDOW - 1).all(|number| window.has(number)));
        assert!(!window.has(1));
    }
}
