"""The table of a config that says how a training service serves."""

import re
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rollouts.config.tables import FrozenDtype, NameText, PathText, Section


class ServeConfig(Section):
    """What `python -m rollouts serve` serves, to whom, and within which limits; docs/service.md."""

    host: str = "127.0.0.1"
    """address to listen at; beyond loopback it takes a proxy with TLS before it"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8801
    """0: any free one, which the first line says"""
    key_file: PathText = ""
    """lines of a user's name and key; empty: the key of the one user is in ROLLOUTS_API_KEY, or in
    output.dir/keys, which is made
    """
    model_names: list[str] = []
    """what clients may call the base model; empty: its directory, and model.name"""
    loaded_models: PositiveInt = 64
    """models in memory at once; idle ones wait on disk"""
    idle_s: PositiveFloat = 600.0
    """a model that nothing was asked of for so long waits on disk"""
    session_s: PositiveFloat = 3600.0
    """a session without a heartbeat for so long has ended"""
    keep_s: PositiveFloat = 3600.0
    """how long results are kept for those who did not collect them, and samplers that nobody uses"""
    snapshot_s: NonNegativeFloat = 30.0
    """of training that a server that was killed does again, at most; 0: after each optimizer step"""
    models_per_user: PositiveInt = 1000
    """that train; a session's end ends its models"""
    queue_length: PositiveInt = 2000
    """requests of a model or sampler that wait"""
    request_bytes: PositiveInt = 64 << 20
    """of one body"""
    request_tokens: PositiveInt = 1 << 20
    """tokens of one forward_backward"""
    micro_batch_tokens: PositiveInt = 8192
    """computed tokens of one forward pass"""
    window_s: NonNegativeFloat = 0.02
    """forward_backward of several users' adapters runs as one pass, and an idle device waits so long for the
    next of those that were in the last one; 0, and deterministic: each runs alone
    """
    max_rank: PositiveInt = 64
    """greatest rank of adapters that servers (engine.kind) are started for"""
    upload_bytes: PositiveInt = 64 << 30
    """of files that a client has sent for a model, or has not fetched yet"""
    loss_modules: list[str] = []
    """modules whose functions our clients may name as losses, as module:function; nothing else is imported
    for them
    """
    sampler_bytes: PositiveInt = 2 << 30
    """of weights that the engine holds beside the base model, to sample from"""
    references: dict[str, NameText] = {}
    """frozen models and reward models that clients may ask, by name: what model.name takes; "base" is there
    """
    reference_bytes: PositiveInt = 8 << 30
    """of these in memory at once; the least recently used makes room"""
    reference_dtype: FrozenDtype = "float32"
    """of these; reward models are in float32"""

    def _list_rules(self) -> dict[str, Any]:
        names = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
        odd = [name for name in self.references if name == "base" or not names.fullmatch(name)]
        return {
            f"references has {odd}; a name has letters, digits, '.', '_' and '-', and 'base' is the base"
            " model's": odd
        }
