"""The plug-ins of docs/adding.md as files in an empty folder."""

import re
from pathlib import Path

from tests.support.root import ROOT

PAGE = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
TASK, OTHER_PLUGIN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[RECIPE] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def write_page(folder: Path) -> Path:
    """my_ext.py (the task), other_ext.py (the rest), yes_no.yaml; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_ext.py").write_text(TASK)
    (folder / "other_ext.py").write_text(OTHER_PLUGIN)
    (folder / "yes_no.yaml").write_text(RECIPE)
    return folder
