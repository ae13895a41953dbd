"""The command line: flags -> RunConfig -> run(); exit codes and nothing else. Imports no torch."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_origin

import typer

from cbatch import __version__
from cbatch.config import (
    BenchConfig,
    DisplayConfig,
    EngineConfig,
    InputConfig,
    OutputConfig,
    PromptConfig,
    RunConfig,
    SamplingParams,
    TaskConfig,
)
from cbatch.errors import Fatal, SettingError, UsageError
from cbatch.settings import by_field, declared, field_names, flag_names

_PANELS: dict[str, tuple[str, type]] = {
    "input": ("Input", InputConfig),
    "prompt": ("Prompt", PromptConfig),
    "sampling": ("Sampling", SamplingParams),
    "engine": ("Engine", EngineConfig),
    "output": ("Output", OutputConfig),
    "task": ("Task", TaskConfig),
    "display": ("Display", DisplayConfig),
    "bench": ("Benchmark", BenchConfig),
}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_INPUTS_HELP = "Files, folders, patterns, hf://NAME?split=S, or - for standard input."

app = typer.Typer(
    name="cbatch",
    help="Batch inference with language models: prompts in, completions out as they finish, nothing lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `cbatch` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a prompt is no reason to fail
    try:
        app()
    except Fatal as error:
        from cbatch.run import fatal

        sys.exit(fatal(error))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cbatch {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None: ...


def _run(**values: Any) -> None:
    """Generate a completion for every row of INPUT and write it to OUT as it finishes.

    Run the same command again after an interruption and it goes on where it was.
    """
    from cbatch.run import run

    raise typer.Exit(run(_config(values)))


def _check(**values: Any) -> None:
    """Read and tokenize all of INPUT without loading the model's weights, and say what a run would meet."""
    from cbatch.check import check

    raise typer.Exit(check(_config(values)))


def _bench(**values: Any) -> None:
    """Measure how fast cbatch is on this machine, beside other schedules and other engines.

    Every contender must generate exactly the tokens asked for, or it is marked as invalid.
    """
    from cbatch.bench.bench import bench

    raise typer.Exit(bench(_part("bench", values), _part("engine", values)))


def _config(values: dict[str, Any]) -> RunConfig:
    return RunConfig(**{panel.name: _part(panel.name, values) for panel in fields(RunConfig)})


def _part(panel: str, values: dict[str, Any]) -> Any:
    """The settings of a panel; UsageError names the flag of a value that can't be."""
    _, kind = _PANELS[panel]
    given = {name: values[name] for name in declared(kind) if name in values}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return kind(**given)
    except SettingError as error:
        flag = flag_names(declared(kind)[error.name][0])[0]
        raise UsageError(f"{flag} {error.problem}") from None


def _command(function: Callable[..., None], name: str, panels: list[str]) -> None:
    """Register a command whose options are the fields of these panels' dataclasses."""
    parameters = [_parameter("config", Annotated[Optional[Path], _config_option()], None)]  # noqa: UP045 typer reads it
    if "input" in panels:
        inputs = Annotated[list[str], typer.Argument(help=_INPUTS_HELP, metavar="INPUT...")]
        parameters.insert(0, _parameter("inputs", inputs))
    for panel in panels:
        title, kind = _PANELS[panel]
        parameters += [_option(spec, hint, title) for spec, hint in declared(kind).values() if spec.metadata]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name)(function)


def _option(spec: Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    """The parameter of a command that sets this field, as typer wants it."""
    kind, default = hint, spec.default
    if get_origin(hint) is tuple:
        kind, default = list[get_args(hint)[0]], []  # type: ignore[misc]
    names = flag_names(spec)
    if bool in (kind, *get_args(kind)):
        names = ["/".join(names)]  # the flag that turns it on, and the flag that turns it off
    choices = ", ".join(spec.metadata.get("choices") or ())
    kinds = set(get_args(kind) or (kind,)) - {type(None)}
    option = typer.Option(
        *names,
        help=spec.metadata["help"] + (f" ({choices})" if choices else ""),
        rich_help_panel=panel,
        metavar=_METAVARS.get(kinds.pop()),  # short, so that the names of the flags fit beside them
        show_default=default is not None and default != "" and default != [],
    )
    return _parameter(spec.name, Annotated[kind, option], default)


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _config_option() -> Any:
    return typer.Option(
        "--config",
        help="TOML file with the same settings, e.g. max-tokens = 64. Flags win over it.",
        is_eager=True,
        callback=_read_config,
        rich_help_panel="Input",
    )


def _read_config(context: typer.Context, path: Path | None) -> None:
    """Make the settings of a TOML file the defaults of this command."""
    if path is None:
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path}: {error}") from None
    settings = {key.replace("-", "_"): value for key, value in settings.items()}
    names = field_names(*(kind for _, kind in _PANELS.values()))
    if unknown := settings.keys() - names.keys():
        raise UsageError(f"--config {path}: unknown setting {min(unknown)!r}")
    try:
        context.default_map = by_field(settings, names)
    except SettingError as error:
        raise UsageError(f"--config {path}: {error}") from None


_command(_run, "run", [panel.name for panel in fields(RunConfig)])
_command(_check, "check", ["input", "prompt", "sampling", "engine", "output"])
_command(_bench, "bench", ["bench", "engine"])
