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

# But for the list of the public interface, which make lint holds the crate against.
RUST_TESTS := $(CARGO) test --profile tested --workspace --exclude certk-public-api --all-features
# Processes that run the Python tests, a file each at a time, so that what a file has set up is set up once. In the order of names: xdist's
# own puts files of few tests last, and those take longest.
WORKERS ?= 2
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What can be done side by side is, in the recipes; tests beside a load test would disturb each other.
.NOTPARALLEL:

.DELETE_ON_ERROR:
.PHONY: help demo test test-rust test-python test-older test-service test-candle test-aarch64 test-aarch64-portable install-aarch64 prove install-gappa install-coq test-msrv install-msrv fuzz fuzz-smoke test-asan test-tsan test-miri test-valgrind lint fmt bench reproduce wheels sdist test-wheel test-wheel-aarch64 test-sdist deny clean

help:
	@echo 'make demo         build, install into .venv, prune the example cache and verify the result'
	@echo 'make test         all Rust and Python tests (installs torch and other test dependencies)'
	@echo 'make test-fast    the core in less than two minutes, once it is built: unit tests, soundness, indexes, files (no torch)'
	@echo 'make test-heavy   what make test leaves out: sweeps over millions of rows and whatever takes minutes, Rust and Python'
	@echo 'make test-rust    the Rust tests only'
	@echo 'make test-python  the Python tests only'
	@echo 'make test-older   the tests of kvpress, and a part of those of models, under transformers 4.57'
	@echo 'make test-service some seconds of load on the example service, whose answers are compared; LOAD_SECONDS for more'
	@echo 'make test-candle  the example of candle, beside candle in float64 (the build takes minutes)'
	@echo 'make test-aarch64 the Rust tests for aarch64 with NEON, under emulation (needs packages, and names those that are missing)'
	@echo 'make test-aarch64-portable  the same with portable code'
	@echo 'make install-aarch64  what that needs, on Debian, as root'
	@echo 'make prove        proves the rounding of the exponentials by Gappa, and theorems by Coq; recomputes the budget of docs/soundness.md'
	@echo 'make install-gappa install-coq  what that needs, on Debian, as root'
	@echo 'make test-msrv    checks that all crates compile with the oldest Rust that Cargo.toml promises'
	@echo 'make install-msrv that Rust, by rustup'
	@echo 'make fuzz-smoke   the fuzz targets over their seeds and over random inputs, by any compiler (less than two minutes)'
	@echo 'make fuzz         fuzz every target in turn (needs nightly Rust and cargo-fuzz); FUZZ_SECONDS for each, 600 if not given'
	@echo 'make test-asan    the Rust tests of kernels and of the whole under AddressSanitizer (needs nightly Rust)'
	@echo 'make test-tsan    snapshots, pools and cancellation under ThreadSanitizer (needs nightly Rust with rust-src)'
	@echo 'make test-miri    rows of strided views under Miri, which sees aliasing (needs nightly Rust with miri and rust-src)'
	@echo 'make test-valgrind  a smaller run of inputs at the ends of memory under valgrind'
	@echo 'make lint         rustfmt, clippy, rustdoc, the list of the public interface, ruff, mypy --strict, stubtest'
	@echo 'make fmt          format Rust and Python'
	@echo 'make docs         the site of the documentation, in site/'
	@echo 'make bench        time the core (criterion), then selection against every peer'
	@echo 'make reproduce    run the experiments of the papers, into experiments/outcomes (minutes)'
	@echo 'make wheels       wheels for Linux, x86_64 and aarch64, that can be published, into dist/ (WHEEL_TARGETS for others); make sdist'
	@echo 'make test-wheel   what they hold, and the one for this machine in environments of its own; test-sdist, test-wheel-aarch64'
	@echo 'make deny         licences, sources and versions of all crates that are built from (needs cargo-deny)'
	@echo 'make clean        remove .venv, .venv-older, target and caches'

demo: $(VENV)/.installed
	@echo '== certk demo'
	$(BIN)/certk demo

# The Rust tests are compiled while what the Python tests need is downloaded.
test: $(VENV)/.tools
	@$(MAKE) rust-tests & compiling=$$!; trap "kill $$compiling" INT TERM; \
	$(MAKE) $(OLDER)/.dev; made=$$?; wait $$compiling && exit $$made
	$(MAKE) test-rust test-service test-python test-older

.PHONY: rust-tests test-fast test-heavy
# Each room of the library, beside exact arithmetic where it proves something; of what is slow only a part.
FAST := \
	tests/structure/test_architecture_python.py tests/structure/test_architecture_rust.py \
	tests/structure/test_signatures.py \
	tests/select/test_oracle.py tests/select/test_select.py tests/select/test_refusals.py tests/select/test_vectors.py \
	tests/select/test_real_rows.py tests/select/test_keepset_queries.py \
	tests/select/test_soundness.py::test_killers tests/select/test_soundness.py::test_each_family_in_float32 \
	tests/select/test_soundness.py::test_whole_blocks \
	tests/index/test_search_soundness.py::test_random_rows tests/index/test_key_index.py \
	tests/attention/test_attention.py \
	tests/files/test_cache_format.py tests/files/test_prune.py tests/files/test_audit.py tests/files/test_record.py
test-fast: $(VENV)/.fast
	@echo '== Rust unit tests'
	$(CARGO) test --profile tested --all-features --lib
	@echo '== Python tests of the core'
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(FAST)

test-heavy: $(VENV)/.dev $(VENV)/.bench $(OLDER)/.dev
	@echo '== Rust tests that are ignored otherwise'
	$(RUST_TESTS) --lib --tests -- --ignored
	@echo '== Python tests that are marked heavy'
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m heavy
	@echo '== all Python tests of models under an older transformers'
	$(OLDER)/bin/python -m pytest $(SIDE_BY_SIDE) -m 'not older or heavy' tests/transformers
	$(MAKE) test-candle
	@if command -v qemu-aarch64-static > /dev/null; then $(MAKE) test-aarch64-portable; \
		else echo '== NOT TESTED: portable code on aarch64. On Debian, as root: make install-aarch64'; fi

rust-tests: $(VENV)/.tools
	@echo '== compiling the Rust tests'
	@$(RUST_TESTS) --no-run --quiet

test-rust: $(VENV)/.tools
	@echo '== Rust tests'
	$(RUST_TESTS)

test-python: $(VENV)/.dev
	@echo '== Python tests'
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

LOAD_SECONDS ?= 8
# An example is named for the features that the dependencies of tests switch on: with them all but the program itself is there from the Rust
# tests, and without them most of it would be compiled again.
test-service: $(VENV)/.installed
	@echo '== the example service under load'
	$(CARGO) build --profile tested --workspace --all-features --bin certk-service --example select
	$(BIN)/python examples/service/load.py --program target/tested/certk-service --seconds $(LOAD_SECONDS)

# A workspace of its own, whose build takes minutes; make test-heavy runs it.
test-candle:
	@echo '== the example of candle'
	cargo test --manifest-path examples/candle/Cargo.toml --target-dir target/candle --release --locked

# kvpress, and what differs between versions of transformers. make test-heavy runs all tests of models there.
test-older: $(OLDER)/.dev
	@echo '== Python tests with kvpress, and a part of those of models, under an older transformers'
	$(OLDER)/bin/python -m pytest $(SIDE_BY_SIDE) -m 'older and not heavy' tests/transformers

# Debian's compiler has the standard library of other machines as a package. Without -L the emulator finds that of libc6:arm64.
AARCH64 := aarch64-unknown-linux-gnu
AARCH64_RUSTC ?= /usr/bin/rustc
AARCH64_PACKAGES := rustc-web libstd-rust-web-dev:arm64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static libc6:arm64

ON_AARCH64 := env RUSTC=$(AARCH64_RUSTC) CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64-static CERTK_EMULATED=1 CERTK_BITS=$(CURDIR)/target/bits.txt \
	cargo test --profile tested --target $(AARCH64) --features files,montecarlo

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
	CERTK_EMULATED=1 CERTK_BITS=$(CURDIR)/target/bits.txt $(RUST_TESTS) --test soundness same_bits
	@echo '== Rust tests for aarch64, under emulation'
	CERTK_LEVEL=neon $(ON_AARCH64) --lib --tests
	@echo '== kernels on a processor without inner products of bytes, and with those of signed ones'
	QEMU_CPU=cortex-a72 $(ON_AARCH64) --lib kernels::
	QEMU_CPU=neoverse-n1 $(ON_AARCH64) --lib kernels::

# A second lap, over code that x86-64 runs natively at its level `portable`.
test-aarch64-portable: $(VENV)/.tools
	@echo '== Rust tests for aarch64 with portable code, under emulation'
	CERTK_LEVEL=portable $(ON_AARCH64) --lib --tests

install-gappa:
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends gappa

install-coq:
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends coq

# A run of all tests passes over the proofs where Gappa or Coq is missing; this does not.
prove: $(VENV)/.dev
	@command -v gappa > /dev/null || { echo 'missing: gappa'; echo 'On Debian, as root: make install-gappa'; exit 1; }
	@command -v coqc > /dev/null || { echo 'missing: coqc'; echo 'On Debian, as root: make install-coq'; exit 1; }
	@echo '== rounding of the exponentials by Gappa, the error budget, and theorems by Coq'
	$(BIN)/python -m pytest -m '' tests/structure/test_gappa.py tests/structure/test_soundness_budget.py tests/structure/test_coq.py

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
	env CERTK_FUZZ_INPUTS=10000 \
		cargo test --manifest-path fuzz/Cargo.toml --target-dir target/fuzz --release --locked --no-default-features replay

FUZZ_SECONDS ?= 600
fuzz:
	@command -v cargo-fuzz > /dev/null || { echo 'cargo-fuzz is needed: cargo install cargo-fuzz'; exit 1; }
	cd fuzz && for target in attention certify index_file saved_index search select; do \
		mkdir -p corpus/$$target && \
		cargo +nightly fuzz run $$target corpus/$$target seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -dict=numbers.dict -max_len=4096 -timeout=25 || exit 1; \
	done

# The standard library of nightly is without instrumentation, which finds less in it and nothing less in what is ours.
test-asan:
	for part in '--lib' '--test soundness guard'; do \
		env RUSTFLAGS=-Zsanitizer=address CERTK_EMULATED=1 cargo +nightly test --release --target-dir target/asan \
			--target "$$(rustc -vV | sed -n 's/host: //p')" --features files,montecarlo $$part || exit 1; \
	done

# Here the standard library must have instrumentation, too: what its locks put in order would look like a race.
test-tsan:
	env RUSTFLAGS=-Zsanitizer=thread CERTK_EMULATED=1 cargo +nightly test -Zbuild-std --release --target-dir target/tsan \
		--target "$$(rustc -vV | sed -n 's/host: //p')" --features files,montecarlo,portable-fma \
		--test runtime --test soundness -- contexts hosts snapshots

# Which slices are made of borrowed memory: what one is made of may be written by nobody else, gaps included.
test-miri:
	env CERTK_LEVEL=portable MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-deterministic-floats' \
		cargo +nightly miri test --target-dir target/miri --features ndarray --lib -- rows::views kernels::strided

test-valgrind:
	@command -v valgrind > /dev/null || { echo 'valgrind is needed'; exit 1; }
	@echo '== kernels under valgrind, which knows no AVX-512'
	binary=$$(cargo test --release --features files,montecarlo --test soundness --no-run 2>&1 | sed -n 's/.*(\(.*soundness-.*\)).*/\1/p') && \
		env CERTK_EMULATED=1 \
		valgrind --quiet --error-exitcode=1 "$$binary" --test-threads 1 rows_of_every vectors_of_every

lint: $(VENV)/.dev
	@echo '== rustfmt'
	$(CARGO) fmt --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) fmt --manifest-path examples/candle/Cargo.toml --check
	@echo '== clippy, of the crate alone, then with every feature and member'
	$(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy --workspace --all-targets --all-features -- -D warnings
	@echo '== rustdoc'
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --no-deps --quiet --all-features
	@echo '== the list of the public interface'
	$(CARGO) test --quiet -p certk-public-api
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

$(VENV)/.docs: $(VENV)/.wanted-docs
	@echo '== installing what makes the documentation into $(VENV)'
	$(BIN)/python -m pip install --quiet -r $<
	@touch $@

bench: $(VENV)/.dev $(VENV)/.bench
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
	$(BIN)/python benches/bench_prune.py --save

reproduce: $(VENV)/.dev
	@echo '== experiments of the papers'
	$(BIN)/python experiments/reproduce.py
	$(BIN)/python experiments/window_fit.py python/certk_rs/_data/minilm_small.safetensors

# What is published is built in an environment of its own, by one version of each tool.
WHEEL_TARGETS := x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
BUILD_VENV := .venv-build

wheels: $(BUILD_VENV)/.tools
	$(BUILD_VENV)/bin/python packaging/wheels.py $(WHEEL_TARGETS)

sdist: $(BUILD_VENV)/.tools
	rm -f dist/*.tar.gz
	$(BUILD_VENV)/bin/maturin sdist --out dist

test-wheel:
	@echo '== wheels, in environments outside the repository'
	$(PYTHON) tests/install/try_wheel.py dist

test-wheel-aarch64:
	@echo '== the aarch64 wheel under emulation, against the x86_64 wheel'
	$(PYTHON) tests/install/aarch64_root.py dist

test-sdist: sdist
	@echo '== the source archive, built outside the repository'
	$(PYTHON) tests/install/try_sdist.py dist/*.tar.gz

# With the network, cargo-deny looks for advisories, too: `make deny DENY='advisories licenses bans sources'`.
DENY ?= licenses bans sources
deny:
	@command -v cargo-deny > /dev/null || { echo 'cargo-deny is needed: cargo install cargo-deny'; exit 1; }
	cargo deny --locked --workspace check $(DENY)

clean:
	rm -rf $(VENV) $(OLDER) $(BUILD_VENV) target dist python/certk_rs/_native*.so python/certk_rs/_native*.pyd
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python tests -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf site docs/site/__pycache__

# The package with its run-time dependencies; edits of Python files need no new build.
$(VENV)/.installed: $(SOURCES) pyproject.toml | $(VENV)/.tools
	@echo '== building the extension and installing certk-rs into $(VENV)'
	$(MATURIN) develop --profile tested
	@touch $@

# The same, with everything that the tests and lints need. What that is pip reads from a list, as nothing is to be built again.
$(VENV)/.dev: $(VENV)/.wanted-dev
	@echo '== installing the test dependencies into $(VENV) (torch is large)'
	$(BIN)/python -m pip install --quiet -r $<
	@touch $@

$(VENV)/.bench: $(VENV)/.wanted-bench
	@echo '== installing peers of the benchmarks into $(VENV)'
	$(BIN)/python -m pip install --quiet -r $<
	@touch $@

# And with what the tests of the core need.
$(VENV)/.fast: $(VENV)/.wanted-dev
	grep -E '^(fsspec|hypothesis|ml.dtypes|pytest|pytest-xdist|python-flint)\W' $< > $@.txt
	$(BIN)/python -m pip install --quiet -r $@.txt mpmath
	@touch $@

.PRECIOUS: $(VENV)/.wanted-%
$(VENV)/.wanted-%: $(VENV)/.installed
	@$(BIN)/python -c 'import importlib.metadata as m; print(*[line.partition(";")[0] for line in m.requires("certk-rs") if "$*" in line.partition("extra ==")[2]], sep="\n")' > $@

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

$(BUILD_VENV)/.tools: packaging/requirements.txt
	@echo '== making $(BUILD_VENV)'
	$(PYTHON) -m venv $(BUILD_VENV)
	$(BUILD_VENV)/bin/python -m pip install --quiet -r packaging/requirements.txt
	@touch $@
