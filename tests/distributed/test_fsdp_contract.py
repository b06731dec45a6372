"""The contract of every TrainingBackend, and what only ranks can do wrong, on FSDPTrainingBackend: one
launch, one test for each check.
"""

from pathlib import Path

import pytest

from tests.distributed.contract_program import list_checks
from tests.distributed.job import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_ranks(
        2, "tests.distributed.contract_program", "0", out=tmp_path_factory.mktemp("contract") / "results"
    )


@pytest.mark.parametrize("check", list_checks())
def test_contract_on_two_ranks(check: str, results: dict[str, str], tmp_path: Path):
    assert results[check] == "ok", results[check]
