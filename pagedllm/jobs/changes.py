"""What became of the results of an earlier run in an input that was edited since."""

from __future__ import annotations

from collections import Counter

from pagedllm.jobs.journal import Journal
from pagedllm.jobs.keys import KEY_BYTES
from pagedllm.jobs.planned import RowTable


def count_changes(journal: Journal, table: RowTable, num_rows_before: int | None) -> str:
    """ "; 2 rows new, 1 changed, 3 vanished", or "" where nothing did. All rows of the input must be in the table.

    A result whose row is not in the input any more counts as changed where its place holds a row without a result, else
    as vanished. num_rows_before: of the earlier input, None where that is not known.
    """
    before = Counter(name for name, _ in set(zip(journal.ids(), journal.all_rows(), strict=True)))
    if not before:
        return ""
    ids = [bytes(table.ids[i : i + KEY_BYTES]) for i in range(0, len(table.ids), KEY_BYTES)]
    surplus = before - Counter(ids)
    if not surplus and num_rows_before in (None, len(ids)):
        return ""
    is_done = (journal.find(ids) >= 0).tolist()
    open_rows = {row for row, done in zip(table.rows, is_done, strict=True) if not done}
    num_changed = num_vanished = 0
    for name, row in sorted(set(zip(journal.ids(), journal.all_rows(), strict=True))):
        if surplus[name] > 0:
            surplus[name] -= 1
            num_changed += row in open_rows
            num_vanished += row not in open_rows
    num_new = 0 if num_rows_before is None else max(0, len(ids) - (num_rows_before - num_vanished))
    counts = ((num_new, "new"), (num_changed, "changed"), (num_vanished, "vanished"))
    found = [f"{count:,} {what}" for count, what in counts if count]
    return f"; in the input since: {', '.join(found)}" if found else ""
