"""A module with a certified operator, compiled by torch: the same bits as without.

`python examples/compiled.py` (torch.compile needs a C++ compiler)
"""

from __future__ import annotations

import torch

import certk_rs.torch as ct


class Attend(torch.nn.Module):
    """Certified attention between two projections."""

    def __init__(self, width: int, heads: int) -> None:
        """As in a transformer: `heads` heads of `width / heads` entries."""
        super().__init__()
        self.heads = heads
        self.inward = torch.nn.Linear(width, 3 * width)
        self.outward = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, m, width) to the same, and the proven tail mass (batch, heads, m)."""
        batch, m, width = x.shape
        parts = self.inward(x).reshape(batch, m, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = ct.attention(q, k, v, eps, causal=True)
        out = found.out.transpose(1, 2).reshape(batch, m, width)
        return self.outward(out), found.tail_mass_upper


def main() -> None:
    """Compile as one graph, and compare with the module as it is."""
    torch.manual_seed(0)
    eps = 0.05
    module = Attend(64, 4).eval()
    compiled = torch.compile(module, fullgraph=True)
    with torch.inference_mode():
        # The second length compiles anew, for every length to come.
        for m in (20, 48, 36):
            x = 3 * torch.randn(2, m, 64)
            (out, mass), (compiled_out, compiled_mass) = module(x, eps), compiled(x, eps)
            print(
                f"{m:2} tokens: outputs equal {torch.equal(out, compiled_out)}, certificates equal "
                f"{torch.equal(mass, compiled_mass)}, largest proven tail mass {mass.max():.4f} "
                f"of {eps:g}"
            )


if __name__ == "__main__":
    main()
