"""Readers in other processes, while what they read is replaced and its writer killed."""

from tests.online.swaps import run


def test_no_reader_loads_a_torn_model_and_publications_only_grow(tmp_path):
    found = run(40, tmp_path, seed=43, readers=2)  # writers that live 0.5 s, 7 s, 1.5 s, …
    assert found["torn"] == [] and found["left over"] == [], found
    assert found["publications"] >= 40 and found["kills"] > 1 and found["loads"] > 0, found
