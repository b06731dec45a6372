"""Which simulated runs to make: `pytest tests/sim --sim-seed 7`, or `--sim-seeds 0..99`."""


def pytest_addoption(parser):
    parser.addoption("--sim-seed", metavar="N", help="simulate the run of this seed")
    parser.addoption(
        "--sim-seeds", metavar="A..B", help="simulate the runs of the seeds A to B, both included"
    )


def pytest_generate_tests(metafunc):
    """Gives `sim_seed` the seeds of the command line; without any, its tests are skipped."""
    if "sim_seed" in metafunc.fixturenames:
        given = metafunc.config.getoption("--sim-seeds", None) or metafunc.config.getoption(
            "--sim-seed", None
        )
        first, _, last = str(given or "0..-1").partition("..")
        metafunc.parametrize("sim_seed", range(int(first), int(last or first) + 1))
