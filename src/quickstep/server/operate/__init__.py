"""What operators use: metrics, probes, `/debug`, traces, LoRA adapters, the prefix cache."""
