"""Metrics: rows, the JSONL files that hold them, progress on a terminal, time by phase. JSONL is the
truth.
"""
