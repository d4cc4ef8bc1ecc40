"""Study: how many chat requests per second does one device serve within the targets?

Every rate is simulated with the engine's own scheduler. The answer is the largest rate at which
90 % of the requests are in time: latencies rise before the throughput stops growing.
"""

from __future__ import annotations

from quickstep.config import PolicyName
from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import EngineLimits, Load, fit
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.traffic import Traffic, simulate_traffic
from quickstep.sim.summary import Targets, summarize
from quickstep.sim.workload import Lengths, PrefixLevel, Workload

MAX_MODEL_LEN = 8192
TARGETS = Targets(ttft_s=0.3, tpot_s=0.045)
CHAT = Workload(Lengths(80, 0.8, 4, 2000), Lengths(80, 0.5, 4, 400), (PrefixLevel(1, 256),))

one_l4 = fit(
    find_model("llama-3.2-3b"),
    find_hardware("l4", read_hardware(None)),
    Split(1),
    ElementBytes(dtype=2, scratch=0),
    Load(1.0, MAX_MODEL_LEN - 1, 1),
    EngineLimits(128, 2048),
)
capacity = 0.0
print("requests/s  TTFT p90  TPOT p90  in time")
for rate in (2.0, 8.0, 16.0, 32.0):
    traffic = Traffic(CHAT, rate=rate, num_requests=100, seed=1)
    outcome = simulate_traffic(one_l4, traffic, MAX_MODEL_LEN, PolicyName.MIXED)
    summary = summarize(outcome, one_l4.num_blocks, TARGETS)
    print(
        f"{rate:10g}  {1e3 * summary.ttft_s.p90:5.0f} ms"
        f"  {1e3 * summary.tpot_s.p90:5.1f} ms  {summary.attainment:7.0%}"
    )
    if summary.attainment >= 0.9:
        capacity = rate
print(f"capacity: {capacity:g} requests per second on an L4")
