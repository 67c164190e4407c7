"""The lists of mutants, together."""

from __future__ import annotations

from tests.mutants import calls, ends, libraries, losses, processes, proofs, resources

MUTANTS = (
    *processes.MUTANTS,
    *calls.MUTANTS,
    *losses.MUTANTS,
    *ends.MUTANTS,
    *resources.MUTANTS,
    *libraries.MUTANTS,
    *proofs.MUTANTS,
)
