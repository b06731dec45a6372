"""The lines of updates.log as a table."""

from __future__ import annotations

from typing import Any

from rollouts.run_dir import RunDir

FIRST, NEWEST = 200, 2000  # lines that are shown of a long log
SKIPPED = "  skipped: "
COLUMNS = {  # word in the line: heading
    "time": "time, UTC",
    "stage": "stage",
    "attempt": "attempt",
    "step": "step",
    "update": "update",
    "version": "version",
    "loss": "loss",
    "kl": "KL",
    "beta": "β",
    "grad_norm": "gradient norm",
    "clipped": "clipped",
    "lr": "learning rate",
    "samples": "samples",
    "zero_advantage": "of these zero advantage",
    "tokens": "tokens",
    "note": "note",
}


def read_updates(run_dir: RunDir) -> dict[str, Any]:
    """The first and the newest lines in columns, how many there are in all, and how many are left out beside
    them, torn or of another form.

    Where all are of another form, as a later version may write them, they are shown as they are, without
    columns.
    """
    if not run_dir.updates_log.exists():
        return {"columns": [], "lines": [], "total": 0, "unread": 0}
    *lines, torn = run_dir.updates_log.read_text(encoding="utf-8", errors="replace").split("\n")
    shown = lines if len(lines) <= FIRST + NEWEST else [*lines[:FIRST], *lines[-NEWEST:]]
    rows = [fields for line in shown if (fields := parse_update(line)) is not None]
    if not rows:
        return {
            "columns": [],
            "lines": [[line] for line in shown],
            "total": len(lines),
            "unread": int(bool(torn)),
        }
    unread = len(shown) - len(rows)
    names = [name for name in COLUMNS if any(fields.get(name, "") not in ("", "-") for fields in rows)]
    cells = [[fields.get(name, "") for name in names] for fields in rows]
    return {
        "columns": [COLUMNS[name] for name in names],
        "lines": cells,
        "total": len(lines) - unread,
        "unread": unread + int(bool(torn)),
    }


def parse_update(line: str) -> dict[str, str] | None:
    """The fields of a line: its time, `attempt N`, its stage, then names and values; None for a line of
    another form.
    """
    body, skipped, reason = line.partition(SKIPPED)
    words = body.split()
    if len(words) < 4 or words[1] != "attempt":
        return None
    fields = {
        "time": words[0].replace("T", " ").rstrip("Z"),
        "attempt": words[2],
        "stage": words[3],
        "note": f"skipped: {reason}" if skipped else "",
    }
    rest = words[4:]
    for word, name in (("clipped", "yes"), ("whole", "no")):
        if word in rest:
            rest.remove(word)
            fields["clipped"] = name
    if len(rest) % 2 or not all(name in COLUMNS for name in rest[::2]):
        return None
    return fields | dict(zip(rest[::2], rest[1::2], strict=True))
