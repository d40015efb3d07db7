"""Where a model's files are: what a name means, and what is asked of the hub.

Owns the rules by which a folder, a GGUF file or a hub id is understood, and what a refusal says.
Opens no file. Presets are not here: they have none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from banyan.engine.presets import PRESETS
from banyan.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILE = re.compile(rf"(?P<repo>{_HUB_ID.pattern}):(?P<file>[^:]+\.gguf)")
_HUB_TIMEOUT_S = 10.0
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files on this machine.

    Args:
        folder: where they are.
        name: what clients call the model.
        gguf: the GGUF file in `folder` that holds everything; None for config.json,
            *.safetensors and a tokenizer.
    """

    folder: Path
    name: str
    gguf: str | None = None

    @property
    def place(self) -> Path:
        """What to name in a message: the GGUF file, else the folder."""
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def arguments(self) -> dict[str, Any]:
        """What every `from_pretrained(folder, ...)` is told: read these files and nothing else."""
        local = {"local_files_only": True, "trust_remote_code": False}
        return local | {"gguf_file": self.gguf} if self.gguf else local


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files that a caller is going to read, where the model is no GGUF file.

    Args:
        required: patterns that must each match a file of the folder.
        fetched: patterns to ask the hub for.
    """

    required: tuple[str, ...]
    fetched: tuple[str, ...]


CONFIG = Wanted(("config.json",), ("config.json",))
TOKENIZER = Wanted(("config.json", "tokenizer*"), ("*.json", "*.model", "*.jinja", "*.txt"))
MODEL = Wanted(
    ("config.json", "*.safetensors", "tokenizer*"), (*TOKENIZER.fetched, "*.safetensors")
)


def find_source(name_or_path: str, wanted: Wanted = MODEL) -> Source:
    """The files that a path or hub id names, fetched from the hub where they are not here yet.

    A folder with *.safetensors is read from these, whatever else it holds; one without them from
    its only GGUF file.

    Args:
        name_or_path: `./folder`, `./file.gguf`, `owner/name` or `owner/name:file.gguf`.
        wanted: `CONFIG`, `TOKENIZER` or `MODEL`; of a GGUF file, always all of it.

    Raises:
        ConfigError: nothing of that name, an incomplete folder, several GGUF files, one that is
            split into parts, or a hub that does not give it.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return _in_folder(path, wanted)
    if path.is_file():
        return _of_file(path)
    if found := _HUB_FILE.fullmatch(name_or_path):
        return _hub_file(found["repo"], found["file"])
    if _HUB_ID.fullmatch(name_or_path):
        return _hub_folder(name_or_path, wanted)
    _unknown(name_or_path, "there is no preset, no folder and no file of that name")


def _in_folder(folder: Path, wanted: Wanted) -> Source:
    name = folder.resolve().name
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files and not any(folder.glob("*.safetensors")):
        return Source(folder, name, _only(folder, files))
    _require_files(folder, wanted, "Use a folder saved by save_pretrained, model and tokenizer")
    return Source(folder, name)


def _only(folder: Path, files: list[str]) -> str:
    """The one of a folder's GGUF files."""
    if all(_PART.fullmatch(file) for file in files):
        _refuse_part(files[0])
    if len(files) > 1:
        raise ConfigError(
            "model",
            f"{folder} has several GGUF files: {', '.join(files)}",
            f"Name the one to use, such as {folder / files[0]}",
        )
    return files[0]


def _of_file(path: Path) -> Source:
    if path.suffix != ".gguf":
        raise ConfigError(
            "model", f"{path} is a file, but no .gguf file", "Name a .gguf file or the folder"
        )
    _refuse_part(path.name)
    return Source(path.parent, path.stem, path.name)


def _refuse_part(file: str) -> None:
    """Raise for a part of a model that is split into several files."""
    found = _PART.fullmatch(file)
    if found is None or int(found["parts"]) < 2:
        return
    stem = found["stem"]
    raise ConfigError(
        "model",
        f"{file} is one of the {int(found['parts'])} parts of {Path(stem).name}, and transformers "
        "reads a GGUF model from one file only",
        f"Join them first: llama-gguf-split --merge {Path(file).name} {Path(stem).name}.gguf",
    )


def _require_files(folder: Path, wanted: Wanted, fix: str) -> None:
    missing = [pattern for pattern in wanted.required if not any(folder.glob(pattern))]
    if missing:
        raise ConfigError("model", f"{folder} has no {', no '.join(missing)}", fix)


# ---- the hub -------------------------------------------------------------------------------------


def _hub_folder(repo: str, wanted: Wanted) -> Source:
    """The hub's snapshot of `repo`; without a network, the one in the local hub cache."""
    from huggingface_hub import snapshot_download

    folder = _from_hub(
        repo,
        lambda: snapshot_download(
            repo, allow_patterns=list(wanted.fetched), etag_timeout=_HUB_TIMEOUT_S
        ),
    )
    fix = f"Use a repository that has them, or name its GGUF file: {repo}:file.gguf"
    _require_files(folder, wanted, fix)
    return Source(folder, repo)


def _hub_file(repo: str, file: str) -> Source:
    """One GGUF file of `repo`; without a network, the one in the local hub cache."""
    from huggingface_hub import hf_hub_download

    _refuse_part(file)
    name = f"{repo}:{file}"
    path = _from_hub(name, lambda: hf_hub_download(repo, file, etag_timeout=_HUB_TIMEOUT_S))
    return Source(path.parent, name, path.name)


def _from_hub(name: str, fetch: Callable[[], str]) -> Path:
    try:
        return Path(fetch())
    except OSError as error:
        why = str(error).splitlines()[0]
        _unknown(name, f"there is no folder of that name, and the hub did not give it ({why})")


def _unknown(name: str, why: str) -> NoReturn:
    raise ConfigError(
        "model",
        f"cannot find {name!r}: {why}",
        f"Use a preset ({', '.join(PRESETS)}), a folder with config.json, *.safetensors and a "
        "tokenizer, a .gguf file, or a hub id (owner/name, or owner/name:file.gguf) that this "
        "machine can reach",
    )
