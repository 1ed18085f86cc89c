"""The experiments of the two papers, one module each; `experiments/reproduce.py` runs them."""
