"""The contract of every TrainingBackend, and what only ranks can do wrong, on FSDPTrainingBackend: a
launch for what trains, one test for each check.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed.contract_program import TRAINED, list_checks
from tests.distributed.job import run_ranks

pytestmark = pytest.mark.slow


@cache
def run_checks(trained):
    with TemporaryDirectory() as folder:
        return run_ranks(2, "tests.distributed.contract_program", trained, out=Path(folder, "found"))


@pytest.mark.parametrize(
    ("trained", "check"), [(one, check) for one in TRAINED for check in list_checks(one)]
)
def test_contract_on_two_ranks(trained, check):
    found = run_checks(trained)[check]
    assert found == "ok", found
