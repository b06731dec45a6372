"""Two runs that must be the same: see tests.support.compare_runs for what is compared."""

from pathlib import Path

from tests.support.compare_runs import find_differences, read_comparable, weights_digest

__all__ = ["assert_same_run", "read_comparable", "weights_digest"]


def assert_same_run(left: Path, right: Path, *, stopped: bool = False) -> None:
    """Rows, and every file of every checkpoint: weights, optimizer, random state, the loop's state."""
    differences = find_differences(left, right, stopped=stopped)
    assert not differences, "\n".join(differences)
