"""Study: prompts in chunks next to decode rows, or prompts first, or decode rows first?

Long prompts and short outputs, on one device. `mixed` takes chunks of prompts into decode steps,
`prefill-first` gives prompts complete steps, which delays the tokens of all others; and
`decode-first` lets prompts wait until no row decodes, or for ten seconds. The table shows who
pays: the first token or the following ones.
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
from quickstep.sim.workload import Lengths, Workload

MAX_MODEL_LEN = 16384
WORKLOAD = Workload(Lengths(3000, 0.6, 200, 12000), Lengths(150, 0.4, 20, 600))

one_l4 = fit(
    find_model("llama-3.2-3b"),
    find_hardware("l4", read_hardware(None)),
    Split(1),
    ElementBytes(dtype=2, scratch=0),
    Load(1.0, MAX_MODEL_LEN - 1, 1),
    EngineLimits(64, 8192),
)
print("policy          TTFT p50/p90      TPOT p50/p90     p99")
for policy in (PolicyName.MIXED, PolicyName.PREFILL_FIRST, PolicyName.DECODE_FIRST):
    traffic = Traffic(WORKLOAD, rate=0.8, num_requests=40, seed=2)
    outcome = simulate_traffic(one_l4, traffic, MAX_MODEL_LEN, policy)
    summary = summarize(outcome, one_l4.num_blocks, Targets())
    ttft, tpot = summary.ttft_s, summary.tpot_s
    print(
        f"{policy.value:14}  {1e3 * ttft.p50:5.0f}/{1e3 * ttft.p90:5.0f} ms"
        f"  {1e3 * tpot.p50:5.0f}/{1e3 * tpot.p90:5.0f} ms  {1e3 * tpot.p99:5.0f} ms"
    )
