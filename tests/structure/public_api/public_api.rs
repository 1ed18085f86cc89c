//! Every public item of the crate, a line each, is in `public_api.txt`, so that a change of the interface is seen by whoever
//! makes it and by whoever reads it.
//!
//! rustdoc lists the items, as JSON that compilers write under `RUSTC_BOOTSTRAP`, and each in a version of its own. The list is
//! compared by one release of the compiler only: where it must be compared (`CERTK_SAME_RUST`, which `.ci/run` sets) another release
//! is a failure; elsewhere the test says that nothing was compared.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use public_api::{Builder, MINIMUM_NIGHTLY_RUST_VERSION};
use similar::TextDiff;

/// The release that the list is compared by, and the version of what its rustdoc writes, which `public-api` reads.
const RELEASE: &str = "rustc 1.95.";
const FORMAT: u64 = 57;
const BLESS: &str = "CERTK_BLESS=1 cargo test --release -p certk-public-api";

fn main_folder() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(3).expect("three folders below the root").to_path_buf()
}

fn said_by(mut command: Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed:\n{errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// The items, as the compiler of this test sees them with every feature, and what the documentation of each says.
/// None of another release, where that is no failure.
fn items() -> Option<Vec<(String, String)>> {
    let mut version = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    version.arg("--version");
    let compiler = said_by(version);
    let advice = "Run it with that release, or raise RELEASE, FORMAT and the version of public-api together (which asks for the rustdoc-types of one FORMAT), \
                  and bless the list.";
    if !compiler.starts_with(RELEASE) {
        let told = format!(
            "NOT COMPARED: the public interface. The list is that of {RELEASE}x, and this is {compiler}{advice}"
        );
        assert!(env::var_os("CERTK_SAME_RUST").is_none(), "{told}");
        eprintln!("{told}");
        return None;
    }
    // A folder of its own: cargo still holds the other while tests are run with some of its commands, and flags differ.
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("public-api");
    let mut rustdoc = Command::new(env!("CARGO"));
    rustdoc.current_dir(main_folder());
    rustdoc.args([
        "rustdoc",
        "--quiet",
        "--locked",
        "-p",
        "certk-rs",
        "--lib",
        "--all-features",
        "--target-dir",
    ]);
    rustdoc.arg(&target).args(["--", "-Zunstable-options", "--output-format=json"]);
    rustdoc.env("RUSTC_BOOTSTRAP", "1").env_remove("RUSTDOCFLAGS");
    said_by(rustdoc);
    let json = target.join("doc").join("certk_rs.json");
    let text = fs::read_to_string(&json).expect("what rustdoc wrote");
    let written: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        written["format_version"], FORMAT,
        "NOT COMPARED: the public interface. rustdoc writes another version than public-api reads (it wants a compiler from \
         {MINIMUM_NIGHTLY_RUST_VERSION} on). {advice}"
    );
    let api = Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .build()
        .unwrap_or_else(|error| panic!("public-api reads what rustdoc wrote: {error}"));
    let documentation = |id: u32| written["index"][id.to_string()]["docs"].as_str().unwrap_or("");
    let lines = api.items().map(|item| (item.to_string(), documentation(item.id().0).to_string()));
    Some(lines.collect())
}

/// Functions of modules, and methods of an index, without an example: it is where readers look first. Properties (a number, a name or a
/// shape of `&self` alone) explain themselves. What traits ask for is not documented, but for what makes two indexes equal; whatever
/// else there is must be, as a lint has it.
fn without_example(items: &[(String, String)]) -> Vec<&str> {
    let looked_at = |line: &str| {
        let path = line.strip_prefix("pub fn certk_rs::").and_then(|rest| rest.split('(').next());
        path.is_some_and(|path| {
            let property = ["usize", "u32", "bool", "&'static str", "&[usize]"]
                .iter()
                .any(|kind| line.ends_with(&format!("(&self) -> {kind}")));
            let of_index = path.starts_with("KeyIndex<") && !path.ends_with("::eq") && !property;
            of_index || !path.contains(char::is_uppercase)
        })
    };
    let lacking = items.iter().filter(|(line, documentation)| {
        looked_at(line) && !documentation.is_empty() && !documentation.contains("```")
    });
    lacking.map(|(line, _)| line.as_str()).collect()
}

#[test]
fn the_public_interface_is_as_the_list_says() {
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("public_api.txt");
    let Some(items) = items() else { return };
    let lacking = without_example(&items);
    assert!(lacking.is_empty(), "an example is wanted, with an assertion: {lacking:#?}");
    let items: Vec<String> = items.into_iter().map(|(line, _)| line).collect();
    // What would be lost with one more option left out of the builder, and what would drown it.
    for line in [
        "pub fn certk_rs::select(",
        "impl core::default::Default for certk_rs::Context",
        "impl core::error::Error for certk_rs::Error",
    ] {
        assert!(items.iter().any(|each| each.starts_with(line)), "missing: {line}");
    }
    for other in [" for T where", "core::marker::Unpin", "core::marker::Send for"] {
        assert!(!items.iter().any(|each| each.contains(other)), "of every type: {other}");
    }
    let found = items.join("\n") + "\n";
    if env::var_os("CERTK_BLESS").is_some() {
        fs::write(&list, found).expect("the list is written");
        return;
    }
    let said = fs::read_to_string(&list).expect("the list is there").replace("\r\n", "\n");
    let differences = TextDiff::from_lines(&said, &found);
    let shown = differences
        .unified_diff()
        .context_radius(0)
        .header("public_api.txt", "the crate")
        .to_string();
    assert!(
        shown.is_empty(),
        "The public interface has changed. If that was meant, write it to CHANGELOG.md and bless it:\n  {BLESS}\n\n{shown}"
    );
}
