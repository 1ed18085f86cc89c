#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| certk_fuzz::saved_index::run(input));
