"""The model card: `model_card.md` filled in with what a run used and what was measured.

Called by `quality`; every number comes from the checkpoint, the token arrays or the measurement.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from tools.demo_model import dataset
from tools.demo_model.corpus import HELD_OUT_MODULES
from tools.demo_model.facts import MAX_FACT_OBJECTS
from tools.demo_model.network import Shape

_TEMPLATE = Path(__file__).parent / "model_card.md"


def write_card(run: Path, folder: Path, measured: Mapping[str, float], note: str) -> None:
    """Write `folder`/README.md for the model trained in `run`; `note` is said about that run."""
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    arrays = dataset.load_arrays(run)
    card = _TEMPLATE.read_text(encoding="utf-8").format(
        **measured,
        note=note,
        **checkpoint["account"],
        **asdict(Shape()),
        parameters=sum(weight.numel() for weight in checkpoint["model"].values()),
        library_tokens=arrays.library.size,
        test_tokens=arrays.tests.size,
        chat_tokens=arrays.chat.size,
        num_facts=MAX_FACT_OBJECTS,
        held_out=", ".join(f"`{module}`" for module in HELD_OUT_MODULES),
        python=platform.python_version(),
        torch=torch.__version__.split("+")[0],
        seed=dataset.SEED,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
