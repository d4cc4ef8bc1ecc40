"""Study: do four devices serve more if some only prefill and the others only decode?

The same clients, whose prompts are long, get four engines that do both (`mixed`), or engines of
each phase, which hand the KV cache over through PCIe, and through 100 GbE. Each engine has the real
scheduler; blocks are counted at both ends. No prompt delays the tokens of others then, but an
engine of one phase cannot help the other: which placement is best depends on the rate and on the
targets.
"""

from __future__ import annotations

from quickstep.config import PolicyName
from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import EngineLimits, Load, fit
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.traffic import PhasePools, Replicas, Traffic, simulate_traffic
from quickstep.sim.summary import Targets, summarize
from quickstep.sim.workload import Lengths, Workload

MAX_MODEL_LEN = 8192
TARGETS = Targets(ttft_s=1.5, tpot_s=0.045)
WORKLOAD = Workload(Lengths(2000, 0.4, 200, 6000), Lengths(100, 0.4, 20, 300))

table = read_hardware(None)
l4 = fit(
    find_model("llama-3.2-3b"),
    find_hardware("l4", table),
    Split(1),
    ElementBytes(dtype=2, scratch=0),
    Load(1.0, MAX_MODEL_LEN - 1, 1),
    EngineLimits(64, 2048),
)
placements = {
    "4 mixed": None,
    "1P3D, pcie4": PhasePools(1, 3, l4, table.links["pcie4"]),
    "2P2D, pcie4": PhasePools(2, 2, l4, table.links["pcie4"]),
    "2P2D, 100gbe": PhasePools(2, 2, l4, table.links["100gbe"]),
    "3P1D, pcie4": PhasePools(3, 1, l4, table.links["pcie4"]),
}
print("placement     requests/s  TTFT p90  TPOT p90  in time  busy (prefill, decode)")
for rate in (3.0, 6.0):
    for name, phases in placements.items():
        traffic = Traffic(WORKLOAD, rate=rate, num_requests=80, seed=3)
        outcome = simulate_traffic(
            l4, traffic, MAX_MODEL_LEN, PolicyName.MIXED, replicas=Replicas(4), phases=phases
        )
        summary = summarize(outcome, l4.num_blocks, TARGETS)
        busy = f"{summary.busy:.0%}"
        if outcome.handovers is not None:
            busy = f"{outcome.handovers.prefill_busy:.0%}, {outcome.handovers.decode_busy:.0%}"
        print(
            f"{name:12}  {rate:10g}  {summary.ttft_s.p90:6.2f} s"
            f"  {1e3 * summary.tpot_s.p90:5.0f} ms  {summary.attainment:7.0%}  {busy}"
        )
