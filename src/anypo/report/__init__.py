"""What a run leaves behind: its metrics, their statistics, and one HTML page that needs nothing else to be read.

`statistics`, `plots` and `trackers` are imported from their own modules, so that recording a run loads neither SciPy nor matplotlib.
"""

from __future__ import annotations

from anypo.report.page import write_compare_page, write_report, write_run_page
from anypo.report.store import MetricsStore, columns, flatten, read, read_json, write_json_atomic

__all__ = [
    "MetricsStore",
    "columns",
    "flatten",
    "read",
    "read_json",
    "write_compare_page",
    "write_json_atomic",
    "write_report",
    "write_run_page",
]
