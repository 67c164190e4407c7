"""Whether the tests notice bugs: puts them into a copy of the sources, one by one, and runs the tests that must fail.

    python tools/mutants.py --list
    python tools/mutants.py                  those in Python, which need no build
    python tools/mutants.py --cpp            those in C++: the copy is built, and again after each
    python tools/mutants.py NAME ...

A mutant is found by its text, wherever that stands by now; text that is missing, or stands twice, is an error: mend the
list. The tests must pass on the sources as they are, and at least one of them must fail with the mutant, which must
compile. Ends with 1 where a mutant survives. The copy is build/mutants.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
LIMIT_S = 900


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug. ``text`` becomes ``instead``; of ``tests``, names of Python or C++ tests, one must fail.

    A ``text`` that may read in more than one way is a compiled pattern.
    """

    name: str
    text: str | re.Pattern[str]
    instead: str
    tests: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.text)) if isinstance(self.text, str) else self.text

    @property
    def is_cpp(self) -> bool:
        return self.name.startswith("cpp-")


MUTANTS = (
    # ---- Python
    Mutant(
        "ucx-never-waits",
        "    return all(\n        address is not None and",
        "    return all(\n        True or address is not None and",
        ("test_ucx_waits_for_a_thread_that_may_be_in_what_it_overwrites",),
    ),
    Mutant(
        "the-store-is-waited-for-as-long-as-ever",
        "self._store.set_timeout(min(usual, _PATIENCE))",
        "pass",
        ("test_nobody_waits_for_a_file_of_the_store_that_is_gone",),
    ),
    Mutant(
        "children-inherit-the-wait",
        "os.environ.pop(_PATCHING_WAIT, None)",
        "pass",
        ("test_ucx_hardly_waits_in_a_process_with_one_thread_and_its_children_do_not_inherit_that",),
    ),
    Mutant(
        "threads-of-python-overlooked",
        "    if len(sys._current_frames()) != 1:\n        return False\n",
        "",
        ("test_ucx_waits_as_it_likes_in_a_process_with_more_threads_of_python",),
    ),
    Mutant(
        "device-maps-swapped",
        "self._set_device_maps(own.device_maps, replies, devices)",
        "self._set_device_maps(replies, own.device_maps, devices)",
        ("test_the_agent_has_the_maps_for_calls_and_those_for_replies_apart",),
    ),
    Mutant(
        "two-workers-of-one-rank",
        "        if earlier.rank == later.rank:\n",
        "        if False:\n",
        ("test_a_rank_used_twice_is_refused_everywhere_naming_both",),
    ),
    Mutant(
        "handlers-of-signals-lost",
        "        for number, action in before.items():\n            sigaction(number, action, None)\n",
        "        pass\n",
        ("test_handlers_that_were_there_before_ucx_stay",),
    ),
    Mutant(
        "older-ucx-taken",
        '    if found.version[:2] >= tuple(int(number) for number in built_for.split(".")):\n        return\n',
        "    if found:\n        return\n",
        ("test_an_older_ucx_than_at_the_build_is_refused_with_the_cure",),
    ),
    Mutant(
        "soak-without-calls",
        "if count < fewest]",
        "if count < 0]",
        ("test_a_run_in_which_little_happens_proves_nothing",),
    ),
    Mutant(
        "verbs-however-late",
        "    expect(seconds < limit_s, ",
        "    expect(seconds < limit_s or bool(what), ",
        ("test_a_time_beyond_its_limit_fails",),
    ),
    Mutant(
        "bounds-always-hold",
        "        return ratio >= limit if self.more_is_better else ratio <= limit\n",
        "        return True\n",
        ("test_the_table_says_which_bounds_are_missed",),
    ),
    Mutant(
        "worse-configuration-of-tensorpipe",
        "            best = max if figure.more_is_better else min\n",
        "            best = min if figure.more_is_better else max\n",
        ("test_a_ratio_is_taken_to_the_better_configuration_of_tensorpipe",),
    ),
    Mutant(
        "any-skip-is-fine",
        "            if not any(re.fullmatch(reasons, reason) for reasons in allowed):\n",
        "            if not allowed:\n",
        ("test_what_is_missing_or_skipped_is_told",),
    ),
    Mutant(
        "pauses-without-bound",
        "    longest = min(_LONGEST_PAUSE_S, max(0.01, workers / _QUESTIONS_PER_S))\n",
        "    longest = 60.0\n",
        ("test_pauses_between_questions_stay_short",),
    ),
    Mutant(
        "another-secret-is-fine",
        "    if not hmac.compare_digest(secret.tag(sealed).encode(), tag.encode()):\n",
        "    if False:\n",
        ("test_an_entry_of_another_secret_is_doubted_and_says_whose_it_is",),
    ),
    Mutant(
        "replies-to-any-device",
        "            sources = [local for local in sources if local.type == remote.type] or [CPU]\n",
        "            pass\n",
        ("test_maps_with_the_cpu_and_several_devices_to_one_fit",),
    ),
    Mutant(
        "warned-of-again",
        "            _told.add(conflict)\n",
        "",
        ("test_a_warning_is_given_once",),
    ),
    Mutant(
        "arrays-become-writable",
        "    array.flags.writeable = is_writable\n",
        "",
        ("test_arrays_arrive_as_they_were_sent",),
    ),
    Mutant(
        "dead-worker0-not-noticed",
        "        except (EOFError, ConnectionError) as error:\n            raise self._failure(",
        "        except ConnectionError as error:\n            raise self._failure(",
        ("test_a_job_whose_worker0_dies_is_a_failure",),
    ),
    Mutant(
        "folders-without-turns",
        "        _lock(number, path, fcntl.LOCK_EX if to_save else fcntl.LOCK_SH)\n",
        "",
        ("test_processes_take_turns_in_a_folder",),
    ),
    Mutant(
        "workers-left-behind",
        "            _children.end_children()\n",
        "",
        ("test_workers_that_cannot_all_be_started_are_ended_and_the_error_says_why",),
    ),
    Mutant(
        "gradients-summed-after-a-timeout",
        "            self.tensors = [tensor.clone() for tensor in self.tensors]\n",
        "",
        ("test_gradients_may_be_written_to_after_a_timeout",),
    ),
    Mutant(
        "gradients-given-back-while-added",
        "if not any(round_.is_adding for round_ in rounds):",
        "if True:",
        ("test_tensors_that_are_being_added_are_given_back_when_that_is_over",),
    ),
    Mutant(
        "hook-writes-to-what-others-get",
        "self._pushed.value()._replace(is_shared=True)",
        "self._pushed.value()",
        ("test_a_hook_that_writes_to_its_result_changes_no_others",),
    ),
    Mutant(
        "push-made-after-its-time",
        "            if not self._is_over:\n                self._pushed =",
        "            if True:\n                self._pushed =",
        ("test_a_push_that_comes_after_its_time_is_not_made",),
    ),
    # ---- C++. Where a name of a suite changes, so does the one here.
    Mutant(
        "cpp-deadlines-late",
        "while (!deadlines_.empty() && deadlines_.begin()->first <= now)",
        "while (!deadlines_.empty() && deadlines_.begin()->first + std::chrono::milliseconds(400) <= now)",
        ("CallTableTest", "test_calls_fail_at_their_deadlines_also_under_load"),
    ),
    Mutant(
        "cpp-offset-of-32-bits",
        "  uint64_t offset = 0; // in its span\n",
        "  uint32_t offset = 0; // in its span\n",
        ("PiecesBeyond4GiBKeepTheirPlaces",),
    ),
    Mutant(
        "cpp-contexts-of-the-dead-stay",
        re.compile(r"contexts = orphanedContexts\(.*?\}\);", re.DOTALL),
        "",
        ("test_contexts_of_a_dead_worker_are_closed_all_along_the_way",),
    ),
    Mutant(
        "cpp-references-of-the-dead-stay",
        re.compile(r"std::ranges::move\(\w+\.takeHeldBy\(\w+\), .*?;|forks = \w+\.takeHeldBy\(\w+\);"),
        "",
        ("test_references_that_the_dead_had_from_a_third_worker_are_dropped",),
    ),
    Mutant(
        "cpp-own-stop-counts-as-silence",
        "std::min(std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now)), 2 * period());",
        "std::chrono::duration_cast<Milliseconds>(now - std::exchange(lastCheck_, now));",
        ("TimeInWhichThisProcessDidNotRunDoesNotCount",),
    ),
    Mutant(
        "cpp-requests-reversed",
        "      for (std::variant<IncomingMessage, Control>& event : inOrder) {\n",
        "      std::ranges::reverse(inOrder);\n      for (std::variant<IncomingMessage, Control>& event : inOrder) {\n",
        ("RequestsAndControlFramesKeepTheOrderOfArrival",),
    ),
    Mutant(
        "cpp-pieces-out-of-order",
        "    return one.offset < other.offset;\n",
        "    return one.offset > other.offset;\n",
        ("AssemblerTest",),
    ),
    Mutant(
        "cpp-replies-by-the-map-for-calls",
        "return find(answers_, worker);",
        "return find(requests_, worker);",
        ("DeviceTest",),
    ),
    Mutant(
        "cpp-queued-calls-of-the-dead-begin",
        "  if (from.state() == Peer::State::kFailed) {\n    return; // it died while",
        "  if (false) {\n    return; // it died while",
        ("test_calls_of_a_dead_worker_that_queue_here_are_not_begun",),
    ),
    Mutant(
        "cpp-expired-requests-run",
        "  return deadline.count() != 0 && Clock::now() - arrivedAt >= deadline;\n",
        "  return false && Clock::now() - arrivedAt >= deadline;\n",
        ("RequestServerTest",),
    ),
    Mutant(
        "cpp-lost-workers-come-back",
        "  if (now >= State::kLeft || now >= state) {\n",
        "  if (now >= state) {\n",
        ("PeerMonitorTest", "DirectoryTest"),
    ),
    Mutant(
        "cpp-window-without-bound",
        "  return used == 0 || bytes == 0 || (used < limit && bytes <= limit - used);\n",
        "  return used == 0 || bytes == 0 || limit != 0;\n",
        ("ReceiveWindowTest",),
    ),
    Mutant(
        "cpp-messages-beyond-the-window-wait-forever",
        "  return used == 0 || bytes == 0 || (used < limit",
        "  return bytes == 0 || (used < limit",
        ("ReceiveWindowTest",),
    ),
    Mutant(
        "cpp-anybody-may-answer",
        "  if (entry == entries_.end() || entry->second.call.to != &peer) {\n",
        "  if (entry == entries_.end()) {\n",
        ("CallTableTest",),
    ),
    Mutant(
        "cpp-deletions-come-before-the-rref",
        "if (type == rpc::MessageType::RREF_USER_DELETE) {",
        "if (false) {",
        ("RRefCreationTest",),
    ),
    Mutant(
        "cpp-calls-to-the-dead-stay-open",
        "    if (entry->second.call.to == &peer) {\n      calls.push_back(removeLocked(entry));\n",
        "    if (false) {\n      calls.push_back(removeLocked(entry));\n",
        ("CallTableTest",),
    ),
    Mutant(
        "cpp-silence-without-a-question",
        "    } else if (!std::exchange(silence.isAsked, true)) {\n",
        "    } else if (false) {\n",
        ("HeartbeatTest",),
    ),
    Mutant(
        "cpp-stopped-neighbours-are-lost",
        "    if (!peer->needsHeartbeat.load()) {\n      silence.lasted =",
        "    if (false) {\n      silence.lasted =",
        ("HeartbeatTest",),
    ),
    Mutant(
        "cpp-another-process-of-that-id-is-watched",
        "  if (process < 0 || (stat && stat->startTicks != member.processStartTime)) {\n",
        "  if (process < 0) {\n",
        ("ProcessWatchTest",),
    ),
    Mutant(
        "cpp-barriers-outlast-the-dead",
        "  if (!failed_.empty()) {\n    // Also where",
        "  if (false) {\n    // Also where",
        ("BarrierTest",),
    ),
    Mutant(
        "cpp-no-threads-for-calls-that-wait",
        "  if (begun.openCalls++ == 0) {\n    ++nestingRequests_;\n",
        "  if (begun.openCalls++ == 0) {\n",
        ("ExecutorTest",),
    ),
    Mutant(
        "cpp-own-errors-end-peers",
        "  if (isLocal(why.code())) {\n    return; // a peer ends",
        "  if (false) {\n    return; // a peer ends",
        ("PeerMonitorTest",),
    ),
    Mutant(
        "cpp-peers-outlive-broken-connections",
        "  if (status == UCS_ERR_CANCELED) {\n    return {ErrorCode::kPeerFailed",
        "  if (false) {\n    return {ErrorCode::kPeerFailed",
        ("UcxStatusTest",),
    ),
)


class Useless(Exception):
    """A mutant of which nothing follows: the list is to be mended."""


def sources() -> Iterator[Path]:
    """Of the copy, where mutants may be: not the tests, nor this list."""
    for folder in ("torch_ucx_rpc", "benchmarks", "tools", "tests/soak", "tests/verbs"):
        for file in sorted((COPY / folder).rglob("*")):
            if file.suffix in (".py", ".h", ".cpp") and file.name != Path(__file__).name:
                yield file


def copy_tree() -> None:
    """What git knows, with changes, and what the build has put beside it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    built = [str(file.relative_to(ROOT)) for file in (ROOT / "torch_ucx_rpc").glob("*.so")]
    built += ["torch_ucx_rpc/_build_info.py"]
    wanted = {name for name in (*listed, *built) if (ROOT / name).is_file()}
    for name in sorted(wanted):
        file, target = ROOT / name, COPY / name
        # Times decide what is compiled again.
        if target.exists() and target.read_bytes() == file.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    # Of a former copy: a test that has moved would be found twice.
    for file in [*sources(), *(COPY / "tests").rglob("*.py")]:
        if str(file.relative_to(COPY)) not in wanted:
            file.unlink(missing_ok=True)


def build_extension() -> None:
    build([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"])


def build_tests(executables: Sequence[str]) -> None:
    """In the build folder of the extension, with which they share its objects."""
    where = [sys.executable, "tools/build_environment.py", "directory"]
    folder = subprocess.run(where, cwd=COPY, capture_output=True, text=True, check=True).stdout.strip()
    cache = Path(folder, "CMakeCache.txt")
    if not cache.exists() or "TORCH_UCX_RPC_TESTS:BOOL=ON" not in cache.read_text(encoding="utf-8"):
        options = ["-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", "-DTORCH_UCX_RPC_TESTS=ON"]
        build(["cmake", *options, "-S", ".", "-B", folder])
    build(["cmake", "--build", folder, "--target", *executables])


def build(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=COPY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # What does not compile is no bug that a test could catch.
        raise Useless(f"it does not compile: {(done.stdout + done.stderr)[-2000:]}")


def executables_of(test: str) -> list[str]:
    """With C++ tests of this name, or of a suite of this name."""
    pattern = re.compile(rf"TEST(_F|_P)?\([^)]*\b{test}\b")
    files = sorted((COPY / "tests" / "cpp").rglob("*_test.cpp"))
    return [file.stem for file in files if pattern.search(file.read_text(encoding="utf-8"))]


def file_of(test: str) -> Path | None:
    """Of a Python test; None for one in C++."""
    pattern = re.compile(rf"^\s*def {test}\(", re.MULTILINE)
    found = [file for file in (COPY / "tests").rglob("test_*.py") if pattern.search(file.read_text(encoding="utf-8"))]
    return found[0] if found else None


def passes(tests: Sequence[str], is_cpp: bool) -> bool:
    """Whether all of these tests pass in the copy, as it is now; a test that there is not raises."""
    python = {test: file for test in tests if (file := file_of(test)) is not None}
    cpp = [(test, name) for test in tests if test not in python for name in executables_of(test)]
    if missing := set(tests) - set(python) - {test for test, _ in cpp}:
        raise Useless(f"there is no test {', '.join(missing)}")
    if python and is_cpp:
        build_extension()
    if cpp:
        build_tests(sorted({name for _, name in cpp}))
    programs = {name: next((COPY / "build").glob(f"*/tests/{name}")) for _, name in cpp}
    commands = [[sys.executable, "-m", "pytest", "-q", "-x", str(python[test]), "-k", test] for test in python]
    commands += [[str(programs[name]), f"--gtest_filter=*{test}*"] for test, name in cpp]
    return all(map(runs, commands))


def runs(command: Sequence[str]) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(COPY)}
    try:
        done = subprocess.run(
            command, cwd=COPY, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    # 5: pytest has found no test. GoogleTest says the same in words.
    if done.returncode == 5 or "Running 0 tests" in done.stdout:
        raise Useless(f"there is no such test: {' '.join(command)}")
    return done.returncode == 0


def place_of(mutant: Mutant) -> Path:
    found = [file for file in sources() for _ in mutant.pattern.finditer(file.read_text(encoding="utf-8"))]
    if len(found) != 1:
        where = ", ".join(str(file.relative_to(COPY)) for file in found) or "nowhere"
        raise Useless(f"its text stands {where}, and must stand once: {mutant.pattern.pattern!r}")
    return found[0]


def fate(mutant: Mutant) -> str:
    """ "caught", or what is wrong."""
    file = place_of(mutant)
    if not passes(mutant.tests, mutant.is_cpp):
        return "its tests fail without it"
    text = file.read_text(encoding="utf-8")
    file.write_text(mutant.pattern.sub(lambda _: mutant.instead, text), encoding="utf-8")
    try:
        return "SURVIVED" if passes(mutant.tests, mutant.is_cpp) else "caught"
    finally:
        file.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME", help="of mutants")
    parser.add_argument("--cpp", action="store_true", help="those in C++, instead of those in Python")
    parser.add_argument("--list", action="store_true", help="list them")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{mutant.name}: {', '.join(mutant.tests)}" for mutant in MUTANTS))
        return 0
    chosen = [m for m in MUTANTS if (m.name in arguments.names if arguments.names else m.is_cpp == arguments.cpp)]
    copy_tree()
    fates = {}
    for mutant in chosen:
        try:
            fates[mutant.name] = fate(mutant)
        except Useless as error:
            fates[mutant.name] = f"useless: {error}"
        print(f"{mutant.name}: {fates[mutant.name]}", flush=True)
    print(f"{list(fates.values()).count('caught')} of {len(fates)} are caught")
    return 0 if set(fates.values()) == {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
