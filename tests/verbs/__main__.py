"""``python -m tests.verbs``: see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from pathlib import Path

from ._image import CannotBuild, Image
from ._machines import MachineEnded, Machines
from ._trials import TRIALS, Trial
from ._workers import Failed, Stuck

# The number of printed lines of a failed trial's output. The folder ``output`` has all lines.
_LAST_LINES = 12


def main() -> int:
    parser = argparse.ArgumentParser(prog="verbs", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the kept image and the report")
    parser.add_argument("--list", action="store_true", help="name the trials")
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help="trials to run (default: all)")
    arguments = parser.parse_args()
    if arguments.list:
        print(*(f"{trial.name:24} {trial.about}" for trial in TRIALS), sep="\n")
        return 0
    if unknown := set(arguments.trials) - {trial.name for trial in TRIALS}:
        parser.error(f"no such trials: {', '.join(sorted(unknown))}")
    chosen = [trial for trial in TRIALS if not arguments.trials or trial.name in arguments.trials]
    folder = arguments.folder.resolve()
    begin = time.monotonic()
    image = Image(folder / "image", lambda what: print(f"verbs: {what}", flush=True))
    try:
        image.build()
    except CannotBuild as error:
        print(f"verbs: {error}", file=sys.stderr)
        return 2
    versions = image.versions()
    print(f"verbs: {', '.join(f'{name} {version}' for name, version in versions.items())}; ", end="")
    print(f"built in {time.monotonic() - begin:.0f} s", flush=True)
    outcomes = Lab(image, folder).run(chosen)
    report = {"versions": versions, "trials": outcomes}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = sum(not outcome["passed"] for outcome in outcomes)
    print(f"verbs: {len(outcomes) - failed} passed, {failed} failed in {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


class Lab:
    """The machines of all trials. They boot when a trial needs them, and again after a trial that ended them."""

    def __init__(self, image: Image, folder: Path) -> None:
        self._image = image
        self._folder = folder
        self._run_folder = folder / "run"
        self._booted: contextlib.ExitStack = contextlib.ExitStack()
        self._machines: Machines | None = None

    def run(self, trials: list[Trial]) -> list[dict[str, object]]:
        """Run the trials. Return the outcome of each, and print it."""
        outcomes = []
        with self._booted:
            for trial in trials:
                begin = time.monotonic()
                passed, text = self._run(trial)
                seconds = time.monotonic() - begin
                outcomes.append({"name": trial.name, "passed": passed, "text": text, "seconds": round(seconds, 1)})
                first, *rest = text.strip().splitlines() or [""]
                print(f"{'passed' if passed else 'FAILED'}  {trial.name:24} {seconds:4.0f} s  {first}", flush=True)
                for line in rest[-_LAST_LINES:]:
                    print(f"{'':40}{line}")
        return outcomes

    def _run(self, trial: Trial) -> tuple[bool, str]:
        self._begin = time.time()
        try:
            try:
                return True, trial.run(self._up())
            except MachineEnded as error:
                # Linux 6.12 sometimes crashes in Soft-RoCE. A second crash is a failure.
                print(f"verbs: {trial.name} runs once more, since {error}", flush=True)
                return True, trial.run(self._up())
        except (Stuck, MachineEnded, TimeoutError) as error:
            # What a trial has left must not disturb the next one.
            self._down()
            return False, str(error)
        except Failed as error:
            return False, str(error)
        finally:
            self._keep_output(trial)

    def _keep_output(self, trial: Trial) -> None:
        """Keep the files that this trial's commands have written, and the consoles."""
        kept = self._folder / "output" / trial.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for file in [*self._run_folder.glob("shared/n?/*.out"), *self._run_folder.glob("*.console")]:
            if file.stat().st_mtime >= self._begin:
                shutil.copyfile(file, kept / "-".join(file.relative_to(self._run_folder).parts[-2:]))

    def _up(self) -> Machines:
        if self._machines is None or not self._machines.are_on:
            self._down()
            machines = Machines(self._image.folder, self._run_folder)
            self._machines = self._booted.enter_context(machines)
        return self._machines

    def _down(self) -> None:
        self._booted.close()
        self._machines = None


if __name__ == "__main__":
    sys.exit(main())
