//! Indexes as files: the bytes of the Python package, whatever comes of damaged ones.

use std::io::ErrorKind;

use certk_rs::{CancelToken, Context, Error, ErrorClass, IndexOptions, KeyIndex, Vectors};

/// Written by `KeyIndex.save` of the Python package; `tests/index/test_key_index.py` writes it again.
const FILE: &[u8] = include_bytes!("../vectors/index.safetensors");
const SHAPE: [usize; 3] = [2, 40, 8];

/// The keys that it is of.
fn entries() -> Vec<f32> {
    let mut data: Vec<f32> = (0..2 * 40 * 8).map(|i: u32| (i * i % 23) as f32 / 8.0).collect();
    data[45 * 8..46 * 8].iter_mut().for_each(|entry| *entry *= 1000.0);
    data
}

fn keys(data: &[f32]) -> Vectors<'_> {
    Vectors::new("keys", data, &SHAPE).unwrap()
}

fn written(index: &KeyIndex<'_>) -> Vec<u8> {
    let mut file = Vec::new();
    index.write_to(&mut file).unwrap();
    assert_eq!(file.len(), index.file_bytes().unwrap());
    file
}

#[test]
fn python_writes_the_same_bytes() {
    let data = entries();
    let index = KeyIndex::build(&keys(&data), &IndexOptions::new()).unwrap();
    assert!(written(&index) == FILE);
    for read in [
        KeyIndex::from_bytes(FILE).unwrap(),
        KeyIndex::from_trusted_bytes(FILE).unwrap(),
        KeyIndex::read_from(FILE).unwrap(),
    ] {
        assert!(read == index && written(&read) == FILE);
        read.check(&keys(&data)).unwrap();
    }
}

#[test]
fn whatever_the_shape_and_wherever_the_bytes_are() {
    for (heads, n, dim) in
        [(0, 5, 4), (1, 0, 3), (1, 1, 1), (3, 17, 20), (11, 40, 8), (1, 9000, 16)]
    {
        let data: Vec<f32> = (0..heads * n * dim).map(|i| (i * i % 23) as f32 / 8.0).collect();
        let shape = [heads, n, dim];
        let some = Vectors::new("keys", &data[..], &shape).unwrap();
        let mut index = KeyIndex::build(&some, &IndexOptions::new()).unwrap();
        // Of several chunks.
        index.append(&some).unwrap();
        let file = written(&index);
        for offset in 0..9 {
            let mut moved = vec![0; offset];
            moved.extend_from_slice(&file);
            assert!(KeyIndex::from_bytes(&moved[offset..]).unwrap() == index);
        }
        // What follows in a stream is left there.
        let mut stream = file.clone();
        stream.extend_from_slice(b"more");
        let mut rest = &stream[..];
        let mut read = KeyIndex::read_from(&mut rest).unwrap();
        assert!(read == index && rest == b"more");
        read.append(&some).unwrap();
        index.append(&some).unwrap();
        assert!(read == index);
    }
}

/// No byte may change, and no part may go, without being noticed; nor does anything panic.
#[test]
fn damage_is_noticed() {
    for at in 0..FILE.len() {
        for bit in [1, 64] {
            let mut bytes = FILE.to_vec();
            bytes[at] ^= bit;
            let error = KeyIndex::from_bytes(&bytes).unwrap_err();
            assert!(matches!(error, Error::IndexFile { .. }), "{at}: {error}");
            let error = KeyIndex::read_from(&bytes[..]).unwrap_err();
            assert!(matches!(error, Error::IndexFile { .. }), "{at}: {error}");
            // This one takes more at its word, but nothing that does not fit.
            if let Ok(index) = KeyIndex::from_trusted_bytes(&bytes) {
                assert!((33..=48).contains(&index.len()) && index.dim() == 8, "{at}");
            }
        }
    }
    for length in 0..FILE.len() {
        let cut = &FILE[..length];
        assert!(matches!(KeyIndex::from_bytes(cut), Err(Error::IndexFile { .. })), "{length}");
        assert!(matches!(KeyIndex::read_from(cut), Err(Error::IndexFile { .. })));
    }
    let longer = [FILE, b"x"].concat();
    assert!(matches!(KeyIndex::from_bytes(&longer), Err(Error::IndexFile { .. })));
}

/// Sizes that a header claims are believed by nobody: they are met by the end of the file before there is memory for them.
#[test]
fn claims_cost_nothing() {
    let text = std::str::from_utf8(&FILE[8..1280]).unwrap();
    for shape in [
        "[2, 40, 1048576]",
        "[2, 4294967290, 8]",
        "[99999999999999999999, 40, 8]",
        "[2, 40, 0]",
        "[8]",
        "[]",
    ] {
        let forged = text.replace("[2, 40, 8]", shape);
        let mut bytes = (forged.len() as u64).next_multiple_of(8).to_le_bytes().to_vec();
        bytes.extend_from_slice(forged.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), b' ');
        bytes.extend_from_slice(&FILE[1280..]);
        assert!(matches!(KeyIndex::from_bytes(&bytes), Err(Error::IndexFile { .. })), "{shape}");
        assert!(KeyIndex::read_from(&bytes[..]).is_err());
    }
    let mut endless = u64::MAX.to_le_bytes().to_vec();
    endless.resize(1 << 16, b' ');
    assert!(KeyIndex::from_bytes(&endless).is_err());
    assert!(matches!(KeyIndex::read_from(&endless[..]), Err(Error::IndexFile { .. })));
}

#[test]
fn a_version_that_is_not_read_is_named() {
    let version = br#"\"version\": 2"#;
    let at = FILE.windows(version.len()).position(|text| text == version).unwrap();
    let mut bytes = FILE.to_vec();
    bytes[at + version.len() - 1] = b'3';
    let error = KeyIndex::from_bytes(&bytes).unwrap_err().to_string();
    assert!(error.contains("format version 3"), "{error}");
}

#[test]
fn reading_and_writing_can_be_stopped() {
    let token = CancelToken::new();
    token.cancel();
    let index = KeyIndex::from_bytes(FILE).unwrap();
    Context::new().cancel(&token).run(|| {
        assert_eq!(KeyIndex::from_bytes(FILE).unwrap_err(), Error::Interrupted);
        assert_eq!(KeyIndex::read_from(FILE).err(), Some(Error::Interrupted));
        assert_eq!(index.write_to(Vec::new()), Err(Error::Interrupted));
    });
}

/// Failures of a reader or a writer come as `Error::File` and keep their kind.
#[test]
fn readers_and_writers_that_fail_say_so() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    impl std::io::Read for Full {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(ErrorKind::ConnectionReset.into())
        }
    }
    let index = KeyIndex::read_from(FILE).unwrap();
    let errors = [index.write_to(Full).unwrap_err(), KeyIndex::read_from(Full).err().unwrap()];
    for (error, expected) in errors.iter().zip([ErrorKind::StorageFull, ErrorKind::ConnectionReset])
    {
        assert!(matches!(error, Error::File { kind, .. } if *kind == expected), "{error}");
        assert_eq!(error.class(), ErrorClass::File);
    }
}
