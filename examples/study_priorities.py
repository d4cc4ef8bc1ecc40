"""Study: what do priorities buy, and who pays?

Two kinds of clients above the capacity of a device: 20 % with priority 0, 80 % with priority 5
(lower runs first). With `fcfs` all wait alike; with `mixed` the urgent ones wait less. The mean
hardly changes: priorities move time from some requests to others, they make none.
"""

from __future__ import annotations

from statistics import mean, median

from quickstep.config import PolicyName
from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import EngineLimits, Load, fit
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.traffic import simulate_arrivals
from quickstep.sim.outcome import Arrival
from quickstep.types import Request, SamplingParams

MAX_MODEL_LEN = 2048

one_l4 = fit(
    find_model("llama-3.2-3b"),
    find_hardware("l4", read_hardware(None)),
    Split(1),
    ElementBytes(dtype=2, scratch=0),
    Load(1.0, MAX_MODEL_LEN - 1, 1),
    EngineLimits(8, 1024),
)
sampling = SamplingParams(max_tokens=60, ignore_eos=True)
arrivals = [
    Arrival(
        0.18 * place,
        Request(
            f"{'urgent' if place % 5 == 0 else 'other'} {place}",
            tuple(range(1000 * place, 1000 * place + 400)),
            sampling,
            priority=0 if place % 5 == 0 else 5,
        ),
    )
    for place in range(80)
]
print("policy  urgent TTFT   other TTFT    mean of all")
for policy in (PolicyName.FCFS, PolicyName.MIXED):
    outcome = simulate_arrivals(one_l4, arrivals, MAX_MODEL_LEN, policy)
    waits: dict[str, list[float]] = {"urgent": [], "other": []}
    for ending in outcome.endings:
        first_s = ending.timings.first_token_s
        if first_s is not None:
            waits[ending.request_id.split()[0]].append(first_s - ending.timings.arrival_s)
    every = waits["urgent"] + waits["other"]
    print(
        f"{policy.value:6}  {median(waits['urgent']):6.2f} s      {median(waits['other']):6.2f} s"
        f"      {mean(every):6.2f} s"
    )
