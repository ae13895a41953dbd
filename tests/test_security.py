"""Models, rows and templates come from strangers: none of them runs code, leaves the output folder or calls home."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import PromptConfig, SamplingParams
from cbatch.errors import OK, USAGE, Fatal, RowError
from cbatch.model.loader import locate
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.request import Row
from tests.jobs import records
from tests.tiny import edit, make_tokenizer, save_model

ROOT = Path(__file__).parent.parent
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "{{ lipsum.__globals__['os'].popen('touch escaped').read() }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(self) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set f = namespace().__init__ %}{{ f.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
]


pytestmark = pytest.mark.usefixtures("empty_folder")


def row() -> Row:
    return Row("in", 0, "in:1", {"messages": [{"role": "user", "content": "x"}]}, 9)


def builder(template: str | None = None, chat_template: str | None = None) -> PromptBuilder:
    tokenizer = make_tokenizer(chat_template) if chat_template else make_tokenizer()
    return PromptBuilder(PromptConfig(template=template), SamplingParams(seed=0), tokenizer, 512, 300)


# Templates


@pytest.mark.parametrize("template", ESCAPES)
@pytest.mark.parametrize("whose", ["the user's", "the model's"])
def test_no_template_leaves_its_sandbox(template: str, whose: str) -> None:
    build, hostile = builder(template) if whose == "the user's" else builder(chat_template=template), row()
    with pytest.raises(RowError) as refused:
        build(hostile)
    assert refused.value.kind in ("template_error", "empty_prompt")  # the model's may show nothing instead
    assert not Path("escaped").exists()
    assert hostile == row()


def test_what_stands_in_a_row_is_never_a_template() -> None:
    text = "{{ 7 * 7 }}{% for x in y %}" + "".join(ESCAPES)
    hostile = Row("in", 0, "in:1", {"prompt": text}, 9)
    tokenizer = make_tokenizer()
    assert text in tokenizer.decode(builder()(hostile).token_ids)
    assert text in tokenizer.decode(builder("{{ prompt }}")(hostile).token_ids)


# Models


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions asked on standard input, where somebody says yes to all."""
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    return questions


CODE = "from pathlib import Path\nPath('ran').touch()\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M"
CODE += "\nfrom transformers import PreTrainedTokenizerFast as T\n"


@pytest.mark.parametrize("model_type", ["llama", "unheard_of"])
@pytest.mark.parametrize("dummy", [False, True])
def test_code_of_a_model_is_never_run_nor_is_anybody_asked(asked: list[str], model_type: str, dummy: bool) -> None:
    folder = save_model(Path("model"))
    (folder / "code.py").write_text(CODE)
    names = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", "code.T"]}
    edit(folder / "config.json", auto_map=names, model_type=model_type)
    known = model_type == "llama"
    edit(folder / "tokenizer_config.json", auto_map=names, **({} if known else {"tokenizer_class": "T"}))
    files = locate("model")
    for part in (lambda: files.config, lambda: files.tokenizer, lambda: files.load("float32", "cpu", dummy)):
        with nullcontext() if known else pytest.raises(Fatal, match="custom code"):
            part()
    assert not Path("ran").exists()
    assert asked == []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.safetensors"])
def test_pickled_weights_are_never_read(name: str) -> None:
    folder = save_model(Path("model"))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(Fatal, match="can't load the weights"):
        locate("model").load("float32", "cpu", False)
    assert not Path("exploded").exists()


# The network


LISTEN = """
import socket
def refuse(*args, **_):
    open("connected", "a").write(repr(args) + chr(10))
    raise OSError("this test has no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from cbatch.cli import main
main()
"""


def without_network(*args: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that finds no network and writes a file `connected` if it looks for one."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", LISTEN, *map(str, args)],
        env={**env, "PYTHONPATH": str(ROOT), "HF_HOME": str(Path("home").absolute()), **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_local_model_and_local_rows_need_no_network(tiny_model: Path) -> None:
    ids = ["../../out", "/etc/passwd", "a/../b", "..", "C:\\x", "a\x00b", "~"]
    Path("in.jsonl").write_text(
        "".join(json.dumps({"id": row_id, "custom_id": row_id, "prompt": "x"}) + "\n" for row_id in ids)
    )
    args = ["run", "in.jsonl", "-m", tiny_model, "-o", "out", "--max-tokens", 2, "--threads", 1]
    ended = without_network(*args)
    assert ended.returncode == OK, ended.stderr
    assert not Path("connected").exists()
    assert sorted(record["id"] for record in records()) == sorted(ids)
    state = {"lock", "manifest.json", "summary.json", "part-00000.idx"}
    assert {str(path) for path in Path("out").rglob("*") if path.is_file()} == {
        "out/part-00000.jsonl",
        *(f"out/.cbatch/{name}" for name in state),
    }
    assert {path.name for path in Path().iterdir()} <= {"in.jsonl", "out", "home"}


@pytest.mark.parametrize(
    "args",
    [
        ["in.jsonl", "-m", "somebody/model"],
        ["hf://somebody/rows", "-m", "MODEL"],
    ],
)
def test_offline_means_that_nothing_is_looked_for(tiny_model: Path, args: list[str]) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    args = [str(tiny_model) if arg == "MODEL" else arg for arg in args]
    ended = without_network("run", *args, "-o", "out", "--progress", "none", HF_HUB_OFFLINE="1")
    assert ended.returncode == USAGE
    assert ended.stderr.startswith("cbatch: ")
    assert len(ended.stderr.splitlines()) == 1
    assert not Path("connected").exists()


@contextmanager
def hub(folder: Path, also: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A Hub that has one repository, somebody/model: its address, and the names of the files that were asked for."""
    content = {path.name: path.read_bytes() for path in folder.iterdir()} | dict.fromkeys(also, pickle.dumps(Bomb()))
    asked_for: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, name = self.path.partition(f"/resolve/{COMMIT}/")
            if name:
                asked_for.append(name)
                body = content.get(name, b"")
            elif "/tree/" in path:
                files = [
                    {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                    for name, data in content.items()
                ]
                body = json.dumps(files).encode()
            else:
                body = json.dumps(
                    {"id": "somebody/model", "sha": COMMIT, "siblings": [{"rfilename": n} for n in content]}
                ).encode()
            self.send_response(200)
            for header, value in (
                ("Content-Length", len(body)),
                ("ETag", f'"{etag(body)}"'),
                ("X-Repo-Commit", COMMIT),
            ):
                self.send_header(header, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked_for
        finally:
            server.shutdown()


COMMIT = "0123456789" * 4


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def test_of_a_repository_only_what_can_not_run_is_fetched_and_only_once(
    tiny_model: Path, cbatch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    args = ["run", "in.jsonl", "-m", "somebody/model", "--max-tokens", 1, "--threads", 1]
    bombs = ["pytorch_model.bin", "model.pt", "consolidated.pth", "modeling.py", "tokenizer.pkl", "training_args.bin"]
    with hub(tiny_model, bombs) as (address, asked_for):
        home = {"HF_HOME": str(Path("home").absolute()), "HF_ENDPOINT": address, "PYTHONPATH": str(ROOT)}
        ended = cbatch(*args, "-o", "out", HF_HUB_OFFLINE="0", **home)
        assert ended.returncode == OK, ended.stderr
        assert set(asked_for) == {path.name for path in tiny_model.iterdir()}
        asked_for.clear()
        assert cbatch(*args, "-o", "again", HF_HUB_OFFLINE="1", **home).returncode == OK
        assert asked_for == []


def test_the_weights_of_a_repository_that_can_not_be_run_are_not_fetched(
    folder_of_gptq: Path, cbatch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    with hub(folder_of_gptq, []) as (address, asked_for):
        home = {"HF_HOME": str(Path("home").absolute()), "HF_ENDPOINT": address, "PYTHONPATH": str(ROOT)}
        ended = cbatch("check", "in.jsonl", "-m", "somebody/model", HF_HUB_OFFLINE="0", **home)
        assert ended.returncode == USAGE
        assert ended.stderr.startswith("cbatch: somebody/model: its weights are quantized by gptq")
        assert "model.safetensors" not in asked_for


@pytest.fixture
def folder_of_gptq() -> Path:
    folder = save_model(Path("model"))
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    return folder
