from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Cbatch
from tests.jobs import read_jsonl, write_rows


@pytest.mark.usefixtures("empty_folder")
def test_prompts_and_names_do_not_depend_on_the_locale(cbatch: Cbatch, tiny_model: Path) -> None:
    write_rows([{"prompt": "été"}], "é.jsonl")
    Path("wie.txt").write_text("größer: {{ prompt }}", encoding="utf-8")
    arguments = ["run", "é.jsonl", "-m", tiny_model, "--system", "ça", "--template", "@wie.txt", "--max-tokens", 2]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for output, environ in (("utf8", {"LC_ALL": "C.UTF-8"}), ("ascii", ascii_only)):
        done = cbatch(*arguments, "-o", f"{output}.jsonl", **environ)
        assert done.returncode == 0, done.stderr
    (record,) = read_jsonl("utf8.jsonl")
    assert record["source"] == "é.jsonl"
    assert record["prompt_tokens"] > len("ça größer: été".encode())  # every byte is a token of this model
    assert [record] == read_jsonl("ascii.jsonl")
