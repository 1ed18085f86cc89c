//! Large pages for large results.

/// Room from this size on is worth it.
const LEAST: usize = 1 << 22;

/// Asks the system to back room that is about to be written with large pages, where it has such: touching memory for the
/// first time, page by page of 4 KiB, costs more than what is written to it.
pub(crate) fn ask_for<T>(room: &mut Vec<T>) {
    let spare = room.spare_capacity_mut();
    if size_of_val(spare) < LEAST {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let start = spare.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(PAGE);
        let len = size_of_val(spare) - skip;
        // SAFETY: the range lies in one allocation that is ours, and this advice changes neither its content nor its
        // protection. Where it is refused, small pages do.
        unsafe { libc::madvise(start.wrapping_add(skip).cast(), len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn advice_changes_nothing() {
        let mut list = vec![7, 8];
        list.reserve_exact(super::LEAST);
        let (room, at) = (list.capacity(), list.as_ptr());
        super::ask_for(&mut list);
        assert_eq!((list.capacity(), list.as_ptr()), (room, at));
        list.extend(0..super::LEAST as u32);
        assert_eq!(&list[..3], [7, 8, 0]);
        assert_eq!(list.last(), Some(&(super::LEAST as u32 - 1)));
    }
}
