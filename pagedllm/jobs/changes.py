"""What became of the results of an earlier run in an input that was edited since."""

from __future__ import annotations

import numpy as np

from pagedllm.jobs.journal import Journal
from pagedllm.jobs.planned import RowTable


def count_changes(journal: Journal, table: RowTable, num_rows_before: int | None) -> str:
    """ "; in the input since: 2 new, 1 changed, 3 vanished", or "" where nothing was edited.

    A result whose row is not in the input any more counts as changed where its place holds a row without a result, else
    as vanished. All rows of the input must be in the table; num_rows_before: of the earlier input, None if not known.
    """
    results = np.unique(journal.results())  # by id, then by row: a row that ran again has two lines
    if not len(results):
        return ""
    ids, begins, counts = np.unique(results["id"], return_index=True, return_counts=True)
    present, num_present = np.unique(table.all_ids(), return_counts=True)
    places = np.searchsorted(present, ids)
    is_present = places < len(present)
    is_present[is_present] = present[places[is_present]] == ids[is_present]
    num_kept = np.zeros(len(ids), np.int64)
    num_kept[is_present] = num_present[places[is_present]]
    number = np.arange(len(results)) - np.repeat(begins, counts)  # among the results of its id
    gone = results["row"][number >= np.repeat(num_kept, counts)]
    is_open = journal.find(table.all_ids()) < 0
    num_changed = int(np.isin(gone, np.array(table.rows)[is_open]).sum())
    num_vanished = len(gone) - num_changed
    num_new = 0 if num_rows_before is None else max(0, len(table.rows) - (num_rows_before - num_vanished))
    found = ((num_new, "new"), (num_changed, "changed"), (num_vanished, "vanished"))
    text = ", ".join(f"{count:,} {what}" for count, what in found if count)
    return f"; in the input since: {text}" if text else ""
