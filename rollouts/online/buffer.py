"""Prompts of a stream, drawn by what they may still teach.

files ─► follow: read ahead ─► admitted before a draw, as far as there is room ─► get_prompts: up to max_draws
                                                                             times each, once a step ◄─┐
                                                  batch that trained ─► learn: spread of its rewards ──┘

Priority p = (FLOOR + s + 1/(1 + n)) · 2^(−age / half_life): s the deviation of the rewards of its group when
it trained last (0 before), n how often it was drawn, age the steps since it came or was drawn. It is drawn
with P = p^alpha / Σ p^alpha, without replacement. Prioritised experience replay (1511.05952): a draw has the
weight (N·P)^−correction, by which its advantages are multiplied, over the largest of the batch: with 1,
prompts count as they came. What is drawn is a prompt: its samples are always new ones of the policy.

A log says after how many draws what was admitted, and a resumed run admits the same then: of the same files
it draws the same prompts, whenever they are read.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial, wraps
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import trio

from rollouts.advantages import AdvantageFn
from rollouts.advantages.inputs import AdvantageInputs
from rollouts.config.online import OnlineConfig
from rollouts.config.tables import DataSourceConfig
from rollouts.data.data_buffer import PromptRow
from rollouts.data.datasets import find_asked_prompts
from rollouts.data.mixture import SOURCE_FIELD
from rollouts.data.rows import MAX_ROW_BYTES, Row, parse_row
from rollouts.errors import DataError, RolloutsError
from rollouts.generation.collector import REPLAYED
from rollouts.messages import parse_json
from rollouts.metrics.jsonl import RecordFile, read_rows
from rollouts.metrics.record import encode_rows
from rollouts.types import TRAJECTORY, Fields, JSONObject, Numbers, Sample

FLOOR = 0.01  # of a priority before it ages
POLL_S = 1.0  # between two looks at the files: what other machines write causes no events
READ_BYTES = 1 << 24  # of a file at a time
MOST_LOG_WEIGHT = 300.0  # of a draw: sums of such numbers are finite
KEPT_STEPS = 64  # after the last draw of a prompt: its samples have trained by then, or never will
DRAW_STREAM = 0x6F6E6C69  # keeps the draws apart from others with the same seed
WEIGHT = "importance_weight"  # of a draw, in the metadata of its samples
# what the run itself notes in the metadata of samples: a line of the stream says nothing of it
OWN_FIELDS = {WEIGHT, TRAJECTORY, REPLAYED, "failure", "reward_note"}


class Arrival(NamedTuple):
    """A line that was read."""

    file: str  # SOURCE/NAME
    end: int  # the offset after it
    row: Row | None  # None: it is malformed


@dataclass
class Entry:
    """A prompt that was admitted."""

    row: Row
    step: int  # of RL, when it came or was drawn last
    spread: float = 0.0  # of the rewards of its group, when it trained last
    weights: list[float] = field(default_factory=list)  # of its draws


@dataclass(eq=False, kw_only=True)
class ExperienceBuffer:
    """A PromptSource over files that grow, and rows that are there from the beginning."""

    config: OnlineConfig
    streams: Mapping[str, DataSourceConfig]  # by name
    rows: Mapping[str, Sequence[Row]]  # of the sources that are no streams
    log: Path
    step: Callable[[], int]  # of RL, that prompts are drawn for
    seed: int
    say: Callable[[str], object]
    held_out: frozenset[str] = frozenset()  # prompts that are not admitted, as find_asked_prompts gives them
    check: Callable[[Row], object] = lambda row: (
        None
    )  # raises RolloutsError for what no answer can be drawn to
    note_arrivals: Callable[[], object] = lambda: None  # called when more may be drawn
    end: Callable[[], object] = lambda: None  # called when too few are left, and no more come
    is_closed: bool = False  # nothing more is written to the streams

    def __post_init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._asked: set[str] = set()  # their prompts
        self._returned: deque[PromptRow] = deque()
        self._admitted: dict[str, int] = {}  # offsets by file
        self._counts = dict.fromkeys(("arrived", "drawn", "repeated", "malformed", "held_out"), 0)
        self._file = RecordFile(self.log)
        self._begin()

    def _begin(self) -> None:
        """Goes on from what was admitted and drawn."""
        logged = read_rows(self.log)
        self._replayed = deque(one for one in logged if one["drawn"] >= self._counts["drawn"])
        gone = {
            name: end for one in self._replayed for name, end in one["files"].items() if self._is_gone(name)
        }
        made = [
            Arrival(f"{name}/rows", number, row)
            for name, rows in self.rows.items()
            for number, row in enumerate(rows, 1)
        ]
        self._arrived = [one for one in made if one.end > self._admitted.get(one.file, 0)]
        if gone:
            self.say(
                f"{', '.join(gone)}: removed since the run read there; what is not saved of it is left out"
            )
        self._read = self._admitted | gone | {one.file: one.end for one in self._arrived}
        self._is_short = self._is_done = False  # which was said; everything is read

    def _is_gone(self, name: str) -> bool:
        source, _, file = name.partition("/")
        path = Path(self.streams[source].path) if source in self.streams else None
        return path is not None and not (path / file if path.is_dir() else path).exists()

    # --- what arrives ---------------------------------------------------------------------------------------

    async def follow(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reads what the files get, about `capacity` lines ahead, of each file as many. Started when it has
        looked once.
        """
        has_looked = False
        while True:
            waiting = Counter(one.file for one in self._arrived)
            read = partial(read_arrivals, self.streams, self._read, waiting, limit=self.config.capacity)
            found = await trio.to_thread.run_sync(partial(read, report=self.say))
            self._arrived += found
            self._read |= {one.file: one.end for one in found}
            others = {f"{name}/rows" for name in self.rows}  # which are all here
            self._is_done = self.is_closed and not found and not waiting.keys() - others
            if found or self._is_done:
                self.note_arrivals()
            if not has_looked:
                task_status.started()
            has_looked = True
            await trio.sleep(0 if found else POLL_S)

    def _admit(self) -> bool:
        """Takes in what has arrived: as far as there is room, of each file as many; or as the log says, which
        is the answer.
        """
        limits: Mapping[str, int] | None = None
        if self._replayed:
            drawn, files = self._replayed[0]["drawn"], self._replayed[0]["files"]
            if drawn > self._counts["drawn"] or any(self._read.get(one, 0) < files[one] for one in files):
                return False
            limits = files
            self._replayed.popleft()
        self._forget()
        room = self.config.capacity - len(self._entries)
        files, left = dict[str, int](), dict[str, list[Arrival]]()
        by_file = groupby(sorted(self._arrived, key=lambda one: one[:2]), lambda one: one.file)
        ranked = ((rank, file, one) for file, each in by_file for rank, one in enumerate(each))
        for _, _, one in sorted(ranked, key=lambda found: found[:2]):
            is_late = one.end > limits.get(one.file, 0) if limits is not None else room <= 0
            if is_late or one.file in left:
                left.setdefault(one.file, []).append(one)
                continue
            files[one.file] = one.end
            room -= self._take(one)
        self._arrived = [one for each in left.values() for one in each]
        self._admitted |= files
        if limits is None and files:
            self._file.append(encode_rows([{"drawn": self._counts["drawn"], "files": files}]))
        return limits is not None

    def _take(self, arrival: Arrival) -> bool:
        """Whether it is a prompt that was not here."""
        row, counted = arrival.row, "arrived"
        try:
            if row is not None:
                self.check(row)
        except RolloutsError as error:
            self.say(f"{arrival.file}, the line that ends at byte {arrival.end}, is left out: {error}")
            row = None
        if row is None:
            counted = "malformed"
        elif (asked := next(find_asked_prompts(row))) in self.held_out or asked in self._asked:
            counted = "held_out" if asked in self.held_out else "repeated"
        else:
            source = arrival.file.partition("/")[0]
            self._asked.add(asked)
            name = f"{source}/row-{self._counts['arrived']}"
            self._entries[name] = Entry({SOURCE_FIELD: source, **row}, self.step() - 1)
        self._counts[counted] += 1
        return counted == "arrived"

    def _is_open(self, entry: Entry) -> bool:
        return len(entry.weights) < self.config.max_draws

    def _forget(self) -> None:
        step = self.step()
        for name, one in list(self._entries.items()):
            if not self._is_open(one) and step - one.step > KEPT_STEPS:
                self._asked.discard(next(find_asked_prompts(self._entries.pop(name).row)))

    # --- draws ----------------------------------------------------------------------------------------------

    def get_prompts(self, count: int) -> list[PromptRow]:
        """The next `count` prompts, returned ones first; none while there are fewer."""
        step, returned = self.step(), min(count, len(self._returned))
        is_replayed, names = True, list[str]()
        while is_replayed and len(names) < max(1, count - returned):
            is_replayed = self._admit()
            names = [name for name, one in self._entries.items() if self._is_open(one) and one.step < step]
        if len(names) < count - returned:
            if not self._is_short:
                self.say(f"step {step} waits for prompts: it needs {count}, {len(names) + returned} are here")
            self._is_short = True
            if self._is_done and not self._arrived:
                self.end()
            return []
        self._is_short = False
        drawn = [self._returned.popleft() for _ in range(returned)]
        for name, weight in self._draw(names, count - returned, step):
            entry = self._entries[name]
            entry.step = step
            entry.weights.append(weight)
            drawn.append(self.find_prompt(name, len(entry.weights) - 1))
        self._counts["drawn"] += len(drawn) - returned
        return drawn

    def _draw(self, names: Sequence[str], count: int, step: int) -> list[tuple[str, float]]:
        """(prompt, importance weight) of `count` of them. What one source has beyond its share comes last.

        The largest of log P + Gumbel noise are a draw without replacement.
        """
        entries = [self._entries[name] for name in names]
        ages = np.asarray([step - one.step for one in entries])
        values = np.asarray([FLOOR + one.spread + 1 / (1 + len(one.weights)) for one in entries])
        logs = self.config.alpha * (np.log(values) - ages * math.log(2) / self.config.half_life)
        logs -= np.logaddexp.reduce(logs)  # P of what is very old is 0 as a number
        noise = np.random.default_rng([DRAW_STREAM, self.seed, self._counts["drawn"]]).gumbel(size=len(names))
        most, taken = math.ceil(self.config.max_source_share * count), Counter[str]()
        first, late = list[int](), list[int]()
        for place in np.argsort(-(logs + noise), kind="stable").tolist():
            taken[source := entries[place].row[SOURCE_FIELD]] += 1
            (late if taken[source] > most else first).append(place)
        weights = np.exp(np.minimum(-self.config.correction * (math.log(len(names)) + logs), MOST_LOG_WEIGHT))
        return [(names[place], float(weights[place])) for place in (first + late)[:count]]

    def return_prompts(self, prompts: Sequence[PromptRow]) -> None:
        """Puts prompts back in front of everything else, the first given being the next drawn."""
        assert all(prompt.prompt_id in self._entries for prompt in prompts), prompts
        self._returned.extendleft(reversed(prompts))

    def find_prompt(self, prompt_id: str, epoch: int) -> PromptRow:
        """The prompt as it was drawn when it had been drawn `epoch` times."""
        entry = self._entries[prompt_id]
        return PromptRow(prompt_id, epoch, {**entry.row, WEIGHT: entry.weights[epoch]})

    def learn(self, samples: Sequence[Sample]) -> None:
        """Notes how far the rewards of each group that trains are apart."""
        for name, members in groupby(samples, lambda sample: str(sample.metadata["prompt_id"])):
            self._entries[name].spread = float(np.std([one.reward or 0.0 for one in members]))

    # --- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> JSONObject:
        """Everything an exact resume needs, as JSON: the prompts, and how far the files are read."""
        return {
            "entries": {name: [*astuple(one)] for name, one in self._entries.items()},
            "returned": [[prompt.prompt_id, prompt.epoch] for prompt in self._returned],
            "admitted": dict(self._admitted),
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Fields) -> None:
        """Goes on from a state_dict, before `follow`."""
        self._entries = {name: Entry(*values) for name, values in state["entries"].items()}
        self._asked = {next(find_asked_prompts(one.row)) for one in self._entries.values()}
        self._returned = deque(self.find_prompt(*pair) for pair in state["returned"])
        self._admitted, self._counts = dict(state["admitted"]), dict(state["counts"])
        self._begin()

    def statistics(self) -> Numbers:
        """Prompts that arrived, were drawn, each time, or left out; and those that wait for a draw."""
        waiting = sum(map(self._is_open, self._entries.values())) + len(self._arrived)
        return {**self._counts, "waiting": waiting, "returned": len(self._returned)}


def weigh_draws(function: AdvantageFn) -> AdvantageFn:
    """The advantage function, its rows times the weights of their prompts' draws, over the largest."""

    @wraps(function)
    def weighed(inputs: AdvantageInputs, **params: Any) -> Any:
        found: Any = function(inputs, **params)
        weights = np.asarray([sample.metadata.get(WEIGHT, 1.0) for sample in inputs.samples])
        weights /= weights.max()
        if isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype != object:
            return found * weights
        return [np.asarray(row) * weight for row, weight in zip(found, weights, strict=True)]

    return weighed


# --- files that grow: JSON lines, appended by anybody, in one file or in all *.jsonl files of a directory ---


def read_arrivals(
    sources: Mapping[str, DataSourceConfig],
    offsets: Mapping[str, int],
    waiting: Mapping[str, int],
    *,
    limit: int,
    report: Callable[[str], object],
) -> list[Arrival]:
    """The next lines of every file, of each as many as make `limit` with those that are `waiting`: in the
    order of sources, names and lines. A line counts once it is complete; what was read is an offset in each
    file, which a checkpoint keeps. Blocks.

    A malformed line is told to `report`, and is no prompt. Raises DataError for a file that has become
    shorter, or that cannot be read.
    """
    found, paths = list[Arrival](), {name: Path(config.path) for name, config in sources.items()}
    files = {
        name: [*filter(Path.is_file, sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
        for name, path in paths.items()
    }
    room = max(1, limit // max(1, sum(map(len, files.values()))))
    for source, config in sources.items():
        for file in files[source]:
            name = f"{source}/{file.name}"
            end, most = offsets.get(name, 0), max(0, room - waiting.get(name, 0))
            for line in _read_lines(file, end)[:most] if most else ():
                end += len(line)
                row = _parse_line(line, config)
                if isinstance(row, str):
                    report(f"{file}, the line that ends at byte {end}, is left out: {row}")
                found.append(Arrival(name, end, row if isinstance(row, dict) else None))
    return found


def _parse_line(line: bytes, config: DataSourceConfig) -> Row | str | None:
    """The row of a line, or what is wrong with it; None for an empty one."""
    if not line.strip():
        return None
    if len(line) > MAX_ROW_BYTES:
        return f"it has more than {MAX_ROW_BYTES} bytes"
    try:
        value = parse_json(line.decode("utf-8-sig"))
        row = parse_row(value, "prompt", columns=config.columns, system_prompt=config.system_prompt)
        if not isinstance(source := row.get(SOURCE_FIELD, ""), str):
            return f"{SOURCE_FIELD!r} is {source!r}; it must be text"
        return {name: value for name, value in row.items() if name not in OWN_FIELDS}
    except (ValueError, RecursionError, DataError) as error:
        return str(error)


def _read_lines(file: Path, offset: int) -> Sequence[bytes]:
    """The complete lines from `offset` on, with their ends; one that is too long as it comes, in pieces. None
    of a file that has just been removed.
    """
    try:
        opened = file.open("rb")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error}); make it readable, or remove it") from error
    with opened:
        if opened.seek(0, 2) < offset:
            raise DataError(
                f"{file} has fewer bytes than the {offset} that were read: files of a stream only grow;"
                " restore it, or remove it and go on in another"
            )
        opened.seek(offset)
        data = opened.read(READ_BYTES)
    whole, end, rest = data.rpartition(b"\n")
    lines = [line + end for line in whole.split(b"\n")] if end else []
    return [*lines, rest] if len(rest) > MAX_ROW_BYTES else lines
