"""summary.json, report.html, progress and advice, computed from the files of a run."""
