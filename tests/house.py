"""The rules of the house: each takes the path (relative, with `/`) and the text of a file and gives what breaks it."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
PACKAGE = "whippletree"
FUNCTION_LINES, FILE_LINES, METHOD_CODE, CORE_CODE = 60, 400, 120, 12_000  # the gateway is 3,900 of it
OUTSIDE_CORE = {"methods", "toys", "control", "diffusion", "analysis", "report"}
PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|stubs?|placeholders?|NotImplementedError|not implemented)\b")
HOSTS = re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|npmjs[.](org|com)|deb[.]debian[.]org")
MACHINE_PATHS = re.compile(r"(?<![\w.$})~/-])/(work|root|home|tmp|opt|Users)/\w")


def files() -> dict[str, str]:
    """Every text file a person wrote in this checkout, by relative path."""
    hidden = re.compile(r"\.(?!ci$|gitignore$)|__pycache__$|runs$|build$|dist$|.*\.egg-info$")
    found: dict[str, bytes] = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if not hidden.match(name))
        paths = [Path(folder, name) for name in sorted(names) if not hidden.match(name)]
        found |= {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}
    return {path: content.decode() for path, content in found.items() if b"\0" not in content}


def is_test(path: str) -> bool:
    return path.endswith(("_test.py", "conftest.py")) or path.startswith("tests/")


def method_name(path: str) -> str | None:
    """The method that lives in this file, if it is a method's file."""
    folder, stem = PurePosixPath(path).parent.as_posix(), PurePosixPath(path).stem
    is_method = folder == f"{PACKAGE}/methods" and path.endswith(".py") and not is_test(path) and stem[0] != "_"
    return stem if is_method else None


# ---- imports ----------------------------------------------------------------------------------------------------


def imported(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import; `from a import b` gives `a.b`, relative ones are made absolute."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def floor(name: str) -> tuple[int, str]:
    """(storey, room) of a dotted name: 0 types, 1 a part folder, 2 codec, 3 methods, 4 loop and all that runs it."""
    room = [*name.split("."), ""][1]
    if room in ("types", "batch", "__version__", ""):
        return 0, "types"
    if room == "codec":
        return 2, room
    if room == "methods":
        return 3, room
    return (1 if (ROOT / PACKAGE / room).is_dir() else 4), room


def upward_imports(path: str, text: str) -> list[str]:
    """Imports point down: types <- parts <- codec <- methods <- loop; parts of two folders do not meet."""
    if is_test(path) or not path.startswith(f"{PACKAGE}/"):
        return []
    storey, room = floor(path.removesuffix(".py").replace("/", "."))
    found = []
    for line, name in imported(path, text):
        if name.split(".")[0] != PACKAGE:
            continue
        other_storey, other_room = floor(name)
        if other_storey > storey or (other_storey == storey and storey < 3 and other_room != room):
            found.append(f"{path}:{line} imports {name}, which is not below it")
    return found


def borrowed_from_methods(path: str, text: str) -> list[str]:
    """A method takes another method's METHOD and nothing else of it; `methods/_x.py` is no method and may be used."""
    if method_name(path) is None:
        return []
    prefix = f"{PACKAGE}.methods."
    inside = re.compile(re.escape(prefix) + r"(?!_)\w+[.](?!METHOD$)")
    found = [f"{path}:{line} imports {name}" for line, name in imported(path, text) if inside.match(name)]
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == prefix.rstrip(".")
        for alias in node.names
        if alias.name[0] != "_"
    }
    uses = [
        (node.lineno, node.value.id, node.attr)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    found += [f"{path}:{line} uses {name}.{attr}" for line, name, attr in uses if name in aliases and attr != "METHOD"]
    return found


def undeclared_imports(path: str, text: str, declared: Collection[str]) -> list[str]:
    """Everything imported is the standard library, this project, or declared in pyproject.toml."""
    return [f"{path}:{line} imports {n}" for line, n in imported(path, text) if n.split(".")[0] not in declared]


# ---- sizes ------------------------------------------------------------------------------------------------------


def code_lines(text: str) -> int:
    """Lines that hold code: not blank, not comment, not docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def too_long(path: str, text: str) -> list[str]:
    """A function has at most 60 lines, a file 400, a method's file fewer than 120 of code."""
    found = []
    if (lines := len(text.splitlines())) > FILE_LINES:
        found.append(f"{path} has {lines} lines, more than {FILE_LINES}")
    if method_name(path) and (lines := code_lines(text)) >= METHOD_CODE:
        found.append(f"{path} has {lines} lines of code; a method has fewer than {METHOD_CODE}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name} has {lines} lines, more than {FUNCTION_LINES}")
    return found


def core_size(sources: dict[str, str]) -> int:
    """Lines of code of the core: the package without its tests and without the folders that grow with papers."""
    rooms = {path: PurePosixPath(path).parts[1] for path in sources if path.startswith(f"{PACKAGE}/")}
    core = [p for p, room in rooms.items() if p.endswith(".py") and not is_test(p) and room not in OUTSIDE_CORE]
    return sum(code_lines(sources[path]) for path in core)


# ---- names ------------------------------------------------------------------------------------------------------


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    """(line, identifier) of each name, attribute, argument and definition; prose is not looked at."""
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(word := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), word


def named_methods(path: str, text: str, methods: Collection[str]) -> list[str]:
    """Nothing in the package asks for a method by name: no identifier, no import, no string that is one."""
    by_hand = path == f"{PACKAGE}/methods/contract_test.py" or not (is_test(path) or method_name(path))
    if not path.startswith(f"{PACKAGE}/") or not by_hand or not methods:
        return []
    names = "|".join(sorted(methods))
    word = re.compile(rf"(?:^|[._])({names})(?:$|[._])")
    value = re.compile(rf"(?:^|[=./:])({names})(?:$|[./:])")
    spoken = [*identifiers(text), *imported(path, text)]
    found = [(line, word.search(name)) for line, name in spoken]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, value.search(node.value)))
    return [f"{path}:{line} names the method {match[1]}" for line, match in found if match]


def untested_methods(paths: Collection[str]) -> list[str]:
    """Every method has its test beside it."""
    return [p for p in paths if method_name(p) and p.replace(".py", "_test.py") not in paths]


# ---- what must not be there -------------------------------------------------------------------------------------


def pickles(path: str, text: str) -> list[str]:
    """Nothing is pickled or unpickled; `torch.load` reads weights only."""
    found = [f"{path}:{line} imports {n}" for line, n in imported(path, text) if n.split(".")[0] in PICKLERS]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        true = {k.arg for k in node.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
        call = ast.unparse(node.func)
        unsafe_load = call == "torch.load" and "weights_only" not in true
        if unsafe_load or "allow_pickle" in true or call == "torch.save" or call.endswith(".read_pickle"):
            found.append(f"{path}:{node.lineno} {ast.unparse(node)[:60]}")
    return found


def matches(path: str, text: str, pattern: re.Pattern[str]) -> list[str]:
    """Each line on which the pattern occurs."""
    lines = enumerate(text.splitlines(), start=1)
    return [f"{path}:{n} {match[0]}" for n, line in lines if (match := pattern.search(line))]


# ---- pages ------------------------------------------------------------------------------------------------------


def code_blocks(text: str) -> list[tuple[int, str, str]]:
    """(line, what follows the opening fence, content) of each fenced block of a Markdown page."""
    fence = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
    return [(text[: m.start()].count("\n") + 1, m[2].strip(), m[3]) for m in fence.finditer(text)]


def unrun_blocks(path: str, text: str) -> list[str]:
    """A block is `python` or `toml` (a test runs it), `text` (nothing to run), or says `not-run` after its language."""
    blocks = ((line, info.split()) for line, info, _ in code_blocks(text))
    return [
        f"{path}:{line} is {' '.join(info) or 'of no language'}: write python, toml, text, or LANGUAGE not-run"
        for line, info in blocks
        if not info or (info[0] not in ("python", "toml", "text") and "not-run" not in info)
    ]
