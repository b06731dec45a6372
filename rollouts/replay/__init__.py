"""`rollouts replay RUN --step N`: the loss of a step computed again from the record alone, and compared with
what was logged.

metrics.jsonl ── loss/total, kl/coef ─────────────┐
contributions.jsonl ─ which rows, loss, share ─┼─► the same loss function, in float64
    ─► loss and shares ─► compared
tokens/*.bin ── per-token arrays ─────────────────┤
config.toml ── loss, parameters, unit ────────────┘
"""
