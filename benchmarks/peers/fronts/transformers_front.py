"""transformers: static batches, padded on the left, greedy; runs in its own environment."""

from __future__ import annotations

import torch
from http_front import StepThread, front_arguments, serve
from transformers import AutoModelForCausalLM

# How long an idle engine waits for others after a first request: a static batch cannot grow.
_GATHER_S = 0.005


class _StaticBatches:
    """What `generate` computes, a step at a time, so that tokens stream at any batch size."""

    def __init__(self, model: str, batch: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._batch = batch
        self._waiting: list[tuple[int, list[int], int]] = []
        self._running: list[tuple[int, list[int], int]] = []
        self._num_decoded = 0

    def add(self, number: int, prompt: list[int], num_outputs: int) -> None:
        self._waiting.append((number, prompt, num_outputs))

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @torch.inference_mode()
    def step(self) -> dict[int, list[int]]:
        if not self._running:
            self._begin()
        places = (self._mask.cumsum(1) - 1).clamp_min(0)[:, -self._inputs.shape[1] :]
        out = self._model(
            input_ids=self._inputs,
            attention_mask=self._mask,
            position_ids=places,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        self._inputs = out.logits[:, -1].argmax(-1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(self._inputs)], dim=1)
        self._num_decoded += 1
        chosen = self._inputs[:, 0].tolist()
        found = {
            number: [token]
            for (number, _, num_outputs), token in zip(self._running, chosen, strict=True)
            if self._num_decoded <= num_outputs
        }
        if self._num_decoded >= max(num_outputs for _, _, num_outputs in self._running):
            self._running = []
        return found

    def _begin(self) -> None:
        self._running = self._waiting[: self._batch]
        self._waiting = self._waiting[self._batch :]
        longest = max(len(prompt) for _, prompt, _ in self._running)
        self._inputs = torch.zeros((len(self._running), longest), dtype=torch.int64)
        self._mask = torch.zeros_like(self._inputs)
        for row, (_, prompt, _) in enumerate(self._running):
            self._inputs[row, longest - len(prompt) :] = torch.tensor(prompt)
            self._mask[row, longest - len(prompt) :] = 1
        self._cache = None
        self._num_decoded = 0


if __name__ == "__main__":
    parser = front_arguments()
    parser.add_argument("--batch", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = StepThread(lambda: _StaticBatches(args.model, args.batch), _GATHER_S)
    serve(engine, args.host, args.port)
