"""What a game takes from the dataset row that it is opened for."""

from rollouts.data.rows import parse_prompt
from rollouts.generation.generate import compute_request_seed
from rollouts.types import ChatMessage, Fields

Row = Fields


def compute_seed(row: Row) -> int:
    """The row's `seed`, or 32 bits that its prompt_id and epoch fix: the samples of a group play one game."""
    return row.get("seed", compute_request_seed(0, f"{row.get('prompt_id')}/{row.get('epoch')}") >> 31)


def begin_game(row: Row, text: str) -> list[ChatMessage]:
    """The row's prompt, which may tell the rules, with `text` at its end."""
    *before, last = parse_prompt(row["prompt"])
    return [*before, {**last, "content": f"{last['content']}\n\n{text}".strip()}]
