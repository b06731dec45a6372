"""The HTML file: one page with its styles, scripts and values inside, which its own policy forbids to load
anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rollouts import __version__
from rollouts.errors import StorageError
from rollouts.inspect.facts import find_differences
from rollouts.inspect.report.gather import CURVE_VALUES, POINTS, RunReport, gather_run
from rollouts.inspect.report.samples import encode_json

SAMPLE_BYTES = 12_000_000  # of samples as JSON, of all runs together
SCRIPTS = ("base", "charts", "curves", "phases", "overview", "samples", "transcript", "keys")  # in this order
VALUES_PER_CURVE = 3 * 64  # mean, least and greatest of about so many metrics
PLACE = re.compile(r"\{\{(\w+)\}\}")


def write_report(roots: Sequence[Path], path: Path, *, time_unix: Callable[[], float] = time.time) -> int:
    """Writes the report of one run, or the comparison of several, and returns its bytes. A file that is there
    is replaced as a whole.

    Raises RunDirError for a directory that is no run, or is damaged; StorageError where the file cannot be
    written.
    """
    points = max(100, min(POINTS, CURVE_VALUES // (VALUES_PER_CURVE * len(roots))))
    runs = [gather_run(root, points=points, sample_bytes=SAMPLE_BYTES // len(roots)) for root in roots]
    page = make_page(runs, time_unix=time_unix()).encode("utf-8", errors="replace")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(page)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written ({error}); name another file with --output FILE"
        ) from error
    return len(page)


def make_page(runs: Sequence[RunReport], *, time_unix: float) -> str:
    """The page. Texts of the runs are only in its JSON and in its title, escaped for both."""
    facts = name_apart([run.facts for run in runs])
    report = {
        "version": __version__,
        "made": int(time_unix),
        "runs": facts,
        "differences": list(find_differences([dict(run["config"]) for run in facts]).items()),
    }
    style = load_text("report.css")
    script = '"use strict";\n(() => {\n' + "\n".join(load_text(f"{name}.js") for name in SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; style-src 'sha256-{hash_source(style)}'; script-src"
        f" 'sha256-{hash_source(script)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "title": html.escape(" · ".join(run["name"] for run in facts)),
        "style": style,
        "script": script,
        "data": encode_json(report),
        "samples": f"[{','.join('[' + ','.join(run.samples) + ']' for run in runs)}]",
    }
    return PLACE.sub(lambda match: values[match[1]], load_text("report.html"))


def name_apart(facts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs with names that differ: of runs of one name, the later ones get a number."""
    names = [run["name"] for run in facts]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [
        run | {"name": f"{run['name']} ({count + 1})"} if count else run
        for run, count in zip(facts, before, strict=True)
    ]


def hash_source(text: str) -> str:
    """SHA-256 in base64, as a content security policy names a style or a script that it allows."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def load_text(name: str) -> str:
    """A file of the page."""
    return resources.files("rollouts.inspect.report").joinpath(name).read_text(encoding="utf-8")
