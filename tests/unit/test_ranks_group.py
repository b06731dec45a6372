"""What ranks agree on, and how they are compared; tests.distributed has real ranks."""

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  (documented there)

from rollouts.backends.fsdp import find_directory
from rollouts.errors import BackendError, ConfigError, RunDirError
from rollouts.models.directories import BLOCK_BYTES, BLOCKS, WHOLE_BYTES, compute_model_digests
from rollouts.ranks.launch import Launch
from rollouts.ranks.meet import decode_error, encode_error, init_group
from tests.support.text_tables import cases

LARGE = WHOLE_BYTES + 10 * 2**20


def test_others_hear_of_an_error_by_rank_and_of_a_full_disk_as_one():
    with pytest.raises(BackendError, match=r"^rank 3 failed: ValueError: no such row$"):
        raise decode_error(3, encode_error(ValueError("no such row")))
    full = decode_error(1, encode_error(OSError(28, "No space left on device", "/x")))
    assert full.errno == 28 and "rank 1 failed" in str(full)


def test_shards_must_divide_the_ranks():
    with pytest.raises(ConfigError, match=r"distributed\.shard_size=2 does not divide 3 ranks"):
        init_group(Launch(0, 3, 0, 3, "127.0.0.1", 0), HashStore(), device="cpu", shard_size=2)


# --- model directories of several machines ------------------------------------------------------------------


def make_digest(folder, size, *, changed=None):
    """Of weights that are zeros behind a header of 100 bytes, with one byte changed."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.write((100).to_bytes(8, "little") + bytes(100))
        file.truncate(size)
        if changed is not None:
            file.seek(changed)
            file.write(b"x")
    return compute_model_digests(folder)["model.safetensors"]


@cases(f"""
size          | at
{LARGE}       | 0
{LARGE}       | 50
{LARGE}       | 107
{LARGE}       | {LARGE - 1}
{LARGE}       | {(LARGE - BLOCK_BYTES) * 5 // (BLOCKS - 1)}
{WHOLE_BYTES} | 4321
{WHOLE_BYTES} | {WHOLE_BYTES // 2 + 1}
""")
def test_a_byte_of_the_header_a_sampled_block_or_a_small_file_is_noticed(tmp_path, size: int, at: int):
    whole = make_digest(tmp_path / "one", size)
    assert make_digest(tmp_path / "same", size) == whole
    assert make_digest(tmp_path / "other", size, changed=at) != whole
    assert make_digest(tmp_path / "longer", size + 1) != whole


def test_a_model_is_taken_where_it_is_or_found_by_its_name_and_a_checkpoint_must_be_seen(tmp_path):
    def find(wanted):
        return find_directory(wanted, base_model="/elsewhere/x", find_model=lambda: tmp_path / "found")

    assert find(str(tmp_path)) == tmp_path
    assert find("/elsewhere/x") == tmp_path / "found"
    with pytest.raises(RunDirError, match=r"/elsewhere/step_2 is not to be seen on .*put output\.dir on a"):
        find("/elsewhere/step_2")
