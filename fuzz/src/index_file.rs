//! Files of indexes: any bytes, and damaged ones. Every way to read them says the same, and what is read has the form of an index.

use certk_rs::{Error, KeyIndex, SearchOptions};

use super::search::Indexed;
use super::tape::Tape;

pub fn run(input: &[u8]) {
    // A file begins with the length of its header, which has no odd first byte.
    let Some((&first, rest)) = input.split_first() else { return };
    if first == b'{' {
        judge(rest, None);
        return;
    }
    let mut tape = Tape::new(input);
    let case = Indexed::new(&mut tape, 40);
    let Ok(index) = case.index(&mut tape) else { return };
    let mut file = Vec::new();
    index.write_to(&mut file).unwrap();
    assert_eq!(file.len(), index.file_bytes().unwrap());
    let sound = file.clone();
    for _ in 0..tape.below(5) {
        let at = tape.below(file.len());
        match tape.below(6) {
            0 => file.truncate(at),
            1 => file.extend(std::iter::repeat_n(tape.u8(), 1 + tape.below(64))),
            2 => drop(file.drain(at..file.len().min(at + 1 + tape.below(16)))),
            3 => drop(file.splice(at..at, [tape.u8(), tape.u8()])),
            // Mostly one byte for another, so that the parts stay where they are.
            _ => file[at] = tape.u8(),
        }
        if file.is_empty() {
            break;
        }
    }
    judge(&file, Some((&sound, &index, &case)));
}

fn judge(file: &[u8], made: Option<(&[u8], &KeyIndex<'_>, &Indexed)>) {
    let checked = KeyIndex::from_bytes(file);
    let mut rest = file;
    let streamed = KeyIndex::read_from(&mut rest);
    match (&checked, &streamed) {
        (Ok(a), Ok(b)) => assert!(a == b && rest.is_empty()),
        (Err(Error::IndexFile { problem, .. }), Ok(_)) => {
            assert!(problem.contains("more behind") && !rest.is_empty());
        }
        (Err(_), Err(_)) => {}
        (a, b) => panic!("{a:?} {b:?}"),
    }
    if let Ok(index) = &checked {
        let mut again = Vec::new();
        index.write_to(&mut again).unwrap();
        assert!(again == file, "what was read is written otherwise");
    }
    if let Some((sound, index, _)) = made {
        assert_eq!(checked.is_ok(), sound == file, "a changed byte was not noticed");
        if let Ok(read) = &checked {
            assert!(read == index);
        }
    }
    // Taken at its word it may be of anything, but it answers with keys that it has.
    let Ok(mut trusted) = KeyIndex::from_trusted_bytes(file) else { return };
    let Some((_, _, case)) = made else { return };
    let (queries, keys) = (case.queries.vectors("q"), case.keys.vectors("keys"));
    let options = SearchOptions::new().threads(1);
    for keys in [Some(&keys), None] {
        if let Ok(found) = trusted.search(&queries, keys, &[0.05], &options) {
            let list = &found.selection.indices;
            assert!(list.iter().all(|key| (*key as usize) < trusted.len()));
        }
    }
    let _ = trusted.check(&keys);
    if trusted.append(&keys).is_ok() {
        let _ = trusted.search(&queries, None, &[0.05], &options);
    }
    let _ = trusted.truncate(trusted.len() / 2, &keys);
    let _ = trusted.evict(&[&[0]], &keys);
}
