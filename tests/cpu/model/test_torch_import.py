"""What an import of torch leaves out is there when it is wanted."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
from quickstep.ops.torch_import import complete_torch, defer_parts_of_torch

defer_parts_of_torch()
import torch

assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
deferred = [name for name in ("torch.export", "torch.distributions") if name in sys.modules]
assert "torch.distributions.normal" not in sys.modules, "nothing is deferred any more"
assert torch.distributions.Normal(0.0, 1.0).sample((3,)).shape == (3,)
assert callable(torch.export.export)
complete_torch()
assert torch.empty(4, 5, device="meta").cumsum(0).shape == (4, 5)
defer_parts_of_torch()  # once more changes nothing
print("whole", len(deferred))
"""


def test_deferred_parts_of_torch_run_when_they_are_used():
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert done.stdout.startswith("whole"), done.stderr
