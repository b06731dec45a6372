"""The contract of every TrainingBackend, and what only ranks can do wrong, on FSDPTrainingBackend: a
launch for what trains, one test for each check.
"""

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.contract_program import TRAINED, list_checks
from tests.distributed.job import run_ranks

pytestmark = pytest.mark.slow


@cache
def run_checks(trained: str, folder: Path) -> dict[str, str]:
    return run_ranks(2, "tests.distributed.contract_program", trained, out=folder / trained)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.mark.parametrize(
    ("trained", "check"), [(one, check) for one in TRAINED for check in list_checks(one)]
)
def test_contract_on_two_ranks(trained, check, folder):
    results = run_checks(trained, folder)
    assert results[check] == "ok", results[check]
