"""Beam search against transformers' own: the same tokens and the same scores."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from quickstep import LLM, BeamSearchParams
from quickstep.bundled import demo_path

PROMPTS = ["def add(first, second):\n    return", "import os\n", "class Stack:\n    def"]


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", dtype="float32", num_threads=2) as llm:
        yield llm
