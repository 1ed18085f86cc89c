"""Pruning jobs: `plan` says what to do, `prune` does one file, `run` all, `report` tells."""
