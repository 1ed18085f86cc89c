# Everything runs inside .venv, which is made here; needed beforehand: Python >= 3.10, Rust, make.
# .venv-older has an older transformers and kvpress, and takes all else (torch is large) from .venv.
# Stamp files in .venv say what is already done, so that a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDER := .venv-older
SOURCES := $(wildcard Cargo.lock) $(shell find Cargo.toml src crates -name '*.rs' -o -name Cargo.toml)
MATURIN := env -u CONDA_PREFIX VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin
CARGO := env PYO3_PYTHON=$(CURDIR)/$(BIN)/python cargo

.DELETE_ON_ERROR:
.PHONY: help demo test test-rust test-python test-older test-service test-aarch64 install-aarch64 test-msrv install-msrv fuzz fuzz-smoke test-asan test-tsan test-valgrind lint fmt bench clean

help:
	@echo 'make demo         build, install into .venv, prune the example cache and verify the result'
	@echo 'make test         all Rust and Python tests (installs torch and other test dependencies)'
	@echo 'make test-rust    the Rust tests only'
	@echo 'make test-python  the Python tests only'
	@echo 'make test-older   the tests that concern transformers, under transformers 4.57, and those of kvpress'
	@echo 'make test-service half a minute of mixed load on the service, with restarts and crashes; SOAK_MINUTES for more'
	@echo 'make test-aarch64 the Rust tests for aarch64, under emulation, with NEON and without (needs packages, and names those that are missing)'
	@echo 'make install-aarch64  what that needs, on Debian, as root'
	@echo 'make test-msrv    checks that all crates compile with the oldest Rust that Cargo.toml promises'
	@echo 'make install-msrv that Rust, by rustup'
	@echo 'make fuzz-smoke   the fuzz targets over their seeds and over random inputs, by any compiler (less than two minutes)'
	@echo 'make fuzz         fuzz every target in turn (needs nightly Rust and cargo-fuzz); FUZZ_SECONDS for each, 600 if not given'
	@echo 'make test-asan    the Rust tests of kernels and of the whole under AddressSanitizer (needs nightly Rust)'
	@echo 'make test-tsan    snapshots, pools and cancellation under ThreadSanitizer (needs nightly Rust with rust-src)'
	@echo 'make test-valgrind  a smaller run of inputs at the ends of memory under valgrind'
	@echo 'make lint         rustfmt, clippy, rustdoc, ruff, mypy --strict, stubtest'
	@echo 'make fmt          format Rust and Python'
	@echo 'make docs         the site of the documentation, in site/'
	@echo 'make bench        time the core (criterion), then selection against every peer'
	@echo 'make clean        remove .venv, .venv-older, target and caches'

demo: $(VENV)/.installed
	@echo '== certk demo'
	$(BIN)/certk demo

test: test-rust test-service test-python test-older

test-rust: $(VENV)/.tools
	@echo '== Rust tests'
	$(CARGO) test --release --workspace --all-features

test-python: $(VENV)/.dev
	@echo '== Python tests'
	$(BIN)/python -m pytest

SOAK_MINUTES ?= 0.5
test-service: $(VENV)/.installed
	@echo '== the service under load, checked by a client of its own'
	$(CARGO) build --release -p certk-service
	$(BIN)/python examples/service/soak.py --program target/release/certk-service --minutes $(SOAK_MINUTES)
	$(BIN)/python tests/support/service_page.py --program target/release/certk-service

test-older: $(OLDER)/.dev
	@echo '== Python tests with an older transformers, and with kvpress'
	$(OLDER)/bin/python -m pytest tests/transformers

# Debian's compiler has the standard library of other machines as a package. Without -L the emulator finds that of libc6:arm64.
AARCH64 := aarch64-unknown-linux-gnu
AARCH64_RUSTC ?= /usr/bin/rustc
AARCH64_PACKAGES := rustc-web libstd-rust-web-dev:arm64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static libc6:arm64

ON_AARCH64 := env RUSTC=$(AARCH64_RUSTC) CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64-static CERTK_EMULATED=1 CERTK_BITS=$(CURDIR)/target/bits.txt \
	cargo test --release --target $(AARCH64)

install-aarch64:
	dpkg --add-architecture arm64
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(AARCH64_PACKAGES)

test-aarch64: $(VENV)/.tools
	@command -v cargo > /dev/null || { echo 'Rust is needed: cargo is not on the PATH'; exit 1; }
	@missing=; \
	command -v aarch64-linux-gnu-gcc > /dev/null || missing="$$missing aarch64-linux-gnu-gcc"; \
	[ -e /usr/aarch64-linux-gnu/include/stdint.h ] || missing="$$missing the headers of C for aarch64-linux-gnu-gcc"; \
	command -v qemu-aarch64-static > /dev/null || missing="$$missing qemu-aarch64-static"; \
	[ -e /lib/ld-linux-aarch64.so.1 ] || missing="$$missing /lib/ld-linux-aarch64.so.1"; \
	ls "$$($(AARCH64_RUSTC) --print target-libdir --target $(AARCH64) 2> /dev/null)"/libstd-*.rlib > /dev/null 2>&1 || \
		missing="$$missing the standard library of $(AARCH64) for $(AARCH64_RUSTC)"; \
	[ -z "$$missing" ] || { echo "missing:$$missing"; \
		echo 'On Debian, as root: make install-aarch64'; exit 1; }
	@echo '== answers of this processor'
	rm -f target/bits.txt
	CERTK_EMULATED=1 CERTK_BITS=$(CURDIR)/target/bits.txt $(CARGO) test --release --workspace --all-features --test same_bits
	@echo '== Rust tests for aarch64, under emulation'
	CERTK_LEVEL=neon $(ON_AARCH64) --lib --tests
	@echo '== the same with portable code'
	CERTK_LEVEL=portable $(ON_AARCH64) --lib --tests
	@echo '== kernels on a processor without inner products of bytes, and with those of signed ones'
	QEMU_CPU=cortex-a72 $(ON_AARCH64) --lib kernels::
	QEMU_CPU=neoverse-n1 $(ON_AARCH64) --lib kernels::

# By the release that rust-version names and by no newer one: what passes with another says nothing of it.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"$$/\1/p' Cargo.toml)
install-msrv:
	rustup run $(MSRV) rustc --version || rustup toolchain install $(MSRV) --profile minimal

test-msrv: $(VENV)/.tools
	@rustup run $(MSRV) rustc --version 2> /dev/null | grep -F 'rustc $(MSRV).' || \
		{ echo 'missing: Rust $(MSRV). With rustup: make install-msrv'; exit 1; }
	@echo '== the crate alone, then with every feature and member, by Rust $(MSRV)'
	rustup run $(MSRV) $(CARGO) check --locked --target-dir target/msrv
	rustup run $(MSRV) $(CARGO) check --locked --workspace --all-features --target-dir target/msrv

# A workspace of its own, with checks of overflow. What it builds may be used again.
fuzz-smoke:
	@echo '== fuzz targets over seeds and random inputs'
	cargo test --manifest-path fuzz/Cargo.toml --target-dir target/fuzz --release --locked --no-default-features

FUZZ_SECONDS ?= 600
fuzz:
	@command -v cargo-fuzz > /dev/null || { echo 'cargo-fuzz is needed: cargo install cargo-fuzz'; exit 1; }
	cd fuzz && for target in attention certify index_file saved_index search select service; do \
		mkdir -p corpus/$$target && \
		cargo +nightly fuzz run $$target corpus/$$target seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -dict=numbers.dict -max_len=4096 -timeout=25 || exit 1; \
	done

# The standard library of nightly is without instrumentation, which finds less in it and nothing less in what is ours.
test-asan:
	env RUSTFLAGS=-Zsanitizer=address CERTK_EMULATED=1 cargo +nightly test --release --target-dir target/asan \
		--target "$$(rustc -vV | sed -n 's/host: //p')" --lib --test hardened

# Here the standard library must have instrumentation, too: what its locks put in order would look like a race.
test-tsan:
	env RUSTFLAGS=-Zsanitizer=thread CERTK_EMULATED=1 cargo +nightly test -Zbuild-std --release --target-dir target/tsan \
		--target "$$(rustc -vV | sed -n 's/host: //p')" --features portable-fma --test contexts --test hosts
	env RUSTFLAGS=-Zsanitizer=thread CERTK_EMULATED=1 cargo +nightly test -Zbuild-std --release --target-dir target/tsan \
		--target "$$(rustc -vV | sed -n 's/host: //p')" --features portable-fma --test soundness -- snapshots

test-valgrind:
	@command -v valgrind > /dev/null || { echo 'valgrind is needed'; exit 1; }
	@echo '== kernels under valgrind, which knows no AVX-512'
	binary=$$(cargo test --release --test hardened --no-run 2>&1 | sed -n 's/.*(\(.*hardened-.*\)).*/\1/p') && \
		env CERTK_EMULATED=1 \
		valgrind --quiet --error-exitcode=1 "$$binary" --test-threads 1 rows_of_every vectors_of_every

lint: $(VENV)/.dev
	@echo '== rustfmt'
	$(CARGO) fmt --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	@echo '== clippy, of the crate alone, then with every feature and member'
	$(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy --workspace --all-targets --all-features -- -D warnings
	@echo '== rustdoc'
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --no-deps --quiet --all-features
	@echo '== ruff'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo '== mypy'
	$(BIN)/mypy
	@echo '== the stub against the built module'
	MYPYPATH=python $(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml certk_rs._native

fmt: $(VENV)/.dev
	$(CARGO) fmt
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A build without warnings, or none; then every link of every page is followed.
.PHONY: docs
docs: $(VENV)/.docs
	@echo '== the pages'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo '== the documentation of the crate'
	rm -rf target/doc
	$(CARGO) doc --target-dir target --no-deps --all-features --quiet
	cp -r target/doc site/rust
	$(BIN)/python docs/site/check_site.py site

$(VENV)/.docs: pyproject.toml $(VENV)/.installed
	@echo '== installing what makes the documentation into $(VENV)'
	$(MATURIN) develop --release --extras docs
	@touch $@

bench: $(VENV)/.dev
	@echo '== the core alone'
	$(CARGO) bench
	@echo '== against every peer'
	$(BIN)/python benches/bench_select.py --plot
	@echo '== attention and search against torch'
	$(BIN)/python benches/bench_attention.py --save
	@echo '== operators and models against torch'
	$(BIN)/python benches/bench_models.py --save
	@echo '== guards of dropped keys'
	$(BIN)/python benches/bench_guard.py --save
	@echo '== decoding from files'
	$(BIN)/python benches/bench_offload.py --save
	@echo '== prune against a script of torch'
	$(BIN)/python benches/bench_prune.py --growth --save

clean:
	rm -rf $(VENV) $(OLDER) target python/certk_rs/_native*.so python/certk_rs/_native*.pyd
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf site docs/site/__pycache__

# The package with its run-time dependencies; edits of Python files need no new build.
$(VENV)/.installed: $(SOURCES) pyproject.toml | $(VENV)/.tools
	@echo '== building the extension and installing certk-rs into $(VENV)'
	$(MATURIN) develop --release
	@touch $@

# The same, with everything that the tests and lints need.
$(VENV)/.dev: pyproject.toml $(VENV)/.installed
	@echo '== installing the test dependencies into $(VENV) (torch is large)'
	$(MATURIN) develop --release --extras dev
	@touch $@

# Its own site-packages come first on the path, then those of .venv, with what their .pth files add.
$(OLDER)/.dev: tests/transformers/older-requirements.txt pyproject.toml | $(VENV)/.dev
	@echo '== making $(OLDER): an older transformers, and kvpress'
	$(BIN)/python -m venv --clear --without-pip $(OLDER)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(OLDER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(BIN)/python -m pip --python $(OLDER)/bin/python install --quiet --no-warn-conflicts \
		-r tests/transformers/older-requirements.txt
	@touch $@

$(VENV)/.tools:
	@command -v cargo > /dev/null || { echo 'Rust is needed: cargo is not on the PATH'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Python >= 3.10 is needed; name one: make PYTHON=python3.12 ...'; exit 1; }
	@echo '== making $(VENV)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'pip>=22.3' 'maturin>=1.9.4,<2'
	@touch $@
