"""What every benchmark needs: rows, peers, an oracle, a clock, the machine and a table."""
