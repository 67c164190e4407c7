"""The programs of docs/pipeline.md, unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ._jobs import drive_with_deaths, kill

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
# The names of the page's workers, and their names in this job.
NAMES = {"stage0": "worker1", "stage1": "worker2", "spare": "worker3", "ckpt": "{folder}"}


def run_programs(folder: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for name, here in NAMES.items():
        programs = [re.sub(rf'"{name}\b', f'"{here.format(folder=folder)}', program) for program in programs]
    train, recover = programs
    known = {"batches": [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(3)]}
    exec(train, known)
    assert known["loss"].isfinite()
    save, replace = recover.split("...\n")
    exec(save, known)
    kill("worker2")
    exec(replace, known)
    assert known["pipe"].workers == ["worker1", "worker3"]
    exec(train[train.index("for x, y") :], known)
    known["pipe"].synchronize()


def test_programs_of_the_page_run(tmp_path):
    drive_with_deaths(run_programs, 4, (2,), str(tmp_path))
