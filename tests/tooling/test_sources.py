"""Sources: lines stay short, long files are told of, names of tests are short, comments have subjects."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tests.support import prose

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
CSRC = ROOT / "torch_ucx_rpc" / "csrc"
CPP = {".h", ".cpp"}
PYTHON = {".py", ".pyi"}

# Longer sources are told of. The ideas in a file say where it ends, not its lines.
LONG_SOURCE = 600
LARGEST_SHARE = 1 / 4
# The name of a test says what holds. The test says how that comes about.
LONGEST_NAME = 60


def sources(*folders: Path) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in CPP | PYTHON and "__pycache__" not in path.parts
    )


SOURCES = sources(ROOT / "torch_ucx_rpc", ROOT / "tests")

TEST_NAME = re.compile(r"^\s*(?:def (test_\w+)|(?:TYPED_)?TEST(?:_F|_P)?\(\s*\w+\s*,\s*(\w+)\s*\))", re.MULTILINE)

CPP_TOKEN = re.compile(
    r'R"(?P<delimiter>[^(\s]*)\(.*?\)(?P=delimiter)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])+'"
    r"|//(?P<line>[^\n]*)"
    r"|/\*(?P<block>.*?)\*/",
    re.DOTALL,
)


def paragraphs(comments: list[tuple[int, bool, str]]) -> str:
    """Of comments as (line, whether it has the line to itself, text). A run of lines without a gap is one paragraph."""
    text = ""
    before, was_alone = -1, False
    for line, is_alone, comment in comments:
        text += "\n" if is_alone and was_alone and line == before + 1 else "\n\n"
        text += comment.strip()
        before, was_alone = line, is_alone
    return text


def comments_of_cpp(text: str) -> str:
    found = []
    for token in CPP_TOKEN.finditer(text):
        comment = token["line"] if token["line"] is not None else token["block"]
        if comment is not None:
            begins = text.rfind("\n", 0, token.start()) + 1
            is_alone = not text[begins : token.start()].strip()
            found.append((text.count("\n", 0, token.start()), is_alone, comment))
    return paragraphs(found)


def comments_of_python(text: str) -> str:
    """Docstrings too."""
    found = [
        (token.start[0], token.line.lstrip().startswith("#"), token.string.lstrip("#:"))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n\n".join([paragraphs(found), *filter(None, docstrings)])


def headless(path: Path, text: str) -> list[str]:
    return prose.headless(comments_of_cpp(text) if path.suffix in CPP else comments_of_python(text))


def wide(text: str) -> list[str]:
    return [f"{number}: {line}" for number, line in enumerate(text.splitlines(), start=1) if prose.is_too_wide(line)]


def long_names(text: str) -> list[str]:
    return [name for names in TEST_NAME.findall(text) for name in names if len(name) > LONGEST_NAME]


def long_sources(lines: dict[str, int]) -> list[str]:
    return [f"{file} has {count} lines: does it have one idea?" for file, count in lines.items() if count > LONG_SOURCE]


def lines_by_folder(lines: dict[str, int]) -> Counter[str]:
    """Of files relative to csrc. transport counts with its subfolders."""
    folders: Counter[str] = Counter()
    for file, count in lines.items():
        folders[file.split("/")[0] if "/" in file else "."] += count
    return folders


def too_large(lines: dict[str, int]) -> list[str]:
    most = sum(lines.values()) * LARGEST_SHARE
    return [folder for folder, count in lines_by_folder(lines).items() if count > most]


def assert_none(found: dict[Path, list[str]]) -> None:
    message = [f"{path.relative_to(ROOT)}: {finding}" for path, findings in found.items() for finding in findings]
    assert not message, "\n" + "\n".join(message)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines_of_csrc() -> dict[str, int]:
    return {path.relative_to(CSRC).as_posix(): len(read(path).splitlines()) for path in sources(CSRC)}


def test_no_line_is_too_wide() -> None:
    assert_none({path: wide(read(path)) for path in SOURCES})


def test_names_of_tests_are_short() -> None:
    assert_none({path: long_names(read(path)) for path in sources(ROOT / "tests")})


def test_sentences_in_comments_have_subjects() -> None:
    assert_none({path: headless(path, read(path)) for path in SOURCES})


@pytest.mark.filterwarnings("default")
def test_long_sources_are_told_of() -> None:
    package = ROOT / "torch_ucx_rpc"
    lines = {str(path.relative_to(ROOT)): len(read(path).splitlines()) for path in sources(package)}
    for finding in long_sources(lines):
        warnings.warn(finding, stacklevel=1)


def test_no_folder_outgrows_the_others() -> None:
    lines = lines_of_csrc()
    assert not too_large(lines), lines_by_folder(lines).most_common()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.h", "int a;\n// Who waits sleeps.\n"),
        ("a.h", "int a; // That of the caller is released. Who calls waits.\n"),
        ("a.h", "/* What was\n   sent stays. */\n"),
        ("a.cpp", "  // It ends. What was\n  // sent stays.\n"),
        ("a.cpp", 'f("a"); // Those of a peer. Who leaves is forgotten.\n'),
        ("a.py", "# Who waits sleeps.\n"),
        ("a.py", "a = 1  # It ends: What is sent stays.\n"),
        ("a.py", '"""A module. Who calls waits."""\n'),
        ("a.py", 'def f():\n    """It ends. What was\n    sent stays."""\n'),
    ],
)
def test_a_sentence_without_a_subject_is_found(name: str, text: str) -> None:
    assert len(headless(Path(name), text)) == 1


def test_a_long_name_is_found() -> None:
    short, long = "x" * LONGEST_NAME, "test_" + "x" * LONGEST_NAME
    assert long_names(f"    def {long}():\ndef test_x(): pass\n") == [long]
    assert long_names(f"TEST(SuiteTest, {short}) {{}}\nTEST_F(SuiteTest,\n       {long}) {{}}\n") == [long]


def test_a_long_source_is_found() -> None:
    assert long_sources({"a.h": 600, "b.cpp": 601}) == ["b.cpp has 601 lines: does it have one idea?"]
