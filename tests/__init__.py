"""Tests; a folder for what they need: unit, whole runs, ranks, servers, a browser."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository
