//! Large pages for large results.

/// Least size that is worth the request.
const LEAST: usize = 1 << 22;

/// Asks the system to back memory that is about to be written with large pages, if it has them. The first touch of
/// memory, page by small page, costs more than the writes.
pub(crate) fn ask_for<T>(room: &mut Vec<T>) {
    let spare = room.spare_capacity_mut();
    if size_of_val(spare) < LEAST {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        // Not every machine has pages of 4 KiB, and the advice is refused for an unaligned address.
        let Some(page) = super::page_size() else { return };
        let start = spare.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(page);
        let Some(len) = size_of_val(spare).checked_sub(skip) else { return };
        // SAFETY: the range lies in one allocation that is ours, and this advice changes neither its content nor its
        // protection. Where it is refused, small pages do.
        unsafe { libc::madvise(start.wrapping_add(skip).cast(), len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn pages_have_a_size() {
        assert!(super::super::page_size().is_some_and(|page| page >= 4096));
    }

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
