"""The HTML file: one page with its styles, scripts and values inside, which its own policy forbids to load
anything.
"""

import base64
import hashlib
import html
import re
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rollouts import __version__
from rollouts.inspect.record import open_records
from rollouts.inspect.report.gather import gather_run
from rollouts.inspect.report.samples import encode_json
from rollouts.run_dir import replace_file

SCRIPTS = (
    "base",
    "facts",
    "charts",
    "curves",
    "phases",
    "overview",
    "samples",
    "transcript",
    "keys",
)  # in order


def write_report(roots: Sequence[Path], path: Path) -> int:
    """Writes the report of one run, or the comparison of several, and returns its bytes. A file that is there
    is replaced as a whole.

    Raises RunDirError for a directory that is no run, or is damaged; StorageError where the file cannot be
    written.
    """
    with open_records(roots) as records:
        runs = [gather_run(record, name, share=1 / len(roots)) for name, record in records.items()]
    page = make_page(runs).encode("utf-8", errors="replace")
    replace_file(path, [page], way_out="name another file with --output FILE")
    return len(page)


def make_page(runs: Sequence[tuple[dict[str, Any], list[str]]]) -> str:
    """The page. Texts of the runs are only in its JSON and in its title, escaped for both."""
    facts = [facts for facts, _ in runs]
    report = {"version": __version__, "made": int(time.time()), "runs": facts}
    files = resources.files("rollouts.inspect.report")
    style, *scripts, frame = (
        files.joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", *(f"{name}.js" for name in SCRIPTS), "report.html")
    )
    script = '"use strict";\n(() => {\n' + "\n".join(scripts) + "})();\n"
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
        "samples": f"[{','.join('[' + ','.join(texts) + ']' for _, texts in runs)}]",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], frame)


def hash_source(text: str) -> str:
    """SHA-256 in base64, as a content security policy names a style or a script that it allows."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
