"""A row of the usage ledger, and a ledger that holds some."""

from pathlib import Path

from quickstep.server.usage.ledger import Ledger, LedgerRow

DAY_NS = 86_400 * 10**9


ROW = LedgerRow(
    request_id="request-0",
    sequence_index=0,
    finished_ns=20_000 * DAY_NS,
    key_name="ann",
    model="m",
    adapter="",
    endpoint="/v1/chat/completions",
    finish_reason="eos",
    num_prompt_tokens=100,
    num_cached_tokens=40,
    num_output_tokens=7,
    queue_ns=1,
    prefill_ns=20,
    decode_ns=300,
    device_ns=4000,
    cost_by_tokens_nusd=5,
    cost_by_device_nusd=60,
)


def written(path: Path, rows: list[LedgerRow]) -> None:
    ledger = Ledger(path)
    ledger.open()
    for row in rows:
        ledger.add(row)
    ledger.close()
    ledger.close()
