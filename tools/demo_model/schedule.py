"""How far a run is, and what follows from it: learning rate, fraction of chat rows, context length.

Pure functions of a run's progress in [0, 1], so that a deadline and a token budget drive training
in the same way. Called by `train`.
"""

from datetime import datetime, timedelta

WARMUP = 0.01  # of the run
DECAY_START = 0.62  # the learning rate is flat from WARMUP to here and then falls to zero
_CHAT_SHARE = 0.30  # of the rows while the learning rate is flat
_CHAT_SHARE_DECAY = 0.50
_LONG_CONTEXTS = ((40, 2048), (10, 1024))  # every 40th step at 2,048 tokens, every 10th at 1,024
_CONTEXT = 512


def learning_rate_scale(progress: float) -> float:
    """Warm-up, stable, linear decay to zero."""
    if progress < WARMUP:
        return (progress + 0.05 * WARMUP) / (1.05 * WARMUP)
    return min(1.0, max(0.0, 1.0 - progress) / (1.0 - DECAY_START))


def chat_share(progress: float) -> float:
    """The fraction of chat rows, which is larger in the decay phase."""
    return _CHAT_SHARE if progress < DECAY_START else _CHAT_SHARE_DECAY


def context_len(step: int) -> int:
    """Tokens per row: mostly short rows, some as long as the model's context."""
    for every, length in _LONG_CONTEXTS:
        if step % every == every - 1:
            return length
    return _CONTEXT


def deadline(clock_time: str, now: datetime) -> datetime:
    """The next moment at which the clock shows HH:MM."""
    hour, minute = map(int, clock_time.split(":"))
    moment = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return moment if moment > now else moment + timedelta(days=1)
