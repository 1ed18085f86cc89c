"""Paths in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "python" / "certk_rs" / "_data" / "minilm_small.safetensors"
