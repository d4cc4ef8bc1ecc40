"""OpenVINO GenAI's continuous batching pipeline; runs in its own environment."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from http_front import StepThread, front_arguments, serve


class _Pipeline:
    """The pipeline, driven step by step, and the requests in it."""

    def __init__(self, model: str, scheduler: dict[str, Any], properties: dict[str, Any]) -> None:
        config = genai.SchedulerConfig()
        for name, value in scheduler.items():
            if not hasattr(config, name):
                raise ValueError(f"OpenVINO's SchedulerConfig has no {name}")
            setattr(config, name, value)
        self._pipeline = genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._handles: dict[int, Any] = {}

    def add(self, number: int, prompt: list[int], num_outputs: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_outputs
        config.ignore_eos = True
        config.do_sample = False
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(number, ids, config)

    def step(self) -> dict[int, list[int]]:
        self._pipeline.step()
        found = {number: _new_tokens(handle) for number, handle in self._handles.items()}
        if not self._pipeline.has_non_finished_requests():
            self._handles.clear()
        return {number: tokens for number, tokens in found.items() if tokens}

    def has_work(self) -> bool:
        return bool(self._handles)


def _new_tokens(handle: Any) -> list[int]:
    """Tokens that have come since the last call."""
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return tokens


if __name__ == "__main__":
    parser = front_arguments()
    parser.add_argument("--scheduler", type=json.loads, required=True)
    parser.add_argument("--properties", type=json.loads, required=True)
    args = parser.parse_args()
    properties = {"INFERENCE_NUM_THREADS": args.threads, **args.properties}
    engine = StepThread(lambda: _Pipeline(args.model, args.scheduler, properties))
    serve(engine, args.host, args.port)
