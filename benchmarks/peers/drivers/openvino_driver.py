"""OpenVINO GenAI's continuous batching pipeline, in its own environment."""

from __future__ import annotations

import argparse
import itertools
import time

from protocol import Run, Work, serve_driver


def main() -> None:
    """Drive one converted model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", required=True)
    args = parser.parse_args()
    numbers = itertools.count()

    def opened():
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": "bf16"}
        pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

        def submit(work: Work):
            config = genai.GenerationConfig()
            config.max_new_tokens = work.num_outputs
            config.ignore_eos = True
            config.do_sample = False
            prompt = ov.Tensor(np.array([work.prompt], dtype=np.int64))
            return pipeline.add_request(next(numbers), prompt, config)

        def num_read(handle) -> int:
            """Tokens that have come since the last call."""
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            return count

        def run(works: list[Work]) -> Run:
            done = Run(time.perf_counter(), [[] for _ in works])
            handles = [submit(work) for work in works]
            while pipeline.has_non_finished_requests():
                pipeline.step()
                for handle, marks in zip(handles, done.marks, strict=True):
                    marks.extend([time.perf_counter()] * num_read(handle))
            return done

        return run

    serve_driver(opened)


if __name__ == "__main__":
    main()
