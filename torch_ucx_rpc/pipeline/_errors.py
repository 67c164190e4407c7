"""How a pipeline fails. Every error names the culprit and the remedy."""

from __future__ import annotations

__all__ = ["PipelineError", "ScheduleError", "StageError", "StageLostError"]


class PipelineError(RuntimeError):
    """A pipeline cannot carry out a request; the base of `StageError` and `StageLostError`."""


class ScheduleError(ValueError):
    """A schedule that cannot run: found before any stage has begun."""


class StageError(PipelineError):
    """The code of a stage raised an exception. The message ends with the stage's own traceback.

    Attributes:
        stage (int | None): index of the stage, or None when the failure belongs to the worker as a whole, such as that
            of its optimizer.
        worker (str): name of the worker that runs the stage.
        micro_batch (int | None): index of the micro-batch, or None outside a schedule.
        traceback_text (str): the traceback on the worker.
    """

    def __init__(
        self, message: str, *, stage: int | None, worker: str, micro_batch: int | None, traceback_text: str
    ) -> None:
        super().__init__(f"{message}\n\n{traceback_text}" if traceback_text else message)
        self.stage = stage
        self.worker = worker
        self.micro_batch = micro_batch
        self.traceback_text = traceback_text


class StageLostError(PipelineError):
    """A worker that runs stages has died or cannot be reached.

    Attributes:
        workers (tuple[str, ...]): names of the lost workers.
        stages (tuple[int, ...]): indices of the stages that they ran.
    """

    def __init__(self, message: str, *, workers: tuple[str, ...], stages: tuple[int, ...]) -> None:
        super().__init__(message)
        self.workers = workers
        self.stages = stages
