#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| certk_fuzz::service::run(input));
