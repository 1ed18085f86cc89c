"""`python -m certk_rs` is `certk`."""

import sys

from .cli import main

sys.exit(main())
