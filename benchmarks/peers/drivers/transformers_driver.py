"""transformers' generate: one stream, or static batches of 16 padded on the left."""

from __future__ import annotations

import argparse
import time

from protocol import Run, Work, serve_driver

_BATCH = 16


def main() -> None:
    """Drive one checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", required=True)
    args = parser.parse_args()

    def opened():
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(args.threads)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)

        class Marks:
            """A streamer: called with the prompt, then once a token."""

            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: object) -> None:
                self.times.append(time.perf_counter())

            def end(self) -> None:
                pass

        def batch_of(works: list[Work]) -> list[list[float]]:
            longest = max(len(work.prompt) for work in works)
            ids = torch.zeros((len(works), longest), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for place, work in enumerate(works):
                ids[place, longest - len(work.prompt) :] = torch.tensor(work.prompt)
                mask[place, longest - len(work.prompt) :] = 1
            marks, steps = Marks(), max(work.num_outputs for work in works)
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=steps,
                    max_new_tokens=steps,
                    pad_token_id=0,
                    streamer=marks if len(works) == 1 else None,
                )
            ended = time.perf_counter()
            if len(works) == 1:
                return [marks.times[1:]]
            return [[ended] * work.num_outputs for work in works]

        def run(works: list[Work]) -> Run:
            done = Run(time.perf_counter(), [])
            for first in range(0, len(works), _BATCH):
                done.marks += batch_of(works[first : first + _BATCH])
            return done

        return run

    serve_driver(opened)


if __name__ == "__main__":
    main()
