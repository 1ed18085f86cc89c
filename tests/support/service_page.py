"""Runs what the page of the service shows: it is started as shown, and asked as shown.

    python tests/support/service_page.py --program target/release/certk-service

Two things are not as for a reader: the program is built already, and its port is a free one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from doc_pages import blocks
from repository import ROOT

sys.path.insert(0, str(ROOT / "examples" / "service"))
from launch import Service

SHOWN_PORT = "8080"


def run_page(page: str, program: Path) -> None:
    """Start the service by the first block of a page, and run the others as the shell would."""
    start, *asked = [each for each in blocks((ROOT / page).read_text()) if each.language == "sh"]
    command, _, options = start.text.strip().partition(" -- ")
    assert command == "cargo run --release -p certk-service"
    assert asked, f"{page} asks nothing"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        service = Service(program, Path(folder) / "log", *shlex.split(options))
        service.start()
        try:
            for block in asked:
                assert f":{SHOWN_PORT}/" in block.text
                text = block.text.replace(f":{SHOWN_PORT}/", f":{service.port}/")
                script = f"set -euo pipefail\n{text}"
                done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
                assert done.returncode == 0, done.stderr.decode()
                print(done.stdout.decode())
                # Of the row that it sends, as the README of the repository shows.
                assert json.loads(done.stdout)["indices"] == [0, 2]
        finally:
            assert service.end() == 0


def main() -> None:
    """Run the page by a program that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=Path, required=True, help="the service, built")
    run_page("examples/service/README.md", parser.parse_args().program.resolve())


if __name__ == "__main__":
    main()
