"""``defaults:``, as NeMo RL has it: a recipe may begin from others and say only what differs.

``defaults`` is a path or a list of paths, relative to the file that says it. Files are merged depth first, a later one
over an earlier one and the file itself over all of them: blocks key by key, anything else (lists too) as a whole. A
block with ``_override_: true`` replaces the inherited one. Every key keeps the file and line that set it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymloop.config.document import Document, parse
from gymloop.config.nearest import did_you_mean
from gymloop.config.problems import KeyPath, Problem

DEFAULTS = "defaults"
REPLACE = "_override_"


class Unreadable(Exception):
    """A file of the chain cannot be read; the text says why."""


def read_chain(path: Path) -> Document:
    """A recipe merged with everything it inherits; what is wrong with any of the files is in ``problems``.

    ``value`` is None when a file of the chain is missing or is no recipe, since the rest would then be judged wrongly.
    """
    document = _read(path, (), None)
    if isinstance(document.value, dict):
        _drop_markers(document.value)
    return document


def _read(path: Path, chain: tuple[Path, ...], said_at: str | None) -> Document:
    """One file and its parents. ``chain`` leads to it; ``said_at`` is the line that names it."""
    via = "" if not chain else f" (inherited: {' -> '.join(map(str, (*chain, path)))})"
    failed = Document()
    if any(path.resolve() == above.resolve() for above in chain):
        failed.problems.append(Problem((DEFAULTS,), f"{path} inherits from itself{via}", said_at))
        return failed
    try:
        own = parse(_text(path), str(path))
    except Unreadable as error:
        failed.problems.append(Problem((DEFAULTS,) if chain else (), f"{error}{via}", said_at or str(path)))
        return failed
    if not isinstance(own.value, dict):
        if own.value is not None or not own.problems:
            what = {type(None): "is empty", list: "holds a list"}.get(type(own.value), "holds one value")
            own.problems.append(Problem((), f"{what}; a recipe is a block of keys{via}", str(path)))
        own.value = None
        return own
    return _with_parents(own, path, chain)


def _with_parents(own: Document, path: Path, chain: tuple[Path, ...]) -> Document:
    if DEFAULTS not in own.value:
        return own
    where = own.positions[DEFAULTS,]
    merged = Document(value={})
    complete = True
    for name, line in _names(own, where):
        parent = _read(_normal(path.parent / name), (*chain, path), line)
        merged.problems.extend(parent.problems)
        merged.unresolved |= parent.unresolved
        if parent.value is None:
            complete = False
        else:
            _merge(merged, parent, ())
    del own.value[DEFAULTS]
    own.forget((DEFAULTS,))
    merged.problems.extend(own.problems)
    merged.unresolved |= own.unresolved
    _merge(merged, own, ())
    if not complete:
        merged.value = None
    return merged


def _names(own: Document, where: str) -> list[tuple[str, str]]:
    """The parents' paths, each with the line that names it."""
    given = own.value[DEFAULTS]
    items = given if isinstance(given, list) else [given]
    names = []
    for index, item in enumerate(items):
        line = own.positions.get((DEFAULTS, index), where)
        if isinstance(item, str) and item and item != "_self_":
            names.append((item, line))
        elif item == "_self_":
            own.problems.append(
                Problem((DEFAULTS,), "'_self_' is Hydra's; a recipe always comes after its parents", line)
            )
        else:
            what = (
                "a config group of Hydra" if isinstance(item, dict) else "empty" if item in (None, "") else repr(item)
            )
            own.problems.append(Problem((DEFAULTS,), f"is {what}; expected a path, or a list of paths", line))
    return names


def _merge(below: Document, above: Document, path: KeyPath) -> None:
    """Lay the block of ``above`` at ``path`` over that of ``below``, with its positions."""
    under, over = _at(below.value, path), _at(above.value, path)
    if path in above.positions:
        below.positions[path] = above.positions[path]
    for key, value in over.items():
        here = (*path, key)
        present = under.get(key)
        if isinstance(value, dict) and isinstance(present, dict) and value.get(REPLACE) is not True:
            _merge(below, above, here)
            continue
        under[key] = value
        below.forget(here)
        below.positions |= {known: where for known, where in above.positions.items() if known[: len(here)] == here}


def _at(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = value[key]
    return value


def _drop_markers(block: dict[str, Any]) -> None:
    """``_override_: true`` has done its work."""
    if isinstance(block.get(REPLACE), bool):
        del block[REPLACE]
    for value in block.values():
        if isinstance(value, dict):
            _drop_markers(value)


def _normal(path: Path) -> Path:
    """Without ``a/..``, so that messages name files as people do; as it is where a link gives that another meaning."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] not in ("..", path.anchor):
            parts.pop()
        else:
            parts.append(part)
    normal = Path(*parts)
    return normal if normal.resolve() == path.resolve() else path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise Unreadable(f"there is no recipe {path}{did_you_mean(path.name, siblings)}") from None
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start} of {path} is not UTF-8; a recipe is UTF-8 text") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from error
