"""Shared parts of benchmarks: rows, peers, an oracle, a clock, the machine and a table."""
